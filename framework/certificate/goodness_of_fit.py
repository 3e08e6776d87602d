"""How well counts fit a law: Pearson's chi-square."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: Cells of a chi-square test that expect fewer samples are pooled.
LEAST_EXPECTED = 5


@dataclass(frozen=True)
class Fit:
    """How well counts fit a law.

    Attributes:
        sd: standard deviation over the vocabulary of (frequency - law).
        expected_sd: what it is on average for samples of that very law.
        chi_square: Pearson's statistic, cells that expect fewer than `LEAST_EXPECTED` samples pooled; infinite
            where the law calls a counted token impossible.
        degrees: its degrees of freedom, cells - 1.
        p_value: probability that samples of that law fit no better; 1 if there is only one cell.
    """

    sd: float
    expected_sd: float
    chi_square: float
    degrees: int
    p_value: float

    def as_json(self) -> dict[str, Any]:
        """Plain values; JSON has no infinity."""
        return {
            "sd": self.sd,
            "expected_sd": self.expected_sd,
            "chi_square": self.chi_square if math.isfinite(self.chi_square) else None,
            "degrees_of_freedom": self.degrees,
            "p_value": self.p_value,
        }


def goodness_of_fit(counts: Tensor, law: Tensor) -> Fit:
    """Chi-square of ``counts [V]`` against ``law [V]`` (K. Pearson, 1900), see `Fit`."""
    counts = counts.double().cpu()
    law = law.double().cpu()
    law = law / law.sum()
    n = counts.sum()
    sd = (counts / n - law).square().mean().sqrt()
    expected_sd = (law * (1 - law) / n).mean().sqrt()
    order = (law * n).argsort()
    expected, observed = (law * n)[order], counts[order]
    pooled = int((expected < LEAST_EXPECTED).sum())
    if pooled and expected[:pooled].sum() < LEAST_EXPECTED:  # too little by itself: join the smallest cell
        pooled = min(pooled + 1, len(expected))

    def cells(values: Tensor) -> Tensor:
        return torch.cat([values[:pooled].sum()[None], values[pooled:]]) if pooled else values

    impossible = bool((observed[expected == 0] > 0).any())
    expected, observed = cells(expected), cells(observed)
    degrees = len(expected) - 1
    if impossible:
        statistic, p_value = math.inf, 0.0
    elif degrees == 0:
        statistic, p_value = 0.0, 1.0
    else:
        from scipy.stats import chisquare  # half a second, which nobody else needs

        statistic, p_value = map(float, chisquare(observed.numpy(), expected.numpy()))
    return Fit(float(sd), float(expected_sd), statistic, degrees, p_value)
