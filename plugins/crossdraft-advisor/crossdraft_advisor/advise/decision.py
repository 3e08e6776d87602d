"""The decision: the best candidate and draft length per batch size, or none; and the best schedule for an engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from crossdraft import Estimate, UsageError

from ..engines.engine import Engine, Range, Schedule
from .candidates import Candidate


def excludes_one(speed_up: Estimate) -> bool:
    """True if the interval of a speed-up excludes 1."""
    low, high = speed_up.low, speed_up.high
    return low is not None and high is not None and (low > 1 or high < 1)


@dataclass(frozen=True)
class Choice:
    """A candidate with a draft length, at one batch size and context."""

    candidate: Candidate
    gamma: int
    tokens_per_second: float | None  # total of all rows; None if no plain speed is known
    speed_up: Estimate  # over plain decoding


@dataclass(frozen=True)
class Step:
    """The recommendation at one batch size and context length."""

    batch_size: int
    context: float | None  # context length; None = as measured for each candidate
    # best, runner_up: the fastest choice, and the fastest of another pair (or of another length if there is no other
    # pair), or None
    best: Choice
    runner_up: Choice | None
    # the fastest choice by measured speed-up at this batch size; None if nothing was measured
    measured: Choice | None = None

    @property
    def draft(self) -> bool:
        """True if drafting is predicted to be faster than plain decoding."""
        return self.best.speed_up.value > 1

    @property
    def advice(self) -> str:
        """``draft``, ``off``, or ``measure`` if published series do not decide against drafting."""
        return "draft" if self.draft else "measure" if self.best.candidate.unmeasured and not self.sure else "off"

    @property
    def sure(self) -> bool:
        """True if the interval of the best speed-up excludes 1."""
        return excludes_one(self.best.speed_up)

    @property
    def close(self) -> bool:
        """True if the interval of the best includes the runner-up."""
        low = self.best.speed_up.low
        return self.runner_up is not None and low is not None and self.runner_up.speed_up.value >= low


def decide(candidates: Sequence[Candidate], batch_size: int, context: float | None = None) -> Step:
    """Recommend one of ``candidates``, which share target and sampling parameters, at a batch size.

    Raises UsageError: no candidates, or an insufficient cost curve.
    """
    if not candidates:
        raise UsageError("no candidates: give the acceptance of at least one drafter")
    choices = []
    for candidate, gamma in _lengths(candidates):
        speed_up, plain = candidate.speed_up(batch_size, gamma, context), candidate.plain_seconds(batch_size, context)
        choices.append(Choice(candidate, gamma, plain and batch_size * speed_up.value / plain, speed_up))
    choices.sort(key=lambda choice: -choice.speed_up.value)
    best, others = choices[0], choices[1:]
    runner_up = next((c for c in others if c.candidate.pair != best.candidate.pair), next(iter(others), None))
    measured_choices = [
        Choice(candidate, candidate.acceptance.gamma, metrics.tokens_per_second, metrics.speed_up)
        for candidate in candidates
        if context is None and (metrics := candidate.measured.get(batch_size)) and metrics.speed_up
    ]
    measured = max(measured_choices, key=lambda choice: choice.speed_up.value, default=None)
    return Step(batch_size, context, best, runner_up, measured)


def _lengths(candidates: Sequence[Candidate]) -> list[tuple[Candidate, int]]:
    """Each candidate with the draft lengths for which no other one of its pair was measured with nearer ones."""
    measured: dict[str, set[int]] = {}
    for candidate in candidates:
        measured.setdefault(candidate.pair, set()).add(candidate.acceptance.gamma)
    return [
        (candidate, gamma)
        for candidate in candidates
        for gamma in candidate.gammas
        if not any(gamma <= length < candidate.acceptance.gamma for length in measured[candidate.pair])
    ]


@dataclass(frozen=True)
class EngineChoice:
    """The best candidate and schedule for one engine."""

    schedule: Schedule
    candidate: Candidate
    unsupported: dict[str, str]  # reasons why the engine does not support other candidates, by `Candidate.pair`


def schedule_for(
    candidates: Sequence[Candidate], engine: Engine, batch_sizes: Sequence[int], context: float | None = None
) -> EngineChoice:
    """Choose one pair for all batch sizes, with a draft length for each if the engine supports that.

    Maximizes the geometric mean of the speed-up over ``batch_sizes``, with 1 at batch sizes for which the engine can
    switch drafting off.

    Raises UsageError: the engine supports none of the candidates or of the batch sizes.
    """
    unsupported = {c.pair: reason for c in candidates if (reason := engine.cannot(c.acceptance)) is not None}
    supported = [c for c in candidates if c.pair not in unsupported]
    if not supported:
        raise UsageError(
            f"{engine.name} supports none of the candidates: " + "; ".join(dict.fromkeys(unsupported.values()))
        )
    sizes = sorted(b for b in set(batch_sizes) if engine.most_sequences is None or b <= engine.most_sequences)
    if not sizes:
        raise UsageError(
            f"{engine.name} drafts for at most {engine.most_sequences} sequence at a time; use --batch-size 1"
        )
    pairs: dict[str, dict[int, Candidate]] = {}
    for candidate, gamma in sorted(_lengths(supported), key=lambda item: item[1]):
        pairs.setdefault(candidate.pair, {}).setdefault(gamma, candidate)
    schedules = [_best_schedule(lengths, engine, sizes, context) for lengths in pairs.values()]
    _, schedule, candidate = max(schedules, key=lambda item: item[0])
    return EngineChoice(schedule, candidate, unsupported)


def _best_schedule(
    lengths: Mapping[int, Candidate], engine: Engine, sizes: Sequence[int], context: float | None
) -> tuple[float, Schedule, Candidate]:
    """The mean log speed-up, the schedule, and the candidate of its longest draft; ``lengths``: of one pair."""

    @cache
    def speed_up(batch_size: int, gamma: int) -> Estimate:
        return lengths[gamma].speed_up(batch_size, gamma, context) if gamma else Estimate(1.0, 1.0, 1.0)

    def off(batch_size: int) -> tuple[int, ...]:
        """0 if a measurement, or the whole interval, speaks against drafts."""
        measured = not all(candidate.unmeasured for candidate in lengths.values())
        return (0,) * (measured or all((speed_up(batch_size, gamma).high or 1.0) < 1 for gamma in lengths))

    @cache
    def best(batch_size: int) -> int:
        return max((*off(batch_size), *lengths), key=lambda gamma: speed_up(batch_size, gamma).value)

    def mean(gamma_at: Callable[[int], int]) -> float:
        return sum(math.log(speed_up(b, gamma_at(b)).value) for b in sizes) / len(sizes)

    if engine.scheduled(lengths[max(lengths)].acceptance):
        ranges = _ranges(best, sorted({1, *sizes}))
        gamma_at: Callable[[int], int] = best
    else:
        constant = max((*off(sizes[0]), *lengths), key=lambda gamma: mean(lambda _: gamma))
        ranges, gamma_at = (Range(1, max(sizes), constant),), lambda _: constant
    longest = max(batch_range.gamma for batch_range in ranges) or max(lengths)
    acceptances = {gamma: candidate.acceptance.cut(gamma) for gamma, candidate in lengths.items()}
    schedule = Schedule(
        acceptances[longest], ranges, {b: speed_up(b, gamma_at(b)) for b in sizes}, tuple(acceptances.values())
    )
    return mean(gamma_at), schedule, lengths[longest]


def _ranges(best: Callable[[int], int], sizes: Sequence[int]) -> tuple[Range, ...]:
    """Ranges of batch sizes with the same best length, by bisection between sizes at which it differs."""
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
