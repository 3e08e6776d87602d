"""The decision: the best drafter, rule and draft length by batch size, or none; and what one server can do of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from ..errors import UsageError
from ..metrics.intervals import Estimate
from .candidates import Candidate
from .engine import Engine, Range, Schedule


@dataclass(frozen=True)
class Choice:
    """A candidate with a draft length, at one batch size and context.

    Attributes:
        tokens_per_second: of all rows together.
        speed_up: over plain decoding.
    """

    candidate: Candidate
    gamma: int
    tokens_per_second: float
    speed_up: Estimate


@dataclass(frozen=True)
class Step:
    """What to do at one batch size and context.

    Attributes:
        context: tokens a row holds; None: what each candidate was measured with.
        best, runner_up: the fastest, and the fastest of another drafter or rule (of another length where there is no
            other pair); None where there is nothing else.
        measured: the fastest of what was measured at this batch size, as it was measured; None where nothing was.
    """

    batch_size: int
    context: float | None
    best: Choice
    runner_up: Choice | None
    measured: Choice | None = None

    @property
    def draft(self) -> bool:
        """Is drafting worth it?"""
        return self.best.speed_up.value > 1

    @property
    def sure(self) -> bool:
        """Does the interval say so, too?"""
        low, high = self.best.speed_up.low, self.best.speed_up.high
        return low is not None and high is not None and (low > 1 or high < 1)

    @property
    def close(self) -> bool:
        """Does the runner-up lie within the interval of the best?"""
        low = self.best.speed_up.low
        return self.runner_up is not None and low is not None and self.runner_up.speed_up.value >= low


def decide(candidates: Sequence[Candidate], batch_size: int, context: float | None = None) -> Step:
    """The best of ``candidates``, which share target and sampling, at a batch size.

    Raises:
        UsageError: there are none, or a curve that cannot say.
    """
    if not candidates:
        raise UsageError("there is nothing to choose from: no acceptance of any drafter was given")
    own = {(candidate.pair, candidate.acceptance.gamma) for candidate in candidates}
    choices = []
    for candidate in candidates:
        for gamma in candidate.gammas:
            if gamma != candidate.acceptance.gamma and (candidate.pair, gamma) in own:
                continue  # that length was measured itself
            rate = candidate.predict(batch_size, gamma, context).tokens_per_second
            choices.append(Choice(candidate, gamma, rate, candidate.speed_up(batch_size, gamma, context)))
    choices.sort(key=lambda choice: -choice.speed_up.value)
    best, others = choices[0], choices[1:]
    runner_up = next((c for c in others if c.candidate.pair != best.candidate.pair), next(iter(others), None))
    known = [
        Choice(candidate, candidate.acceptance.gamma, found.tokens_per_second, found.speed_up)
        for candidate in candidates
        if context is None and (found := candidate.measured.get(batch_size)) and found.speed_up
    ]
    measured = max(known, key=lambda choice: choice.speed_up.value, default=None)
    return Step(batch_size, context, best, runner_up, measured)


# -- one server ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scheduled:
    """A schedule for one engine.

    Attributes:
        candidate: the one that it drafts with.
        left_out: why the engine cannot do the others, by `Candidate.pair`.
    """

    schedule: Schedule
    candidate: Candidate
    left_out: dict[str, str]


def schedule_for(
    candidates: Sequence[Candidate], engine: Engine, batch_sizes: Sequence[int], context: float | None = None
) -> Scheduled:
    """What a server should do: one drafter and rule for all batch sizes, a draft length for each if the engine can.

    That with the greatest mean of the logarithm of the speed-up over ``batch_sizes``; where it would be below 1 and the
    engine switches off, plain decoding counts.

    Raises:
        UsageError: the engine can do none of the candidates, or drafts at none of the batch sizes.
    """
    left_out = {c.pair: reason for c in candidates if (reason := engine.cannot(c.acceptance)) is not None}
    able = [c for c in candidates if c.pair not in left_out]
    if not able:
        raise UsageError(f"{engine.name} can do none of these: " + "; ".join(dict.fromkeys(left_out.values())))
    sizes = sorted(b for b in set(batch_sizes) if engine.most_sequences is None or b <= engine.most_sequences)
    if not sizes:
        raise UsageError(
            f"{engine.name} drafts for at most {engine.most_sequences} sequence at a time; ask for --batch-size 1"
        )
    made = [_best_schedule(candidate, engine, sizes, context) for candidate in able]
    _, found, candidate = max(made, key=lambda one: one[0])
    return Scheduled(found, candidate, left_out)


def _best_schedule(
    candidate: Candidate, engine: Engine, sizes: Sequence[int], context: float | None
) -> tuple[float, Schedule, Candidate]:
    @cache
    def speed_up(batch_size: int, gamma: int) -> float:
        return candidate.speed_up(batch_size, gamma, context).value if gamma else 1.0

    @cache
    def best(batch_size: int) -> int:
        return max((0, *candidate.gammas), key=lambda gamma: speed_up(batch_size, gamma))

    def mean(gamma_at: Callable[[int], int]) -> float:
        return sum(math.log(speed_up(b, gamma_at(b))) for b in sizes) / len(sizes)

    if engine.scheduled(candidate.acceptance):
        ranges = _ranges(best, sorted({1, *sizes}))
        gamma_at: Callable[[int], int] = best
    else:
        one = max((0, *candidate.gammas), key=lambda gamma: mean(lambda _: gamma))
        ranges, gamma_at = (Range(1, max(sizes), one),), lambda _: one
    speed_ups = {
        b: candidate.speed_up(b, gamma, context) if (gamma := gamma_at(b)) else Estimate(1.0, 1.0, 1.0) for b in sizes
    }
    return mean(gamma_at), Schedule(candidate.acceptance, ranges, speed_ups), candidate


def _ranges(best: Callable[[int], int], sizes: Sequence[int]) -> tuple[Range, ...]:
    """Where the best length changes, found by halving between batch sizes at which it differs."""
    starts = [(sizes[0], best(sizes[0]))]

    def search(low: int, high: int) -> None:
        if best(low) == best(high):
            return
        if high - low == 1:
            starts.append((high, best(high)))
            return
        middle = (low + high) // 2
        search(low, middle)
        search(middle, high)

    for low, high in pairwise(sizes):
        search(low, high)
    ends = [start - 1 for start, _ in starts[1:]] + [sizes[-1]]
    return tuple(Range(start, end, gamma) for (start, gamma), end in zip(starts, ends, strict=True))
