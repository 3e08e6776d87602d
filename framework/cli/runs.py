"""``crossdraft runs [DIR]``: list the runs in a directory and their progress."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from ..contracts.command import Argument, Command
from ..errors import CrossdraftError, printable
from ..runs.state import RunState, runs_in, state_of
from ..util.table import Table
from .options.run import JsonOptions


class Runs(JsonOptions, Command):
    """The runs in a directory and their progress."""

    name: ClassVar[str] = "runs"

    directory: Annotated[Path, Argument("DIR", positional=True)] = Field(Path("runs"), description="directory of runs")

    def run(self) -> int:
        """Return 0, or 1 if a run cannot be read. Raises UsageError if the directory does not exist."""
        states: list[tuple[Path, RunState]] = []
        unreadable: list[tuple[Path, str]] = []
        for path in runs_in(self.directory):
            try:
                states.append((path, state_of(path)))
            except CrossdraftError as error:
                unreadable.append((path, str(error)))
        if self.json_:
            readable = [{"run": str(path), **asdict(state)} for path, state in states]
            print(json.dumps(readable + [{"run": str(path), "error": error} for path, error in unreadable], indent=2))
        elif not states and not unreadable:
            print(f"no runs in {self.directory}")
        else:
            states.sort(key=lambda item: item[1].updated)  # the latest last, next to the prompt
            rows = [[self._title(path), *_row(state)] for path, state in states]
            rows += [[self._title(path), "cannot be read"] for path, _ in unreadable]
            notes = [f"{self._title(path)}: {printable(state.note)}" for path, state in states if state.note]
            print(
                Table(
                    ("run", "state", "cells", "started", "updated"), rows, [*notes, *(e for _, e in unreadable)]
                ).text()
            )
        return 1 if unreadable else 0

    def _title(self, path: Path) -> str:
        """The path of a run relative to the directory."""
        return printable(path.name if path == self.directory else str(path.relative_to(self.directory)))


def _row(state: RunState) -> list[str]:
    at = f" {100 * state.progress:.0f} %" if state.state == "running" and state.progress is not None else ""
    cells = f"{state.finished} of {state.cells}" if state.cells is not None else str(state.finished)
    failed = f", {state.failed} failed" if state.failed else ""
    return [f"{state.state}{at}", cells + failed, _time(state.started), _time(state.updated)]


def _time(iso: str) -> str:
    """A time of `RunState` in UTC, without seconds."""
    return f"{iso[:16].replace('T', ' ')} UTC" if iso else ""
