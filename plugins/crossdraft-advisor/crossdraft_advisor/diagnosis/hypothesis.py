"""Hypotheses about the acceptance by position that a server counted, and their likelihood.

Let n_i be the number of drafts of which at least i tokens were accepted (n_0 = drafts), and h_i the conditional
acceptance rate at position i. Then n_i is binomial: n_(i-1) trials with probability h_i. Rates of one drafter differ by
more than that from text to text, so the trials count as e_i, 1 / e_i = 1 / n_(i-1) + 1 / `PRECISION`:

    log L_i(h) = e_i (f_i log(h / f_i) + (1 - f_i) log((1 - h) / (1 - f_i))),    f_i = n_i / n_(i-1)

A hypothesis is a distribution of the curve x_i = logit h_i (a mixture of `Curve`s, each a Markov chain over positions).
If two sources were counted under different circumstances, the second has logit h_i = x_i + o_i + s at all positions: o
is what follows from the draft lengths, s the shift, with a distribution of the hypothesis, too. The likelihood of a
hypothesis is the integral over both, by the forward recursion on a grid of x (and of s):

    L = sum_s p(s) sum_x a_K(x, s),    a_i(x, s) = prod_sources L_i(x + o_i + s) * sum_y p_i(x | y) a_(i-1)(y, s)

`assess` divides it, times the prior, by the sum over all hypotheses, which include `NONE`: independent rates, each
uniform from 0 to 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from scipy.special import expit, logit, xlogy

#: Trials as which arbitrarily many drafts count: rates of one drafter differ by about 0.03 between texts.
PRECISION = 300.0
GRID = np.linspace(-7.0, 7.0, 281)  # grid of x = logit h
_STEP = float(GRID[1] - GRID[0])
_RATES = expit(GRID)
#: Share of the likelihood from which on a hypothesis is named alone; ratio of shares up to which others are named, too.
CLEAR_SHARE, _ALIKE = 0.9, 10.0
_LOW, _HIGH = 0.025, 0.975  # bounds of the interval of an expected rate
#: Prior of `NONE`, in those of a hypothesis: few servers have a shape that is not in the catalogue.
_NONE_PRIOR = 0.05
#: Log-likelihood below that of independent rates, from which on a rate is evidence against a hypothesis.
_AGAINST = -math.log(3.0)


@dataclass(frozen=True)
class Counts:
    """Counters of one source."""

    label: str  # shown to users
    at_least: tuple[float, ...]  # n_0, .., n_K: drafts, and those of which at least 1, .., K tokens were accepted
    offset: tuple[float, ...] = ()  # [K], o_i: the difference of logit h_i that follows from another draft length
    precision: float = PRECISION  # trials as which arbitrarily many drafts count

    @property
    def gamma(self) -> int:
        return len(self.at_least) - 1

    def rate(self, position: int) -> float:
        """f_i; 0 if no draft reached the position."""
        before = self.at_least[position - 1]
        return self.at_least[position] / before if before else 0.0

    def log_likelihood(self, position: int, shifts: np.ndarray) -> np.ndarray:
        """Return log L_i, ``[shifts, GRID]``; 0 beyond the last position."""
        if position > self.gamma or not self.at_least[position - 1]:
            return np.zeros((len(shifts), len(GRID)))
        f, trials = self.rate(position), 1 / (1 / self.at_least[position - 1] + 1 / self.precision)
        offset = self.offset[position - 1] if self.offset else 0.0
        x = GRID + offset + shifts[:, None]
        best = xlogy(f, f) + xlogy(1 - f, 1 - f)
        return trials * (f * -np.logaddexp(0, -x) + (1 - f) * -np.logaddexp(0, x) - best)


class Curve:
    """Independent rates, each uniform from 0 to 1; base of the other distributions of a curve."""

    def prior(self, position: int, before: np.ndarray) -> np.ndarray:
        """Distribution over `GRID` of x at a position, from that at the position before (``[shifts, GRID]``)."""
        return _normal(_RATES * (1 - _RATES)) * before.sum(-1, keepdims=True)


@dataclass(frozen=True)
class Level:
    """A normal distribution of x, cut to rates from ``low`` to ``high``."""

    center: float = 0.85
    spread: float = 0.8
    low: float = 0.0
    high: float = 1.0

    def on_grid(self) -> np.ndarray:
        return _level(self.center, self.spread, self.low, self.high)


@dataclass(frozen=True)
class Walk(Curve):
    """Rates that change little from position to position."""

    first: Level  # x at the first position
    step: float = 0.35  # standard deviation of the change of x from one position to the next
    turn: int = 0  # position (> 1) at which the rates continue from ``after``; 0 = none
    after: Level = Level()
    step_after: float = 1.5  # as ``step``, behind the turn

    def prior(self, position: int, before: np.ndarray) -> np.ndarray:
        if position in (1, self.turn):
            level = self.first if position == 1 else self.after
            return level.on_grid() * before.sum(-1, keepdims=True)
        return before @ _kernel(self.step_after if self.turn and position > self.turn else self.step)


@dataclass(frozen=True)
class Known(Curve):
    """Rates of a replay: x_i is normal around logit ``rates[i]``, with the standard deviation ``errors[i]``."""

    rates: tuple[float, ...]
    errors: tuple[float, ...]

    def prior(self, position: int, before: np.ndarray) -> np.ndarray:
        if position > len(self.rates):
            return super().prior(position, before)
        center = float(np.clip(logit(self.rates[position - 1]), GRID[0], GRID[-1]))
        return Level(center, self.errors[position - 1]).on_grid() * before.sum(-1, keepdims=True)


@dataclass(frozen=True)
class Around(Known):
    """Rates of a replay behind an unknown shift of all x_i, which changes by ``step`` from position to position."""

    spread: float
    step: float = 0.3

    def prior(self, position: int, before: np.ndarray) -> np.ndarray:
        if position > len(self.rates):
            return Curve.prior(self, position, before)
        centers = np.clip(logit(np.array(self.rates)), GRID[0], GRID[-1])
        own = self.errors[position - 1]
        if position == 1:
            return Level(float(centers[0]), math.hypot(self.spread, own)).on_grid() * before.sum(-1, keepdims=True)
        step = math.hypot(self.step, own, self.errors[position - 2])
        return before @ _kernel(step, float(centers[position - 1] - centers[position - 2]))


@dataclass(frozen=True)
class Shift:
    """Distribution of the shift s: normal with ``spread`` if ``fall`` is 0; else of at least ``fall`` downwards.

    ``both``: or upwards; ``first``: at the first position only, as if nothing is drafted in a share of the steps.
    """

    spread: float = 0.2
    fall: float = 0.0
    both: bool = False
    first: bool = False

    def grid(self) -> tuple[np.ndarray, np.ndarray]:
        """Values and probabilities."""
        if not self.fall:
            values = np.linspace(-2.5, 2.5, 11) * self.spread
            return values, _normal(np.exp(-0.5 * (values / self.spread) ** 2))
        values = -self.fall - np.linspace(0.0, 5.0, 26)
        weights = np.exp((values + self.fall) / self.spread)
        if self.both:
            values, weights = np.concatenate([values, -values]), np.concatenate([weights, weights])
        return values, _normal(weights)


@dataclass(frozen=True)
class Hypothesis:
    """A possible state of a server."""

    name: str  # shown to users
    meaning: str  # likely reasons, or the cure
    check: str  # the next cheapest check, a command line
    curves: Sequence[Curve]  # mixture of the distributions of the curve, equally likely
    # mixture of the distributions of the shift of the second source, equally likely
    shifts: Sequence[Shift] = (Shift(),)
    prior: float = 1.0  # weight of the hypothesis before anything was counted; 0 = excluded by a test of its own
    evidence: float = 0.0  # log-likelihood of what else is known, up to a constant


NONE = Hypothesis(
    "none of these",
    "the counters have a shape that is not in the catalogue",
    "",
    (Curve(),),
    (Shift(2.0), Shift(2.0, first=True)),
    _NONE_PRIOR,
)


@dataclass(frozen=True)
class Assessment:
    """A hypothesis given the counters."""

    hypothesis: Hypothesis
    log_likelihood: float  # log L
    against: str  # the rate that it explains worst, in words; empty if none is evidence against it
    share: float = 0.0  # of the likelihood of all hypotheses, each times its prior


def assess(hypotheses: Sequence[Hypothesis], sources: Sequence[Counts], none: Hypothesis = NONE) -> list[Assessment]:
    """The hypotheses and ``none``, that none of them is true, with their likelihoods, the most likely first."""
    assessments = []
    for hypothesis in (*hypotheses, none):
        shifts = hypothesis.shifts if len(sources) > 1 else hypothesis.shifts[:1]
        results = [_forward(curve, shift, sources) for curve in hypothesis.curves for shift in shifts]
        likelihood = float(np.logaddexp.reduce([value for value, _ in results])) - math.log(len(results))
        assessments.append(Assessment(hypothesis, likelihood + hypothesis.evidence, max(results)[1]))
    with np.errstate(divide="ignore"):
        priors = np.log([item.hypothesis.prior for item in assessments])
    logs = priors + [item.log_likelihood for item in assessments]
    shares = np.exp(logs - np.logaddexp.reduce(logs)).tolist()
    shared = [replace(item, share=share) for item, share in zip(assessments, shares, strict=True)]
    return sorted(shared, key=lambda assessment: (assessment.share, assessment.log_likelihood), reverse=True)


def not_excluded(assessments: Sequence[Assessment]) -> list[Hypothesis]:
    """The most likely hypothesis, and those that the counters do not distinguish from it."""
    best = assessments[0]
    if best.share >= CLEAR_SHARE:
        return [best.hypothesis]
    return [item.hypothesis for item in assessments if item.share * _ALIKE > best.share]


def _forward(curve: Curve, shift: Shift, sources: Sequence[Counts]) -> tuple[float, str]:
    """Return log L of a curve, and the strongest evidence against it in words."""
    values, weights = shift.grid() if len(sources) > 1 else (np.zeros(1), np.ones(1))
    mass, scale = weights[:, None] * np.full(len(GRID), 1 / len(GRID)), 0.0
    worst, against = _AGAINST, ""
    for position in range(1, max(source.gamma for source in sources) + 1):
        mass = curve.prior(position, mass)
        mass /= mass.sum()
        for number, source in enumerate(sources):
            unshifted, uniform = _unshifted(source, position)
            shifts = values * (position == 1 or not shift.first) if number else np.zeros(1)
            term = source.log_likelihood(position, shifts) if number else unshifted
            surprise = _log_sum(mass, term) - uniform
            if position <= source.gamma and surprise < worst:
                worst, against = surprise, _surprise(source, position, mass, shifts)
            peak = np.max(np.where(mass > 0, term, -np.inf))
            mass = mass * np.exp(np.minimum(term - peak, 0.0))
            scale += peak + math.log(mass.sum())
            mass /= mass.sum()
    return scale, against


@lru_cache(64)
def _unshifted(source: Counts, position: int) -> tuple[np.ndarray, float]:
    """Return log L_i, ``[1, GRID]``, and the logarithm of its mean over independent rates."""
    term = source.log_likelihood(position, np.zeros(1))
    return term, _log_sum(_UNIFORM, term)


def _surprise(source: Counts, position: int, mass: np.ndarray, shifts: np.ndarray) -> str:
    offset = source.offset[position - 1] if source.offset else 0.0
    x = np.broadcast_to(GRID + offset + shifts[:, None], mass.shape).ravel()
    order = np.argsort(x)
    below = np.cumsum(mass.ravel()[order])
    low, high = (float(expit(x[order][np.searchsorted(below, q * below[-1])])) for q in (_LOW, _HIGH))
    label = f"{source.label}: " if source.label else ""
    return f"{label}{source.rate(position):.2f} go on at position {position}; {low:.2f} to {high:.2f} expected"


def _log_sum(mass: np.ndarray, term: np.ndarray) -> float:
    """Logarithm of the mean of exp(term) over ``mass``."""
    peak = float(term.max())
    return peak + math.log(max(float((mass * np.exp(term - peak)).sum()), 1e-300))


def _normal(weights: np.ndarray) -> np.ndarray:
    return weights / weights.sum()


_UNIFORM = _normal(_RATES * (1 - _RATES))


@lru_cache(1024)
def _level(center: float, spread: float, low: float, high: float) -> np.ndarray:
    """`Level` on `GRID`; at least half a grid step wide."""
    log_weights = -0.5 * ((GRID - center) / max(spread, _STEP / 2)) ** 2
    weights = np.exp(log_weights - log_weights.max()) * ((low <= _RATES) & (high >= _RATES))
    return _normal(weights)


@lru_cache(64)
def _kernel(step: float, shift: float = 0.0) -> np.ndarray:
    """``[from, to]``: normal changes of x with the mean ``shift`` and the standard deviation ``step``."""
    log_weights = -0.5 * ((GRID[:, None] + shift - GRID) / step) ** 2
    weights = np.exp(log_weights - log_weights.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)
