"""``crossdraft compare A B``: two runs of the same prompts, pair by pair."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..errors import UsageError, printable
from ..report.comparison import compare_runs, comparison_text
from ..report.load_run import FinishedRun, read_runs
from .run_args import note_partial


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", type=Path, metavar="A", help="directory of a finished run, runs/NAME-HASH")
    parser.add_argument("b", type=Path, metavar="B", help="another one, which answered the same prompts")
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--markdown", action="store_true", help="print Markdown")
    forms.add_argument("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> int:
    """0: done; 2 (as UsageError): a run that cannot be read, or runs that cannot be compared."""
    runs = _one(args.a), _one(args.b)
    note_partial(runs)
    comparison = compare_runs(*runs)
    if args.json:
        print(json.dumps(comparison.to_json(), indent=2, ensure_ascii=False))
    else:
        print(comparison_text(comparison, "github" if args.markdown else "simple"), end="")
    return 0


def _one(directory: Path) -> FinishedRun:
    """The run in a directory, of shards or not."""
    runs = read_runs([directory])
    if len(runs) > 1:
        raise UsageError(f"{printable(str(directory))} holds shards of {len(runs)} recipes; give the shards of one")
    return runs[0]
