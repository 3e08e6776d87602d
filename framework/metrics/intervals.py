"""95 % intervals of ratios over independent pieces, valid for few pieces.

A percentile bootstrap of 3, 4 or 6 pieces covers 75, 80, 86 %. Here the standard error of a ratio of sums is estimated
by the jackknife over pieces on the logarithm (B. Efron and C. Stein, "The jackknife estimate of variance",
Annals of Statistics 9, 1981), and the interval is Student's t with as many degrees of freedom as there are pieces of
equal weight, (sum w)^2 / sum w^2 (A. Carter, K. Schnepel, D. Steigerwald, "Asymptotic behavior of a t-test robust to
cluster heterogeneity", Review of Economics and Statistics 99, 2017), times 0.6. That factor comes from a
simulation, which tests/metrics/test_intervals.py repeats (figures in docs/reliability.md).

Pieces that agree do not show the kinds of prompts that are missing among them: of five prompts, 44 % lack a kind that
15 % of all prompts are of. So `bounded_estimate` adds as many prompts at the bounds of the statistic as n prompts
cannot exclude: the 97.5 % quantile of Jeffreys' posterior of a share that none of n has, Beta(1/2, n).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from ..util.estimate import Estimate

#: Minimum number of independent pieces for an interval.
LEAST_PIECES = 3
CONFIDENCE = 0.95
#: Degrees of freedom for each piece of equal weight.
FREEDOM = 0.6


class Noise(NamedTuple):
    """An error of a statistic that is not visible in its pieces: variance (of the logarithm if `log`) and freedom."""

    variance: float
    freedom: float


def estimate(
    statistic: Callable[[np.ndarray], np.ndarray],
    sums: np.ndarray,
    *,
    log: bool = True,
    value: float | None = None,
    minimum: float = -np.inf,
    maximum: float = np.inf,
    noise: Sequence[Noise] = (),
) -> Estimate:
    """Estimate a statistic of the totals of independent pieces, with its interval.

    Args:
        statistic: function of totals ``[..., k]``; positive if ``log``.
        sums: sums of each piece, ``[n, k]``; the first column is the weight of a piece.
        log: make the interval symmetric in the logarithm.
        value: value to report instead of the statistic of ``sums``, of an estimator with the same spread.
        minimum, maximum: range of the statistic; the interval is clipped to it.
        noise: errors independent of those of the pieces; degrees of freedom follow Satterthwaite.

    Returns:
        the estimate, without an interval for fewer than `LEAST_PIECES` pieces or if all pieces agree.
    """
    sums = sums[sums[:, 0] > 0]
    point = float(statistic(sums.sum(0))) if value is None else value
    if len(sums) < LEAST_PIECES:
        return Estimate(point)

    def transformed(totals: np.ndarray) -> np.ndarray:
        return np.log(statistic(totals)) if log else statistic(totals)

    errors = [jackknife(transformed, sums), *noise]
    half = half_width(errors)
    if not half:
        return Estimate(point)
    low, high = (point * float(np.exp(s * half)) if log else point + s * half for s in (-1, 1))
    return Estimate(point, max(low, minimum), min(high, maximum))


def bounded_estimate(
    statistic: Callable[[np.ndarray], np.ndarray],
    sums: np.ndarray,
    minimum: float,
    maximum: float,
    *,
    log: bool = True,
    value: float | None = None,
    noise: Sequence[Noise] = (),
) -> Estimate:
    """`estimate` of a mean over prompts, for all prompts of the source: kinds that no piece is of are possible.

    Args:
        minimum, maximum: bounds of the statistic of one prompt.
        log: the mean is harmonic (tokens over steps, of prompts with equal tokens), else arithmetic.
    """
    seen = estimate(statistic, sums, log=log, value=value, minimum=minimum, maximum=maximum, noise=noise)
    pieces = int((sums[:, 0] > 0).sum())
    if pieces < LEAST_PIECES or minimum == maximum:
        return Estimate(seen.value)
    unseen, power = float(stats.beta.ppf((1 + CONFIDENCE) / 2, 0.5, pieces)), -1 if log else 1
    low, high = (((1 - unseen) * seen.value**power + unseen * end**power) ** power for end in (minimum, maximum))
    low, high = (low, high) if seen.low is None or seen.high is None else (min(low, seen.low), max(high, seen.high))
    return Estimate(seen.value, max(low, minimum), min(high, maximum))


def half_width(errors: Sequence[Noise]) -> float:
    """Half width of the interval of a sum of independent errors (Satterthwaite); 0 without errors."""
    error = float(np.sqrt(sum(part.variance for part in errors)))
    if not np.isfinite(error) or error < 1e-12:
        return 0.0
    freedom = error**4 / max(sum(part.variance**2 / max(part.freedom, 1.0) for part in errors), 1e-300)
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * error


def jackknife(statistic: Callable[[np.ndarray], np.ndarray], sums: np.ndarray) -> Noise:
    """Variance of a statistic of the totals of ``sums [n, k]``, see `estimate`."""
    total, n, weight = sums.sum(0), len(sums), sums[:, 0]
    apart = statistic(total - sums) - float(statistic(total))
    return Noise(float((n - 1) / n * (apart**2).sum()), FREEDOM * weight.sum() ** 2 / (weight**2).sum())


def ratio(sums: np.ndarray) -> np.ndarray:
    """Block efficiency of totals ``[..., 2]``: tokens over steps."""
    return sums[..., 0] / sums[..., 1]


def double_ratio(sums: np.ndarray) -> np.ndarray:
    """Ratio of two such ratios, of totals ``[..., 4]``."""
    return ratio(sums[..., :2]) / ratio(sums[..., 2:])


def ratio_difference(sums: np.ndarray) -> Estimate:
    """Difference of two ratios on the same pieces.

    Args:
        sums: ``[n, 4]``: numerator and denominator of the first ratio, then of the second.
    """
    return estimate(lambda s: ratio(s[..., :2]) - ratio(s[..., 2:]), sums, log=False)
