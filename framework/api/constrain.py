"""The argument ``constraint`` of `generate`, `stream` and the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from ..contracts.constraint import Constraint
from ..contracts.options import fault
from ..errors import UsageError, quoted


def checked_constraint(value: Any, name: str = "constraint") -> Constraint | None:
    """Validate a constraint, None, or a mapping of the fields of `Constraint`."""
    if value is None or isinstance(value, Constraint):
        return value
    if not isinstance(value, Mapping):
        raise UsageError(
            f"{name}={quoted(value)} is not a constraint; give a mapping such as {{'regex': '[0-9]+'}}, with "
            "json_schema, regex, grammar or choice"
        )
    try:
        return Constraint(**value)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join([name, *map(str, first["loc"])])
        raise UsageError(f"{key}: {fault(first)}") from None


def per_input_constraints(value: Any, inputs: int) -> list[Constraint | None]:
    """``constraint`` of each input: one for all of them, or a list with one per input."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return [checked_constraint(value)] * inputs
    if len(value) != inputs:
        raise UsageError(f"constraint has {len(value)} values for {inputs} inputs; give one, or one per input")
    return [checked_constraint(item, f"constraint[{i}]") for i, item in enumerate(value)]
