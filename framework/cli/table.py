"""``crossdraft table RUN...``: a pivot table of finished runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..cost.load_run import read_runs, titles_of
from ..errors import UsageError, printable
from ..report.pivot import hidden_keys, pivot, rendered, withheld_note
from ..report.segments import with_segments
from ..report.selection import finished_cells
from ..util.output_files import check_output, writing_output
from ..util.table import FORMATS
from .options.run import add_force, add_runs, add_segment, add_where, comma_list, note_partial

loads_models = False  # as of `Command`


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_runs(parser)
    parser.add_argument(
        "--rows",
        type=comma_list(),
        default=["drafter"],
        metavar="KEY,...",
        help="keys of the rows: run, drafter, verifier, target, batch_size, temperature, gamma, ... (drafter)",
    )
    parser.add_argument(
        "--cols", type=comma_list(), default=["verifier"], metavar="KEY,...", help="keys of the columns (verifier)"
    )
    parser.add_argument(
        "--value",
        type=comma_list(),
        metavar="COLUMN,...",
        help="columns of summary.csv, explained in a run's README (block_efficiency, with --segment of each segment)",
    )
    add_segment(parser)
    add_where(parser)
    parser.add_argument("--baseline", action="store_true", help="include plain decoding (drafter none)")
    parser.add_argument("--format", choices=FORMATS, default="markdown", help=f"{', '.join(FORMATS)} (markdown)")
    parser.add_argument("--digits", type=int, default=2, metavar="N", help="decimal places, except in CSV (2)")
    parser.add_argument("--no-intervals", action="store_true", help="omit confidence intervals")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table to a file instead of printing it")
    add_force(parser)


def main(args: argparse.Namespace) -> int:
    """Return 0. Raises UsageError (exit status 2) for an unreadable run, or keys under which cells collide."""
    if not 0 <= args.digits <= 12:
        raise UsageError(f"--digits {args.digits} is out of range; give 0 to 12")
    # A table carries no mark of its origin, so an existing file always requires --force.
    out = None if args.out is None else check_output(args.out, "--out", inputs=args.runs, force=args.force)
    runs = [with_segments(run, args.segment) for run in read_runs(args.runs)]
    note_partial(runs)
    cells = finished_cells(list(zip(titles_of(runs), runs, strict=True)), args.where)
    cells = [cell for cell in cells if args.baseline or not cell.result.config.is_baseline]
    if not cells:
        raise UsageError("no cells to show: --where excludes all of them (plain decoding requires --baseline)")
    names = [name for run in runs for segments in run.segments.values() for name in segments]
    values = args.value or [f"block_efficiency_{name}" for name in dict.fromkeys(names)] or ["block_efficiency"]
    table = pivot(cells, args.rows, args.cols, values)
    if keys := hidden_keys(table, cells):
        note = f"the cells of this table differ in {', '.join(keys)}, which are not in --rows or --cols"
        print(f"crossdraft: note: {note}", file=sys.stderr)
    if note := withheld_note(table):
        print(f"crossdraft: note: {note}", file=sys.stderr)
    text = rendered(table, args.format, args.digits, not args.no_intervals)
    if out is None:
        print(text, end="")
        return 0
    with writing_output(out, "--out") as file:
        file.write(text.encode("utf-8"))
    print(f"wrote {printable(str(out))}")
    return 0
