"""From acceptance and cost curves to tokens/s and speed-up, at any batch size.

Acceptance does not depend on the machine or the batch size, time does; so a pair's acceptance (`CellStatistics`) and
the curves of its models give its speed elsewhere (`predict`):

    seconds a step = T_target(B, nodes + 1) + passes x T_draft(B, nodes / passes) + the rest
    tokens/s        = rows in use x tokens a step / seconds a step

and plain decoding has one row, no draft and one token a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..errors import UsageError
from .curve import Curve


@dataclass(frozen=True)
class CellStatistics:
    """What the speed of a pair depends on beside the curves of its models.

    Attributes:
        batch_size: rows that every pass computes.
        occupied: mean number of them that hold a sequence: less than all once prompts run out.
        tokens_per_step: tokens a row emits in a step: the block efficiency.
        widths: share of the steps by nodes of the widest row; the target evaluates one position more.
        context: mean length of the longest row, in tokens.
        passes: forward passes of the draft model in a step; draft_width: tokens of a row in each of them.
        draft_seconds: of a step's drafting, for drafters whose passes have no curve.
        other_seconds: of a step's verification and bookkeeping.
        acceptance: Pr(tau >= i) for i = 1, 2, ...
    """

    batch_size: int
    occupied: float
    tokens_per_step: float
    widths: Mapping[int, float]
    context: float
    passes: float = 0.0
    draft_width: float = 1.0
    draft_seconds: float = 0.0
    other_seconds: float = 0.0
    acceptance: tuple[float, ...] = ()

    @classmethod
    def chain(cls, batch_size: int, gamma: int, acceptance: float, context: float) -> CellStatistics:
        """Token verification of chains of ``gamma`` tokens, each accepted with the same probability if all before
        it were: E[tau] + 1 = (1 - a^(gamma+1)) / (1 - a) (Leviathan, Kalman and Matias, "Fast inference from
        transformers via speculative decoding", 2023, eq. 1). A pass of the draft model for each token."""
        survival = tuple(acceptance**i for i in range(1, gamma + 1))
        return cls(batch_size, batch_size, 1 + sum(survival), {gamma: 1.0}, context, gamma, acceptance=survival)

    def plain(self) -> CellStatistics:
        """Plain decoding of the same rows, with the same bookkeeping."""
        return replace(self, tokens_per_step=1.0, widths={0: 1.0}, passes=0.0, draft_seconds=0.0, acceptance=())

    def at(self, batch_size: int) -> CellStatistics:
        """The same pair with ``batch_size`` rows, all in use. Times without a curve are taken to grow with the rows."""
        ratio = batch_size / self.batch_size
        return replace(
            self,
            batch_size=batch_size,
            occupied=batch_size,
            draft_seconds=self.draft_seconds * ratio,
            other_seconds=self.other_seconds * ratio,
        )

    def cut(self, gamma: int) -> CellStatistics:
        """Chains cut to ``gamma`` tokens. Exact for token verification of chains that all were that long;
        a rule that looks ahead (block verification) does slightly worse with less to look at.

        Raises:
            UsageError: ``gamma`` is longer than what was measured, or the drafts were trees.
        """
        if max(self.widths) > len(self.acceptance):
            raise UsageError(
                f"drafts of {max(self.widths)} nodes that go {len(self.acceptance)} deep are trees; "
                "only chains can be cut to another gamma"
            )
        if gamma > len(self.acceptance):
            raise UsageError(
                f"acceptance was measured for drafts of up to {len(self.acceptance)} tokens, not {gamma}; "
                f"run a cell with gamma {gamma}"
            )
        widths: dict[int, float] = {}
        for nodes, share in self.widths.items():
            widths[min(nodes, gamma)] = widths.get(min(nodes, gamma), 0.0) + share
        longest = max(self.widths)
        ratio = gamma / longest if longest > gamma else 1.0
        return replace(
            self,
            tokens_per_step=self.tokens_per_step - sum(self.acceptance[gamma:]),
            widths=widths,
            passes=self.passes * ratio,
            draft_seconds=self.draft_seconds * ratio,
            acceptance=self.acceptance[:gamma],
        )


@dataclass(frozen=True)
class Prediction:
    """A pair's predicted step.

    Attributes:
        target, draft, other: seconds of a step's parts; ``seconds``: of the step.
        tokens_per_second: of all rows together.
        speed_up: over plain decoding, predicted the same way.
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
    """Seconds a step, tokens/s and speed-up of a pair.

    Args:
        target, drafter: curves of the two models; without the drafter's, ``cell.draft_seconds`` counts.
        baseline: statistics of plain decoding; `CellStatistics.plain` by default.
        overlap: the next draft is made while the target verifies the last one, so that a step takes as long as the
            longer of the two. At best: a draft whose predecessor is not accepted whole has to be made again.
    """
    mine = _step(cell, target, drafter, overlap)
    plain = _step(baseline or cell.plain(), target, None)
    return replace(mine, speed_up=mine.tokens_per_second / plain.tokens_per_second)


def _step(cell: CellStatistics, target: Curve, drafter: Curve | None, overlap: bool = False) -> Prediction:
    b, context = cell.batch_size, cell.context
    scoring = sum(share * target.seconds(b, nodes + 1, context) for nodes, share in cell.widths.items())
    if drafter is None:
        drafting = cell.draft_seconds
    else:
        drafting = cell.passes * drafter.seconds(b, cell.draft_width, context)
    both = max(scoring, drafting) if overlap else scoring + drafting
    total = both + cell.other_seconds
    rate = cell.occupied * cell.tokens_per_step / total
    return Prediction(scoring, drafting, cell.other_seconds, total, rate)


def schedule(
    acceptance: float, gamma: int, target: Curve, drafter: Curve | None, batch_sizes: Sequence[int], context: float
) -> list[tuple[int, int]]:
    """The draft length that pays best at each batch size: pairs of a batch size and the length from there on.

    The lengths are those up to ``gamma``, of chains as `CellStatistics.chain` has them; 0 where no length reaches a
    speed-up of 1. What the length policy ``batch-size`` takes as ``lengths``.
    """
    found: list[tuple[int, int]] = []
    for b in sorted(batch_sizes):
        speed_ups = {0: 1.0}
        for n in range(1, gamma + 1):
            speed_ups[n] = predict(CellStatistics.chain(b, n, acceptance, context), target, drafter).speed_up
        best = max(speed_ups, key=lambda n: (speed_ups[n], -n))
        if not found or found[-1][1] != best:
            found.append((b if found else 1, best))
    return found


def stops_paying(batch_sizes: Sequence[int], speed_ups: Sequence[float]) -> int | None:
    """The least batch size from which on every speed-up is below 1; None if the last one is not."""
    below = None
    for b, speed_up in sorted(zip(batch_sizes, speed_ups, strict=True), reverse=True):
        if speed_up >= 1:
            break
        below = b
    return below


def pays_until(speed_ups: Mapping[int, float]) -> int:
    """The greatest batch size before `stops_paying`; 0 if it is the least one that stops."""
    stop = stops_paying(list(speed_ups), list(speed_ups.values()))
    return max((b for b in speed_ups if stop is None or b < stop), default=0)
