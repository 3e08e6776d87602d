"""Decision about a sampler from its draws: within a total variation d of the target, different from it, or undecided.

Three statistics of the same draws, see `equivalence`:

* *temperature*: the log-probability of the drawn tokens, pooled over all prefixes;
* *pooled cells*: the tokens of each distribution in falling order of probability fill [0, 1), each with its own share;
  a drawn token is placed uniformly in its share (M. Rosenblatt, "Remarks on a multivariate transformation", Annals of
  Mathematical Statistics 23, 1952). If each token was drawn from its distribution, these positions are uniform and
  independent for any distributions, so one draw per prefix suffices. They are counted in equal cells;
* *cells of each prefix* with enough draws: groups of tokens of similar probability, the most probable ones separately.
  It detects differences that cancel out between prefixes.

"Within d" requires all upper bounds to be at most d; a sampler that deviates by d in one of these respects passes once
in 20 files. "Different" requires a p-value below `LEVEL`, corrected for the number of tests, or a token of probability
0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from .equivalence import BATCH_ELEMENTS, CONFIDENCE, CellCounts, TemperatureShift

LEVEL = 0.01  # maximum false-positive rate: exact samplers that are called different
#: Maximum number of cells of a distribution, and minimum expected draws of a cell.
CELLS, DRAWS_PER_CELL = 16, 5


@dataclass(frozen=True)
class PrefixDraws:
    """Draws after one prefix: ``counts[i]`` draws of token ``tokens[i]``."""

    place: str
    tokens: Sequence[int]
    counts: Sequence[int]


@dataclass(frozen=True)
class Statistic:
    """One of the statistics of a verdict."""

    # name, draws: for display
    name: str
    draws: int
    p_value: float  # of "no difference"
    # tv_at_least, tv_at_most: bounds on the average TV, or None
    tv_at_least: float | None
    tv_at_most: float | None
    draws_needed: float  # draws with which an exact sampler is found within d
    estimate: str  # for display


@dataclass(frozen=True)
class Verdict:
    """Decision from the draws."""

    outcome: str  # ``yes``, ``no`` or ``undecided``
    deviation: float  # the TV d in question
    # draws, prefixes: number of tested ones
    draws: int
    prefixes: int
    p_value: float  # of "no difference", corrected for the number of tests
    # tv_at_least, tv_at_most: bounds on the TV, averaged over draws
    tv_at_least: float
    tv_at_most: float
    each_prefix: bool  # the bound covers the cells of each prefix; otherwise only deviations common to all prefixes
    more_draws: int  # additional draws needed for a decision; 0 if decided
    impossible: int  # draws of tokens of probability 0
    # log_p, expected_log_p: mean log-probability of the drawn tokens, and its expectation
    log_p: float
    expected_log_p: float
    statistics: list[Statistic]
    by_prefix: list[tuple[str, int, float]]


@dataclass
class Evidence:
    """Accumulated statistics of draws and their target distributions."""

    seed: int = 0  # of the random positions within a token's share
    prefixes: int = 0
    impossible: int = 0
    _possible: int = 0
    _temperature: TemperatureShift = field(default_factory=TemperatureShift)
    _pooled: np.ndarray = field(default_factory=lambda: np.zeros(CELLS))
    _rows: list[tuple[str, np.ndarray, np.ndarray, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)

    @property
    def draws(self) -> int:
        return self._possible + self.impossible

    def add(self, probs: Tensor, draws: Sequence[PrefixDraws]) -> None:
        """Add the draws of R prefixes with next-token distributions ``probs [R, V]``."""
        step = max(1, BATCH_ELEMENTS // probs.shape[1])
        for start in range(0, len(draws), step):
            self._add(probs[start : start + step].detach().cpu(), draws[start : start + step])

    def _add(self, probs: Tensor, draws: Sequence[PrefixDraws]) -> None:
        sizes = [len(statistic.tokens) for statistic in draws]
        rows = np.repeat(np.arange(len(draws)), sizes)
        tokens = np.concatenate([np.asarray(statistic.tokens, dtype=np.int64) for statistic in draws])
        counts = np.concatenate([np.asarray(statistic.counts, dtype=np.int64) for statistic in draws])
        falling, order = probs.sort(dim=1, descending=True, stable=True)
        ranks = torch.empty_like(order).scatter_(1, order, torch.arange(probs.shape[1]).expand_as(order))
        reached = falling.double().cumsum(1)
        reached /= reached[:, -1:].clone()
        rank = ranks[rows, tokens].numpy()
        p = probs[rows, tokens].double().numpy()
        fine = p > 0
        self.prefixes += len(draws)
        self.impossible += int(counts[~fine].sum())
        rows, counts, rank, p = rows[fine], counts[fine], rank[fine], p[fine]
        self._possible += int(counts.sum())
        drawn = np.bincount(rows, counts, len(draws))
        log_p = np.bincount(rows, counts * np.log(p), len(draws))
        self._temperature.add(probs, torch.from_numpy(drawn), torch.from_numpy(log_p))
        multiple = falling[:, 0].numpy() < 1 - 1e-9  # one token that has everything fills no cells
        self._add_pooled(reached, rows, counts, rank, multiple)
        cumulative, starts = reached.numpy(), np.searchsorted(rows, np.arange(len(draws) + 1))
        for r in np.flatnonzero((drawn >= 2 * DRAWS_PER_CELL) & multiple).tolist():
            ends = _cell_ends(cumulative[r], max(1 / CELLS, DRAWS_PER_CELL / drawn[r]))
            if len(ends) < 2:
                continue
            more = len(ends) if drawn[r] >= CELLS * DRAWS_PER_CELL else len(_cell_ends(cumulative[r], 1 / CELLS))
            span = slice(starts[r], starts[r + 1])
            cell = np.searchsorted(ends, rank[span], side="right")
            mass = np.diff(cumulative[r][ends - 1], prepend=0.0)
            row = np.bincount(cell, counts[span], len(ends))
            self._rows.append((draws[r].place, row, mass, more))

    def _add_pooled(
        self, reached: Tensor, rows: np.ndarray, counts: np.ndarray, rank: np.ndarray, multiple: np.ndarray
    ) -> None:
        selected = multiple[rows]
        rows, counts, rank = rows[selected], counts[selected], rank[selected]
        end = reached[rows, rank].numpy()
        start = np.where(rank > 0, reached[rows, np.maximum(rank - 1, 0)].numpy(), 0.0)
        edges = np.arange(CELLS + 1) / CELLS
        for first in range(0, len(rows), 2**16):
            part = slice(first, first + 2**16)
            low, high = np.maximum(start[part, None], edges[:-1]), np.minimum(end[part, None], edges[1:])
            shares = np.clip(high - low, 0, None)
            underflow = shares.sum(1) <= 0  # a share too small for float64
            shares[underflow, np.minimum((start[part][underflow] * CELLS).astype(int), CELLS - 1)] = 1
            shares /= shares.sum(1, keepdims=True)
            self._pooled += self._random.multinomial(counts[part], shares).sum(0)

    def verdict(self, deviation: float) -> Verdict:
        """Decide whether the TV is at most ``deviation``."""
        pooled, rows = self._pooled_cells(), self._row_cells()
        temperature = self._temperature
        statistics, by_prefix = [self._support_test(deviation)], list[tuple[str, int, float]]()
        if self._possible and temperature.informative:
            best, low, high = temperature.interval
            estimate = f"temperature x {best:.3g} [{low:.3g}, {high:.3g}]"
            bound, needed = temperature.tv_at_most, temperature.draws_needed(deviation)
            statistics.append(
                Statistic("temperature", self._possible, temperature.p_value, None, bound, needed, estimate)
            )
        if pooled is not None:
            statistics.append(self._cell_test("pooled cells", pooled, pooled.p_value, deviation))
        covers_each = rows is not None and rows.total >= self.draws / 2
        if rows is not None:
            name = f"cells of each prefix ({len(rows.draws)})"
            statistics.append(self._cell_test(name, rows, rows.p_value, deviation))
            lines = zip(self._rows, rows.draws, rows.p_values, strict=True)
            by_prefix = sorted(((place, int(n), float(p)) for (place, *_), n, p in lines), key=lambda line: line[2])
            place, n, p = by_prefix[0]
            worst = min(1.0, p * len(rows.draws))
            statistics.append(Statistic("the worst prefix", n, worst, None, None, 0.0, place))
        tests = max(1, len(statistics) - 1)  # the support test cannot fail for an exact sampler
        p_value = min(1.0, tests * min(statistic.p_value for statistic in statistics))
        binding = [
            statistic
            for statistic in statistics
            if statistic.tv_at_most is not None and (covers_each or not statistic.name.startswith("cells of"))
        ]
        at_most = max(statistic.tv_at_most for statistic in binding if statistic.tv_at_most is not None)
        at_least = max((statistic.tv_at_least or 0.0 for statistic in statistics), default=0.0)
        if at_most <= deviation and not self.impossible:
            outcome = "yes"
        elif p_value < LEVEL or self.impossible:
            outcome = "no"
        else:
            outcome = "undecided"
        more = 0
        if outcome == "undecided":
            # Scale to all draws: the cells of each prefix use only prefixes with enough draws.
            more = max(
                math.ceil(statistic.draws_needed * self.draws / max(1, statistic.draws)) - self.draws
                for statistic in binding
                if statistic.tv_at_most is not None and statistic.tv_at_most > deviation
            )
            more = max(more, self.draws // 2, 1)  # enough draws in expectation, but a close case
        return Verdict(
            outcome, deviation, self.draws, self.prefixes, p_value, at_least, at_most, covers_each, more,
            self.impossible, temperature.log_p / max(1, self._possible), temperature.expected_log_p / max(1,
            self._possible), statistics, by_prefix,
        )  # fmt: skip

    def _support_test(self, deviation: float) -> Statistic:
        """Test of tokens of probability 0: their share is a lower bound of the TV."""
        from scipy.stats import beta

        n, k, alpha = self.draws, self.impossible, 1 - CONFIDENCE
        low = float(beta.ppf(alpha, k, n - k + 1)) if k else 0.0
        high = float(beta.ppf(1 - alpha, k + 1, n - k)) if k < n else 1.0
        needed = math.log(alpha) / math.log1p(-deviation)
        return Statistic("tokens of probability 0", n, 0.0 if k else 1.0, low, high, needed, f"{k:,}")

    def _cell_test(self, name: str, cells: CellCounts, p_value: float, deviation: float) -> Statistic:
        low, high = cells.tv_of_head if len(cells.counts) == 1 else cells.tv_at_least(self._random), cells.tv_at_most
        needed = cells.draws_needed(deviation)
        return Statistic(name, int(cells.total), p_value, low, high, needed, f"TV {cells.tv:.3f}")

    def _pooled_cells(self) -> CellCounts | None:
        counts = self._pooled
        while len(counts) > 2 and counts.sum() < 2 * DRAWS_PER_CELL * len(counts):
            counts = counts.reshape(-1, 2).sum(1)
        if counts.sum() < 2 * DRAWS_PER_CELL:
            return None
        return CellCounts(counts[None], np.full((1, len(counts)), 1 / len(counts)), np.array([CELLS]))

    def _row_cells(self) -> CellCounts | None:
        if not self._rows:
            return None
        counts, probs = np.zeros((len(self._rows), CELLS)), np.zeros((len(self._rows), CELLS))
        for i, (_, row, mass, _) in enumerate(self._rows):
            counts[i, : len(row)], probs[i, : len(row)] = row, mass
        return CellCounts(counts, probs, np.array([more for *_, more in self._rows]))


def _cell_ends(reached: np.ndarray, mass: float) -> np.ndarray:
    """End ranks (exclusive) of cells with at least ``mass``; ``reached [V]``: cumulative probabilities, descending."""
    ends, start = [], 0.0
    while start + 2 * mass <= 1 + 1e-12:  # the rest fills this cell and another
        end = int(np.searchsorted(reached, start + mass - 1e-12)) + 1
        if end >= len(reached) or reached[end - 1] + mass > 1 + 1e-12:
            break
        ends.append(end)
        start = float(reached[end - 1])
    return np.array([*ends, len(reached)])


#: Probability to show a bias of the stated size, in a plan of the draws that are common to all prefixes: the power of
#: their test depends on the number of cells only, not on the distributions.
POWER = 0.9
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
