"""Lines of a log that sum up a window of time, or a request, and what they come to together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from .acceptance import Acceptance
from .engine_log import Source
from .prometheus import short_drafts

#: How far what a line says may be from adding up: its rates have three decimals, its length two.
_RATE_ERROR, _LENGTH_ERROR = 0.0005, 0.0051


class Window(NamedTuple):
    """What one line says: its number, accepted and drafted tokens, marginal rates, mean length with the bonus."""

    line: int
    accepted: float
    drafted: float
    rates: tuple[float, ...]
    mean: float

    def row(self, given: Source) -> tuple[float, ...]:
        """``(steps, accepted at 1, ...)``: what the line was made from, as far as its decimals go.

        Raises:
            UsageError: its numbers do not belong together.
        """
        gamma, total = len(self.rates), sum(self.rates)
        if abs(1 + total - self.mean) > gamma * _RATE_ERROR + _LENGTH_ERROR:
            raise given.error(self.line, f"the mean length {self.mean:g} is not 1 + the rates, {1 + total:.3f}")
        if not self.accepted:
            drafts = self.drafted / gamma
        elif total:
            drafts = self.accepted / total
        else:
            raise given.error(self.line, f"{self.accepted:g} tokens were accepted, and none at any position")
        if self.accepted > self.drafted or self.drafted > drafts * gamma * (1 + gamma * _RATE_ERROR / (total or 1)) + 1:
            raise given.error(self.line, f"{self.accepted:g} accepted of {self.drafted:g} drafted tokens do not add up")
        return (drafts, *(drafts * rate for rate in self.rates))


def from_windows(
    windows: Iterable[Window], given: Source, pieces: str = "windows of the log", **about: Any
) -> list[Acceptance]:
    """Acceptance by gamma: a server that was started anew with another one gives two."""
    by_gamma: dict[int, list[Window]] = {}
    for window in windows:
        if window.drafted:
            by_gamma.setdefault(len(window.rates), []).append(window)
    found = []
    for gamma, mine in by_gamma.items():
        rows = [window.row(given) for window in mine]
        drafts, drafted = sum(row[0] for row in rows), sum(window.drafted for window in mine)
        remarks = ("drafts were counted back from rates of three decimals",)
        if drafted / drafts < gamma * 0.995:
            remarks = (*remarks, short_drafts(drafted / drafts, gamma))
        lines = f"{mine[0].line}" + (f"-{mine[-1].line}" if len(mine) > 1 else "")
        found.append(Acceptance.from_rows(rows, f"{given.name}:{lines}", pieces=pieces, remarks=remarks, **about))
    return found
