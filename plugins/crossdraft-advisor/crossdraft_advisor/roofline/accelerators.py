"""Accelerators by vendor data: the built-in ``accelerators.yaml``, or a file of the user."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from crossdraft import UnknownNameError, UsageError, quoted
from crossdraft.commands import path_of, read_yaml
from crossdraft.framework.recipe.yaml_errors import Places


@dataclass(frozen=True)
class Accelerator:
    """Vendor data of a device."""

    name: str
    bandwidth: float  # memory bandwidth, bytes/s.
    flops: float  # dense bfloat16 matrix products, FLOP/s.
    memory: float  # memory size, bytes.
    link: float  # bandwidth to other devices, bytes/s in one direction.
    source: str  # data sheet.


@cache
def accelerators() -> dict[str, Accelerator]:
    """Built-in accelerators by name."""
    return _read_accelerators(Path(__file__).with_name("accelerators.yaml"))


def accelerator(name: str) -> Accelerator:
    """Return the accelerator called ``name``, or that in a YAML file with the format of ``accelerators.yaml``.

    Raises UsageError for an invalid file, UnknownNameError for an unknown name.
    """
    if name.endswith((".yaml", ".yml")):
        entries = _read_accelerators(path_of(name))
        if len(entries) != 1:
            raise UsageError(f"{name} contains {len(entries)} accelerators; a file for --on must contain one")
        return next(iter(entries.values()))
    if name not in accelerators():
        hint = "Or give a YAML file with one accelerator, see docs/cost.md."
        raise UnknownNameError.among("accelerator", name, accelerators(), hint)
    return accelerators()[name]


def _read_accelerators(path: Path) -> dict[str, Accelerator]:
    """Read the accelerators in a file. Raises UsageError with the line of an invalid entry."""
    rows, places = read_yaml(path, "accelerator file", "name: {bandwidth: ..., flops: ..., ...}")
    return {name: _accelerator(name, row, places) for name, row in rows.items()}


def _accelerator(name: str, row: Any, places: Places) -> Accelerator:
    numbers = ("bandwidth", "flops", "memory", "link")
    if not isinstance(row, dict) or row.keys() != {*numbers, "source"}:
        keys = "bandwidth, flops, memory, link and source"
        raise places.error((name,), f"an accelerator must be a mapping with the keys {keys}, not {quoted(row)}")
    values = {}
    for key in numbers:
        try:  # YAML parses 1e12 as a string, because it has no dot
            values[key] = float(row[key]) if not isinstance(row[key], bool) else math.nan
        except (TypeError, ValueError, OverflowError):
            values[key] = math.nan
        if not 0 < values[key] < math.inf:
            raise places.error((name, key), f"{key} must be a positive number, not {quoted(row[key])}")
    if not isinstance(row["source"], str):
        raise places.error((name, "source"), f"source must be a text, not {quoted(row['source'])}")
    return Accelerator(name, **values, source=row["source"])
