"""A value with its 95 % interval, and numbers as text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: Suffixes of the columns of an interval.
ENDS = ("_low", "_high")


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % interval; `low` and `high` are None without an interval."""

    value: float
    low: float | None = None
    high: float | None = None

    def scaled(self, factor: float) -> Estimate:
        """Return the estimate in another unit."""
        low, high = (None if end is None else factor * end for end in (self.low, self.high))
        return Estimate(factor * self.value, low, high)


def spread(name: str, estimate: Estimate | None) -> dict[str, Any]:
    """The columns ``name``, ``name_low`` and ``name_high`` of an estimate; None in all of them for None."""
    ends = (None, None, None) if estimate is None else (estimate.value, estimate.low, estimate.high)
    return dict(zip((name, *(name + end for end in ENDS)), ends, strict=True))


def estimate_text(estimate: Estimate | None, sign: str = "", digits: int = 2) -> str:
    """A value with its interval, to ``digits`` decimals; empty for None."""
    if estimate is None:
        return ""
    interval = "" if estimate.low is None else f" [{estimate.low:{sign}.{digits}f}, {estimate.high:{sign}.{digits}f}]"
    return f"{estimate.value:{sign}.{digits}f}{interval}"
