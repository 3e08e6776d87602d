"""The shape of the files of a run, checked as they are read: nothing behind `parse` and `check` meets a wrong type.

The dataclasses of `metrics`, `pieces` and `intervals` are their own schema. Keys that a reader does not need are not
checked: versions add some.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
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
#: Greater than any number of a run: bytes, tokens, seconds.
_MOST = 10**18


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


class Response(BaseModel):
    """A line of ``responses.jsonl``."""

    question_id: str | int | None = None
    turn: int = 0
    category: str | None = None
    prompt_tokens: int
    tokens: list[int]
    text: str = ""
    finish_reason: str | None = None
    logprobs: list[float | None] | None = None


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
    """``environment.json`` of a run; see `models.environment.describe`."""

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


def read_checked(file: Path, schema: type[BaseModel]) -> dict[str, Any]:
    """The object in a JSON file of a run. Raises UsageError, naming file and key, if it is not of that shape."""
    found = read_json(file, CONFIG_BYTES, surrogates=True)
    check(found, schema, file)
    return found


def check(value: Any, schema: type[BaseModel], file: Path, key: str = "", line: int = 0) -> None:
    """Raise UsageError, naming file and key, if a value of a file is not of that shape."""
    try:
        schema.model_validate(value, strict=True)
    except ValidationError as error:
        raise _malformed(error, file, key, line) from None
    _check_numbers(value, file, key)


def read_numbers(file: Path) -> Numbers:
    """``metrics.json`` of a cell. Raises UsageError, naming file and key."""
    text = read_text(file, INDEX_BYTES, surrogates=True)
    try:
        found = TypeAdapter(Numbers).validate_json(text, strict=True)
    except ValidationError as error:
        raise _malformed(error, file) from None
    _check_numbers(parse_json(text, file), file)
    metrics = found.metrics
    for key in ("tokens", "steps", "sequences"):
        if getattr(metrics, key) < 1:
            raise _wrong(file, f"metrics.{key}", "it must be at least 1")
    if not found.pieces:
        raise _wrong(file, "pieces", "it is empty")
    if not {"draft", "target", "verify", "rest"} <= metrics.shares.keys():
        raise _wrong(file, "metrics.shares", "a phase is missing")
    for i, piece in enumerate(found.pieces):
        try:
            piece.check_steps()
        except ValueError as error:
            raise _wrong(file, f"pieces.{i}", str(error)) from None
    return found


def read_responses(file: Path) -> list[dict[str, Any]]:
    """``responses.jsonl`` of a cell. Raises UsageError, naming file, line and key."""
    found = []
    for number, line in read_lines(file, RESPONSE_FILE_BYTES, LINE_BYTES, surrogates=True):
        if line:
            found.append(parse_json(line, file, line=number))
            check(found[-1], Response, file, line=number)
    return found


def _check_numbers(value: Any, file: Path, key: str = "") -> None:
    """Raise UsageError for a number in ``value`` that no clock and no count gives."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value) or abs(value) > _MOST:
            raise _wrong(file, key, f"{quoted(value, 20)} is not a number that a run writes")
    elif isinstance(value, Mapping | list):
        entries = value.items() if isinstance(value, Mapping) else enumerate(value)
        for name, one in entries:
            _check_numbers(one, file, f"{key}.{name}".lstrip("."))


def _malformed(error: ValidationError, file: Path, key: str = "", line: int = 0) -> UsageError:
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, ([key] if key else []) + list(first["loc"])))
    return _wrong(file, place, fault(first), line)


def _wrong(file: Path, key: str, why: str, line: int = 0) -> UsageError:
    where = f"{printable(str(file))}{f':{line}' if line else ''}"
    what = f"{printable(key)[:120]}: " if key else ""
    return UsageError(f"{where}: {what}{why}; it is damaged, or another version wrote it: run its recipe again")
