"""``crossdraft plot RUN...``: charts of finished runs, for papers."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from ..errors import UsageError, printable
from ..report.charts.charts import KINDS, draw_to
from ..report.charts.style import FORMATS, MARK, WIDTHS
from ..report.load_run import FinishedRun, read_runs
from ..report.markdown import titles_of
from ..report.selection import finished_cells
from ..util.output_files import check_output
from .run_args import add_force, add_runs, add_where, comma_list, note_partial, output_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = "; ".join(f"{name}: {kind.shows}" for name, kind in KINDS.items())
    add_runs(parser)
    parser.add_argument(
        "--kind",
        type=comma_list(KINDS),
        action="extend",
        metavar="KIND,...",
        help=f"all that the cells allow, or some of these. {kinds}",
    )
    parser.add_argument(
        "--format",
        dest="formats",
        type=comma_list(FORMATS),
        metavar="FORMAT,...",
        default=list(FORMATS),
        help=f"some of {', '.join(FORMATS)} (all)",
    )
    parser.add_argument("--width", choices=WIDTHS, default="column", help="of a two-column paper (column)")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where files go, as RUN-KIND.FORMAT; by default KIND.FORMAT beside the records",
    )
    add_force(parser)
    add_where(parser)


def main(args: argparse.Namespace) -> int:
    """0: done; 2 (as UsageError): a run that cannot be read, cells that do not allow a chart that was named."""
    out = None if args.out is None else output_folder(args.out)
    runs = read_runs(args.runs)
    note_partial(runs)
    sections = list(zip(titles_of(runs), runs, strict=True))
    cells = finished_cells(sections, args.where)
    planned: list[tuple[str, FinishedRun, dict[str, list[Path]]]] = []
    for title, run in sections:
        folder, start = run.summary.directory, ""
        if out is not None:
            folder, start = out, re.sub(r"[^\w.-]+", "-", title).strip("-.") + "-"
        files = {kind: [folder / f"{start}{kind}.{form}" for form in args.formats] for kind in args.kind or KINDS}
        for file in (file for found in files.values() for file in found):
            check_output(file, "--out", mark=MARK, force=args.force)
        planned.append((title, run, files))
    written = 0
    for title, run, by_kind in planned:
        results = [cell.result for cell in cells if cell.run is run]
        for kind, files in by_kind.items():
            left_out = draw_to(results, kind, args.width, files)
            if left_out is None:
                if args.kind:
                    raise UsageError(f"the run {printable(title)} has no {kind}: it needs {KINDS[kind].needs}")
                continue
            for file in files:
                print(f"wrote {printable(str(file))}")
            written += len(files)
            if left_out:
                print(f"{kind} of {printable(title)} leaves out {left_out} panels; choose cells with --where")
    if not written:
        raise UsageError("there is nothing to draw: no run has finished cells that draft")
    return 0
