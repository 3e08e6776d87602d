"""Base of every recipe, sampling and strategy's ``Config``.

Invalid options raise errors: unknown keys, NaN and infinity, and ``true`` for a number, which Python would treat as 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

#: Messages by pydantic's error type: the types are a stable interface, pydantic's messages are not.
_FAULTS = {
    "bool_parsing": "should be true or false",
    "bool_type": "should be true or false",
    "dict_type": "should be a mapping of keys to values",
    "finite_number": "should be a finite number",
    "float_parsing": "should be a valid number",
    "float_type": "should be a valid number",
    "greater_than": "should be greater than {gt}",
    "greater_than_equal": "should be greater than or equal to {ge}",
    "int_from_float": "should be a valid integer, without a fraction",
    "int_parsing": "should be a valid integer",
    "int_parsing_size": "should be a valid integer, of fewer digits",
    "int_type": "should be a valid integer",
    "less_than": "should be less than {lt}",
    "less_than_equal": "should be less than or equal to {le}",
    "list_type": "should be a valid list",
    "literal_error": "should be {expected}",
    "missing": "is missing",
    "extra_forbidden": "is unknown",
    "string_pattern_mismatch": "should match the pattern {pattern}",
    "string_too_short": "should have at least {min_length} character(s)",
    "string_type": "should be a valid string",
    "too_short": "should have at least {min_length} item(s)",
    "too_long": "should have at most {max_length} item(s)",
    "tuple_type": "should be a valid list",
}


def fault(problem: Mapping[str, Any]) -> str:
    """Message for an entry of ``ValidationError.errors()``, without key and value: "should be a valid integer"."""
    if (sentence := _FAULTS.get(problem["type"])) is None:  # raised by a validator
        return problem["msg"].removeprefix("Value error, ").replace("Input should", "should")
    context = problem.get("ctx", {})
    integers = {key: int(value) for key, value in context.items() if isinstance(value, float) and value.is_integer()}
    return sentence.format(**{**context, **integers})


def permits(config: type[BaseModel], options: Mapping[str, Any], gamma: int) -> bool:
    """Return True if a drafter's ``config`` accepts ``gamma`` beside its other options, or has no such option."""
    try:
        return "gamma" not in config.model_fields or bool(config(**{**options, "gamma": gamma}))
    except ValidationError:
        return False


class _Truth:
    """Stand-in for a bool given for a number, which pydantic then rejects with the name of the field."""

    def __init__(self, value: bool):
        self.value = value

    def __repr__(self) -> str:
        return repr(self.value).lower()


class Options(BaseModel):
    """Frozen model without extra keys; numbers are finite and not bools."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _reject_bools(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {key: _replace_bools(value) if _numeric(cls, key) else value for key, value in values.items()}


@lru_cache(maxsize=4096)
def _numeric(cls: type[BaseModel], key: str) -> bool:
    field = cls.model_fields.get(key)
    kinds = _kinds(field.annotation) if field is not None else set()
    return bool not in kinds and bool(kinds & {int, float})


def _replace_bools(value: Any) -> Any:
    """``value`` with a `_Truth` in place of every bool, in lists too."""
    if isinstance(value, bool):
        return _Truth(value)
    return [_replace_bools(item) for item in value] if isinstance(value, list | tuple) else value


def _kinds(annotation: Any) -> set[Any]:
    """The classes in an annotation, nested ones and those of literal values included."""
    inner = get_args(annotation)
    if not inner:
        return {annotation if isinstance(annotation, type) else type(annotation)}
    return set().union(*map(_kinds, inner))
