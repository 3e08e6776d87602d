"""Handling of standard streams that are closed or full, or whose reader has closed the pipe."""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def open_closed() -> None:
    """Open the null device for each standard stream that is closed (``>&-``).

    Otherwise printing fails, and the next file that is opened gets the stream's file descriptor.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is not None:
            continue
        null = os.open(os.devnull, os.O_RDWR)
        try:
            os.fstat(number)
        except OSError:  # still closed
            os.dup2(null, number)
        setattr(sys, name, open(null, mode, encoding="utf-8"))  # noqa: SIM115 (open until exit)


def discard(stream: str = "stdout") -> None:
    """Redirect a stream to the null device, with its unwritten buffer."""
    with suppress(OSError, ValueError):  # streams in tests have no file descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), getattr(sys, stream).fileno())


def print_error(text: str) -> None:
    """Print to standard error; ignore a closed pipe."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        discard("stderr")


def print_stored(text: str) -> None:
    """Print text that is also stored in a file; ignore a closed pipe, as in ``crossdraft run … | head``."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        discard()
