"""Policies that choose the draft length of every running request in a step, and the seconds of that step.

A step is one pass of the target over the decoding rows, each with its draft, and the prompt tokens that are prefilled
with them; before it, the draft model takes one pass for each drafted token of the longest draft. Unless both curves are
measured, drafts cost at least as much as in published series.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from crossdraft import MOST_NODES, UsageError, quoted
from crossdraft.commands import MOST_ROWS
from crossdraft.runs import Curve

from .request import Pool, SimulatedRequest

CONTEXT_STEP = 16  # contexts are rounded to multiples of this many tokens


@dataclass
class StepCost:
    """Seconds of a step."""

    target: Curve  # curve of the target
    drafter: Curve | None = None  # curve of the draft model; None if it has none, or if it is unknown
    # seconds of a prefill by its tokens, as the curve of a batch of 1; by default that of ``target``, plus that of the
    # draft model in proportion to the models' passes over one token
    prefill: Curve | None = None
    overhead: float = 0.0  # further seconds of a step
    padded: bool = False  # rows are padded to the widest and drafted for as long as it; else a pass costs its tokens
    separate: bool = False  # prompts are prefilled in a pass of their own before the step; else with the step's rows
    # seconds of a step over those of a plain one at batch size 1, by drafted tokens of a row; None for those of the
    # curves
    floor: Callable[[float], float] | None = None

    def __post_init__(self) -> None:
        names = ("_passes", "_floor_draft", "_draft_pass")
        self.__dict__ |= {name: cache(getattr(self, name)) for name in names}  # computed once each

    def seconds(self, lengths: Sequence[int], context: float, prefill_tokens: int = 0, prefill_rows: int = 0) -> float:
        """Seconds of a step: ``lengths`` are the drafted tokens of its decoding rows, of mean length ``context``."""
        rows, place = len(lengths), round(context / CONTEXT_STEP) * CONTEXT_STEP
        deepest = max(lengths, default=0)
        nodes = rows * deepest if self.padded else sum(lengths)
        seconds = self._passes(rows, nodes, place, prefill_tokens, prefill_rows)
        drafting = 0.0
        if self.drafter is not None and deepest:
            for depth in range(1, deepest + 1):
                drafting += self._draft_pass(rows if self.padded else sum(length >= depth for length in lengths), place)
        if self.floor is not None and nodes:
            drafting = max(drafting, self._floor_draft(rows, nodes, place))
        return seconds + drafting + self.overhead

    def _floor_draft(self, rows: int, nodes: int, context: int) -> float:
        """Least seconds of drafting ``nodes`` tokens: what ``floor`` has beyond the curve at batch size 1."""
        assert self.floor is not None
        drafted = nodes / rows
        ratio = self.target.seconds(1, 1 + drafted, context) / self.target.seconds(1, 1, context)
        return (self.floor(drafted) - ratio) * self.target.seconds(rows, 1, context)

    def _draft_pass(self, rows: int, context: int) -> float:
        assert self.drafter is not None
        return self.drafter.seconds(rows, 1, context)

    def _passes(self, rows: int, nodes: int, context: int, prefill_tokens: int, prefill_rows: int) -> float:
        decoding = 0.0
        if rows:  # more positions do not take less time
            decoding = max(self.target.seconds(rows, width, context) for width in (1, 1 + nodes / rows))
        if not prefill_tokens:
            return decoding
        if self.prefill is not None:
            seconds = self.prefill.seconds(1, prefill_tokens, 0)
            if rows and not self.separate:  # the weights are read once for both
                seconds = max(seconds - self.target.seconds(1, 1, context), 0.0)
            return decoding + seconds
        if rows and not self.separate:
            tokens, all_rows = rows + nodes + prefill_tokens, rows + prefill_rows
            seconds = max(self.target.seconds(all_rows, tokens / all_rows, context) - decoding, 0.0)
        else:
            seconds = self.target.seconds(prefill_rows, prefill_tokens / prefill_rows, 0)
        if self.drafter is not None:
            seconds *= 1 + self.drafter.seconds(1, 1, context) / self.target.seconds(1, 1, context)
        return decoding + seconds


PRIOR_TOKENS = 4  # weight of the prior of a request's acceptance rate, in drafted tokens
Rows = Sequence[SimulatedRequest]
_FORMS = "off, static:N, schedule, schedule:B=N,..., budget:N or oracle"


@dataclass(frozen=True)
class LengthSchedule:
    """Draft lengths by the number of running requests."""

    name: str
    thresholds: tuple[tuple[int, int], ...]  # pairs of a batch size and the length from there on, from batch size 1

    def lengths(self, rows: Rows, longest: Sequence[int], cost: StepCost, context: float) -> list[int]:
        gamma = self.thresholds[bisect_right(self.thresholds, (len(rows), 1 << 30)) - 1][1]
        return [min(gamma, maximum) for maximum in longest]


@dataclass(frozen=True)
class DraftBudget:
    """``tokens`` drafted tokens per step, shared by the running requests.

    The i-th drafted token of a request with acceptance rate a is accepted with probability a^i; the budget goes to the
    most probable tokens. The rate of a request is that of its own drafts so far, with a prior.
    """

    name: str
    tokens: int
    prior: float  # acceptance rate of a new request

    def lengths(self, rows: Rows, longest: Sequence[int], cost: StepCost, context: float) -> list[int]:
        probs = []
        for i, (row, maximum) in enumerate(zip(rows, longest, strict=True)):
            rate = (PRIOR_TOKENS * self.prior + row.accepted) / (PRIOR_TOKENS + row.tested)
            prob = 1.0
            for depth in range(maximum):
                prob *= rate
                probs.append((-prob, depth, i))
        probs.sort()
        lengths = [0] * len(rows)
        for _, _, i in probs[: self.tokens]:
            lengths[i] += 1
        return lengths


@dataclass(frozen=True)
class OracleLengths:
    """Drafts that contain accepted tokens only, as deep as makes the step emit most tokens per second.

    It reads the outcome of the step, so it bounds the other policies and is not a method.
    """

    name: str = "oracle"

    def lengths(self, rows: Rows, longest: Sequence[int], cost: StepCost, context: float) -> list[int]:
        accepted = [min(row.accepts[row.emitted], maximum) for row, maximum in zip(rows, longest, strict=True)]
        best, best_rate = [0] * len(rows), len(rows) / cost.seconds([0] * len(rows), context)
        for depth in range(1, max(accepted) + 1):
            lengths = [min(n, depth) for n in accepted]
            rate = (len(rows) + sum(lengths)) / cost.seconds(lengths, context)
            if rate > best_rate:
                best, best_rate = lengths, rate
        return best


#: A policy, whose ``lengths`` returns the drafted tokens of each row of a step, at most ``longest``.
StepPolicy = LengthSchedule | DraftBudget | OracleLengths


def parse_policy(text: str, pool: Pool, cost: StepCost, batch_size: int) -> StepPolicy:
    """Create a policy from its text: ``off``, ``static:N``, ``schedule[:B=N,...]``, ``budget:N`` or ``oracle``.

    ``batch_size``: largest number of running requests. Raises UsageError: another text, or a draft longer than those of
    the pool.
    """
    name, colon, value = text.partition(":")
    if name in ("off", "oracle") and not colon:
        return OracleLengths() if name == "oracle" else LengthSchedule("off", ((1, 0),))
    if name == "schedule":
        if not colon:
            return best_schedule(pool, cost, batch_size)
        pairs = [tuple(map(int, match.groups())) for match in re.finditer(r"(\d{1,9})=(\d{1,9})", value)]
        if (
            not pairs
            or value != ",".join(f"{b}={n}" for b, n in pairs)
            or [b for b, _ in pairs] != sorted({b for b, _ in pairs})
        ):
            raise UsageError(
                f"--policy {quoted(text)} is not a schedule; give increasing batch sizes, as in schedule:1=4,8=2,32=0"
            )
        if pairs[0][0] != 1:
            raise UsageError(f"--policy {text} has no length for 1 request; begin with schedule:1=N")
        for _, length in pairs:
            _check_length(text, length, pool)
        return LengthSchedule(text, tuple((b, n) for b, n in pairs))
    if name not in ("static", "budget") or not value.isdecimal() or not value.isascii():
        raise UsageError(f"--policy {quoted(text)} is not a policy; give {_FORMS}")
    number = int(value[:12])
    if name == "budget":
        if reason := MOST_NODES.violation(-(-number // MOST_ROWS)):
            raise UsageError(f"--policy {text} has too many tokens; {reason}")
        return DraftBudget(text, number, pool.acceptance)
    _check_length(text, number, pool)
    return LengthSchedule(text, ((1, number),))


def _check_length(text: str, length: int, pool: Pool) -> None:
    if length > pool.gamma:
        raise UsageError(
            f"--policy {text} drafts {length} tokens, but the replay has drafts of {pool.gamma}; set --gamma {length}"
        )


def best_schedule(pool: Pool, cost: StepCost, batch_size: int) -> LengthSchedule:
    """The lengths with the highest mean tokens per second by batch size; 0 if drafting does not pay."""
    thresholds: list[tuple[int, int]] = []
    for b in range(1, batch_size + 1):

        def rate(gamma: int, b: int = b) -> float:
            drafted = pool.drafted_per_step[gamma]
            shorter, longer = (cost.seconds([n] * b, pool.context) for n in (math.floor(drafted), math.ceil(drafted)))
            return pool.tokens_per_step[gamma] / (shorter + (drafted % 1) * (longer - shorter))

        gamma = max(range(pool.gamma + 1), key=lambda g: (rate(g), -g))
        if not thresholds or thresholds[-1][1] != gamma:
            thresholds.append((b, gamma))
    text = ",".join(f"{b}={gamma}" for b, gamma in thresholds)
    return LengthSchedule(f"schedule:{text}", tuple(thresholds))
