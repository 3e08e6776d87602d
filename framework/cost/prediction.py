"""Prediction of tokens/s and speed-up at any batch size, from acceptance and cost curves.

Acceptance does not depend on the machine or the batch size, so the acceptance of a pair (`CellStatistics`) and the
curves of its models give its speed on other machines (`predict`):

    seconds per step = T_target(B, nodes + 1) + passes x T_draft(B, nodes / passes) + other
    tokens/s         = rows in use x tokens per step / seconds per step

Plain decoding has no draft and one token per step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from .curve import Curve


@dataclass(frozen=True)
class CellStatistics:
    """Statistics of a pair that determine its speed, besides the curves of its models.

    Attributes:
        batch_size: rows of every pass.
        occupied: mean number of rows in use; less than `batch_size` after prompts run out.
        tokens_per_step: tokens emitted per row and step: block efficiency.
        widths: share of the steps by nodes of the widest row; the target evaluates one position more.
        context: mean length of the longest row, in tokens.
        passes: forward passes of the draft model per step.
        draft_width: tokens of a row in each of these passes.
        draft_seconds: drafting time per step, for drafters without a curve.
        other_seconds: time per step for verification and the rest.
        acceptance: Pr(tau >= i) for i = 1, 2, ...
        idle: share of the steps of a row without a draft, in engines, which do not pad: a row drafts independently of
            others, and ``widths`` are nodes per row.
    """

    batch_size: int
    occupied: float
    tokens_per_step: float
    widths: Mapping[float, float]
    context: float
    passes: float = 0.0
    draft_width: float = 1.0
    draft_seconds: float = 0.0
    other_seconds: float = 0.0
    acceptance: tuple[float, ...] = ()
    idle: float = 0.0

    @classmethod
    def chain(cls, batch_size: int, gamma: int, acceptance: float, context: float) -> CellStatistics:
        """Token verification of chains of ``gamma`` tokens with i.i.d. acceptance, one draft pass per token.

        E[tau] + 1 = (1 - a^(gamma+1)) / (1 - a) (Leviathan, Kalman and Matias, "Fast inference from transformers via
        speculative decoding", 2023, eq. 1).
        """
        survival = tuple(acceptance**i for i in range(1, gamma + 1))
        return cls(batch_size, batch_size, 1 + sum(survival), {gamma: 1.0}, context, gamma, acceptance=survival)

    @property
    def nodes(self) -> float:
        """Mean drafted tokens of a row in a step."""
        return (1 - self.idle) * sum(nodes * share for nodes, share in self.widths.items())

    def plain(self) -> CellStatistics:
        """Plain decoding of the same rows, with the same other time."""
        return replace(
            self, tokens_per_step=1.0, widths={0: 1.0}, passes=0.0, draft_seconds=0.0, acceptance=(), idle=0.0
        )

    def at(self, batch_size: int) -> CellStatistics:
        """Return the same pair with ``batch_size`` rows, all in use. Times without a curve scale with the rows."""
        ratio = batch_size / self.batch_size
        widths = self.widths
        if self.idle:
            nodes, drafting = max(widths), np.arange(batch_size + 1)
            shares = stats.binom.pmf(drafting, batch_size, 1 - self.idle)
            widths = dict(zip((nodes * drafting / batch_size).tolist(), shares.tolist(), strict=True))
        return replace(
            self,
            batch_size=batch_size,
            occupied=batch_size,
            widths=widths,
            draft_seconds=self.draft_seconds * ratio,
            other_seconds=self.other_seconds * ratio,
        )


@dataclass(frozen=True)
class Prediction:
    """Predicted speed of a pair.

    Attributes:
        target, draft, other: seconds of the parts of a step.
        seconds: seconds of a step.
        tokens_per_second: rate of all rows.
        speed_up: speed-up over predicted plain decoding, at most the ratio of the tokens of a step.
    """

    target: float
    draft: float
    other: float
    seconds: float
    tokens_per_second: float
    speed_up: float = 1.0


def predict(
    cell: CellStatistics,
    target: Curve,
    drafter: Curve | None = None,
    baseline: CellStatistics | None = None,
    *,
    overlap: bool = False,
) -> Prediction:
    """Predict seconds per step, tokens/s and speed-up of a pair.

    Args:
        target, drafter: curves of the two models; without a drafter curve, ``cell.draft_seconds`` is used.
        baseline: statistics of plain decoding; `CellStatistics.plain` by default.
        overlap: drafting runs in parallel with the target, so that a step takes the maximum of the two. This is an
            upper bound: a draft must be repeated if the previous one is not accepted completely.
    """
    baseline = baseline or cell.plain()
    pair, plain = _step(cell, target, drafter, overlap), _step(baseline, target, None)
    emitted = cell.occupied * cell.tokens_per_step / (baseline.occupied * baseline.tokens_per_step)
    return replace(pair, speed_up=min(pair.tokens_per_second / plain.tokens_per_second, emitted))


def _step(cell: CellStatistics, target: Curve, drafter: Curve | None, overlap: bool = False) -> Prediction:
    b, context = cell.batch_size, cell.context
    scoring = sum(share * target.seconds(b, nodes + 1, context) for nodes, share in cell.widths.items())
    if drafter is None:
        drafting = cell.draft_seconds
    else:
        drafting = cell.passes * drafter.seconds(b, cell.draft_width, context)
    model_seconds = max(scoring, drafting) if overlap else scoring + drafting
    total = model_seconds + cell.other_seconds
    rate = cell.occupied * cell.tokens_per_step / total
    return Prediction(scoring, drafting, cell.other_seconds, total, rate)


def schedule(
    acceptance: float, gamma: int, target: Curve, drafter: Curve | None, batch_sizes: Sequence[int], context: float
) -> list[tuple[int, int]]:
    """Best draft length by batch size, as pairs of a batch size and the length from there on.

    Lengths are at most ``gamma``, for chains as in `CellStatistics.chain`; 0 if no length has a speed-up above 1. This
    is the option ``lengths`` of the policy ``batch-size``.
    """
    thresholds: list[tuple[int, int]] = []
    for b in sorted(batch_sizes):
        speed_ups = {0: 1.0}
        for n in range(1, gamma + 1):
            speed_ups[n] = predict(CellStatistics.chain(b, n, acceptance, context), target, drafter).speed_up
        best = max(speed_ups, key=lambda n: (speed_ups[n], -n))
        if not thresholds or thresholds[-1][1] != best:
            thresholds.append((b if thresholds else 1, best))
    return thresholds


def stops_paying(batch_sizes: Sequence[int], speed_ups: Sequence[float]) -> int | None:
    """Smallest batch size from which on all speed-ups are below 1; None if the last one is at least 1."""
    below = None
    for b, speed_up in sorted(zip(batch_sizes, speed_ups, strict=True), reverse=True):
        if speed_up >= 1:
            break
        below = b
    return below


def pays_until(speed_ups: Mapping[int, float]) -> int:
    """Largest batch size below `stops_paying`, or 0."""
    stop = stops_paying(list(speed_ups), list(speed_ups.values()))
    return max((b for b in speed_ups if stop is None or b < stop), default=0)
