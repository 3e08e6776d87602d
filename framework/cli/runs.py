"""``crossdraft runs [DIR]``: the runs in a directory, and how far each of them is."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from tabulate import tabulate

from ..errors import CrossdraftError, printable
from ..runs.state import RunState, runs_in, state_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory", nargs="?", type=Path, default=Path("runs"), metavar="DIR", help="where they are (runs)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> int:
    """0: done; 1: one of them cannot be read; 2 (as UsageError): no such directory."""
    found: list[tuple[Path, RunState]] = []
    unreadable: list[tuple[Path, str]] = []
    for path in runs_in(args.directory):
        try:
            found.append((path, state_of(path)))
        except CrossdraftError as error:
            unreadable.append((path, str(error)))
    if args.json:
        known = [{"run": str(path), **asdict(state)} for path, state in found]
        print(json.dumps(known + [{"run": str(path), "error": error} for path, error in unreadable], indent=2))
    elif not found and not unreadable:
        print(f"no runs in {args.directory}")
    else:
        found.sort(key=lambda one: one[1].updated)  # the last one stands above the prompt
        rows = [[_name(path, args.directory), *_row(state)] for path, state in found]
        rows += [[_name(path, args.directory), "cannot be read", "", "", ""] for path, _ in unreadable]
        print(tabulate(rows, headers=["run", "state", "cells", "started", "updated"], disable_numparse=True))
        notes = [f"{_name(path, args.directory)}: {printable(state.note)}" for path, state in found if state.note]
        notes += [error for _, error in unreadable]
        if notes:
            print("\n" + "\n".join(notes))
    return 1 if unreadable else 0


def _name(path: Path, directory: Path) -> str:
    """A run as it lies in the directory."""
    return printable(path.name if path == directory else str(path.relative_to(directory)))


def _row(state: RunState) -> list[str]:
    at = f" {100 * state.progress:.0f} %" if state.state == "running" and state.progress is not None else ""
    cells = f"{state.finished} of {state.cells}" if state.cells is not None else str(state.finished)
    failed = f", {state.failed} failed" if state.failed else ""
    return [f"{state.state}{at}", cells + failed, _time(state.started), _time(state.updated)]


def _time(iso: str) -> str:
    """A time of `RunState` to the minute, as UTC."""
    return f"{iso[:16].replace('T', ' ')} UTC" if iso else ""
