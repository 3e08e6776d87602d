"""What an engine wrote: a log, a scrape, a file; read from a path or a URL, with lines to point at."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from queue import Empty, SimpleQueue
from typing import Any
from urllib.request import urlopen

from ..errors import UsageError, first_line, printable
from ..util.input_files import parse_json, path_of, read_text
from ..util.limits import METRICS_BYTES, MOST_NESTING

#: The first line of a JSON value over several lines; a log's time stamp in brackets is none.
_JSON_BEGINS = re.compile(r"[\[{]\s*([\[{\"]|$)")
#: Characters that no URL may hold as they are.
UNFIT = re.compile(r"[\x00-\x20\x7f]")
#: Seconds in which a server has to send its whole answer.
PATIENCE = 10.0


@dataclass(frozen=True)
class Source:
    """A text and its name.

    Attributes:
        name: a path or URL, for people.
    """

    text: str
    name: str

    @cached_property
    def _lines(self) -> list[str]:
        return self.text.split("\n")

    @property
    def count(self) -> int:
        """How many lines there are."""
        return len(self._lines) - self.ended

    @property
    def ended(self) -> bool:
        """Does the last line end with a newline?"""
        return self.text.endswith("\n") or not self.text

    def lines(self) -> Iterator[tuple[int, str]]:
        """Lines and their numbers, from 1."""
        for number, line in enumerate(self._lines[: self.count], start=1):
            yield number, line.removesuffix("\r")

    def place(self, line: int) -> str:
        return f"{self.name}:{line}"

    def error(self, line: int, why: str) -> UsageError:
        """The error to raise for what is wrong in a line."""
        return UsageError(f"{self.place(line)}: {why}")

    def number(self, text: str, line: int, what: str, most: float = float("inf")) -> float:
        """The number in ``text``, from 0 to ``most``. Raises UsageError for any other, NaN too."""
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not 0 <= value <= most or value == float("inf"):
            bound = f" from 0 to {most:g}" if most < float("inf") else ""
            raise self.error(line, f"{what} is {printable(text)[:40]}, no number{bound}")
        return value

    def rates(self, found: dict[str, Any], key: str, line: int) -> tuple[float, ...]:
        """The rates by position under ``key``, as many as there are speculative tokens. Raises UsageError."""
        rates, n = found[key], found.get("num_speculative_tokens")
        if not isinstance(rates, list) or not rates or not all(type(rate) in (int, float) for rate in rates):
            raise self.error(line, f"{key} is no list of numbers")
        if n is not None and n != len(rates):
            raise self.error(line, f"{key} has {len(rates)} entries, num_speculative_tokens is {n!r:.20}")
        return tuple(map(float, rates))

    def objects(self, key: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """Every JSON object with ``key`` in it, however deep, and the line that it, or its file, begins in.

        The text is one JSON value, or has one a line, with ``data:`` in front if it is a stream of events; lines
        without the key are passed over.
        """
        quoted = f'"{key}"'
        if quoted not in self.text:
            return
        if self._is_one_value():
            for found in _holding(parse_json(self.text, self.name), key):
                yield 1, found
            return
        for number, line in self.lines():
            line = line.strip().removeprefix("data:").strip()
            if quoted in line and line[:1] in ("{", "["):
                for found in _holding(parse_json(line, self.name, line=number), key):
                    yield number, found

    def _is_one_value(self) -> bool:
        """Does a JSON value begin in the first line and not end there?"""
        first = next((line.strip() for _, line in self.lines() if line.strip()), "")
        return _JSON_BEGINS.match(first) is not None and (len(first) == 1 or first[-1] not in "}]")


def _holding(value: Any, key: str) -> list[dict[str, Any]]:
    """The objects in ``value`` that have ``key``; no deeper than `MOST_NESTING`."""
    found, level = [], [value]
    for _ in range(MOST_NESTING):
        found += [one for one in level if isinstance(one, dict) and key in one]
        level = [v for one in level for v in (one.values() if isinstance(one, dict) else one)]
        level = [one for one in level if isinstance(one, dict | list)]
    return found


def read_source(source: str) -> Source:
    """The text of a file, or what a URL answers with. Raises UsageError."""
    if not source.startswith(("http://", "https://")):
        return Source(read_text(path_of(source), METRICS_BYTES), printable(source))
    data = _fetched(source)
    if reason := METRICS_BYTES.refusal(data):
        raise UsageError(f"{printable(source)} answers with too much; in bytes, {reason}")
    try:
        return Source(data.decode("utf-8"), printable(source))
    except UnicodeDecodeError as error:
        raise UsageError(f"cannot read {printable(source)}: the answer is not UTF-8 text: {error}") from None


def _fetched(url: str) -> bytes:
    """Return the answer of a URL, at most `METRICS_BYTES` and one more. Raises UsageError.

    A thread reads it: time limits of sockets are for a single read, and a server that sends a byte now and then would
    hold the command for ever. The thread ends with the process.
    """
    answers: SimpleQueue[bytes | Exception] = SimpleQueue()

    def read() -> None:
        try:
            with urlopen(url, timeout=PATIENCE) as answer:
                answers.put(answer.read(METRICS_BYTES + 1))
        except Exception as error:  # of the network, of http.client, of a URL that is none
            answers.put(error)

    if flaw := UNFIT.search(url):
        raise UsageError(f"{printable(url)} is not a URL: it holds {flaw[0]!r}; write it as %{ord(flaw[0]):02X}")
    threading.Thread(target=read, daemon=True).start()
    try:
        found = answers.get(timeout=PATIENCE)
    except Empty:
        raise UsageError(
            f"cannot read {printable(url)}: the answer was not complete after {PATIENCE:g} s; save it to a file, and "
            "give that"
        ) from None
    if isinstance(found, Exception):
        raise UsageError(f"cannot read {printable(url)}: {first_line(found)}")
    return found
