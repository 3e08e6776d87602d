"""Acceptance statistics of a drafter, from any source.

Two quantities are called "acceptance rate by position". In this package a rate is *marginal* unless it is called
conditional:

    marginal_i    = Pr(tau >= i), over all drafts (vLLM, llama.cpp, this project)
    conditional_i = Pr(tau >= i | tau >= i - 1) = marginal_i / marginal_(i-1)

A step emits tau + 1 tokens, so the block efficiency is 1 + the sum of the marginals.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from scipy import optimize

from crossdraft import MOST_LEVELS, Estimate, UsageError
from crossdraft.runs import LEAST_PIECES, Noise, bounded_estimate, counted, estimate, half_width

from ..shorter_drafts import by_runs, shorter_drafts

#: Standard deviation of the relative error of `shorter_drafts`: this share of its correction of a plain cut, and this
#: much times the share of the draft that is left out (`benchmarks/shorter_drafts.py`, docs/advise.md).
_MODEL_ERROR, _DRIFT = 0.3, 0.018
#: `Acceptance.refusal` if only a name is missing.
UNKNOWN_PAIR = "the drafter or the verifier is unknown; name them as --drafter and --verifier"
WINDOWS = "windows of the log"  # `Acceptance.pieces` of a log
EACH_LENGTH = "each length is measured"  # `Acceptance.refusal` if there is nothing to derive


@dataclass(frozen=True)
class Acceptance:
    """Acceptance by position of one drafter. Raises UsageError for values that are not decreasing probabilities."""

    marginal: tuple[float, ...]  # Pr(tau >= i) for i = 1..gamma; empty if only ``length`` is known
    source: str  # origin of the numbers, shown to users: a file with lines, a run and its cell
    drafts: float | None = None  # number of counted steps; None if unknown
    # counts of independent pieces, for intervals: ``(steps, accepted at 1, ..., at gamma)`` each; if only the length is
    # known ``(steps, accepted tokens)``
    rows: tuple[tuple[float, ...], ...] = ()
    pieces: str = "prompts"  # the unit of a row: "prompts", `WINDOWS`
    names: tuple[str, ...] = ()  # ids of the rows, by which those of two sources are paired; empty if unknown
    length: float | None = None  # mean tokens per step, bonus included, if the marginals are unknown
    draft_length: int | None = None  # maximum draft length, if it is known and the marginals are not
    drafter: str = ""  # its name in recipes, and the verifier's; empty if unknown
    verifier: str = ""
    model: str = ""  # the draft model; empty if none or unknown
    temperature: float | None = None  # of the target; None if unknown
    point_mass: bool | None = None  # drafts are greedy or looked up, not sampled; None if unknown
    chain: bool = True  # a draft is one sequence, not a tree
    options: Mapping[str, Any] = field(default_factory=dict)  # of the drafter, as in recipes, if known
    # target and mode (thinking on or off), if the source has several; they are not comparable
    setting: tuple[str, ...] = ()
    idle: float = 0.0  # share of the counted steps without a draft
    drafted: float | None = None  # number of drafted tokens; None if unknown
    every_step: bool = True  # True unless steps without a draft may be missing
    # share of the steps by drafted tokens, 0 included, if the server has several drafters
    widths: Mapping[float, float] = field(default_factory=dict)
    parts: tuple[Acceptance, ...] = ()  # the acceptance of each of several drafters of one server, over its own steps
    # the reason why the acceptance of shorter drafts does not follow, see `cut`; empty if it does
    refusal: str = UNKNOWN_PAIR
    # the measured acceptance of longer drafts that this one is derived from; None if this one is measured
    longer: Acceptance | None = None
    format: str = ""  # name of the format that it was read in, and the meaning of its numbers; empty if it was not read
    remarks: tuple[str, ...] = ()  # caveats for the reader

    def __post_init__(self) -> None:
        if reason := MOST_LEVELS.violation(self.gamma):
            raise UsageError(f"{self.source}: acceptance at {self.gamma} positions; {reason}")
        for i, rate in enumerate(self.marginal, start=1):
            if not 0 <= rate <= 1:  # NaN too
                raise UsageError(
                    f"{self.source}: the acceptance rate at position {i} is {rate:g}, which is not a probability"
                )
            if i > 1 and rate > self.marginal[i - 2]:
                raise UsageError(
                    f"{self.source}: the acceptance rate increases from {self.marginal[i - 2]:g} to {rate:g} at "
                    f"position {i}, but Pr(tau >= i) cannot increase; are these conditional rates?"
                )
        if not self.marginal and not (self.length is not None and 1 <= self.length <= MOST_LEVELS + 1):
            raise UsageError(f"{self.source}: a mean acceptance length of {self.length} is not possible")
        if self.drafts is not None and not 0 < self.drafts < math.inf:
            raise UsageError(f"{self.source}: {self.drafts:g} is not a positive number of drafts")

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[float]], source: str, **attributes: Any) -> Acceptance:
        """Build from counts of independent pieces, see ``rows``."""
        counts = tuple(tuple(float(n) for n in row) for row in rows if row[0] > 0)
        if not counts:
            raise UsageError(f"{source}: no drafts were counted; send requests to the server first")
        drafts, *accepted = (sum(column) for column in zip(*counts, strict=True))
        return cls(tuple(a / drafts for a in accepted), source, drafts=drafts, rows=counts, **attributes)

    @classmethod
    def from_conditional(cls, conditional: Iterable[float], source: str, **attributes: Any) -> Acceptance:
        """Build from Pr(tau >= i | tau >= i - 1)."""
        rates = list(conditional)
        for i, rate in enumerate(rates, start=1):
            if not 0 <= rate <= 1:
                raise UsageError(
                    f"{source}: the conditional rate at position {i} is {rate:g}, which is not a probability"
                )
        return cls(tuple(float(rate) for rate in np.cumprod(rates)), source, **attributes)

    @property
    def block(self) -> bool:
        """True if it is that of block verification, which equals token verification of point masses."""
        return self.verifier == "block" and not self.point_mass and self.temperature != 0

    @property
    def gamma(self) -> int:
        """The number of positions in ``marginal``; 0 if only the length is known."""
        return len(self.marginal)

    @property
    def maximum(self) -> float:
        """The greatest possible block efficiency, if known."""
        gamma = self.gamma or self.draft_length
        return 1.0 + gamma if gamma else math.inf

    @property
    def conditional(self) -> tuple[float, ...]:
        """Pr(tau >= i | tau >= i - 1); 0 if no draft reached position i."""
        return tuple(conditional_rates(np.array(self.marginal)).tolist())

    def cut(self, gamma: int) -> Acceptance:
        """Acceptance with drafts of at most ``gamma`` tokens, by the model of `shorter_drafts`.

        Raises UsageError if ``gamma`` exceeds the measured one, or ``refusal`` is set.
        """
        if gamma == self.gamma:
            return self
        if not self.marginal:
            raise UsageError(f"{self.source} has the mean acceptance length and not the acceptance by position")
        measured = self.longer or self
        if self.refusal or not 0 < gamma < self.gamma:
            other = "shorter drafts" if gamma < self.gamma else "longer drafts"
            reason = f": {self.refusal}" if self.refusal and gamma < self.gamma else ""
            raise UsageError(
                f"{self.source} was measured with {counted(measured.gamma, 'token')}; the acceptance of {other} "
                f"does not follow{reason}"
            )
        marginal = shorter_drafts(np.array(measured.marginal), gamma)
        # The number of steps without a draft does not depend on the length of drafts.
        idle = measured.idle * (1 + float(marginal.sum())) / (1 + sum(measured.marginal))
        return replace(measured, marginal=tuple(marginal.tolist()), rows=(), idle=idle, longer=measured)

    def with_constant_rate(self, gamma: int) -> Acceptance:
        """Acceptance with marginals a, a^2, ... whose sum matches ``length``, if only that is known.

        The assumption is noted in ``remarks``. Real conditional rates usually decrease, so short drafts do better.
        Raises UsageError if the marginals are known, or drafts of ``gamma`` tokens cannot have that length.
        """
        if self.marginal or self.length is None:
            raise UsageError(f"{self.source} has the acceptance by position; a constant rate is not needed")
        if not 0 <= self.length - 1 <= gamma:
            raise UsageError(
                f"{self.source}: drafts of {counted(gamma, 'token')} cannot emit {self.length:g} per step; give "
                "their actual gamma"
            )
        rate = constant_rate(self.length - 1, gamma)
        marginal = tuple(rate**i for i in range(1, gamma + 1))
        total = sum(marginal) or 1.0
        rows = tuple((row[0], *(sum(row[1:]) * m / total for m in marginal)) for row in self.rows)
        remark = f"assumed: a constant conditional acceptance rate of {rate:.3f}"
        return replace(self, marginal=marginal, rows=rows, length=None, remarks=(*self.remarks, remark))

    def block_efficiency(self) -> Estimate:
        """Mean tokens per step, bonus included, with a 95 % interval under `interval_assumes`."""
        value = 1 + sum(self.marginal) if self.marginal else float(self.length or 1.0)
        measured, maximum = self.longer or self, self.maximum
        model = [self.model_error()] if self.longer is not None else []

        def statistic(sums: np.ndarray) -> np.ndarray:
            rates = sums[..., 1:] / sums[..., :1]
            return 1 + (rates if self.longer is None else shorter_drafts(rates, self.gamma)).sum(-1)

        if len(measured.rows) >= LEAST_PIECES:
            rows = np.array(measured.rows)
            if measured.pieces == WINDOWS:  # each has steps of many prompts, so no kind of prompts is at a bound
                return estimate(statistic, rows, value=value, minimum=1.0, maximum=maximum, noise=model)
            return bounded_estimate(statistic, rows, 1.0, maximum, value=value, noise=model)
        if measured.drafts is None or not self.marginal:
            return Estimate(value)
        # Drafts that accept 0, 1, .. tokens, as independent pieces, and half a draft more of each (Jeffreys): what none
        # of few drafts did is possible.
        at_least = np.array([1.0, *measured.marginal])
        counts = measured.drafts * (at_least - np.append(at_least[1:], 0.0)) + 0.5
        shares = counts / counts.sum()
        step = 1e-6 * np.tril(np.ones((len(shares), len(shares))))
        slopes = (np.log(statistic((1 - 1e-6) * at_least + step)) - math.log(value)) / 1e-6
        sampling = Noise(float((shares * slopes**2).sum()) / measured.drafts, math.inf)
        half = half_width([sampling, *model])
        return Estimate(value, max(value * math.exp(-half), 1.0), min(value * math.exp(half), maximum))

    def model_error(self) -> Noise:
        """Variance of the logarithm of the block efficiency by the model of shorter drafts; 0 if it was measured."""
        longer = self.longer
        if longer is None:
            return Noise(0.0, math.inf)
        correction = math.log((1 + sum(self.marginal)) / (1 + sum(by_runs(np.array(longer.marginal), self.gamma))))
        correction = max(abs(correction), math.log((1 + sum(self.marginal)) / (1 + sum(longer.marginal[: self.gamma]))))
        drift = _DRIFT * (1 - self.gamma / longer.gamma)
        return Noise((_MODEL_ERROR * correction) ** 2 + drift**2, math.inf)

    @property
    def drafted_per_step(self) -> float:
        """Mean number of drafted tokens of a step with a draft; the longest draft if that is unknown."""
        return self.drafted / ((self.drafts or 0.0) * (1 - self.idle)) if self.drafted else float(self.gamma)

    def spread(self) -> float:
        """Standard deviation of tau."""
        mean = sum(self.marginal)
        square = sum((2 * i - 1) * m for i, m in enumerate(self.marginal, start=1))  # E[tau^2]
        return math.sqrt(max(square - mean**2, 0.0))

    @property
    def interval_assumes(self) -> str:
        """The assumption behind the interval of `block_efficiency`."""
        if self.longer is not None:
            return f"{self.longer.interval_assumes}; derived from drafts of {counted(self.longer.gamma, 'token')}"
        if len(self.rows) >= LEAST_PIECES:
            return f"{len(self.rows)} independent {self.pieces}"
        if self.drafts is None or not self.marginal:
            return "the number of steps is unknown: intervals have the uncertainty of the cost only"
        kind = "steps" if self.idle else "drafts"
        return f"{self.drafts:.0f} independent {kind}; too narrow if prompts differ"


def conditional_rates(marginal: np.ndarray) -> np.ndarray:
    """Pr(tau >= i | tau >= i - 1) from Pr(tau >= i), i = 1, 2, ..; 0 at positions that no draft reached."""
    before = np.concatenate([[1.0], marginal[:-1]])
    return np.divide(marginal, before, out=np.zeros(len(marginal)), where=before > 0)


def constant_rate(accepted: float, gamma: int) -> float:
    """Solve a + a^2 + ... + a^gamma = ``accepted`` for a."""
    if accepted in (0.0, float(gamma)):
        return 1.0 if accepted else 0.0

    def excess(a: float) -> float:
        return sum(a**i for i in range(1, gamma + 1)) - accepted

    return float(optimize.brentq(excess, 0.0, 1.0))  # type: ignore[arg-type]
