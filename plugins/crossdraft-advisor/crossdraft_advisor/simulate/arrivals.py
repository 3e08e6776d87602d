"""Arrival processes: Poisson and bursts, a closed loop, and recorded traces.

A trace is CSV with a header, or JSONL, in the columns of one of the published traces (`_COLUMNS`). Its times are dates
with a time of day, or numbers whose unit follows from the trace it resembles, or is given.
"""

from __future__ import annotations

import codecs
import csv
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from crossdraft import UsageError, first_line, printable, quoted
from crossdraft.commands import (
    LINE_BYTES,
    MOST_TOKENS,
    RESPONSE_FILE_BYTES,
    open_file,
    parse_json,
    path_of,
    read_lines,
    read_text,
)
from crossdraft.runs import counted

from ..engines.engine_log import packed_as
from ..limits import MOST_REQUESTS

#: Units of numbers that are times -> how many are a second.
TIME_UNITS = {"s": 1, "ms": 1000, "us": 10**6, "ns": 10**9}
#: Columns of time, prompt tokens and output tokens: Azure LLM inference; BurstGPT; Mooncake, Bailian (Qwen) and
#: AIPerf; ServeGen and others, whose unit is not known; Vidur.
_COLUMNS = (
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    ("Timestamp", "Request tokens", "Response tokens"),
    ("timestamp", "input_length", "output_length"),
    ("timestamp", "input_tokens", "output_tokens"),
    ("arrived_at", "num_prefill_tokens", "num_decode_tokens"),
)
#: A key of a published trace -> its unit of time and its name; the first one that a request has counts, as Bailian's
#: requests have Mooncake's keys, too.
_MARKS = {
    "chat_id": ("s", "the Bailian traces"),
    "parent_chat_id": ("s", "the Bailian traces"),
    "hash_ids": ("ms", "the Mooncake traces"),
    "Request tokens": ("s", "the BurstGPT traces"),
}
#: A date with a time of day; Azure's have up to seven decimals, and Python's at most six.
_DATE = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:(\.\d{1,6})\d*)?(Z|[+-]\d\d(?::?\d\d)?)?", re.ASCII)
_WHOLE = re.compile(r"\d{1,9}\.0", re.ASCII)  # a number of tokens, as pandas writes it in a column with gaps
_NUMBER = re.compile(r"\d{1,30}(\.\d{1,30})?([eE][+-]?\d{1,3})?", re.ASCII)


class Arrival(NamedTuple):
    """Arrival of a request: time in seconds, and its lengths in tokens if they are recorded."""

    seconds: float
    prompt_tokens: int | None = None
    output_tokens: int | None = None


@dataclass(frozen=True)
class GammaArrivals:
    """Arrivals with independent gamma-distributed gaps, as in ``vllm bench serve``."""

    rate: float  # requests per second
    # shape of the gaps; 1 is a Poisson process, less is burstier (coefficient of variation ``burstiness ** -0.5``)
    burstiness: float = 1.0
    concurrency: int = 0

    @property
    def title(self) -> str:
        bursts = "" if self.burstiness == 1 else f", burstiness {self.burstiness:g}"
        return f"{self.rate:g} requests/s{bursts}"

    def draw(self, n: int, random: np.random.Generator) -> list[Arrival]:
        gaps = random.gamma(self.burstiness, 1 / (self.rate * self.burstiness), n)
        return [Arrival(float(t)) for t in np.cumsum(gaps)]


@dataclass(frozen=True)
class ClosedLoop:
    """``concurrency`` requests at all times: the next one arrives when one ends."""

    concurrency: int

    @property
    def title(self) -> str:
        return f"{self.concurrency} concurrent requests"

    def draw(self, n: int, random: np.random.Generator) -> list[Arrival]:
        return [Arrival(0.0)] * n


@dataclass(frozen=True)
class ArrivalTrace:
    """Recorded arrivals."""

    name: str
    arrivals: tuple[Arrival, ...]
    times: str = ""  # how the times of the file were read, for a remark
    concurrency: int = 0

    @property
    def title(self) -> str:
        n, seconds = len(self.arrivals), self.arrivals[-1].seconds
        rate = f"{(n - 1) / seconds:.3g} requests/s over {seconds:.6g} s" if seconds else "all at once"
        return f"trace {self.name}: {counted(n, 'request')}, {rate}"

    def draw(self, n: int, random: np.random.Generator) -> list[Arrival]:
        return list(self.arrivals[:n])


#: A source of arrival times, whose ``draw(n, random)`` returns at most n in order of time. In a closed loop of
#: ``concurrency`` requests (0: an open one) a request arrives when another ends.
ArrivalProcess = GammaArrivals | ClosedLoop | ArrivalTrace


def read_trace(name: str, limit: int | None = None, unit: str | None = None) -> ArrivalTrace:
    """Read a trace, CSV or JSONL; its times start at 0.

    ``limit``: read the first requests only; None = all; ``unit``: of times that are numbers, one of `TIME_UNITS`; None:
    that of the published trace with the same keys. Raises UsageError: an invalid file, with line and column or key;
    times whose unit is unknown or differs within the file, and requests that are not in order.
    """
    path = path_of(name)
    file, arrivals = printable(str(path)), []
    reader: _TraceReader | None = None
    for place, line, is_cut in _requests(path, file):
        if len(arrivals) == limit:
            break
        if reason := MOST_REQUESTS.violation(len(arrivals) + 1):
            raise UsageError(f"{place}: too many requests, {reason}; use --requests")
        is_json = not isinstance(line, str) or line.lstrip().startswith("{")
        if reader is None and not is_json:
            reader = _TraceReader(unit, _header(line, place))
            continue
        reader = reader or _TraceReader(unit)
        try:
            if isinstance(line, str):
                number = int(place.rpartition(":")[2])
                if reader.header is None:
                    line = parse_json(line, path, line=number)
                elif len(cells := _csv(line, place)) == len(reader.header):
                    line = {key: cell.strip() for key, cell in zip(reader.header, cells, strict=True)}
                else:
                    names = ", ".join(reader.header)
                    raise UsageError(f"{place}: the line has {len(cells)} values; {names} are required")
            arrival = reader.arrival(line, place)
        except UsageError:
            if not (is_cut and arrivals):
                raise
            reader.skipped["in a truncated last line"] += 1
            break
        if arrival is None:
            continue
        if arrivals and arrival.seconds < arrivals[-1].seconds:
            raise UsageError(f"{place}: the request arrives before the previous one; sort the trace by time")
        arrivals.append(arrival)
    if not arrivals:
        raise UsageError(f"{file} does not contain a request; give a trace with at least one")
    assert reader is not None
    skipped = [f"{count} requests {reason} are left out" for reason, count in reader.skipped.items()]
    return ArrivalTrace(path.name, tuple(arrivals), "; ".join([reader.times, *skipped]))


def _requests(path: Path, file: str) -> Iterator[tuple[str, Any, bool]]:
    """The places of the requests of a trace, their lines, or the items of a JSON list, and if that is cut off."""
    with open_file(path, RESPONSE_FILE_BYTES, subject="the trace") as opened:
        start = opened.read(2**16).removeprefix(codecs.BOM_UTF8).lstrip()
        size = opened.seek(0, 2)
        opened.seek(max(size - 1, 0))
        is_ended = opened.read() in (b"\n", b"")
    if kind := packed_as(start):
        raise UsageError(f"{file} is {kind} and give the result")
    if start.startswith(b"["):
        items = parse_json(read_text(path, RESPONSE_FILE_BYTES, subject="the trace"), path)
        yield from ((f"{file}, item {i}", item, False) for i, item in enumerate(items, start=1))
        return
    lines = read_lines(path, RESPONSE_FILE_BYTES, LINE_BYTES, subject="the trace")
    written = ((f"{file}:{number}", line) for number, line in lines if line.strip())
    for entry, following in pairwise(chain(written, [None])):
        assert entry is not None
        yield *entry, following is None and not is_ended


def _header(line: str, place: str) -> list[str]:
    """The column names of a CSV trace. Raises UsageError for a line that is neither a header nor JSON."""
    header = [cell.strip() for cell in _csv(line, place)]
    if not any(set(columns) <= set(header) for columns in _COLUMNS) or len(set(header)) < len(header):
        known = ", or ".join(",".join(columns) for columns in _COLUMNS)
        raise UsageError(
            f"{place}: a trace must begin with a JSON object, or with a line of different column names, among them "
            f"{known}; rename the columns"
        )
    return header


def _csv(line: str, place: str) -> list[str]:
    try:
        return next(csv.reader([line], strict=True))
    except csv.Error as error:
        raise UsageError(f"{place}: not valid CSV: {first_line(error)}") from None


class _TraceReader:
    """Reader of the requests of one trace, which agree in their kind of times.

    ``unit``: see `read_trace`; ``header``: the columns of CSV; None for JSONL.
    """

    def __init__(self, unit: str | None, header: list[str] | None = None):
        self.header, self.times, self.skipped = header, "", Counter[str]()
        self._given, self._unit = unit, unit
        self._first: int | float | datetime | None = None

    def arrival(self, row: Any, place: str) -> Arrival | None:
        """The arrival of a request; its seconds are counted from the first one. Raises UsageError.

        None for a request without output, which failed, and for a later turn whose time depends on the answer before.
        """
        if not isinstance(row, dict):
            raise UsageError(f"{place}: a request is a JSON object, not {type(row).__name__}")
        if "delay" in row and row.get("timestamp") is None:
            self.skipped["at a delay after the answer before"] += 1
            return None
        columns = max(_COLUMNS, key=lambda keys: len(row.keys() & set(keys)))
        if missing := [key for key in columns if key not in row]:
            raise UsageError(f"{place}: {missing[0]!r} is missing; a request has {', '.join(columns)}")
        if row[columns[-1]] in (0, "0"):
            self.skipped["without output tokens"] += 1
            return None
        time, *lengths = columns
        moment = self._time(row[time], time, place)
        if isinstance(moment, datetime):
            self._check_date(moment, f"{place}: {time!r} {quoted(row[time])}")
        else:
            self._check_number(moment, row, f"{place}: {time!r} {quoted(row[time])}")
        if self._first is None:
            self._first = moment
        gap: Any = moment - self._first  # type: ignore[operator]  # of one kind, as was checked
        seconds = gap.total_seconds() if isinstance(gap, timedelta) else gap / TIME_UNITS[self._unit or "s"]
        return Arrival(seconds, *(self._tokens(row[key], key, place) for key in lengths))

    def _time(self, cell: Any, key: str, place: str) -> int | float | datetime:
        value: Any = cell
        if isinstance(value, str) and (match := _DATE.fullmatch(value)):
            try:
                return datetime.fromisoformat("".join(part or "" for part in match.groups()))
            except ValueError:
                pass  # the 31st of June
        elif isinstance(value, str) and self.header is not None and _NUMBER.fullmatch(value):
            value = int(value) if value.isdecimal() else float(value)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise UsageError(
                f"{place}: {key!r} {quoted(cell)} is not a time; give a number, at least 0, or a date such as "
                "2023-11-16 18:17:03.97, with or without an offset such as +00:00"
            )
        return value

    def _check_date(self, moment: datetime, subject: str) -> None:
        if self._given:
            raise UsageError(f"{subject} is a date, which --time-unit {self._given} does not apply to; remove it")
        if self._first is None:
            self.times = (
                "dates with an offset from UTC" if moment.tzinfo else "dates without an offset, as if all had the same"
            )
        elif not isinstance(self._first, datetime):
            raise UsageError(f"{subject} is a date, but the first time is a number; write all times alike")
        elif (moment.tzinfo is None) != (self._first.tzinfo is None):
            raise UsageError(
                f"{subject} and the first time differ in that only one has an offset from UTC; add it to all or none"
            )

    def _check_number(self, moment: int | float, row: Mapping[str, Any], subject: str) -> None:
        if isinstance(self._first, datetime):
            raise UsageError(f"{subject} is a number, but the first time is a date; write all times alike")
        unit, trace = next((_MARKS[key] for key in _MARKS if key in row), (None, ""))
        if self._given:
            self.times = self.times or f"numbers in {self._given} (--time-unit)"
            return
        if self._unit is None and unit is None:
            raise UsageError(
                f"{subject} has an unknown unit: the keys are not those of a published trace with numbers as times; "
                f"set --time-unit to one of {', '.join(TIME_UNITS)}"
            )
        self._unit = self._unit or unit
        self.times = self.times or f"numbers in {unit}, as in {trace}"
        if unit not in (None, self._unit):
            raise UsageError(
                f"{subject} is in {unit} as in {trace}, but earlier ones are in {self._unit}; set --time-unit if all "
                "are in one unit"
            )
        if self._unit == "ms" and not float(moment).is_integer():
            raise UsageError(
                f"{subject} is not a whole number of milliseconds, as in {trace or 'earlier requests'}; set "
                "--time-unit to s if it is in seconds, or to ms"
            )

    def _tokens(self, value: Any, key: str, place: str) -> int:
        if self.header is not None and isinstance(value, str) and value.isascii() and value.isdecimal():
            digits = value.lstrip("0") or "0"
            value = int(digits) if len(digits) < 20 else value
        elif self.header is not None and isinstance(value, str) and _WHOLE.fullmatch(value):
            value = int(value.partition(".")[0])
        if type(value) is not int or not 1 <= value <= MOST_TOKENS:
            raise UsageError(
                f"{place}: {key!r} {quoted(value)} is not a number of tokens; give an integer from 1 to "
                f"{int(MOST_TOKENS)}"
            )
        return value
