"""``crossdraft report RUN...``: one page of Markdown or HTML from the records of finished runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..contracts.errors import UsageError
from ..report.finished import read_runs
from ..report.html import html_page
from ..report.page import page
from .selecting import add_runs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_runs(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the page there instead of printing it")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write one self-contained page there, to be sent around"
    )


def main(args: argparse.Namespace) -> int:
    """0: done; 2 (as UsageError): a directory that is no finished run, a file that cannot be written."""
    runs = read_runs(args.runs)
    pages = {args.html: html_page} if args.html is not None else {}
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
