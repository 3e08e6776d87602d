"""The answer of runs: the best certified pair of each group, as far as the intervals allow one to be named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..metrics.cell_metrics import clock_ratio
from ..runs.marks import mark_of
from ..util.estimate import estimate_text
from .metrics_text import efficiency_text, no_speed_up

if TYPE_CHECKING:
    from ..cost.summary import Summary
    from ..metrics.cell_metrics import Metrics
    from ..metrics.intervals import Estimate
    from ..runs.records import CellResult

#: Title and summary of each run.
SUMMARIES = Sequence[tuple[str, "Summary"]]
NOT_FASTER = "no certified pair was shown to be faster"
NOT_CERTIFIED = "no pair here is certified lossless"


@dataclass(frozen=True)
class Best:
    """The best certified pair of a group: by speed-up, or by block efficiency if every speed-up is missing.

    Attributes:
        group: settings in which the group differs from the others; ``setting``: all its settings.
        conditions: target, device and number of prompts.
        plain: metrics of plain decoding; None if it was not measured.
        certified_pairs: number of certified pairs in the group.
        rivals: number of the others whose interval overlaps that of this one, or is unknown.
        missing: reason why no pair of the group has a speed-up, or empty.
        clock: ratio of rates by the clock to plain decoding, with its interval over pieces, if speed-ups are withheld.
    """

    group: str
    setting: str
    pair: str
    metrics: Metrics
    conditions: str
    plain: Metrics | None
    certified_pairs: int
    rivals: int
    missing: str
    clock: Estimate | None = None

    @property
    def speed_up(self) -> Estimate | None:
        return self.metrics.speed_up

    @property
    def faster(self) -> bool:
        """True if the pair was shown to be faster than plain decoding."""
        return self.speed_up is not None and (self.speed_up.low or 0.0) > 1

    @property
    def verdict(self) -> str:
        """Conclusion from the intervals, for a pair with a speed-up."""
        e = self.speed_up
        if e is None:
            return self.missing
        if e.low is None or e.high is None:
            return "too few prompts for an interval"
        if e.low > 1:
            return "faster than plain decoding"
        return "slower than plain decoding" if e.high < 1 else "no difference from plain decoding was shown"

    @property
    def efficiency(self) -> str:
        return efficiency_text(self.metrics)

    @property
    def by_efficiency(self) -> str:
        """The pair with the greatest block efficiency; none if intervals overlap."""
        if not self.rivals:
            return f"{self.pair}, {self.efficiency}"
        known = self.metrics.block_efficiency is not None and self.metrics.block_efficiency.low is not None
        return f"no winner, {f'{self.rivals + 1} intervals overlap' if known else 'too few prompts for intervals'}"


def split_groups(runs: SUMMARIES) -> tuple[list[str], list[tuple[str, str, list[CellResult]]]]:
    """The settings that all groups share; of each group the settings of its own, all its settings, and its results."""
    groups = [(title, group.split(", "), results) for title, run in runs for group, results in run.groups]
    shared = [part for part in groups[0][1] if all(part in parts for _, parts, _ in groups)] if groups else []
    split = []
    for title, parts, results in groups:
        run = [title] * (len(runs) > 1)
        own = [part for part in parts if part not in shared]
        split.append((", ".join(run + own), ", ".join(run + parts), results))
    return shared, split


def best_of(runs: SUMMARIES) -> list[Best]:
    """The best certified pair of each group.

    Pairs that are lossy, failed, uncertified or emitted a text that is not the target's are left out: their speed-up
    may be bought with a changed distribution.
    """
    best = []
    for group, setting, results in split_groups(runs)[1]:
        certified = [(r, m) for r in results if (m := r.drafting) and mark_of(r).headline and not m.faults]
        if not certified:
            continue
        result, metrics = max(certified, key=lambda cell: _order(cell[1]))
        place = ", ".join(str(result.provenance[key]) for key in ("device", "dtype") if key in result.provenance)
        conditions = ", ".join(filter(None, (f"target {result.config.target}", place, f"{result.prompts} prompts")))
        key = "speed_up" if metrics.speed_up else "block_efficiency"
        rivals = sum(m is not metrics and _overlap(getattr(m, key), getattr(metrics, key)) for _, m in certified)
        pair = f"{result.config.drafter.title} × {result.config.verifier.title}"
        plain = next((r for r in results if r.config.is_baseline), None)
        missing, clock = no_speed_up(results), None
        if plain and metrics.withheld:
            clock = clock_ratio(list(zip(result.pieces, plain.pieces, strict=False)))
        about = conditions, plain and plain.metrics, len(certified), rivals, missing, clock
        best.append(Best(group, setting, pair, metrics, *about))
    return best


def headline_of(bests: Sequence[Best]) -> Best | None:
    """The best of all groups; None if no pair is certified."""
    return max(bests, key=lambda best: _order(best.metrics), default=None)


def answer_line(summary: Summary) -> str:
    """The answer of a run, in a line for each temperature; empty without finished pairs."""
    by_temperature: dict[str, list[Best]] = {}
    for best in best_of([("", summary)]):
        by_temperature.setdefault(best.setting.partition(", ")[0], []).append(best)
    if not by_temperature and any(r.drafting for r in summary.results):
        return f"answer: unknown, {NOT_CERTIFIED}"
    return "\n".join(_answer(max(bests, key=lambda best: _order(best.metrics))) for bests in by_temperature.values())


def _answer(best: Best) -> str:
    if best.speed_up is None and best.clock is not None and best.clock.low is not None:
        rivals = f", {best.rivals} other intervals overlap" * bool(best.rivals)
        pair = f"{best.pair}, {best.efficiency}{rivals}, {best.metrics.target_rows_per_token:.2f} rows/tok"
        clock = f"{estimate_text(best.clock)} × plain decoding by the clock ({best.setting})"
        remedy = "a quieter machine or more prompts make it sure"
        return f"answer: not sure, {best.missing}; greatest BE: {pair}, {clock}; {remedy}"
    if best.speed_up is None:
        return f"answer: unknown, {best.missing}; greatest BE: {best.by_efficiency}"
    words = f"{best.pair}, {estimate_text(best.speed_up)} × plain decoding ({best.setting})"
    if best.faster:
        return f"answer: {words}" + f"; {best.rivals} other intervals overlap" * bool(best.rivals)
    return f"answer: {NOT_FASTER}; best: {words}"


def _order(metrics: Metrics) -> tuple[bool, float, float]:
    """Sort key: shown to be faster than plain decoding, then speed-up, then block efficiency."""
    speed_up, efficiency = metrics.speed_up, metrics.block_efficiency
    faster = speed_up is not None and (speed_up.low or 0.0) > 1
    return faster, speed_up.value if speed_up else -1.0, efficiency.value if efficiency else -1.0


def _overlap(a: Estimate | None, b: Estimate | None) -> bool:
    """True if the intervals overlap, or one is unknown."""
    if a is None or b is None or a.low is None or a.high is None or b.low is None or b.high is None:
        return True
    return a.low <= b.high and b.low <= a.high
