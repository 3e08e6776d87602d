"""Arrival processes: Poisson and bursts, a closed loop, and recorded traces.

Traces are read in two formats:

- CSV of the Azure LLM inference traces, with the header ``TIMESTAMP,ContextTokens,GeneratedTokens``;
- JSONL of the Mooncake traces, with ``timestamp`` (milliseconds), ``input_length`` and ``output_length``.
"""

from __future__ import annotations

import csv
import math
import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from ..errors import UsageError, first_line, printable, quoted
from ..util.input_files import parse_json, path_of, read_lines
from ..util.limits import LINE_BYTES, MOST_REQUESTS, MOST_TOKENS, RESPONSE_FILE_BYTES

_AZURE = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
#: Azure's timestamps have up to seven decimals, and Python's at most six.
_DECIMALS = re.compile(r"(\.\d{6})\d+")


class Arrival(NamedTuple):
    """Arrival of a request: time in seconds, and its lengths in tokens if they are recorded."""

    seconds: float
    prompt_tokens: int | None = None
    output_tokens: int | None = None


class ArrivalProcess(Protocol):
    """Source of arrival times.

    Attributes:
        concurrency: number of requests of a closed loop, in which a request arrives when another ends; 0 otherwise.
    """

    @property
    def title(self) -> str:
        """Description for tables."""
        ...

    @property
    def concurrency(self) -> int: ...

    def draw(self, n: int, random: np.random.Generator) -> list[Arrival]:
        """Return at most ``n`` arrivals in order of time."""
        ...


@dataclass(frozen=True)
class GammaArrivals:
    """Arrivals with independent gamma-distributed gaps, as in ``vllm bench serve``.

    Attributes:
        rate: requests per second.
        burstiness: shape of the gaps; 1 is a Poisson process, less is burstier (coefficient of variation
            ``burstiness ** -0.5``).
    """

    rate: float
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
    concurrency: int = 0

    @property
    def title(self) -> str:
        return f"trace {self.name}"

    def draw(self, n: int, random: np.random.Generator) -> list[Arrival]:
        return list(self.arrivals[:n])


def read_trace(name: str, limit: int | None = None) -> ArrivalTrace:
    """Read a trace in the format of Azure (CSV) or Mooncake (JSONL); times start at 0.

    Args:
        limit: read the first requests only; None = all.

    Raises:
        UsageError: an invalid file, with line and column or key.
    """
    path = path_of(name)
    parse = _azure if path.suffix == ".csv" else _mooncake
    arrivals, file, first = [], printable(str(path)), 0.0
    for number, line in read_lines(path, RESPONSE_FILE_BYTES, LINE_BYTES, what="the trace"):
        if not line.strip() or (parse is _azure and number == 1 and _is_header(line, path)):
            continue
        if len(arrivals) == limit:
            break
        where = f"{file}:{number}"
        if reason := MOST_REQUESTS.refusal(len(arrivals) + 1):
            raise UsageError(f"{where}: too many requests, {reason}; use --requests")
        arrival = parse(line, path, number, where)
        first = first if arrivals else arrival.seconds
        arrival = arrival._replace(seconds=arrival.seconds - first)
        if arrivals and arrival.seconds < arrivals[-1].seconds:
            raise UsageError(f"{where}: the request arrives before the previous one; sort the trace by time")
        arrivals.append(arrival)
    if not arrivals:
        raise UsageError(f"{file} does not contain a request; give a trace with at least one")
    return ArrivalTrace(path.name, tuple(arrivals))


def _is_header(line: str, path: Path) -> bool:
    if [cell.strip() for cell in line.split(",")] != _AZURE:
        raise UsageError(
            f"{printable(str(path))}:1: a CSV trace must begin with the line {','.join(_AZURE)}; name a Mooncake trace "
            "with the ending .jsonl"
        )
    return True


def _azure(line: str, path: Path, number: int, where: str) -> Arrival:
    try:
        cells = next(csv.reader([line]))
    except csv.Error as error:
        raise UsageError(f"{where}: not valid CSV: {first_line(error)}") from None
    if len(cells) != len(_AZURE):
        raise UsageError(f"{where}: the line has {len(cells)} values; {', '.join(_AZURE)} are required")
    try:
        moment = datetime.fromisoformat(_DECIMALS.sub(r"\1", cells[0].strip()))
        seconds = (moment - datetime(1970, 1, 1, tzinfo=moment.tzinfo)).total_seconds()
    except ValueError:
        raise UsageError(
            f"{where}: TIMESTAMP {quoted(cells[0])} is not a time; write it as 2023-11-16 18:17:03.97"
        ) from None
    return Arrival(seconds, *(_tokens(cell, key, where) for cell, key in zip(cells[1:], _AZURE[1:], strict=True)))


def _mooncake(line: str, path: Path, number: int, where: str) -> Arrival:
    row = parse_json(line, path, line=number)
    if not isinstance(row, dict):
        raise UsageError(f"{where}: a request is a JSON object, not {type(row).__name__}")
    if missing := [key for key in ("timestamp", "input_length", "output_length") if key not in row]:
        raise UsageError(f"{where}: {missing[0]!r} is missing; a request has timestamp, input_length and output_length")
    time = row["timestamp"]
    if type(time) not in (int, float) or not 0 <= time < math.inf:
        raise UsageError(f"{where}: 'timestamp' {quoted(time)} is not a time; give milliseconds, at least 0")
    lengths = (_tokens(row[key], key, where) for key in ("input_length", "output_length"))
    return Arrival(time / 1000, *lengths)


def _tokens(value: object, key: str, where: str) -> int:
    digits = str(value).strip() if not isinstance(value, bool) else ""
    if not digits.isascii() or not digits.isdecimal() or not 1 <= int(digits[:12]) <= MOST_TOKENS:
        raise UsageError(
            f"{where}: {key!r} {quoted(value)} is not a number of tokens; give an integer from 1 to {int(MOST_TOKENS)}"
        )
    return int(digits)
