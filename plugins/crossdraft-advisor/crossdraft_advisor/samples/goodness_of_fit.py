"""Pearson's chi-square test of counts against a distribution."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch import Tensor

#: Smallest expected count of a chi-square cell; smaller cells are pooled.
MIN_EXPECTED = 5


@dataclass(frozen=True)
class Fit:
    """Goodness of fit of counts to a distribution.

    Attributes:
        sd: standard deviation over the vocabulary of frequency minus probability.
        expected_sd: its expectation for samples of the distribution.
        chi_square: Pearson's statistic, with cells that expect fewer than `MIN_EXPECTED` samples pooled; infinite if a
            counted token has probability 0.
        degrees_of_freedom: number of cells - 1.
        p_value: probability that samples of the distribution fit no better; 1 with a single cell.
    """

    sd: float
    expected_sd: float
    chi_square: float
    degrees_of_freedom: int
    p_value: float

    def as_json(self) -> dict[str, Any]:
        """JSON values; an infinite chi-square is null."""
        return {**asdict(self), "chi_square": self.chi_square if math.isfinite(self.chi_square) else None}


def goodness_of_fit(counts: Tensor, probs: Tensor) -> Fit:
    """Chi-square of ``counts [V]`` against ``probs [V]`` (K. Pearson, 1900), see `Fit`."""
    observed, p = counts.double().cpu().numpy(), probs.double().cpu().numpy()
    p = p / p.sum()
    n = observed.sum()
    sd = math.sqrt(np.square(observed / n - p).mean())
    expected_sd = math.sqrt((p * (1 - p) / n).mean())
    impossible = bool((observed[p == 0] > 0).any())
    order = p.argsort()
    expected, observed = (p * n)[order], observed[order]
    pooled = int((expected < MIN_EXPECTED).sum())
    if pooled and expected[:pooled].sum() < MIN_EXPECTED:  # the pooled cell is too small: add the next one
        pooled = min(pooled + 1, len(expected))
    if pooled:
        starts = np.r_[0, pooled : len(expected)]
        expected, observed = np.add.reduceat(expected, starts), np.add.reduceat(observed, starts)
    degrees = len(expected) - 1
    if impossible:
        statistic, p_value = math.inf, 0.0
    elif degrees == 0:
        statistic, p_value = 0.0, 1.0
    else:
        from scipy.stats import chisquare  # imported here: half a second

        statistic, p_value = map(float, chisquare(observed, expected))
    return Fit(sd, expected_sd, statistic, degrees, p_value)
