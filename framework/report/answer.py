"""The answer of runs: the best certified pair of each group, as far as the intervals allow one to be named."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..metrics.cell_metrics import clock_ratio
from ..metrics.intervals import LEAST_PIECES
from ..runs.marks import mark_of
from ..util.estimate import estimate_text
from .caveats import verifier_gains
from .metrics_text import efficiency_text, no_speed_up

if TYPE_CHECKING:
    from ..cost.summary import Summary
    from ..metrics.intervals import Estimate
    from ..runs.records import CellResult

NOT_FASTER = "no certified pair was shown to be faster"
NOT_CERTIFIED = "no pair here is certified lossless"
#: Most kinds of prompts and most differences of verifiers in an answer.
_MOST_CATEGORIES, _MOST_GAINS = 3, 2


class Best:
    """The best certified pair of a group: by speed-up, or by block efficiency if every speed-up is missing.

    Attributes:
        setting: settings of the group.
        result: the cell of the pair; ``certified``: those of all certified pairs of the group.
        plain: the cell of plain decoding; None if it was not measured.
        missing: reason why no pair of the group has a speed-up, or empty.
        faster: True if the pair was shown to be faster than plain decoding.
        rivals: number of the other certified pairs whose interval overlaps that of this one, or is unknown; ``overlap``
            is that as text.
        clock: ratio to plain decoding by the clock; None unless the speed-up is withheld.
        text: the pair with its speed-up, or with its block efficiency, target rows and ratio by the clock.
    """

    def __init__(
        self,
        setting: str,
        result: CellResult,
        certified: Sequence[CellResult],
        plain: CellResult | None,
        missing: str,
    ):
        assert result.metrics is not None
        self.setting, self.result, self.certified, self.plain, self.missing = setting, result, certified, plain, missing
        self.pair = f"{result.config.drafter.title} × {result.config.verifier.title}"
        self.metrics, self.speed_up, self.faster = result.metrics, result.metrics.speed_up, order(result)[0]
        key = "speed_up" if self.speed_up else "block_efficiency"
        others = [getattr(other.metrics, key) for other in certified if other is not result]
        self.rivals = sum(_overlap(other, getattr(self.metrics, key)) for other in others)
        self.overlap = f" ({self.rivals} of {len(others)} other intervals overlap)" * bool(self.rivals)
        self.clock = None
        if plain is not None and self.metrics.withheld:
            self.clock = clock_ratio(list(zip(result.pieces, plain.pieces, strict=False)))
        if self.speed_up is not None:
            self.text = f"{self.pair}, {estimate_text(self.speed_up)} × plain decoding"
            return
        self.text = f"{self.pair}, BE {efficiency_text(self.metrics)}{self.overlap}"
        self.text += f", {self.metrics.target_rows_per_token:.2f} rows/tok"
        self.text += f", {estimate_text(self.clock)} × plain decoding by the clock" if self.clock else ""


def best_of(groups: Iterable[tuple[str, Sequence[CellResult]]]) -> list[Best]:
    """The best certified pair of each group, given by its settings and results.

    Pairs that are lossy, failed, uncertified or emitted a text that is not the target's are left out: their speed-up
    may be bought with a changed distribution.
    """
    bests = []
    for setting, results in groups:
        certified = [r for r in results if r.drafting and mark_of(r).headline and not r.drafting.faults]
        if certified:
            plain = next((r for r in results if r.config.is_baseline), None)
            bests.append(Best(setting, max(certified, key=order), certified, plain, no_speed_up(results)))
    return bests


def answer_text(summary: Summary) -> str:
    """The answer of a run for each temperature, and for its other settings, kinds of prompts and verifiers.

    Empty without finished pairs.
    """
    by_temperature: dict[str, list[Best]] = {}
    for best in best_of(summary.groups):
        by_temperature.setdefault(best.setting.partition(", ")[0], []).append(best)
    if not by_temperature and any(r.drafting for r in summary.results):
        return f"answer: unknown, {NOT_CERTIFIED}"
    lines = []
    for temperature, bests in by_temperature.items():
        first = max(bests, key=lambda best: order(best.result))
        lines += _answer(first)
        lines += [f"  {best.setting.partition(', ')[2]}: {best.text}" for best in bests if best is not first]
        categories = first.metrics.by_category
        if 1 < len(categories) <= _MOST_CATEGORIES and all(m.speed_up for m in categories.values()):
            ratios = (f"{name} {estimate_text(m.speed_up)}" for name, m in categories.items())
            lines.append(f"  by kind of prompt: {', '.join(ratios)}")
        if gains := [gain for gain in verifier_gains(summary) if gain[0].startswith(temperature)]:
            shown = [f"{pair} {text} ({group})" for group, pair, text, sure in gains if sure]
            none = f"no difference of BE between them was shown, of {len(gains)} compared"
            lines.append(f"  verifiers: {'; '.join(shown[:_MOST_GAINS]) or none}")
    return "\n".join(lines)


def _answer(best: Best) -> list[str]:
    if best.speed_up is not None:
        words = f"{best.text} ({best.setting}){best.overlap * best.faster}"
        return [f"answer: {'' if best.faster else f'{NOT_FASTER}; best: '}{words}"]
    drafting = [r for r in best.certified if order(r)[2] > 1] or [best.result]
    frugal = min(drafting, key=lambda r: r.metrics.target_rows_per_token if r.metrics else 0.0)
    lines = [f"answer: not sure, {best.missing} ({best.setting})", f"  greatest BE: {best.text}"]
    if frugal is not best.result:
        lines.append(
            f"  fewest target rows: {Best(best.setting, frugal, best.certified, best.plain, best.missing).text}"
        )
    if best.metrics.withheld:
        known = best.clock is not None and best.clock.low is not None
        condition = "" if known else f", of which an interval requires {LEAST_PIECES} pieces"
        lines.append(f"  to be sure: a quieter machine, or run it again for more prompts{condition}")
    return lines


def order(result: CellResult) -> tuple[bool, float, float]:
    """Sort key: shown to be faster than plain decoding, then speed-up, then block efficiency."""
    assert result.metrics is not None
    speed_up, efficiency = result.metrics.speed_up, result.metrics.block_efficiency
    faster = speed_up is not None and (speed_up.low or 0.0) > 1
    return faster, speed_up.value if speed_up else -1.0, efficiency.value if efficiency else -1.0


def _overlap(a: Estimate | None, b: Estimate | None) -> bool:
    """True if the intervals overlap, or one is unknown."""
    if a is None or b is None or a.low is None or a.high is None or b.low is None or b.high is None:
        return True
    return a.low <= b.high and b.low <= a.high
