"""Gate against drops of block efficiency (mean acceptance length), with its power.

A pair passes if a drop of ``limit`` or more is excluded, fails if it dropped and such a drop is not excluded, and is
undecided otherwise, each by the 95 % interval of `metrics.intervals.estimate`. So the false-alarm rate is at most
2.5 %, and the probability to fail at a drop of `GateCheck.detectable`, if that is at most the limit, is `POWER`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy import stats

from crossdraft import Estimate, UsageError
from crossdraft.framework.metrics.intervals import FREEDOM
from crossdraft.runs import (
    CONFIDENCE,
    LEAST_PIECES,
    Noise,
    bounded_estimate,
    half_width,
    jackknife,
    ratio,
    ratio_difference,
)

from .intervals import pieces_needed

POWER = 0.9  # probability to detect a drop of `GateCheck.detectable`


def _quantile(freedom: float) -> float:
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, max(freedom, 1.0)))


#: A drop with that probability, in half widths of the interval.
_HALVES = 1 + float(stats.norm.ppf(POWER)) / _quantile(math.inf)


@dataclass(frozen=True)
class Sample:
    """Block efficiency of one drafter and verifier in one source."""

    title: str  # shown to users; equal titles are compared
    rows: Sequence[tuple[float, float]]  # tokens and steps of each independent piece
    names: tuple[str, ...] = ()  # of the pieces, to pair them by; empty if unknown
    unit: str = "prompts"  # of a piece: "prompts", "windows of the log"
    # the value with an interval from another source, if there are fewer than `LEAST_PIECES` pieces
    overall: Estimate | None = None
    remark: str = ""  # an assumption for the reader
    sampling: Mapping[str, Any] = field(default_factory=dict)  # known sampling parameters of the responses
    maximum: float = math.inf  # greatest possible block efficiency, if known

    @property
    def sums(self) -> np.ndarray:
        """``[n, 2]``, pieces with steps only."""
        sums = np.array(self.rows, dtype=float).reshape(-1, 2)
        return sums[sums[:, 1] > 0]

    def block_efficiency(self) -> Estimate:
        """Tokens per step, with an interval if known."""
        if self.overall is not None:
            return self.overall
        return bounded_estimate(ratio, self.sums, 1.0, self.maximum)

    def noise(self) -> Noise | None:
        """Variance of the block efficiency; None if unknown."""
        if self.overall is not None:
            if self.overall.low is None or self.overall.high is None:
                return None
            half = (self.overall.high - self.overall.low) / 2
            return Noise((half / _quantile(math.inf)) ** 2, math.inf)
        return jackknife(ratio, self.sums) if len(self.sums) >= LEAST_PIECES else None


@dataclass(frozen=True)
class GateCheck:
    """Change of one pair."""

    title: str
    # baseline, current: block efficiencies; the latter is None before it is measured
    baseline: Estimate
    current: Estimate | None
    change: Estimate  # relative change of block efficiency; 0 before it is measured
    pieces: int  # number of independent pieces of a source (of the smaller one)
    unit: str
    paired: bool  # the interval is of the differences of the same prompts
    limit: float  # relative drop that must not pass
    remark: str = ""

    @property
    def half(self) -> float | None:
        """Half width of the interval of the change; 0 if all pieces agree, None if they are too few."""
        if self.change.low is not None and self.change.high is not None:
            return (self.change.high - self.change.low) / 2
        return 0.0 if self.pieces >= LEAST_PIECES and self.current is not None else None

    @property
    def detectable(self) -> float | None:
        """Smallest relative drop that fails with probability `POWER`; None if the pieces are too few."""
        return None if self.half is None else _HALVES * self.half

    @property
    def needed(self) -> int | None:
        """Number of pieces with which a drop of `limit` is detected; None if unknown."""
        if self.half is None or not self.pieces:
            return None
        pieces = pieces_needed(self.half, self.limit / _HALVES, self.pieces)
        needed, normal = max(LEAST_PIECES, math.ceil(pieces)), _quantile(math.inf)
        while needed < pieces * (_quantile(FREEDOM * needed) / normal) ** 2:
            needed += 1
        return needed

    @property
    def outcome(self) -> str:
        """``pass``, ``drop`` or ``undecided``; before a measurement, ``pass`` if the pieces suffice."""
        if self.half is None or self.detectable is None:
            return "undecided"
        if self.current is None:
            return "pass" if self.detectable <= self.limit else "undecided"
        if self.change.value - self.half > -self.limit:
            return "pass"
        return "drop" if self.change.value + self.half < 0 else "undecided"


def planned(baseline: Sample, limit: float) -> GateCheck:
    """The check before the current code is measured: as for two independent measurements like ``baseline``."""
    block_efficiency, noise = baseline.block_efficiency(), baseline.noise()
    sums = baseline.sums
    change = Estimate(0.0)
    if noise is not None and noise.variance > 0:
        half = half_width([noise, noise]) / block_efficiency.value
        change = Estimate(0.0, -half, half)
    return GateCheck(
        baseline.title, block_efficiency, None, change, len(sums), baseline.unit, False, limit, baseline.remark
    )


def checked(baseline: Sample, current: Sample, limit: float) -> GateCheck:
    """Compare two samples, by the pieces of equal names if at least half of all are in both.

    Raises UsageError: their sampling parameters differ.
    """
    for key in baseline.sampling.keys() & current.sampling.keys():
        if (value := baseline.sampling[key]) != (other := current.sampling[key]):
            raise UsageError(
                f"{baseline.title}: {key} is {value} in the baseline and {other} in the current responses; acceptance "
                "depends on it, so measure both with the same"
            )
    paired = _paired(baseline, current)
    if paired is not None:
        before, after = (
            bounded_estimate(ratio, paired[:, 2 * i : 2 * i + 2], 1.0, (current, baseline)[i].maximum) for i in (1, 0)
        )
        pieces, difference = len(paired), ratio_difference(paired)
    else:
        before, after = baseline.block_efficiency(), current.block_efficiency()
        pieces, noises = min(len(baseline.sums), len(current.sums)), [baseline.noise(), current.noise()]
        value, half = after.value - before.value, half_width([noise for noise in noises if noise is not None])
        difference = Estimate(value) if None in noises else Estimate(value, value - half, value + half)
    change, unit = difference.scaled(1 / before.value), baseline.unit
    return GateCheck(baseline.title, before, after, change, pieces, unit, paired is not None, limit, baseline.remark)


def _paired(baseline: Sample, current: Sample) -> np.ndarray | None:
    """``[n, 4]``: tokens and steps of the current pieces, then of the baseline's of equal names; None if too few."""
    rows = [dict(zip(s.names, s.rows, strict=False)) for s in (current, baseline)]
    if any("" in by_name or len(by_name) < len(s.rows) for by_name, s in zip(rows, (current, baseline), strict=True)):
        return None  # pieces without a name, or of equal names
    both = [(*row, *rows[1][name]) for name, row in rows[0].items() if name in rows[1]]
    if 2 * len(both) < max(map(len, rows)):
        return None
    sums = np.array(both, dtype=float).reshape(-1, 4)
    sums = sums[(sums[:, 1] > 0) & (sums[:, 3] > 0)]
    return sums if len(sums) else None
