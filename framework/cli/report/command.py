"""``crossdraft report RUN...``: one page of Markdown or HTML from the records of runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from ...errors import UsageError, printable
from ...report.html import document
from ...report.html.document import LIBRARIES, html_page
from ...report.load_run import FinishedRun, read_runs
from ...report.markdown import MARK, page
from ...util.extras import need
from ...util.output_files import check_output, writing_output
from ..run_args import add_force, add_runs
from ..serve import listening
from .engine_settings import settings_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_runs(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the page there instead of printing it")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write one self-contained page there, to be sent around"
    )
    add_force(parser)
    parser.add_argument(
        "--watch", action="store_true", help="serve the HTML page on this machine while runs go on; Ctrl-C ends it"
    )
    parser.add_argument("--port", type=int, metavar="N", help="of --watch; 0 takes a free one (8010)")


def main(args: argparse.Namespace) -> int:
    """0: done; 2 (as UsageError): a directory that is no finished run, a file or port that cannot be had."""
    if args.watch:
        return _watch(args)
    if args.port is not None:
        raise UsageError("--port is of --watch; give that, too")
    outputs = _outputs(args)
    runs = read_runs(args.runs)
    if not outputs:
        print(page(runs), end="")
    for option, (file, make) in outputs.items():
        text = make(runs)
        with writing_output(file, option) as opened:
            opened.write(text.encode("utf-8"))
        print(f"wrote {printable(str(file))}")
    return 0


def _outputs(args: argparse.Namespace) -> dict[str, tuple[Path, Callable[[Sequence[FinishedRun]], str]]]:
    """The files to write and how each is made, by option. Raises UsageError for one that would destroy another file."""
    if args.out is not None and args.html is not None and args.out.absolute() == args.html.absolute():
        raise UsageError(f"--out and --html both name {printable(str(args.out))}; give two files")
    made: dict[str, tuple[bytes, Callable[[Sequence[FinishedRun]], str]]] = {
        "--html": (document.MARK, lambda runs: html_page(runs, settings_of(runs))),
        "--out": (MARK, page),
    }
    found: dict[str, tuple[Path, Callable[[Sequence[FinishedRun]], str]]] = {}
    for option, (mark, make) in made.items():
        if (name := getattr(args, option.lstrip("-"))) is not None:
            found[option] = check_output(name, option, inputs=args.runs, mark=mark, force=args.force), make
    return found


def _watch(args: argparse.Namespace) -> int:
    if args.out is not None or args.html is not None:
        raise UsageError("--watch serves the page and writes none; give --out or --html once the run has ended")
    for run in args.runs:
        if not run.is_dir():
            raise UsageError(f"{run} is no directory; crossdraft run says the one of a run when it begins")
    need("report --watch", "html,serve", *LIBRARIES, "starlette", "uvicorn")
    from ...report.watch import Live

    taken = listening("127.0.0.1", 8010 if args.port is None else args.port)
    print(f"crossdraft: http://127.0.0.1:{taken.getsockname()[1]} (Ctrl-C ends it)", flush=True)
    try:
        Live(args.runs, settings_of).server().run(sockets=[taken])
    except KeyboardInterrupt:  # uvicorn has ended in good order, and raises the signal again
        print("crossdraft: the server has ended")
    return 0
