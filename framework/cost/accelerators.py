"""Machines that one does not have, as their vendors describe them: ``accelerators.yaml``, or a file of one's own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import UnknownNameError, UsageError, quoted
from ..recipe.yaml_errors import Places, read_yaml
from ..util.input_files import path_of


@dataclass(frozen=True)
class Accelerator:
    """One device, as its vendor describes it.

    Attributes:
        bandwidth: of its memory, bytes/s.
        flops: dense bfloat16 matrix products, FLOP/s.
        memory: bytes.
        link: to its neighbours, bytes/s in one direction.
        source: which data sheet says so.
    """

    name: str
    bandwidth: float
    flops: float
    memory: float
    link: float
    source: str


@cache
def accelerators() -> dict[str, Accelerator]:
    """The built-in accelerators by name, from ``accelerators.yaml``."""
    return _read_accelerators(Path(__file__).with_name("accelerators.yaml"))


def accelerator(name: str) -> Accelerator:
    """The accelerator called ``name``, or the one that a YAML file written like ``accelerators.yaml`` holds.

    Raises UsageError (UnknownNameError for a name).
    """
    if name.endswith((".yaml", ".yml")):
        found = _read_accelerators(path_of(name))
        if len(found) != 1:
            raise UsageError(f"{name} holds {len(found)} accelerators; a file for --on holds one")
        return next(iter(found.values()))
    if name not in accelerators():
        hint = "Or give a YAML file with one accelerator, see docs/cost.md."
        raise UnknownNameError.among("accelerator", name, accelerators(), hint)
    return accelerators()[name]


def _read_accelerators(path: Path) -> dict[str, Accelerator]:
    """The accelerators in a file. Raises UsageError with the line of what is none."""
    rows, places = read_yaml(path, "accelerator file", "name: {bandwidth: ..., flops: ..., ...}")
    return {name: _accelerator(name, row, places) for name, row in rows.items()}


def _accelerator(name: str, row: Any, places: Places) -> Accelerator:
    numbers = ("bandwidth", "flops", "memory", "link")
    if not isinstance(row, dict) or row.keys() != {*numbers, "source"}:
        keys = "bandwidth, flops, memory, link and source"
        raise places.error((name,), f"an accelerator is a name with the keys {keys}, not {quoted(row)}")
    found = {}
    for key in numbers:
        try:  # YAML takes 1e12 for a text, because it has no dot
            found[key] = float(row[key]) if not isinstance(row[key], bool) else math.nan
        except (TypeError, ValueError, OverflowError):
            found[key] = math.nan
        if not 0 < found[key] < math.inf:
            raise places.error((name, key), f"{key} must be a positive number, not {quoted(row[key])}")
    if not isinstance(row["source"], str):
        raise places.error((name, "source"), f"source must be a text, not {quoted(row['source'])}")
    return Accelerator(name, **found, source=row["source"])
