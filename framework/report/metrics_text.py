"""Speed-ups, rates and block efficiency of cells as text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..util.estimate import estimate_text

if TYPE_CHECKING:
    from ..metrics.cell_metrics import CategoryMetrics, Metrics, SegmentMetrics
    from ..runs.records import CellResult


def speed_up_text(metrics: Metrics) -> str:
    """The speed-up with its interval; if it is withheld, the ratio by the clock, marked; empty without a baseline."""
    return clock_text(metrics.speed_up_wall) if metrics.withheld else estimate_text(metrics.speed_up)


def clock_text(ratio: float | None) -> str:
    """A ratio by the clock, which is not a speed-up: ``~1.3 clock``; empty for None."""
    return "" if ratio is None else f"~{ratio:.{1 if ratio >= 1 else 2}f} clock"


def rate_text(metrics: Metrics, share: int = 1) -> str:
    """Tokens/s over ``share``, marked with ``~`` if they are by the clock; empty if not timed."""
    return f"{'~' * bool(metrics.withheld)}{metrics.tokens_per_second / share:.1f}" if metrics.timed else ""


def efficiency_text(metrics: Metrics | CategoryMetrics | SegmentMetrics) -> str:
    """Block efficiency with its interval, marked with ``*`` if it is of all steps; empty without steps."""
    return estimate_text(metrics.block_efficiency) + " *" * (metrics.all_cut and metrics.block_efficiency is not None)


def no_speed_up(results: Iterable[CellResult]) -> str:
    """The reason why none of the pairs has a speed-up; empty if one has, or without pairs."""
    measured = [metrics for r in results if (metrics := r.drafting)]
    if not measured or any(metrics.speed_up for metrics in measured):
        return ""
    if not any(metrics.timed for metrics in measured):
        return "the run was not timed (--untimed)"
    reasons = list(dict.fromkeys(metrics.withheld for metrics in measured if metrics.speed_up_wall is not None))
    return f"every speed-up is withheld ({', '.join(reasons)})" if reasons else "plain decoding was not measured"
