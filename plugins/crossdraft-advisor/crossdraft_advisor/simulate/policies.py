"""Policies that choose the draft length of every running request in a step."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from crossdraft.framework.errors import UsageError, quoted
from crossdraft.framework.util.limits import MOST_NODES, MOST_ROWS

from .request import Pool, SimulatedRequest
from .step_cost import StepCost

#: Weight of the prior of a request's acceptance rate, in drafted tokens.
PRIOR_TOKENS = 4
_FORMS = "off, static:N, schedule, schedule:B=N,..., budget:N or oracle"


class StepPolicy(Protocol):
    """A policy for the draft lengths of a step."""

    @property
    def name(self) -> str: ...

    def lengths(
        self, rows: Sequence[SimulatedRequest], longest: Sequence[int], cost: StepCost, context: float
    ) -> list[int]:
        """Return the drafted tokens of each row, at most ``longest``."""
        ...


@dataclass(frozen=True)
class LengthSchedule:
    """Draft lengths by the number of running requests.

    Attributes:
        thresholds: pairs of a batch size and the length from there on, from batch size 1.
    """

    name: str
    thresholds: tuple[tuple[int, int], ...]

    def lengths(
        self, rows: Sequence[SimulatedRequest], longest: Sequence[int], cost: StepCost, context: float
    ) -> list[int]:
        gamma = self.thresholds[bisect_right(self.thresholds, (len(rows), 1 << 30)) - 1][1]
        return [min(gamma, maximum) for maximum in longest]


@dataclass(frozen=True)
class DraftBudget:
    """``tokens`` drafted tokens per step, shared by the running requests.

    The i-th drafted token of a request with acceptance rate a is accepted with probability a^i; the budget goes to the
    most probable tokens. The rate of a request is that of its own drafts so far, with a prior.

    Attributes:
        prior: acceptance rate of a new request.
    """

    name: str
    tokens: int
    prior: float

    def lengths(
        self, rows: Sequence[SimulatedRequest], longest: Sequence[int], cost: StepCost, context: float
    ) -> list[int]:
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

    def lengths(
        self, rows: Sequence[SimulatedRequest], longest: Sequence[int], cost: StepCost, context: float
    ) -> list[int]:
        accepted = [min(row.accepts[row.emitted], maximum) for row, maximum in zip(rows, longest, strict=True)]
        best, best_rate = [0] * len(rows), len(rows) / cost.seconds([0] * len(rows), context)
        for depth in range(1, max(accepted) + 1):
            lengths = [min(n, depth) for n in accepted]
            rate = (len(rows) + sum(lengths)) / cost.seconds(lengths, context)
            if rate > best_rate:
                best, best_rate = lengths, rate
        return best


def parse_policy(text: str, pool: Pool, cost: StepCost, batch_size: int) -> StepPolicy:
    """Create a policy from its text: ``off``, ``static:N``, ``schedule[:B=N,...]``, ``budget:N`` or ``oracle``.

    Args:
        batch_size: largest number of running requests.

    Raises:
        UsageError: another text, or a draft longer than those of the pool.
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
