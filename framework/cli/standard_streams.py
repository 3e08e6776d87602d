"""Standard streams: closed or full ones, those whose reader has closed the pipe, and foreign text on them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

#: Control characters, but tabs and line breaks, and changes of the direction of text. A carriage return is permitted at
#: the beginning of a text, where progress bars have one, and before a line feed.
_CONTROL = re.compile("(?<=[\\s\\S])\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
#: Movements of the cursor by progress bars, each a text of its own.
_BAR = re.compile("\n*(\x1b\\[A)*")


class CleanStream:
    """A text stream on which control characters, which terminals execute, are printed as escapes.

    Names of models, errors of engines and responses are foreign text, and any of them may be printed.
    """

    def __init__(self, stream: Any):
        self._stream = stream

    def write(self, text: str) -> int:
        clean = text if _BAR.fullmatch(text) else _CONTROL.sub(lambda c: c[0].encode("unicode_escape").decode(), text)
        self._stream.write(clean)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def cleaned() -> Iterator[None]:
    """Let standard output and standard error be a `CleanStream`."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(CleanStream, before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


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
    """Print text that is also stored in a file; ignore a closed pipe, as in ``crossdraft run … | head``.

    On a terminal, ratios by the clock are grey, unless the environment has ``NO_COLOR``.
    """
    if sys.stdout.isatty() and "NO_COLOR" not in os.environ:
        text = re.sub(r"~[\d.]+ clock", "\x1b[90m\\g<0>\x1b[0m", text)
    try:
        print(text, flush=True)
    except BrokenPipeError:
        discard()
