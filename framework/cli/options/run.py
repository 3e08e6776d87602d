"""Options shared by the commands on finished runs."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from ...contracts.command import Argument
from ...contracts.options import Options
from ...errors import UsageError, printable
from ...util.input_files import kind_of, path_of
from ...util.output_files import check_writable

if TYPE_CHECKING:
    from ...cost.load_run import FinishedRun


class RunsOptions(Options):
    """``RUN ...``, the runs of a command that inherits from this."""

    runs: Annotated[tuple[Path, ...], Argument("RUN", positional=True)] = Field(
        description="directory of a finished run, runs/NAME-HASH, or runs/latest; the shards of a run are merged"
    )


class CellFilterOptions(Options):
    """``--where``; an option of a command that inherits from this."""

    where: Annotated[tuple[str, ...], Argument("KEY=VALUE,...")] = Field(
        (), description="filter cells, e.g. batch_size=1,8 or drafter=draft-model (repeatable)"
    )


class SegmentOptions(Options):
    """``--segment``; an option of a command that inherits from this."""

    segment: Annotated[tuple[str, ...], Argument("NAME")] = Field(
        (),
        description="acceptance by segment of the responses: think, tool, code, or NAME=REGEX; the first that matches "
        "a token counts, and all others are the answer (repeatable)",
    )


class ForceOptions(Options):
    """``--force``; an option of a command that inherits from this."""

    force: bool = Field(False, description="overwrite existing files that this command did not write")


class JsonOptions(Options):
    """``--json``; an option of a command that inherits from this."""

    json_: Annotated[bool, Argument(exclusive="format")] = Field(False, description="print JSON")


def note_partial(runs: Iterable[FinishedRun]) -> None:
    """Print a note on standard error for each unfinished run."""
    for run in runs:
        if run.partial:
            text = printable(f"{run.summary.directory}: partial results, {run.partial}")
            print(f"crossdraft: note: {text}", file=sys.stderr)


def one_run(name: str) -> FinishedRun:
    """The run in a directory, shards merged. Raises UsageError for shards of several recipes."""
    from ...cost.load_run import read_runs

    runs = read_runs([Path(name)])
    if len(runs) > 1:
        raise UsageError(f"{printable(name)} holds shards of {len(runs)} recipes; give the shards of one")
    note_partial(runs)
    return runs[0]


def output_folder(name: Path) -> Path:
    """The directory of ``--out``, created if it does not exist. Raises UsageError if it cannot be created."""
    folder = path_of(name)
    option = f"--out {printable(str(folder))}"
    if kind_of(folder) in ("file", "other"):
        raise UsageError(f"{option} is not a directory; give an existing or a new directory")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{option} cannot be created: {error.strerror or error}") from None
    check_writable(folder, option)
    return folder
