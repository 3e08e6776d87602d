"""Acceptance from log lines that summarize a time window or a request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from .acceptance import Acceptance
from .engine_log import Source
from .prometheus import short_drafts

#: Rounding errors: rates have three decimals, lengths two.
_RATE_ERROR, _LENGTH_ERROR = 0.0005, 0.0051


class Window(NamedTuple):
    """A log line: its number, accepted and drafted tokens, marginal rates, and mean length with the bonus token."""

    line: int
    accepted: float
    drafted: float
    rates: tuple[float, ...]
    mean: float

    def row(self, source: Source) -> tuple[float, ...]:
        """Reconstruct the counts ``(steps, accepted at 1, ...)``, up to rounding.

        Raises:
            UsageError: inconsistent numbers.
        """
        gamma, total = len(self.rates), sum(self.rates)
        if abs(1 + total - self.mean) > gamma * _RATE_ERROR + _LENGTH_ERROR:
            raise source.error(
                self.line, f"the mean length {self.mean:g} is not 1 + the sum of the rates, {1 + total:.3f}"
            )
        if not self.accepted:
            drafts = self.drafted / gamma
        elif total:
            drafts = self.accepted / total
        else:
            raise source.error(self.line, f"{self.accepted:g} tokens were accepted, but all rates are 0")
        if self.accepted > self.drafted or self.drafted > drafts * gamma * (1 + gamma * _RATE_ERROR / (total or 1)) + 1:
            raise source.error(
                self.line,
                f"{self.accepted:g} accepted and {self.drafted:g} drafted tokens are inconsistent with the rates",
            )
        return (drafts, *(drafts * rate for rate in self.rates))


def from_windows(
    windows: Iterable[Window], source: Source, pieces: str = "windows of the log", **attributes: Any
) -> list[Acceptance]:
    """One acceptance per gamma in the log."""
    by_gamma: dict[int, list[Window]] = {}
    for window in windows:
        if window.drafted:
            by_gamma.setdefault(len(window.rates), []).append(window)
    acceptances = []
    for gamma, group in by_gamma.items():
        rows = [window.row(source) for window in group]
        drafts, drafted = sum(row[0] for row in rows), sum(window.drafted for window in group)
        remarks = ("the number of drafts is computed from rates with three decimals",)
        if drafted / drafts < gamma * 0.995:
            remarks = (*remarks, short_drafts(drafted / drafts, gamma))
        lines = f"{group[0].line}" + (f"-{group[-1].line}" if len(group) > 1 else "")
        acceptances.append(
            Acceptance.from_rows(rows, f"{source.name}:{lines}", pieces=pieces, remarks=remarks, **attributes)
        )
    return acceptances
