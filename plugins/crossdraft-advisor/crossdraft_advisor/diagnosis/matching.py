"""Hypotheses about what a server computes: each reading of a drafter, replayed, against what the server counted.

The expected rates of a reading are those of its replay, by the engine's own definition of its counters: x_i is normal
around their logit, with the standard error over responses. If the responses are those that were counted (as many tokens
in steps), the acceptance is known up to chance and rounding, so errors are `ROUNDING` and drafts count up to `OWN`
trials.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from crossdraft.framework.metrics.intervals import estimate
from crossdraft.framework.util.estimate import Estimate

from ..engines.acceptance import Acceptance
from ..replay.engine_counts import EngineCounts
from .hypothesis import Assessment, Counts, Hypothesis, Known, assess
from .signatures import counts_of, faulty_shapes
from .trials import TrialResult

#: Name of the reading of the files.
CONFIGURED = "as configured"
#: Prior of a signature beside the readings: it describes a fault, and a reading explains it.
SHAPE = 0.25
#: Standard error of logit h_i by rounding, and trials as which many drafts count, if the responses are the server's.
ROUNDING, OWN = 0.1, 3000.0
#: Relative difference of tokens in steps up to which responses are those that the server counted.
_SAME_TOKENS = 0.03


@dataclass(frozen=True)
class Match:
    """Assessments of all readings, and their replays by the name of the hypothesis.

    Attributes:
        own: the responses are those that the server counted.
        unknown: readings that could not be replayed.
    """

    counted: Counts
    assessments: Sequence[Assessment]
    results: dict[str, TrialResult]
    own: bool
    unknown: int = 0

    def marginal(self, name: str, position: int) -> Estimate:
        """Pr(tau >= position) of a reading, with an interval over responses."""
        counts = self.results[name].counts
        assert counts is not None
        rows = np.array(counts.by_response)[:, [0, position]]
        return estimate(lambda sums: sums[..., 1] / np.maximum(sums[..., 0], 1e-9), rows, minimum=0.0, maximum=1.0)


def match(results: Sequence[TrialResult], acceptance: Acceptance) -> Match:
    """Compare the replays of a drafter as configured (the first) and of its misreadings with what a server counted.

    Raises:
        UsageError: the source has the mean acceptance length only.
    """
    replayed = {
        result.misconfiguration.mistake or CONFIGURED: result
        for result in results
        if result.counts is not None and result.counts.drafts
    }
    counted = counts_of(acceptance)
    own = any(_same_responses(counted, result.counts) for result in replayed.values())
    counted = Counts("", counted.at_least, precision=OWN if own else counted.precision)
    readings = [
        Hypothesis(
            name,
            result.misconfiguration.cure,
            "",
            (_known(result.counts, own),),
            prior=float(max(len(replayed) - 1, 1)) if name == CONFIGURED else 1.0,
        )
        for name, result in replayed.items()
        if result.counts is not None
    ]
    shapes = [replace(shape, prior=SHAPE) for shape in faulty_shapes(counted.gamma)]
    assessments = assess([*readings, *shapes], [counted])
    return Match(counted, assessments, replayed, own, len(results) - len(replayed))


def _same_responses(counted: Counts, counts: EngineCounts | None) -> bool:
    if counts is None:
        return False
    theirs, ours = sum(counted.at_least), counts.drafts + counts.accepted
    return abs(theirs - ours) <= _SAME_TOKENS * ours


def _known(counts: EngineCounts, own: bool) -> Known:
    """Expected rates, half a draft added to each outcome, and their standard errors as logits."""
    rows = np.array(counts.by_response)
    rates, errors = [], []
    for before, after in zip(rows.T[:-1], rows.T[1:], strict=True):
        drafts, accepted = before.sum(), after.sum()
        rate = (accepted + 0.5) / (drafts + 1)
        variance = ((after - rate * before) ** 2).sum() / (drafts + 1) ** 2 + rate * (1 - rate) / (drafts + 1) ** 2
        error = math.sqrt(variance) / (rate * (1 - rate))
        rates.append(float(rate))
        errors.append(ROUNDING + (0.0 if own and drafts >= 1 else float(error)))
    return Known(tuple(rates), tuple(errors))
