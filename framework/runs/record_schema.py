"""Schemas of the files of a run, validated on reading, so that other code can rely on their types.

The dataclasses of `metrics`, `pieces` and `intervals` are their own schemas. Unknown keys are accepted, because later
versions add some.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from ..contracts.options import fault
from ..errors import UsageError, printable, quoted
from ..metrics.cell_metrics import Metrics
from ..metrics.pieces import Piece
from ..util.input_files import parse_json, read_json, read_lines, read_text
from ..util.limits import CONFIG_BYTES, INDEX_BYTES, LINE_BYTES, RESPONSE_FILE_BYTES

T = TypeVar("T")
#: Upper bound of all numbers of a run: bytes, tokens, seconds.
_MAX_NUMBER = 10**18


class ModelUsed(BaseModel):
    """A model of a cell."""

    sha256: str


class Provenance(BaseModel):
    """Conditions of a measurement; see `bench.provenance`."""

    device: str
    dtype: str
    models: dict[str, ModelUsed]
    threads: int | None = None
    prompts: str | None = None
    timed: bool | None = None


class Head(BaseModel):
    """``config.json`` of a cell."""

    hash: str
    measured: str
    error: str | None
    provenance: dict[str, Any]
    config: dict[str, Any]
    planned: int | None = None
    budget: str = ""


class GroupHead(BaseModel):
    """``group.json``: conditions of the pieces of a group under measurement."""

    format: int
    cells: dict[str, dict[str, Any]]
    pieces: list[list[int]]
    measured: str
    failed: dict[str, str]
    threads: list[dict[str, Any]]


class Difference(BaseModel):
    """First difference of a greedy response from plain decoding; see `bench.greedy_differences`."""

    token: int
    gap: float | None
    tie: float
    fault: bool


class ResponseRecord(BaseModel):
    """A line of ``responses.jsonl``."""

    question_id: str | int | None = None
    turn: int = 0
    category: str | None = None
    prompt_tokens: int
    tokens: list[int]
    text: str = ""
    finish_reason: str | None = None
    logprobs: list[float | None] | None = None
    difference: Difference | None = None
    arrivals: list[int] = []


class _Cpu(BaseModel):
    model: str | None = None
    cores: int | None = None


class _Gpu(BaseModel):
    name: str
    memory_gib: float | None


class _Machine(BaseModel):
    cpu: _Cpu | None = None
    gpus: list[_Gpu] | None = None
    memory_gib: float | None = None


class Environment(_Machine):
    """``environment.json`` of a run; see `bench.environment.describe`."""

    versions: dict[str, str | None] = {}
    python: str = ""
    git_commit: str | None = None
    elsewhere: list[_Machine] = []
    models: dict[str, Any] = {}
    conditions: list[dict[str, Any]] = []


class ShardFile(BaseModel):
    """``shard.json`` of a shard."""

    cells: list[str] = []


class CurvesFile(BaseModel):
    """``cost_curves.json`` of a run."""

    curves: list[dict[str, Any]] = []


@dataclass
class Numbers:
    """``metrics.json`` of a cell."""

    metrics: Metrics
    pieces: list[Piece]


@cache
def _numbers() -> TypeAdapter[Numbers]:
    return TypeAdapter(Numbers)  # takes 10 ms, more than reading the file


def read_checked(file: Path, schema: type[BaseModel]) -> dict[str, Any]:
    """Read a JSON file of a run. Raises UsageError with file and key if it does not match the schema."""
    content = read_json(file, CONFIG_BYTES, surrogates=True)
    check_schema(content, schema, file)
    return content


def check_schema(value: Any, schema: type[BaseModel], file: Path, key: str = "", line: int = 0) -> None:
    """Raise UsageError with file and key if a value does not match the schema."""
    try:
        schema.model_validate(value, strict=True)
    except ValidationError as error:
        raise _malformed(error, file, key, line) from None
    _check_numbers(value, file, key)


def read_numbers(file: Path) -> Numbers:
    """Read ``metrics.json`` of a cell. Raises UsageError with file and key."""
    text = read_text(file, INDEX_BYTES, surrogates=True)
    try:
        numbers = _numbers().validate_json(text, strict=True)
    except ValidationError as error:
        raise _malformed(error, file) from None
    _check_numbers(parse_json(text, file), file)
    metrics = numbers.metrics
    for key in ("tokens", "steps", "sequences"):
        if getattr(metrics, key) < 1:
            raise _wrong(file, f"metrics.{key}", "it must be at least 1")
    if not numbers.pieces:
        raise _wrong(file, "pieces", "it is empty")
    if not {"draft", "target", "verify", "rest"} <= metrics.shares.keys():
        raise _wrong(file, "metrics.shares", "a phase is missing")
    for i, piece in enumerate(numbers.pieces):
        try:
            piece.check_steps()
        except ValueError as error:
            raise _wrong(file, f"pieces.{i}", str(error)) from None
    return numbers


def read_responses(file: Path) -> list[dict[str, Any]]:
    """Read ``responses.jsonl`` of a cell. Raises UsageError with file, line and key."""
    responses = []
    for number, line in read_lines(file, RESPONSE_FILE_BYTES, LINE_BYTES, surrogates=True):
        if line:
            responses.append(parse_json(line, file, line=number))
            check_schema(responses[-1], ResponseRecord, file, line=number)
    return responses


def _check_numbers(value: Any, file: Path, key: str = "") -> None:
    """Raise UsageError for a number in ``value`` that is not finite or exceeds `_MAX_NUMBER`."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value) or abs(value) > _MAX_NUMBER:
            raise _wrong(file, key, f"{quoted(value, 20)} is not a finite number of plausible size")
    elif isinstance(value, Mapping | list):
        entries = value.items() if isinstance(value, Mapping) else enumerate(value)
        for name, item in entries:
            _check_numbers(item, file, f"{key}.{name}".lstrip("."))


def _malformed(error: ValidationError, file: Path, key: str = "", line: int = 0) -> UsageError:
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, ([key] if key else []) + list(first["loc"])))
    return _wrong(file, place, fault(first), line)


def _wrong(file: Path, key: str, reason: str, line: int = 0) -> UsageError:
    place = f"{printable(str(file))}{f':{line}' if line else ''}"
    key_text = f"{printable(key)[:120]}: " if key else ""
    return UsageError(
        f"{place}: {key_text}{reason}; the file is damaged or was written by another version; run its recipe again"
    )
