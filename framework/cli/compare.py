"""``crossdraft compare A B``: compare two runs on the same prompts, pair by pair."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..errors import UsageError, printable
from ..report.comparison import compare_runs, comparison_text
from ..report.load_run import FinishedRun, read_runs
from .options.run import note_partial

loads_models = False  # as of `Command`


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", type=Path, metavar="A", help="directory of a finished run, runs/NAME-HASH")
    parser.add_argument("b", type=Path, metavar="B", help="directory of another run on the same prompts")
    formats = parser.add_mutually_exclusive_group()
    formats.add_argument("--markdown", action="store_true", help="print Markdown")
    formats.add_argument("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> int:
    """Return 0. Raises UsageError (exit status 2) for runs that cannot be read or compared."""
    runs = _read(args.a), _read(args.b)
    note_partial(runs)
    comparison = compare_runs(*runs)
    if args.json:
        print(json.dumps(comparison.to_json(), indent=2, ensure_ascii=False))
    else:
        print(comparison_text(comparison, "markdown" if args.markdown else "text"), end="")
    return 0


def _read(directory: Path) -> FinishedRun:
    """The run in a directory, shards merged."""
    runs = read_runs([directory])
    if len(runs) > 1:
        raise UsageError(f"{printable(str(directory))} holds shards of {len(runs)} recipes; give the shards of one")
    return runs[0]
