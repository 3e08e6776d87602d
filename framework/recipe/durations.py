"""Durations with units: ``90s``, ``5m``, ``2h``."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator

from ..errors import quoted

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_WRITTEN = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)([smh])", re.ASCII)


def seconds_of(text: Any) -> float:
    """Parse a duration into seconds. Raises ValueError if it is invalid or has no unit."""
    match = _WRITTEN.fullmatch(text) if isinstance(text, str) else None
    if match is None or float(match[1]) == 0:
        raise ValueError(f"{quoted(text)} is not a duration; write a number above 0 with its unit: 90s, 5m or 2h")
    return float(match[1]) * _UNITS[match[2]]


def _duration(value: Any) -> Any:
    seconds_of(value)
    return value


#: Type of fields with a duration, stored as written.
Duration = Annotated[str, BeforeValidator(_duration)]
