"""Helpers for tables and remarks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from tabulate import tabulate

from ..runs.labels import group_title

if TYPE_CHECKING:
    from ..metrics.cell_metrics import CategoryMetrics, Estimate, Metrics, SegmentMetrics
    from ..runs.records import CellResult
    from .summary import Summary


def groups_of(summary: Summary) -> list[tuple[str, list[CellResult]]]:
    """Title and results of each group of cells."""
    cells = [result.config for result in summary.results]
    groups: dict[str, list[CellResult]] = {}
    for result in summary.results:
        groups.setdefault(result.config.group, []).append(result)
    return [(group_title(results[0].config, cells), results) for results in groups.values()]


def tabulated(columns: Mapping[str, str] | Sequence[tuple[str, str]], rows: Sequence[Sequence[str]], style: str) -> str:
    """A table of strings; ``columns``: headers and their alignment; ``style``: a table format of tabulate."""
    pairs = list(columns.items()) if isinstance(columns, Mapping) else list(columns)
    header, *body = [[_escape(cell, style) for cell in row] for row in ([name for name, _ in pairs], *rows)]
    align = tuple(align for _, align in pairs)
    return tabulate(body, headers=header, tablefmt=style, disable_numparse=True, colalign=align)


def _escape(text: str, style: str) -> str:
    """Escape control characters and, in Markdown, bars."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
    return text.replace("|", "\\|") if style == "github" else text


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
    measured = [r.metrics for r in results if r.metrics is not None and not r.config.is_baseline]
    if not measured or any(metrics.speed_up for metrics in measured):
        return ""
    if not any(metrics.timed for metrics in measured):
        return "the run was not timed (--untimed)"
    reasons = list(dict.fromkeys(metrics.withheld for metrics in measured if metrics.speed_up_wall is not None))
    return f"every speed-up is withheld ({', '.join(reasons)})" if reasons else "plain decoding was not measured"


def estimate_text(estimate: Estimate | None, sign: str = "", digits: int = 2) -> str:
    """A value with its interval, to ``digits`` decimals; empty for None."""
    if estimate is None:
        return ""
    interval = "" if estimate.low is None else f" [{estimate.low:{sign}.{digits}f}, {estimate.high:{sign}.{digits}f}]"
    return f"{estimate.value:{sign}.{digits}f}{interval}"


def percent_text(share: float, sign: str = "") -> str:
    return f"{100 * share:{sign}.1f} %"


def change_text(change: Estimate) -> str:
    """A relative change in per cent, with its interval."""
    interval = ""
    if change.low is not None and change.high is not None:
        interval = f" [{percent_text(change.low, '+')}, {percent_text(change.high, '+')}]"
    return f"{percent_text(change.value, '+')}{interval}"
