"""``crossdraft runs [DIR]``: list the runs in a directory and their progress."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from tabulate import tabulate

from ..errors import CrossdraftError, printable
from ..runs.state import RunState, runs_in, state_of

loads_models = False  # as of `Command`


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory", nargs="?", type=Path, default=Path("runs"), metavar="DIR", help="directory of runs (runs)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> int:
    """Return 0, or 1 if a run cannot be read. Raises UsageError (exit status 2) if the directory does not exist."""
    states: list[tuple[Path, RunState]] = []
    unreadable: list[tuple[Path, str]] = []
    for path in runs_in(args.directory):
        try:
            states.append((path, state_of(path)))
        except CrossdraftError as error:
            unreadable.append((path, str(error)))
    if args.json:
        readable = [{"run": str(path), **asdict(state)} for path, state in states]
        print(json.dumps(readable + [{"run": str(path), "error": error} for path, error in unreadable], indent=2))
    elif not states and not unreadable:
        print(f"no runs in {args.directory}")
    else:
        states.sort(key=lambda item: item[1].updated)  # the latest last, next to the prompt
        rows = [[_name(path, args.directory), *_row(state)] for path, state in states]
        rows += [[_name(path, args.directory), "cannot be read", "", "", ""] for path, _ in unreadable]
        print(tabulate(rows, headers=["run", "state", "cells", "started", "updated"], disable_numparse=True))
        notes = [f"{_name(path, args.directory)}: {printable(state.note)}" for path, state in states if state.note]
        notes += [error for _, error in unreadable]
        if notes:
            print("\n" + "\n".join(notes))
    return 1 if unreadable else 0


def _name(path: Path, directory: Path) -> str:
    """The path of a run relative to the directory."""
    return printable(path.name if path == directory else str(path.relative_to(directory)))


def _row(state: RunState) -> list[str]:
    at = f" {100 * state.progress:.0f} %" if state.state == "running" and state.progress is not None else ""
    cells = f"{state.finished} of {state.cells}" if state.cells is not None else str(state.finished)
    failed = f", {state.failed} failed" if state.failed else ""
    return [f"{state.state}{at}", cells + failed, _time(state.started), _time(state.updated)]


def _time(iso: str) -> str:
    """A time of `RunState` in UTC, without seconds."""
    return f"{iso[:16].replace('T', ' ')} UTC" if iso else ""
