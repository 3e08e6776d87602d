"""Durations as people write them: ``90s``, ``5m``, ``2h``."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator

from ..errors import quoted

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_WRITTEN = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)([smh])", re.ASCII)


def seconds_of(text: Any) -> float:
    """Return the seconds that a duration stands for. Raises ValueError for anything else, plain numbers included."""
    found = _WRITTEN.fullmatch(text) if isinstance(text, str) else None
    if found is None or float(found[1]) == 0:
        raise ValueError(f"{quoted(text)} is not a duration; write a number above 0 with its unit: 90s, 5m or 2h")
    return float(found[1]) * _UNITS[found[2]]


def _duration(value: Any) -> Any:
    seconds_of(value)
    return value


#: The field of a recipe or option that holds a duration, kept as it was written.
Duration = Annotated[str, BeforeValidator(_duration)]
