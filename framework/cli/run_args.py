"""Options that several commands on finished runs have."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UsageError, printable
from ..util.input_files import kind_of, path_of

if TYPE_CHECKING:
    from ..report.load_run import FinishedRun


def add_runs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="directory of a finished run, runs/NAME-HASH, or of shards of one, which become one run",
    )


def add_where(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="KEY=VALUE,...",
        help="only cells with one of these values, e.g. batch_size=1,8 or drafter=draft-model; repeatable",
    )


def note_partial(runs: Iterable[FinishedRun]) -> None:
    """Note on standard error which of the runs are not finished."""
    for run in runs:
        if run.partial:
            text = printable(f"{run.summary.directory}: partial results, {run.partial}")
            print(f"crossdraft: note: {text}", file=sys.stderr)


def add_force(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--force", action="store_true", help="replace existing files that this command did not write, too"
    )


def output_folder(name: Path) -> Path:
    """The directory called ``name`` by ``--out``, made if nothing is there. Raises UsageError for anything else."""
    folder = path_of(name)
    about = f"--out {printable(str(folder))}"
    if kind_of(folder) in ("file", "other"):
        raise UsageError(f"{about}: it is not a directory; name one, or a new one")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{about}: it cannot be made a directory: {error.strerror or error}") from None
    return folder


def comma_list(known: Iterable[str] = ()) -> Callable[[str], list[str]]:
    """Names with commas between them; of ``known`` ones, if there are any."""
    choices = list(known)

    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        for name in names:
            if choices and name not in choices:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(choices)}")
        if not names:
            raise argparse.ArgumentTypeError("it names nothing")
        return list(dict.fromkeys(names))

    return parse
