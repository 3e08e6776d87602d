"""How many drafted tokens are accepted: one type for everything that can say so.

Two conventions are in use, and both are called "acceptance rate by position". Here a rate is *marginal* unless it is
called conditional:

    marginal_i    = Pr(tau >= i), of all drafts (vLLM, llama.cpp, this project)
    conditional_i = Pr(tau >= i | tau >= i - 1) = marginal_i / marginal_(i-1)

A step emits tau + 1 tokens, so the block efficiency is 1 + the sum of the marginals.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from scipy import optimize, stats

from ..errors import UsageError
from ..metrics.intervals import CONFIDENCE, LEAST_PIECES, Estimate, estimate
from ..util.limits import MOST_LEVELS


@dataclass(frozen=True)
class Acceptance:
    """What was accepted of the drafts of one drafter, by position.

    Attributes:
        marginal: Pr(tau >= i) for i = 1..gamma; empty where nothing but ``length`` is known.
        source: where the numbers are from, for people: a file with its lines, a run and its cell.
        drafts: steps that were counted; None where the source does not say.
        rows: counts of independent pieces, for intervals: ``(steps, accepted at 1, ..., at gamma)`` each; where only
            the length is known ``(steps, all accepted tokens)``.
        pieces: what a row is: "prompts", "windows of the log".
        length: mean tokens of a step, bonus included, where that is all there is.
        drafter, verifier: names, as recipes have them; empty where the source does not say.
        model: the draft model; empty where there is none or the source does not say.
        temperature: of the target; None where the source does not say.
        point_mass: the drafts were not sampled but greedy or looked up; None where the source does not say.
        chain: a draft is one sequence, no tree.
        options: of the drafter, as recipes have them, where they are known.
        cuttable: a smaller gamma would have had the same marginals up to there, see `cut`.
        remarks: what a reader of the numbers should know.

    Raises:
        UsageError: numbers that are no probabilities, or that grow with the position.
    """

    marginal: tuple[float, ...]
    source: str
    drafts: float | None = None
    rows: tuple[tuple[float, ...], ...] = ()
    pieces: str = "prompts"
    length: float | None = None
    drafter: str = ""
    verifier: str = ""
    model: str = ""
    temperature: float | None = None
    point_mass: bool | None = None
    chain: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    cuttable: bool = True
    remarks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if reason := MOST_LEVELS.refusal(self.gamma):
            raise UsageError(f"{self.source}: acceptance at {self.gamma} positions is too much; {reason}")
        for i, rate in enumerate(self.marginal, start=1):
            if not 0 <= rate <= 1:  # NaN too
                raise UsageError(f"{self.source}: the acceptance rate at position {i} is {rate:g}, no probability")
            if i > 1 and rate > self.marginal[i - 2]:
                raise UsageError(
                    f"{self.source}: the acceptance rate grows to {rate:g} at position {i}, from "
                    f"{self.marginal[i - 2]:g}, which Pr(tau >= i) cannot; are these conditional rates?"
                )
        if not self.marginal and not (self.length is not None and 1 <= self.length <= MOST_LEVELS + 1):
            raise UsageError(f"{self.source}: a step cannot emit {self.length} tokens in the mean")
        if self.drafts is not None and not 0 < self.drafts < math.inf:
            raise UsageError(f"{self.source}: {self.drafts:g} drafts are none to judge by")

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[float]], source: str, **about: Any) -> Acceptance:
        """From counts of independent pieces ``(steps, accepted at 1, ..., at gamma)``, as ``rows`` has them."""
        found = tuple(tuple(float(n) for n in row) for row in rows if row[0] > 0)
        if not found:
            raise UsageError(f"{source}: no draft was counted; let the server answer some requests first")
        drafts, *accepted = (sum(column) for column in zip(*found, strict=True))
        return cls(tuple(a / drafts for a in accepted), source, drafts=drafts, rows=found, **about)

    @classmethod
    def from_conditional(cls, conditional: Iterable[float], source: str, **about: Any) -> Acceptance:
        """From Pr(tau >= i | tau >= i - 1)."""
        rates = list(conditional)
        for i, rate in enumerate(rates, start=1):
            if not 0 <= rate <= 1:
                raise UsageError(f"{source}: the conditional rate at position {i} is {rate:g}, no probability")
        return cls(tuple(float(rate) for rate in np.cumprod(rates)), source, **about)

    @property
    def gamma(self) -> int:
        """The longest draft of which the marginals tell; 0 where only the length is known."""
        return len(self.marginal)

    @property
    def conditional(self) -> tuple[float, ...]:
        """Pr(tau >= i | tau >= i - 1); 0 where no draft came so far."""
        before = (1.0, *self.marginal[:-1])
        return tuple(m / b if b else 0.0 for m, b in zip(self.marginal, before, strict=True))

    def cut(self, gamma: int) -> Acceptance:
        """The same with drafts of at most ``gamma`` tokens.

        Whether token i is accepted does not depend on what is drafted after it: true of token and block verification of
        chains and of point masses, for drafts that are made token after token. What stays out of sight is that steps
        then start elsewhere in the text.

        Raises:
            UsageError: longer than what was measured, or another drafter or rule.
        """
        if gamma == self.gamma:
            return self
        if not self.marginal:
            raise UsageError(
                f"{self.source} knows how many tokens a step emits, not at which position they are accepted"
            )
        if not self.cuttable or not 0 < gamma < self.gamma:
            what = "drafts of another length have" if gamma < self.gamma else "longer drafts have"
            raise UsageError(f"{self.source} was measured at {self.gamma} tokens; {what} an acceptance of their own")
        rows = tuple(row[: gamma + 1] for row in self.rows)
        return replace(self, marginal=self.marginal[:gamma], rows=rows)

    def with_constant_rate(self, gamma: int) -> Acceptance:
        """Where only the length is known: the marginals a, a^2, ... of equal conditional rates that come to it.

        An assumption, and ``remarks`` says so. Real rates usually fall, so that short drafts do better than this.

        Raises:
            UsageError: the marginals are known, or no ``gamma`` tokens give that length.
        """
        if self.marginal or self.length is None:
            raise UsageError(f"{self.source} tells the acceptance by position; nothing has to be assumed")
        if not 0 <= self.length - 1 <= gamma:
            raise UsageError(
                f"{self.source}: drafts of {gamma} tokens cannot emit {self.length:g} a step; give the gamma they had"
            )
        rate = _constant_rate(self.length - 1, gamma)
        marginal = tuple(rate**i for i in range(1, gamma + 1))
        total = sum(marginal) or 1.0
        rows = tuple((row[0], *(sum(row[1:]) * m / total for m in marginal)) for row in self.rows)
        remark = f"assumed: every token is accepted with the same probability, {rate:.3f}, if those before it were"
        return replace(self, marginal=marginal, rows=rows, length=None, remarks=(*self.remarks, remark))

    def block_efficiency(self) -> Estimate:
        """Tokens a step emits, bonus included, with its 95 % interval; `interval_assumes` says by what right."""
        value = 1 + sum(self.marginal) if self.marginal else float(self.length or 1.0)
        if len(self.rows) >= LEAST_PIECES:
            sums = np.array([(row[0], sum(row[1:])) for row in self.rows])
            return estimate(lambda s: 1 + s[..., 1] / s[..., 0], sums, value=value, least=1.0)
        if self.drafts is None or not self.marginal:
            return Estimate(value)
        square = sum((2 * i - 1) * m for i, m in enumerate(self.marginal, start=1))  # E[tau^2]
        error = math.sqrt(max(square - (value - 1) ** 2, 0.0) / self.drafts)
        half = float(stats.norm.ppf((1 + CONFIDENCE) / 2)) * error
        return Estimate(value, max(value - half, 1.0), min(value + half, 1.0 + self.gamma))

    @property
    def interval_assumes(self) -> str:
        """What the interval of `block_efficiency` takes for granted, for people."""
        if len(self.rows) >= LEAST_PIECES:
            return f"{len(self.rows)} independent {self.pieces}"
        if self.drafts is None or not self.marginal:
            return "no interval: the source does not say how many drafts it counted"
        return f"{self.drafts:.0f} independent drafts, which is too narrow where prompts differ"


def _constant_rate(accepted: float, gamma: int) -> float:
    """The a with a + a^2 + ... + a^gamma = ``accepted``."""
    if accepted in (0.0, float(gamma)):
        return 1.0 if accepted else 0.0

    def excess(a: float) -> float:
        return sum(a**i for i in range(1, gamma + 1)) - accepted

    return float(optimize.brentq(excess, 0.0, 1.0))  # type: ignore[arg-type]
