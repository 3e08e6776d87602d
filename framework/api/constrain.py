"""The argument ``constraint`` of `generate`, `stream` and the server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..contracts.constraint import Constraint, checked_constraint
from ..errors import UsageError


def per_input_constraints(value: Any, inputs: int) -> list[Constraint | None]:
    """``constraint`` of each input: one for all of them, or a list with one per input."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return [checked_constraint(value)] * inputs
    if len(value) != inputs:
        raise UsageError(f"constraint has {len(value)} values for {inputs} inputs; give one, or one per input")
    return [checked_constraint(item, f"constraint[{i}]") for i, item in enumerate(value)]
