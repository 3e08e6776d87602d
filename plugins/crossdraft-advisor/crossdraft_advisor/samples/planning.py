"""Numbers of questions and of draws that show a bias of a stated size, computed before anything is measured.

Draws are those of deviations that all prefixes have in common (`sampler_verdict`, pooled cells): their test depends on
the number of cells only, not on the target's distributions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .equivalence import CellCounts
from .sampler_verdict import CELLS, LEVEL

POWER = 0.9  # probability to show a bias of the stated size
_Z, _Z_POWER = 1.9599640, 1.2815516  # normal quantiles: two-sided at 0.05, and of `POWER`
_TESTS = 2  # tests among which `Evidence.verdict` divides its level, with one draw at each prefix


@dataclass(frozen=True)
class ScorePlan:
    """Scores of a task with and without speculative decoding."""

    questions: int  # number of questions of the task
    score: float  # share of right answers
    # share of questions whose grade differs between two runs; by default that of independent answers, about 2 score (1
    # - score), the most that it can be
    changed: float | None = None

    def variance(self, difference: float) -> float:
        """Variance of the difference of the grades of a question, if the scores differ by ``difference``."""
        if self.changed is not None:
            return self.changed
        other = self.score + math.copysign(min(difference, abs(0.5 - self.score)), 0.5 - self.score)
        return self.score * (1 - self.score) + other * (1 - other)

    @property
    def visible(self) -> float:
        """Smallest difference of the scores that differs from noise, at level 0.05 with probability `POWER`."""
        difference = 0.0
        for _ in range(50):  # a contraction: the variance hardly depends on the difference
            difference = (_Z + _Z_POWER) * math.sqrt(self.variance(difference) / self.questions)
        return difference

    def needed(self, difference: float) -> int:
        """Number of questions with which ``difference`` is visible."""
        return max(1, math.ceil((_Z + _Z_POWER) ** 2 * self.variance(difference) / difference**2))


def draws_to_exclude(deviation: float) -> int:
    """Draws of an exact sampler with which ``crossdraft certify-samples`` excludes a TV of ``deviation``."""
    uniform = np.full((1, CELLS), 1 / CELLS)
    cells = CellCounts(np.full((1, CELLS), 1e9), uniform, np.array([CELLS]))
    support = math.log(1 - 0.95) / math.log1p(-deviation)
    return math.ceil(max(cells.draws_needed(deviation), support))


def draws_to_show(deviation: float) -> int:
    """Draws with which ``crossdraft certify-samples`` shows a bias of TV ``deviation``, at most.

    The chi-square divergence of cells is at least 4 TV^2 (Jensen), and its test has the non-centrality draws times it.
    """
    from scipy.optimize import brentq
    from scipy.stats import chi2, ncx2

    limit = float(chi2.isf(LEVEL / _TESTS, CELLS - 1))
    centrality = brentq(lambda x: float(ncx2.sf(limit, CELLS - 1, x)) - POWER, 1e-6, 1e4)
    return math.ceil(float(centrality) / (4 * deviation**2))  # type: ignore[arg-type]
