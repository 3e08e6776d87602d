"""``crossdraft report RUN...``: one page of Markdown from the records of finished runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..contracts.errors import UsageError
from ..report.finished import read_run
from ..report.page import page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="directory of a finished run, runs/NAME-HASH")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the page there instead of printing it")


def main(args: argparse.Namespace) -> int:
    """0: done; 2 (as UsageError): a directory that is no finished run, a file that cannot be written."""
    text = page([read_run(directory) for directory in args.runs])
    if args.out is None:
        print(text, end="")
        return 0
    try:
        args.out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {args.out}: {error.strerror}") from None
    print(f"wrote {args.out}")
    return 0
