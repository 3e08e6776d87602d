"""``crossdraft report RUN...``: one page of Markdown or HTML from the records of runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..contracts.errors import UsageError
from ..contracts.extras import need
from ..report.finished import read_runs
from ..report.html import LIBRARIES, html_page
from ..report.page import page
from .report_settings import settings_of
from .selecting import add_runs
from .serve import listening


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_runs(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the page there instead of printing it")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write one self-contained page there, to be sent around"
    )
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
    runs = read_runs(args.runs)
    pages: dict[Path | None, Any] = {}
    if args.html is not None:
        pages[args.html] = lambda runs: html_page(runs, settings_of(runs))
    if args.out is not None or args.html is None:
        pages[args.out] = page
    if len(pages) < (args.out is not None) + (args.html is not None):
        raise UsageError(f"--out and --html both name {args.out}; give two files")
    for file, make in pages.items():
        text = make(runs)
        if file is None:
            print(text, end="")
            continue
        try:
            file.write_text(text, encoding="utf-8", newline="\n")
        except OSError as error:
            raise UsageError(f"cannot write {file}: {error.strerror}") from None
        print(f"wrote {file}")
    return 0


def _watch(args: argparse.Namespace) -> int:
    if args.out is not None or args.html is not None:
        raise UsageError("--watch serves the page and writes none; give --out or --html once the run has ended")
    for run in args.runs:
        if not run.is_dir():
            raise UsageError(f"{run} is no directory; crossdraft run says the one of a run when it begins")
    need("report --watch", "html,serve", *LIBRARIES, "starlette", "uvicorn")
    from ..report.live import Live

    taken = listening("127.0.0.1", 8010 if args.port is None else args.port)
    print(f"crossdraft: http://127.0.0.1:{taken.getsockname()[1]} (Ctrl-C ends it)", flush=True)
    try:
        Live(args.runs, settings_of).server().run(sockets=[taken])
    except KeyboardInterrupt:  # uvicorn has ended in good order, and raises the signal again
        print("crossdraft: the server has ended")
    return 0
