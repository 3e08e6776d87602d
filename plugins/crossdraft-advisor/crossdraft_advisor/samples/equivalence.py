"""Difference and equivalence tests of draws against known distributions, pooled over many of them.

Two statistics, each with a p-value for "no difference", and confidence bounds on the total variation (TV):

* `CellCounts`: counts of draws in cells of known probability. The divergence sum_i (r_i - p_i)^2 / p_i of the sampler's
  cell probabilities r from the target's p is estimated without bias, however few draws a row has
  (sum_i X_i (X_i - 1) / (n (n - 1) p_i) - 1), averaged over rows by their draws, and bounded from above. By Jensen's
  inequality TV <= sqrt(divergence) / 2, for one row and for the average.
* `TemperatureShift`: sum of log p of the drawn tokens. It is the sufficient statistic of the family p^beta, so no test
  is more powerful against a temperature 1 / beta; its expectation at other temperatures is computed from the
  distributions themselves, so that the power is known before anything is drawn.

An upper bound below d rejects "the TV is d or more" at `CONFIDENCE` (the two one-sided tests of D. J. Schuirmann, "A
comparison of the two one-sided tests procedure and the power approach for assessing the equivalence of average
bioavailability", J. Pharmacokinetics and Biopharmaceutics 15, 1987). If all of several statistics must do so, none
needs a correction (R. L. Berger, "Multiparameter hypothesis testing and acceptance sampling", Technometrics 24, 1982).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

CONFIDENCE = 0.95  # confidence level of all bounds
#: Normal quantiles: of `CONFIDENCE`, of 0.9 (the power with `draws_needed` draws), and of the better of two bounds.
_Z, _Z_POWER, _Z_EITHER = 1.6448536, 1.2815516, 1.9599640
#: Grid of temperatures; effects are interpolated between them.
TEMPERATURES = (0.25, 0.4, 0.6, 0.8, 0.9, 1.0, 1.1, 1.25, 1.6, 2.5, 5.0)
BATCH_ELEMENTS = 2**22  # maximum elements of a batch of distributions


@dataclass(frozen=True)
class CellCounts:
    """Counts of draws in cells of known probability."""

    counts: np.ndarray  # ``[R, K]``, a row for each distribution
    probs: np.ndarray  # ``[R, K]``, 0 in cells that a row does not use
    cells_with_more: np.ndarray  # ``[R]``, the cells that each row would have with more draws

    @cached_property
    def draws(self) -> np.ndarray:
        """``[R]``."""
        return self.counts.sum(1)

    @cached_property
    def total(self) -> float:
        return float(self.draws.sum())

    @cached_property
    def p_values(self) -> np.ndarray:
        """``[R]``, of Pearson's chi-square of each row."""
        from scipy.stats import chi2

        return chi2.sf(self._pearson, np.maximum(self._degrees, 1))

    @cached_property
    def p_value(self) -> float:
        """P-value of the sum of all rows' chi-squares."""
        from scipy.stats import chi2

        return float(chi2.sf(self._pearson.sum(), max(1, self._degrees.sum())))

    @cached_property
    def _degrees(self) -> np.ndarray:
        return (self.probs > 0).sum(1) - 1

    @cached_property
    def _pearson(self) -> np.ndarray:
        expected = self.draws[:, None] * self.probs
        return ((self.counts - expected) ** 2 / np.where(expected > 0, expected, 1)).sum(1)

    @cached_property
    def divergence(self) -> float:
        """The unbiased estimate, an average over draws; it may be negative."""
        n = self.draws
        pairs = self.counts * (self.counts - 1) / np.where(self.probs > 0, self.probs, 1)
        return float((n / self.total * (pairs.sum(1) / (n * (n - 1)) - 1)).sum())

    def _variance(self, degrees: np.ndarray) -> float:
        """Variance of the estimate for an exact sampler."""
        n = self.draws
        return float(((n / self.total) ** 2 * 2 * degrees / (n * (n - 1))).sum())

    @property
    def tv(self) -> float:
        """The largest TV that the divergence allows."""
        return min(1.0, math.sqrt(max(0.0, self.divergence)) / 2)

    @cached_property
    def tv_at_most(self) -> float:
        """The average TV of rows is at most this, at `CONFIDENCE`."""
        from scipy.optimize import brentq

        null = self._variance(self._degrees)

        def excess(x: float) -> float:
            return x - _Z * math.sqrt(null + _linear(x) / self.total) - self.divergence

        low = max(0.0, self.divergence)
        if excess(low) > 0:  # closer to the target than 19 of 20 samples of the target itself
            return 0.0
        root: Any = brentq(excess, low, 4 * (abs(self.divergence) + _Z**2 * (math.sqrt(null) + 16 / self.total) + 1))
        return min(1.0, math.sqrt(root) / 2)

    def tv_at_least(self, random: np.random.Generator) -> float:
        """The average TV of rows is at least this, at 97.5 %.

        Half of the draws selects the cells with too many draws, the other half estimates their excess.
        """
        first = random.binomial(self.counts.astype(np.int64), 0.5)
        second = self.counts - first
        chosen = first > first.sum(1, keepdims=True) * self.probs
        n = second.sum(1)
        excess = (second * chosen).sum(1) - n * (self.probs * chosen).sum(1)
        return max(0.0, float(excess.sum() / max(1, n.sum())) - _Z_EITHER / 2 / math.sqrt(max(1, n.sum())))

    @property
    def tv_of_head(self) -> float:
        """The average TV is at least this, at 97.5 %, by the first cells of a single row against its others.

        The bound of Kolmogorov and Smirnov on any such difference, 2 exp(-2 n e^2) (P. Massart, 1990).
        """
        apart = np.abs((self.counts / self.total - self.probs).cumsum(1)).max()
        return max(0.0, float(apart) - math.sqrt(math.log(2 / 0.025) / 2 / self.total))

    def draws_needed(self, tv: float) -> float:
        """Draws with which an exact sampler is found within ``tv`` of such rows, with probability 0.9."""
        null = self._variance(self.cells_with_more - 1) * self.total**2
        n = 2.0  # the smallest number, within 1 %
        while 4 * tv**2 < _Z * math.sqrt(null / n**2 + _linear(4 * tv**2) / n) + _Z_POWER * null**0.5 / n and n < 1e15:
            n *= 1.01
        return n


def _linear(x: float) -> float:
    """Variance that a true divergence x adds to its estimate, times the number of draws."""
    return 4 * x * (1 + math.sqrt(x))


@dataclass
class TemperatureShift:
    """Sum of log p of the drawn tokens, and its expectation and variance at other temperatures.

    Attributes:
        observed: sum of log p, less its expectation.
        log_p, expected_log_p: sum of log p, and its expectation.
        tv, shift, variance: ``[TEMPERATURES]``, sums over draws for a sampler at that temperature: TV from the target,
            expectation minus the target's, and variance of log p.
    """

    total: float = 0.0  # draws
    log_p: float = 0.0
    expected_log_p: float = 0.0
    tv: np.ndarray = field(default_factory=lambda: np.zeros(len(TEMPERATURES)))
    shift: np.ndarray = field(default_factory=lambda: np.zeros(len(TEMPERATURES)))
    variance: np.ndarray = field(default_factory=lambda: np.zeros(len(TEMPERATURES)))

    def add(self, probs: Tensor, draws: Tensor, log_p: Tensor) -> None:
        """Add ``draws [R]`` draws from each of ``probs [R, V]`` with sums of log p ``log_p [R]``."""
        weights = draws.numpy()
        at = TEMPERATURES.index(1.0)
        logs = probs.clamp(min=torch.finfo(probs.dtype).tiny).log()
        possible = probs > 0
        means, variances, apart = (np.zeros((len(TEMPERATURES), len(probs))) for _ in range(3))
        for i, temperature in enumerate(TEMPERATURES):
            if i == at:
                tempered = probs
            else:
                tempered = (logs / temperature).exp_() * possible
                tempered /= tempered.sum(1, keepdim=True)
                apart[i] = ((tempered - probs).abs().sum(1) / 2).double().numpy()
            weighted = tempered * logs
            mean = weighted.sum(1)
            means[i] = mean.double().numpy()
            variances[i] = ((weighted * logs).sum(1) - mean**2).clamp(min=0).double().numpy()
        self.total += float(weights.sum())
        self.log_p += float(log_p.sum())
        self.expected_log_p += float(means[at] @ weights)
        self.tv += apart @ weights
        self.shift += (means - means[at]) @ weights
        self.variance += variances @ weights

    @property
    def observed(self) -> float:
        return self.log_p - self.expected_log_p

    @property
    def _own_variance(self) -> float:
        return float(self.variance[TEMPERATURES.index(1.0)])

    @property
    def informative(self) -> bool:
        """False if temperature has no effect: all distributions are uniform or point masses."""
        return self._own_variance > 1e-9 * self.total

    @cached_property
    def _fine(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Interpolated temperatures, descending, with their TV, shift and variance."""
        from scipy.interpolate import PchipInterpolator

        x = np.log(TEMPERATURES)
        fine = np.unique(np.concatenate([np.linspace(x[0], x[-1], 2001), x]))
        values = (PchipInterpolator(x, column)(fine) for column in (self.tv / self.total, self.shift, self.variance))
        return np.exp(fine), *values

    @cached_property
    def p_value(self) -> float:
        """Two-sided."""
        if not self.informative:
            return 1.0
        return math.erfc(abs(self.observed) / math.sqrt(2 * self._own_variance))

    @cached_property
    def interval(self) -> tuple[float, float, float]:
        """Temperature relative to the target that best explains the draws, and its 90 % interval.

        The ends, each one-sided at `CONFIDENCE`, are clamped to the grid.
        """
        temperature, _, shift, variance = self._fine
        margin = _Z * np.sqrt(variance)
        agrees = np.flatnonzero(np.abs(self.observed - shift) <= margin)
        best = int(np.argmin(np.abs(self.observed - shift)))
        low, high = (agrees[0], agrees[-1]) if len(agrees) else (best, best)
        return float(temperature[best]), float(temperature[low]), float(temperature[high])

    @cached_property
    def tv_at_most(self) -> float:
        """If the sampler has another temperature, the average TV is at most this, at `CONFIDENCE`."""
        if not self.informative:
            return 0.0
        temperature, tv, _, _ = self._fine
        _, low, high = self.interval
        return float(max(tv[temperature == low].max(), tv[temperature == high].max()))

    def draws_needed(self, tv: float) -> float:
        """See `CellCounts.draws_needed`."""
        if not self.informative:
            return 2.0
        temperature, apart, shift, variance = self._fine
        needed = 2.0
        for side in (temperature < 1, temperature > 1):
            if not (beyond := side & (apart >= tv)).any():
                continue  # the TV is not reached on the grid
            at = np.flatnonzero(beyond)[np.argmin(apart[beyond])]
            spread = _Z * math.sqrt(variance[at]) + _Z_POWER * math.sqrt(self._own_variance)
            needed = max(needed, self.total * (spread / abs(float(shift[at]))) ** 2)
        return needed
