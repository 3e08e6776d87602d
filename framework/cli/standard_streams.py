"""Standard streams that are closed, full, or whose reader has left."""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def open_closed() -> None:
    """Open the null device for each standard stream that was closed (``>&-``).

    Printing then works, and no file that is opened later gets the stream's number.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is not None:
            continue
        opened = os.open(os.devnull, os.O_RDWR)
        try:
            os.fstat(number)
        except OSError:  # still closed
            os.dup2(opened, number)
        setattr(sys, name, open(opened, mode, encoding="utf-8"))  # noqa: SIM115 (open until the process ends)


def discard(stream: str = "stdout") -> None:
    """Send what is still to be written to a stream to the null device."""
    with suppress(OSError, ValueError):  # a stream of a test has no number
        os.dup2(os.open(os.devnull, os.O_WRONLY), getattr(sys, stream).fileno())


def complain(text: str) -> None:
    """Print to standard error, if somebody reads it."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        discard("stderr")


def print_kept(text: str) -> None:
    """Print what is on the disk as well: that its reader has left, as in ``crossdraft run … | head``, is no failure."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        discard()
