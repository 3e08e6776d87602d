"""Configuration of a run."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..cost.summary import Summary
from ..errors import UsageError
from ..models.placement import SPLIT
from ..recipe.recipe import Recipe
from ..runs.shards import Shard


def log_to_stderr(line: str) -> None:
    with suppress(OSError):  # a closed pipe or a full disk does not end the run
        print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class RunConfig:
    """Recipe and options of a run.

    Attributes:
        out: parent of the run's directory.
        fresh: measure everything, ignoring results on disk.
        retry_failed: measure groups with failed cells again instead of reporting the failures again.
        fail_fast: end the run at the first failed cell.
        step_limit: seconds after which a step is aborted and its cell fails; None = no limit.
        validate: how often drafts and verdicts are checked in full, see `Decoder`.
        trust_remote_code: names of models that may run Python code from their own directories.
        allow_programs: programs that the engines of the recipe may start.
        shard: measure only this part of the groups, in its own directory, see `runs.shards`.
        untimed: discard times, for a device shared with other processes.
        log: receives progress messages, one line each; None for no messages.
        table: receives the results so far whenever a time budget makes a table due.
        progress: show a bar on stderr if it is a terminal.
        debug: log the tracebacks of failed cells.
        clock: returns seconds, for the time budget and estimates.
        launcher: name of a registered launcher that measures every group in its own process, or empty.
        launcher_options: options of the launcher.
        workers: maximum number of concurrent processes; by default the number of devices of the launcher.
        command: arguments of ``crossdraft`` that name the recipe in a launcher's process: ``["run", "recipe.yaml",
            "--set", ...]``.

    Raises:
        UsageError: options that cannot be combined.
    """

    recipe: Recipe
    out: Path
    fresh: bool = False
    retry_failed: bool = False
    fail_fast: bool = False
    step_limit: float | None = None
    validate: str = "sampled"
    trust_remote_code: Iterable[str] = ()
    allow_programs: Iterable[str] = ()
    shard: Shard | None = None
    untimed: bool = False
    log: Callable[[str], None] | None = log_to_stderr
    table: Callable[[Summary], object] | None = None
    progress: bool = False
    debug: bool = False
    clock: Callable[[], float] = time.monotonic
    launcher: str = ""
    launcher_options: Mapping[str, Any] = field(default_factory=dict)
    workers: int | None = None
    command: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.shard and self.launcher:
            raise UsageError(
                "--shard and --launcher cannot be combined: a launcher creates shards itself; remove one of them"
            )
        if self.launcher and self.recipe.device == SPLIT:
            raise UsageError(
                f"--launcher and device {SPLIT}: a launcher starts one process per group, but a split target needs "
                "several processes; use torchrun ... -m crossdraft run with --shard instead"
            )

    def message(self, line: str) -> None:
        """Log a line."""
        if self.log is not None:
            self.log(line)
