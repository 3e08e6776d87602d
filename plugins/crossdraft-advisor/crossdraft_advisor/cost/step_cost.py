"""Seconds of a speculative step over those of a plain one, as a line in the draft length with an interval.

A step that drafts ``gamma`` tokens takes ``a + b gamma`` plain steps of the same batch: ``a`` is the price of drafting
at all, ``b`` of one drafted and verified token. The prior of ``(log a, log b)`` is a bivariate Student t fitted to
published series (`prior.yaml`); the logarithm of a measured ratio has an error with a Student t of 3 degrees of
freedom. The posterior is computed on a grid, and quantiles are roots of the distribution function of its mixture.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from scipy import optimize, special

from crossdraft import Estimate, UsageError

#: Degrees of freedom of the error of one measured ratio.
_NOISE_FREEDOM = 3.0
#: Error of a speed-up measured at twice or half the batch size, in log scale, in addition to that of the measurement.
PER_OCTAVE = 0.03
#: Engines that serve many requests in one batch; others run on one machine for one user.
SERVING = ("vllm", "sglang")
#: Points of the grid in each of log a and log b, and its range in scales of the prior.
_POINTS, _RANGE = 100, 12.0
#: Points of the integral over the logarithm of unknown plain seconds.
_PLAIN_POINTS = 49


class SpeedPoint(NamedTuple):
    """A measured speed of a server."""

    batch_size: float  # mean number of running requests
    gamma: float  # tokens of a draft; 0 for plain decoding
    context: float  # mean number of cached tokens of a request; NaN if unknown
    seconds_per_step: float  # seconds of one step of the batch
    weight: float  # number of steps that it is the mean of
    place: str  # file and line, shown to users
    flaw: str = ""  # what else is in these seconds; empty if nothing


@dataclass(frozen=True)
class Prior:
    """Distribution of ``(log a, log b)``, and the error of a measured ratio."""

    # centre, scale, correlation, freedom: of the bivariate Student t
    centre: tuple[float, float]
    scale: tuple[float, float]
    correlation: float
    freedom: float
    noise: float  # scale of the error of the logarithm of one measured ratio
    # factor of the half width of the interval, in log scale, with 0, 1 and at least 2 measured lengths
    widening: tuple[float, float, float] = (1.0, 1.0, 1.0)

    def log_density(self, log_a: np.ndarray, log_b: np.ndarray) -> np.ndarray:
        """Logarithm of the density."""
        x, y = (log_a - self.centre[0]) / self.scale[0], (log_b - self.centre[1]) / self.scale[1]
        rest = 1 - self.correlation**2
        distance = (x**2 - 2 * self.correlation * x * y + y**2) / rest
        volume = 2 * math.pi * self.scale[0] * self.scale[1] * math.sqrt(rest)
        return -(self.freedom / 2 + 1) * np.log1p(distance / self.freedom) - math.log(volume)


@cache
def published_prior(engine: str = "", batch_size: float = 1.0) -> Prior:
    """The prior fitted to published series, for a server that nothing was measured on.

    A property shifts its centre if that predicts sources that were left out better (docs/lab-notes.md): so far only
    that the engine is a server's. Blocks, draft models, lookups and experts have no shift.

    ``engine``: name of the engine in lower case; empty if it is unknown; ``batch_size``: running requests. Beyond the
    largest one of the corpus the price is as much less certain as a speed measured at another batch size. Raises
    UsageError: a batch size that is not positive.
    """
    if not 0 < batch_size < math.inf:
        raise UsageError(f"a batch size of {batch_size:g} is not possible")
    fitted = _fitted()
    prior = prior_of(fitted["prior"])
    known = {engine, "serving" if engine in SERVING else engine and "local"}
    octaves = max(0.0, math.log2(batch_size / fitted["largest_batch_size"]))
    centre, variance = list(prior.centre), [scale**2 + (PER_OCTAVE * octaves) ** 2 for scale in prior.scale]
    for shift in fitted["shifts"]:
        axis = ("log_a", "log_b").index(shift["axis"])
        if shift["of"] in known:
            centre[axis] += shift["by"]
            variance[axis] += shift["deviation"] ** 2
        elif not engine and shift["of"] == "serving":  # either is as likely
            centre[axis] += shift["by"] / 2
            variance[axis] += (shift["by"] / 2) ** 2 + shift["deviation"] ** 2
    return replace(prior, centre=(centre[0], centre[1]), scale=(math.sqrt(variance[0]), math.sqrt(variance[1])))


@cache
def _fitted() -> dict[str, Any]:
    return yaml.safe_load(Path(__file__).with_name("prior.yaml").read_text(encoding="utf-8"))


def prior_of(values: dict[str, Any]) -> Prior:
    """A prior from its fields as they are stored."""
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    return Prior(**fields)


@cache
def _grid(prior: Prior) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values of log a and log b, denser near the centre of the prior, and the logarithms of their probabilities."""
    steps = np.sinh(np.linspace(-3.5, 3.5, _POINTS))
    steps *= _RANGE / steps[-1]
    axes = [centre + scale * steps for centre, scale in zip(prior.centre, prior.scale, strict=True)]
    log_a, log_b = np.meshgrid(*axes, indexing="ij")
    area = np.outer(*(np.gradient(axis) for axis in axes))
    return log_a, log_b, prior.log_density(log_a, log_b) + np.log(area)


@dataclass(frozen=True)
class StepCost:
    """Posterior of the seconds of a step over those of a plain step, at one batch size."""

    # gammas, ratios: measured draft lengths, and seconds of their steps: in plain steps if ``plain_known``, else in any
    # unit, so that only their quotients count
    gammas: tuple[float, ...] = ()
    ratios: tuple[float, ...] = ()
    spread: float = 0.0  # additional error of each, in log scale; 0 if it was measured at this batch size
    plain_known: bool = True  # the seconds of a plain step are known
    prior: Prior = field(default_factory=published_prior)

    def __post_init__(self) -> None:
        for gamma, ratio in zip(self.gammas, self.ratios, strict=True):
            if not (0 < gamma < math.inf and 0 < ratio < math.inf):
                raise UsageError(f"a step with {gamma:g} drafted tokens of {ratio:g} plain steps is not possible")

    @classmethod
    def from_speeds(cls, points: Sequence[SpeedPoint], batch_size: float, prior: Prior | None = None) -> StepCost:
        """The cost at ``batch_size`` from measured speeds, of which those of the nearest batch size count.

        Plain seconds are those of the same batch size (within 10 %); without them, only quotients of the speeds of
        several draft lengths count. The prior is `published_prior` unless one is given.

        Raises UsageError: a speed that is not a positive finite number.
        """
        for point in points:
            if not (0 < point.seconds_per_step < math.inf and point.batch_size > 0 and point.weight > 0):
                raise UsageError(f"{point.place}: {point.seconds_per_step:g} s a step is not a speed")
        drafting = [point for point in points if point.gamma > 0]
        if not drafting:
            return cls(prior=prior or published_prior())
        nearest = min((p.batch_size for p in drafting), key=lambda b: (abs(math.log(b / batch_size)), b))
        seconds = {
            gamma: _mean([p for p in points if p.gamma == gamma and abs(math.log(p.batch_size / nearest)) < 0.1])
            for gamma in sorted({p.gamma for p in points})
        }
        plain = seconds.pop(0, None)
        measured = {gamma: value for gamma, value in seconds.items() if value is not None}
        spread = PER_OCTAVE * abs(math.log2(batch_size / nearest))
        ratios = tuple(value / (plain or 1.0) for value in measured.values())
        spread = spread if spread > PER_OCTAVE / 8 else 0.0
        return cls(tuple(measured), ratios, spread, plain is not None, prior or published_prior())

    def ratio(self, gamma: float) -> Estimate:
        """Seconds of a step with ``gamma`` drafted tokens over those of a plain step: median and 95 % interval."""
        log_a, log_b, _ = _grid(self.prior)
        return self._estimate(_log_line(log_a, log_b, gamma), self._log_posterior)

    def seconds(self, gamma: float) -> Estimate:
        """Seconds of a step with ``gamma`` drafted tokens in the unit of ``ratios``: median and 95 % interval.

        Raises UsageError: nothing was measured.
        """
        if self.plain_known:
            return self.ratio(gamma)
        if not self.gammas:
            raise UsageError("seconds of a step need a measured length")
        log_a, log_b, _ = _grid(self.prior)
        plain, log_weights = self._log_plain
        return self._estimate(_log_line(log_a, log_b, gamma) + plain, log_weights)

    @property
    def _noise(self) -> float:
        return math.hypot(self.prior.noise, self.spread)

    @cached_property
    def _log_posterior(self) -> np.ndarray:
        log_a, log_b, log_prior = _grid(self.prior)
        return log_prior + log_likelihood(self.gammas, self.ratios, self._noise, self.plain_known, log_a, log_b)

    @cached_property
    def _log_plain(self) -> tuple[np.ndarray, np.ndarray]:
        """Logarithms of plain seconds, and of the posterior of them and of the grid."""
        log_a, log_b, log_prior = _grid(self.prior)
        plain, density = _over_plain(_errors(self.gammas, self.ratios, log_a, log_b), self._noise)
        return plain, log_prior + density

    def _estimate(self, logs: np.ndarray, log_weights: np.ndarray) -> Estimate:
        """Median and 95 % interval of a measured value whose logarithm is one of ``logs``, and an error.

        The distribution is a mixture of Student t in cells of a quarter of the error.
        """
        kept = log_weights > log_weights.max() - 25
        weights = special.softmax(log_weights[kept])
        cells = np.round(logs[kept] * (4 / self._noise)).astype(int)
        total = np.bincount(cells - cells.min(), weights)
        kept = np.flatnonzero(total > 1e-9)
        means, shares = (kept + cells.min()) * (self._noise / 4), total[kept] / total[kept].sum()
        reach = 1000 * self._noise

        def excess(x: float, probability: float) -> float:
            return float(shares @ special.stdtr(_NOISE_FREEDOM, (x - means) / self._noise)) - probability

        def quantile(probability: float) -> float:
            ends = means[0] - reach, means[-1] + reach
            root: Any = optimize.brentq(excess, *ends, args=(probability,), xtol=1e-6)
            return math.exp(root)

        value, low, high = (quantile(probability) for probability in (0.5, 0.025, 0.975))
        is_informed = len(self.gammas) > (not self.plain_known)
        widening = self.prior.widening[min(len(self.gammas), 2) if is_informed else 0]
        return Estimate(value, value * (low / value) ** widening, value * (high / value) ** widening)


def log_likelihood(
    gammas: Sequence[float],
    ratios: Sequence[float],
    noise: float,
    plain_known: bool,
    log_a: np.ndarray,
    log_b: np.ndarray,
) -> np.ndarray:
    """Logarithm of the density of measured ratios for each pair of ``log_a`` and ``log_b``.

    Without plain seconds, their logarithm has a flat prior, and one length alone does not restrict the others.
    """
    if len(gammas) <= (not plain_known):
        return np.zeros_like(log_a)
    errors = _errors(gammas, ratios, log_a, log_b)
    if plain_known:
        return _log_density(errors, noise).sum(axis=0)
    return np.asarray(special.logsumexp(_over_plain(errors, noise)[1], axis=0))


def _errors(gammas: Sequence[float], ratios: Sequence[float], log_a: np.ndarray, log_b: np.ndarray) -> np.ndarray:
    """Logarithms of measured over predicted ratios, by length."""
    return np.stack([math.log(r) - _log_line(log_a, log_b, g) for g, r in zip(gammas, ratios, strict=True)])


def _over_plain(errors: np.ndarray, noise: float) -> tuple[np.ndarray, np.ndarray]:
    """Logarithms of plain seconds, and of the density of the errors over them with the width of their cells."""
    low, high = errors.min(axis=0) - 8 * noise, errors.max(axis=0) + 8 * noise
    plain = low + (high - low) * np.linspace(0, 1, _PLAIN_POINTS)[:, None, None]
    density = sum(_log_density(error - plain, noise) for error in errors)
    return plain, density + np.log((high - low) / (_PLAIN_POINTS - 1))


def _log_line(log_a: np.ndarray, log_b: np.ndarray, gamma: float) -> np.ndarray:
    """Logarithm of ``a + b gamma``."""
    return np.logaddexp(log_a, log_b + math.log(gamma))


def speed_up_of(tokens: Estimate, ratio: Estimate, limit: float) -> Estimate:
    """Speed-up of steps that emit ``tokens`` and take ``ratio`` plain steps, whose errors are independent.

    Tokens without an interval count as exact; a ratio without one gives none. At most ``limit``.
    """
    value = tokens.value / ratio.value
    if ratio.low is None or ratio.high is None:
        return Estimate(min(value, limit))
    down = math.hypot(math.log(ratio.high / ratio.value), math.log(tokens.value / (tokens.low or tokens.value)))
    up = math.hypot(math.log(ratio.value / ratio.low), math.log((tokens.high or tokens.value) / tokens.value))
    return Estimate(*(min(bound, limit) for bound in (value, value * math.exp(-down), value * math.exp(up))))


def _log_density(error: np.ndarray, scale: float) -> np.ndarray:
    """Logarithm of the density of a Student t with 3 degrees of freedom; `scipy.stats.t` is ten times slower."""
    return -2 * np.log1p((error / scale) ** 2 / _NOISE_FREEDOM) - math.log(scale * math.pi * math.sqrt(3) / 2)


def _mean(points: Sequence[SpeedPoint]) -> float | None:
    """Mean seconds of a step, by steps; None without points."""
    if not points:
        return None
    return sum(p.seconds_per_step * p.weight for p in points) / sum(p.weight for p in points)
