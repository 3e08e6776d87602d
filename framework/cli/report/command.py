"""``crossdraft report RUN...``: a Markdown or HTML report of finished runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from ...cost.load_run import FinishedRun, read_runs
from ...errors import UsageError, printable
from ...report.html import document
from ...report.html.document import LIBRARIES, html_page
from ...report.markdown import MARK, page
from ...report.segments import with_segments
from ...util.extras import need
from ...util.output_files import check_output, writing_output
from ..options.run import add_force, add_runs, add_segment
from .engine_settings import engine_settings

loads_models = False  # as of `Command`


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_runs(parser)
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the Markdown report to a file instead of printing it"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a self-contained HTML report to a file")
    add_force(parser)
    add_segment(parser)
    parser.add_argument(
        "--watch",
        action="store_true",
        help="serve the HTML report on this machine while runs are running; Ctrl-C stops it",
    )
    parser.add_argument("--port", type=int, metavar="N", help="port of --watch; 0 = any free port (8010)")


def main(args: argparse.Namespace) -> int:
    """Return 0. Raises UsageError (exit status 2) for a directory, an output file or a port that cannot be used."""
    if args.watch:
        return _watch(args)
    if args.port is not None:
        raise UsageError("--port requires --watch; add it, or remove --port")
    outputs = _outputs(args)
    runs = [with_segments(run, args.segment) for run in read_runs(args.runs)]
    if not outputs:
        print(page(runs), end="")
    for option, (file, make) in outputs.items():
        text = make(runs)
        with writing_output(file, option) as opened:
            opened.write(text.encode("utf-8"))
        print(f"wrote {printable(str(file))}")
    return 0


def _outputs(args: argparse.Namespace) -> dict[str, tuple[Path, Callable[[Sequence[FinishedRun]], str]]]:
    """Output file and page function by option. Raises UsageError for a file that must not be overwritten."""
    if args.out is not None and args.html is not None and args.out.absolute() == args.html.absolute():
        raise UsageError(f"--out and --html both name {printable(str(args.out))}; name two different files")
    pages: dict[str, tuple[bytes, Callable[[Sequence[FinishedRun]], str]]] = {
        "--html": (document.MARK, lambda runs: html_page(runs, engine_settings(runs))),
        "--out": (MARK, page),
    }
    outputs: dict[str, tuple[Path, Callable[[Sequence[FinishedRun]], str]]] = {}
    for option, (mark, make) in pages.items():
        if (path := getattr(args, option.lstrip("-"))) is not None:
            outputs[option] = check_output(path, option, inputs=args.runs, mark=mark, force=args.force), make
    return outputs


def _watch(args: argparse.Namespace) -> int:
    if args.segment:
        raise UsageError("--watch and --segment cannot be combined; remove one of them")
    if args.out is not None or args.html is not None:
        raise UsageError("--watch does not write files; use --out or --html after the run has finished")
    for run in args.runs:
        if not run.is_dir():
            raise UsageError(
                f"{run} is not a directory; give a run directory, which crossdraft run prints at its start"
            )
    need("report --watch", "html", *LIBRARIES, "starlette", "uvicorn")
    from ...report.watch import ReportServer
    from ...util.loopback import listen

    listener = listen("127.0.0.1", 8010 if args.port is None else args.port)
    print(f"crossdraft: http://127.0.0.1:{listener.getsockname()[1]} (press Ctrl-C to stop)", flush=True)
    try:
        ReportServer(args.runs, engine_settings).server().run(sockets=[listener])
    except KeyboardInterrupt:  # uvicorn shuts down cleanly, then raises the signal again
        print("crossdraft: server stopped")
    return 0
