"""Comparison of the steps that an engine took with those that replay derives from its responses.

Given the response, a step that starts at a token accepts a number of drafted tokens that only the drafts and the
verifier's coins decide. Where drafts are deterministic, so is that number, and the engine must accept exactly as many.
Otherwise the accepted tokens of all steps must agree with their expectation: their difference is a martingale over the
steps, whose variance is the sum of the steps' variances.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from crossdraft.framework.metrics.cell_metrics import StepRecord


@dataclass
class ServedSteps:
    """Counts of the steps of one cell.

    Attributes:
        decided: steps whose number of accepted tokens follows from the response; ``equal``: those that accepted it.
        accepted, expected: accepted tokens of all steps, and their expectation.
        variance: of ``accepted``.
        at_least, expected_at_least: number of steps that accepted at least i = 1, 2, ... tokens, and its expectation.
        steps: number of compared steps.
        unequal: place of the first steps that differ: prompt, token, accepted tokens, those of replay.
    """

    decided: int = 0
    equal: int = 0
    accepted: float = 0.0
    expected: float = 0.0
    variance: float = 0.0
    steps: int = 0
    at_least: np.ndarray = field(default_factory=lambda: np.zeros(0))
    expected_at_least: np.ndarray = field(default_factory=lambda: np.zeros(0))
    unequal: list[tuple[str, int, int, int]] = field(default_factory=list)

    def add(self, name: str, records: Sequence[StepRecord], survival: np.ndarray, inferred: bool = False) -> None:
        """Add the steps of one response.

        Args:
            name: of the prompt.
            records: steps in order; the last emitted the end of the response.
            survival: ``[T, G]``, Pr(tau >= i | the rest of the response) of a step that starts at each token.
            inferred: the ends of steps were inferred from arrival times. Then the number of steps decides, if the
                response determines it.
        """
        depth = survival.shape[1]
        start = len(survival) - sum(record.emitted for record in records)  # the prefill's tokens belong to no step
        if start < 0:
            return
        if not self.steps:
            self.at_least, self.expected_at_least = np.zeros(depth), np.zeros(depth)
        before = self.accepted, self.expected, self.decided, self.equal, len(self.unequal)
        as_replayed = inferred and records and len(records) in _steps_from(start, survival, records[0].limit)
        for record in records:
            end = start + record.emitted
            # An engine that ends a response inside a draft reports the accepted tokens beyond the end, or none of them.
            if start >= len(survival) or end >= len(survival):
                break
            probs = survival[start, : record.limit] if record.limit < depth else survival[start]
            self.steps += 1
            self.accepted += record.tau
            mean = float(probs.sum())
            self.expected += mean
            # E[tau^2] = sum over i of (2i - 1) Pr(tau >= i)
            self.variance += max(float((probs * (2 * np.arange(len(probs)) + 1)).sum()) - mean**2, 0.0)
            self.at_least[: record.tau] += 1
            self.expected_at_least[: len(probs)] += probs
            if np.all((probs < 1e-6) | (probs > 1 - 1e-6)):
                self.decided += 1
                if record.tau == round(mean):
                    self.equal += 1
                else:
                    self.unequal.append((name, start + 1, record.tau, round(mean)))
            start = end
        accepted, expected, decided, equal, differing = before
        if as_replayed:
            self.expected = expected + self.accepted - accepted
            self.equal = equal + self.decided - decided
            del self.unequal[differing:]

    @property
    def z(self) -> float:
        """Standard score of the accepted tokens; infinite if they differ without variance."""
        difference = self.accepted - self.expected
        if self.variance < 1e-9:
            return 0.0 if abs(difference) < 1e-6 else math.copysign(math.inf, difference)
        return difference / math.sqrt(self.variance)

    @property
    def p_value(self) -> float:
        """Two-sided p-value of `z` under the normal approximation."""
        return math.erfc(abs(self.z) / math.sqrt(2))


def _steps_from(start: int, survival: np.ndarray, limit: int) -> tuple[int, ...]:
    """Possible numbers of steps from ``start`` to the end of the response; empty if they are not deterministic.

    If the last token is an accepted one, the last step has no bonus token, and an engine that counts that acceptance
    seems to have taken a step less.
    """
    depth, end_of_limit, steps = survival.shape[1], start + limit, 0
    while start < len(survival):
        probs = survival[start, : min(max(end_of_limit - start, 0), depth)]
        if np.any((probs >= 1e-6) & (probs <= 1 - 1e-6)):
            return ()
        start, steps = start + round(float(probs.sum())) + 1, steps + 1
    return (steps - 1, steps) if start > len(survival) else (steps,)
