"""Acceptance from log lines that summarize a time window or a request."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

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
        """Counts ``(steps, accepted at 1, ...)`` that are rounded to the printed numbers.

        Steps with full drafts are exact; otherwise their number is computed from the rates. The accepted tokens sum to
        ``accepted``.

        Raises:
            UsageError: inconsistent numbers.
        """
        gamma, rates = len(self.rates), np.array(self.rates)
        low, high = np.maximum(rates - _RATE_ERROR, 0.0), np.minimum(rates + _RATE_ERROR, 1.0)
        lower, upper = max(low.sum(), self.mean - 1 - _LENGTH_ERROR), min(high.sum(), self.mean - 1 + _LENGTH_ERROR)
        if lower > upper:
            raise source.error(
                self.line, f"the mean length {self.mean:g} is not 1 + the sum of the rates, {1 + rates.sum():.3f}"
            )
        drafts = float(math.ceil(self.drafted / gamma - 1e-9))  # if all drafts are full
        fewest, greatest = np.ceil(drafts * low - 1e-9), np.floor(drafts * high + 1e-9)
        if not ((fewest <= greatest).all() and fewest.sum() <= self.accepted <= greatest.sum()):
            few = max(drafts, self.accepted / upper if self.accepted else 0.0)
            many = min(self.drafted, self.accepted / lower) if lower > 0 else self.drafted
            if self.accepted > self.drafted or few > many * (1 + 1e-9):
                raise source.error(
                    self.line,
                    f"{self.accepted:g} accepted and {self.drafted:g} drafted tokens are inconsistent with the rates",
                )
            drafts = min(max(self.accepted / (rates.sum() or upper), few), many)
            fewest, greatest = drafts * low, drafts * high
        share = (self.accepted - fewest.sum()) / max((greatest - fewest).sum(), 1e-9)
        return (drafts, *(fewest + min(max(share, 0.0), 1.0) * (greatest - fewest)).tolist())


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
        rows = []
        for window in group:
            with source.skipping():
                rows.append(window.row(source))
        if not rows:
            continue
        drafts, drafted = sum(row[0] for row in rows), sum(window.drafted for window in group)
        remarks: tuple[str, ...] = ()
        if drafted < drafts * gamma * (1 - 1e-9):
            computed = "the number of drafts is computed from rates with three decimals"
            remarks = (computed, short_drafts(drafted / drafts, gamma))
        lines = f"{group[0].line}" + (f"-{group[-1].line}" if len(group) > 1 else "")
        acceptances.append(
            Acceptance.from_rows(rows, f"{source.name}:{lines}", pieces=pieces, remarks=remarks, **attributes)
        )
    return acceptances
