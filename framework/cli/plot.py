"""``crossdraft plot RUN...``: publication-quality charts of finished runs."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from ..cost.load_run import FinishedRun, read_runs, titles_of
from ..errors import UsageError, printable
from ..report.charts.charts import KINDS, draw_to
from ..report.charts.style import FORMATS, MARK, WIDTHS
from ..report.metrics_text import no_speed_up
from ..report.selection import finished_cells
from ..util.output_files import check_output
from .options.run import add_force, add_runs, add_where, comma_list, note_partial, output_folder

loads_models = False  # as of `Command`


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = "; ".join(f"{name}: {kind.shows}" for name, kind in KINDS.items())
    add_runs(parser)
    parser.add_argument(
        "--kind",
        type=comma_list(KINDS),
        action="extend",
        metavar="KIND,...",
        help=f"kinds of chart (default: all that the cells allow). {kinds}",
    )
    parser.add_argument(
        "--format",
        dest="formats",
        type=comma_list(FORMATS),
        metavar="FORMAT,...",
        default=list(FORMATS),
        help=f"file formats: {', '.join(FORMATS)} (all)",
    )
    parser.add_argument("--width", choices=WIDTHS, default="column", help="width in a two-column paper (column)")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="output directory, for files RUN-KIND.FORMAT (default: KIND.FORMAT in the run's directory)",
    )
    add_force(parser)
    add_where(parser)


def main(args: argparse.Namespace) -> int:
    """Return 0.

    Raises:
        UsageError: an unreadable run, or, once the others are drawn, a chart that the cells do not allow.
    """
    out = None if args.out is None else output_folder(args.out)
    runs = read_runs(args.runs)
    note_partial(runs)
    sections = list(zip(titles_of(runs), runs, strict=True))
    cells = finished_cells(sections, args.where)
    planned: list[tuple[str, FinishedRun, dict[str, list[Path]]]] = []
    for title, run in sections:
        folder, prefix = run.summary.directory, ""
        if out is not None:
            folder, prefix = out, re.sub(r"[^\w.-]+", "-", title).strip("-.") + "-"
        files = {
            kind: [folder / f"{prefix}{kind}.{extension}" for extension in args.formats] for kind in args.kind or KINDS
        }
        for file in (file for paths in files.values() for file in paths):
            check_output(file, "--out", mark=MARK, force=args.force)
        planned.append((title, run, files))
    written, undrawn = 0, []
    for title, run, by_kind in planned:
        results = [cell.result for cell in cells if cell.run is run]
        for kind, files in by_kind.items():
            omitted = draw_to(results, kind, args.width, files)
            if omitted is None:
                if args.kind:
                    missing = no_speed_up(results) if kind == "speed_up" else ""
                    reason = missing or f"it requires {KINDS[kind].needs}"
                    undrawn.append(f"{kind} cannot be drawn for run {printable(title)}: {reason}")
                continue
            for file in files:
                print(f"wrote {printable(str(file))}")
            written += len(files)
            if omitted:
                print(f"{kind} of {printable(title)} omits {omitted} panels; select cells with --where")
    if undrawn:
        raise UsageError("\n".join(undrawn))
    if not written:
        raise UsageError("nothing to draw: none of the runs has finished cells with a drafter")
    return 0
