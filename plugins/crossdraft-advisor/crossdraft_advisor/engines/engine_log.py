"""Text sources: logs, metrics and files of engines, read from a path or a URL, with line numbers for errors."""

from __future__ import annotations

import codecs
import csv
import json
import re
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

from crossdraft import UsageError, printable
from crossdraft.commands import MOST_NESTING, parse_json, path_of, read_bytes

from ..limits import METRICS_BYTES
from .http_response import HEADERS, HttpResponse, NetworkError, redacted, without_password

if TYPE_CHECKING:
    from ..cost.step_cost import SpeedPoint

_T = TypeVar("_T")
#: The first line of a multi-line JSON value, but not a time stamp in brackets.
_JSON_BEGINS = re.compile(r"[\[{]\s*([\[{\"]|$)")
UNFIT = re.compile(r"[\x00-\x20\x7f]")  # characters that must be escaped in a URL
ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|[@-_])")  # colours and other control sequences of terminals
_SEPARATED = re.compile(r"\d{1,3}(,\d{3})+(\.\d*)?")  # a number with separators of thousands
_GZIP = b"\x1f\x8b"  # first bytes of a compressed file, as log rotation writes it
#: First bytes of files that are not text, and how they are made one.
_PACKED = {
    _GZIP: "compressed; unpack it (gunzip -k)",
    b"\x28\xb5\x2f\xfd": "compressed; unpack it (unzstd)",
    b"\xfd7zXZ": "compressed; unpack it (unxz -k)",
    b"BZh": "compressed; unpack it (bunzip2 -k)",
    b"PK\x03\x04": "an archive; unpack it (unzip)",
    b"PAR1": "a Parquet file; convert it to JSONL or CSV",
}
TIMEOUT = 10.0  # time limit in seconds for a complete HTTP response


class DraftLengthError(UsageError):
    """A given draft length that contradicts the counts of a source; no record of it is damaged."""


class _Lines:
    """Numbered lines, and those with a text."""

    def __init__(self, items: list[tuple[int, str]]) -> None:
        self.items = items

    @cached_property
    def _joined(self) -> tuple[str, list[int]]:
        """The lines as one text, and the position of each."""
        lines = [line for _, line in self.items]
        return "\n".join(lines), [0, *accumulate(len(line) + 1 for line in lines)][: len(lines)]

    def having(self, marks: Sequence[str]) -> Iterator[tuple[int, str]]:
        """The lines with one of ``marks``, which are searched without a loop over lines; all without ``marks``."""
        if not marks:
            yield from self.items
            return
        text, starts = self._joined
        indices = set[int]()
        for mark in marks:
            at = text.find(mark)
            while at >= 0:
                index = bisect_right(starts, at)
                indices.add(index - 1)
                at = text.find(mark, starts[index]) if index < len(starts) else -1
        yield from (self.items[index] for index in sorted(indices))


@dataclass(frozen=True)
class Source:
    """A text and its name."""

    text: str
    name: str  # a path or URL, for messages
    gamma: int | None = None  # the draft length, if it is given and the text does not have it
    skipped: list[str] = field(default_factory=list, compare=False)  # messages about records that could not be read
    # seconds of steps, added by the formats that read it, see `speeds`
    timed: list[SpeedPoint] = field(default_factory=list, compare=False)
    # those of a scrape by name, parsed once, see `prometheus.samples`
    series: dict[str, dict[Any, Any]] = field(default_factory=dict, compare=False)

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """Skip a record that raises UsageError; its message is kept."""
        try:
            yield
        except DraftLengthError:
            raise
        except UsageError as error:
            self.skipped.append(str(error))

    def read(self, items: Iterable[tuple[Any, ...]], parse: Callable[..., _T | None]) -> list[_T]:
        """Results of ``parse`` but None, one per item; items for which it raises UsageError are skipped."""
        results = []
        for item in items:
            with self.skipping():
                if (result := parse(*item)) is not None:
                    results.append(result)
        return results

    @cached_property
    def _lines(self) -> list[str]:
        return self.text.split("\n")

    @property
    def count(self) -> int:
        """The number of lines."""
        return len(self._lines) - self.ended

    @property
    def ended(self) -> bool:
        """True if the last line ends with a newline."""
        return self.text.endswith("\n") or not self.text

    def lines(self, *marks: str) -> Iterator[tuple[int, str]]:
        """Line numbers, from 1, and lines; of a log in JSON or CSV the lines that were wrapped, see `unwrapped`.

        ``marks``: only lines with one of these texts, which are searched without a loop over lines.
        """
        yield from self._unwrapped.having(marks)

    def raw_lines(self, *marks: str) -> Iterator[tuple[int, str]]:
        """Line numbers, from 1, and lines as they are in the file, see `lines`."""
        yield from self._raw.having(marks)

    @cached_property
    def _raw(self) -> _Lines:
        return _Lines([(n, line.removesuffix("\r")) for n, line in enumerate(self._lines[: self.count], start=1)])

    @cached_property
    def _unwrapped(self) -> _Lines:
        if self._is_one_value and (texts := [(1, ESCAPES.sub("", text)) for text in texts_in(self.text)]):
            return _Lines(texts)
        lines = [
            (number, ESCAPES.sub("", text) if text is not line else line)
            for number, line in self._raw.items
            for text in unwrapped(line) or [line]
        ]
        return _Lines(lines) if lines != self._raw.items else self._raw

    def place(self, line: int) -> str:
        return f"{self.name}:{line}"

    def error(self, line: int, message: str) -> UsageError:
        """A UsageError with file and line."""
        return UsageError(f"{self.place(line)}: {message}")

    def skip(self, line: int, message: str) -> None:
        """Count a record as skipped."""
        self.skipped.append(f"{self.place(line)}: {message}")

    def number(self, text: str, line: int, subject: str, maximum: float = float("inf")) -> float:
        """Parse a number from 0 to ``maximum``. Raises UsageError, for NaN as well."""
        try:
            value = float(text.replace(",", "") if _SEPARATED.fullmatch(text) else text)
        except ValueError:
            value = float("nan")
        if not 0 <= value <= maximum or value == float("inf"):
            bound = f" from 0 to {maximum:g}" if maximum < float("inf") else ""
            raise self.error(line, f"{subject} is {printable(text)[:40]}, which is not a number{bound}")
        return value

    def rates(self, fields: dict[str, Any], key: str, line: int) -> tuple[float, ...]:
        """The rates by position under ``key``, one per speculative token. Raises UsageError."""
        rates, n = fields[key], fields.get("num_speculative_tokens")
        if not isinstance(rates, list) or not rates or not all(type(rate) in (int, float) for rate in rates):
            raise self.error(line, f"{key} is not a list of numbers")
        if n is not None and n != len(rates):
            raise self.error(line, f"{key} has {len(rates)} entries, num_speculative_tokens is {n!r:.20}")
        return tuple(map(float, rates))

    def objects(self, key: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """All JSON objects with ``key``, at any depth, and the line of each (1 if the text is one JSON value).

        The text is one JSON value or has one per line, with the prefix ``data:`` in an event stream; lines without the
        key are skipped.
        """
        quoted = f'"{key}"'
        if quoted not in self.text:
            return
        if self._is_one_value:
            for item in _objects_with(self._value, key):
                yield 1, item
            return
        for number, line in self.raw_lines():
            line = line.strip().removeprefix("data:").strip()
            if quoted in line and line[:1] in ("{", "["):
                for item in _objects_with(self._parsed(line, number), key):
                    yield number, item

    @cached_property
    def _value(self) -> Any:
        """The text as one JSON value, parsed once for all keys."""
        return self._parsed(self.text, 1)

    def _parsed(self, text: str, line: int) -> Any:
        """A JSON value; an empty list if it is damaged, which is counted as skipped."""
        with self.skipping():
            return parse_json(text, self.name, line=line)
        return []

    def row(self, line: int) -> dict[str, Any]:
        """The JSON object in a line; empty if it has another value, or if the text is one. Raises UsageError."""
        if self._is_one_value:
            return {}
        row = parse_json(self._lines[line - 1].strip().removeprefix("data:").strip(), self.name, line=line)
        return row if isinstance(row, dict) else {}

    def row_id(self, line: int) -> str:
        """``custom_id``, or else ``id``, of the JSON object in a line; empty if it has none."""
        row = self.row(line)
        name = row.get("custom_id") or row.get("id")
        return name if isinstance(name, str) else ""

    def responses(self, key: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """The objects with ``key``, see `objects`, of whole responses.

        The chunks of a streamed response repeat its counts; the last one counts. A line without ``key`` that is
        damaged or has an error is counted as skipped.
        """
        latest: dict[Any, tuple[int, dict[str, Any]]] = {}
        stream, before, nth = 0, 0, 0
        for number, fields in self.objects(key):
            for line in range(before + 1, number):
                stream += self._lines[line - 1].startswith("data: [DONE]")
                self._skip_failed(line)
            nth, before = (nth + 1 if number == before else 0), number
            row, events = self.row(number), self._lines[number - 1].startswith("data:")
            name = fields.get("id") or row.get("id") or ""
            ends = [choice.get("finish_reason") for choice in row.get("choices") or () if isinstance(choice, dict)]
            unfinished = None in [*ends, fields.get("finish_reason", "")] or row.get("stop") is False
            if events or (unfinished and name):
                latest[stream, name, nth] = number, fields
            else:
                latest.pop((stream, name, nth), None)
                latest[number, nth] = number, fields
        for line in range(before + 1, self.count + 1 if before else 0):
            self._skip_failed(line)
        yield from latest.values()

    def _skip_failed(self, line: int) -> None:
        if self._lines[line - 1].startswith("{") and not self._is_one_value:
            with self.skipping():
                if error := self.row(line).get("error"):
                    reason = error.get("message", error) if isinstance(error, dict) else error
                    raise self.error(line, f"the request failed: {printable(str(reason))[:200]}")

    @cached_property
    def _is_one_value(self) -> bool:
        """True if a JSON value begins in the first line and does not end there."""
        first = next((line.strip() for _, line in self.raw_lines() if line.strip()), "")
        return _JSON_BEGINS.match(first) is not None and (len(first) == 1 or first[-1] not in "}]")


def _objects_with(value: Any, key: str) -> list[dict[str, Any]]:
    """The objects in ``value`` that have ``key``, up to depth `MOST_NESTING`."""
    objects, level = [], [value]
    for _ in range(MOST_NESTING):
        objects += [item for item in level if isinstance(item, dict) and key in item]
        level = [v for item in level for v in (item.values() if isinstance(item, dict) else item)]
        level = [item for item in level if isinstance(item, dict | list)]
    return objects


def read_source(source: str, gamma: int | None = None) -> Source:
    """Read a file, which may be compressed, or an HTTP response, without its colours. Raises UsageError.

    Bytes that are not UTF-8 are replaced: llama.cpp logs tokens that are parts of characters.
    """
    if not source.startswith(("http://", "https://")):
        data = read_bytes(path_of(source), METRICS_BYTES)
        if (kind := packed_as(data)) and not data.startswith(_GZIP):
            raise UsageError(f"{printable(source)} is {kind} and give the result")
        return Source(_text_of(data), printable(source), gamma)
    if (bare := without_password(source)) != source:
        raise UsageError(
            f"{printable(bare)} is given with a user name or a password; set {HEADERS} instead (docs/remote.md)"
        )
    if flaw := UNFIT.search(source):
        raise UsageError(f"{printable(source)} is not a valid URL: it has {flaw[0]!r}; write it as %{ord(flaw[0]):02X}")
    try:
        with HttpResponse(source, seconds=TIMEOUT, maximum=METRICS_BYTES) as response:
            if response.status != 200:
                raise NetworkError(response.error())
            return Source(redacted(_text_of(response.body())), printable(source), gamma)
    except NetworkError as error:
        raise UsageError(f"cannot read {printable(source)}: {error}; save it to a file and give the file") from None


def packed_as(data: bytes) -> str:
    """The kind of a file that begins with ``data``, and the way to make it text; empty for a text."""
    return next((kind for start, kind in _PACKED.items() if data.startswith(start)), "")


def _text_of(data: bytes) -> str:
    if data[:2] == _GZIP:
        data = _unpacked(data)
    # PowerShell redirects as UTF-16.
    encoding = "utf-16" if data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"
    return ESCAPES.sub("", data.decode(encoding, "replace"))


def _unpacked(data: bytes) -> bytes:
    """The content of a gzip file, as far as it is whole. Raises UsageError if it is too large."""
    parts, size = [], 0
    while data[:2] == _GZIP:
        stream = zlib.decompressobj(wbits=31)
        try:
            parts.append(stream.decompress(data, METRICS_BYTES - size + 1))
        except zlib.error:
            break
        size += len(parts[-1])
        if reason := METRICS_BYTES.violation(size):
            raise UsageError(f"the compressed source is too large; {reason}")
        data = stream.unused_data
    return b"".join(parts)


#: Keys of the text of a line: Docker; journald; structured loggers; Loki and Grafana; Google; AWS; OpenTelemetry.
_TEXT_KEYS = ("log", "MESSAGE", "message", "msg", "line", "Line", "textPayload", "@message", "body")
_TEXT_MARKS = tuple(f'"{key}"' for key in (*_TEXT_KEYS, "values"))


def unwrapped(line: str) -> list[str]:
    """The texts in a line of JSON or CSV; empty if it is neither, or has none."""
    if line.startswith(("{", "[")):
        return list(texts_in(line))
    if line.endswith('"') and (line.startswith('"') or (line[:1].isdigit() and ',"' in line)):
        try:
            return [max(next(csv.reader([line], strict=True)), key=len)]
        except (csv.Error, StopIteration):
            return []
    return []


def texts_in(text: str) -> Iterator[str]:
    """The lines of a log in a JSON value, in their order; none if it has no such keys or is damaged."""
    if not any(mark in text for mark in _TEXT_MARKS):
        return
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return
    for item in _texts(value):
        yield from item.splitlines()


def _texts(value: Any, depth: int = 0) -> Iterator[str]:
    if depth > 16:
        return
    if isinstance(value, dict):
        text = next((value[key] for key in _TEXT_KEYS if isinstance(value.get(key), str)), None)
        if text is None and isinstance(data := value.get("MESSAGE"), list):  # of journald, with control characters
            text = bytes(n for n in data if type(n) is int and 0 <= n < 256).decode("utf-8", "replace")
        if text is not None:
            yield text
            return
        value = list(value.values())
    if isinstance(value, list):
        if len(value) == 2 and all(isinstance(item, str) for item in value) and value[0].isdigit():
            yield value[1]  # of Loki: nanoseconds and a line
            return
        for item in value:
            if isinstance(item, dict | list):
                yield from _texts(item, depth + 1)
