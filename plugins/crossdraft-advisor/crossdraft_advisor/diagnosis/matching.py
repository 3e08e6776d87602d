"""Hypotheses about what a server computes: each reading of a drafter, replayed, against what the server counted.

The expected rates of a reading are those of its replay, by the engine's own definition of its counters: x_i is normal
around their logit, with the standard error over responses. The server's own responses have the same error, so that its
drafts count as fewer trials. If the responses are those that were counted, acceptance is known up to rounding and
chance (`OWN`), and without chance if it is deterministic (`EXACT`). They may be if they have as many tokens in steps,
and are if the readings then explain the counters better than as other responses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from crossdraft.framework.metrics.intervals import estimate
from crossdraft.framework.util.estimate import Estimate

from ..engines.acceptance import Acceptance
from ..replay.engine_counts import EngineCounts
from .hypothesis import Assessment, Counts, Hypothesis, Known, assess, not_excluded
from .signatures import counts_of, faulty_shapes
from .trials import TrialResult

#: Name of the reading of the files.
CONFIGURED = "as configured"
#: Prior of a signature beside the readings: it describes a fault, and a reading explains it.
SHAPE = 0.25


@dataclass(frozen=True)
class _Precision:
    """Precision of the counters of the replayed responses.

    Attributes:
        rounding: standard error of logit h_i by rounding.
        repeats: number of times that a drafted token counts as a trial.
        maximum: trials as which many drafts count.
    """

    rounding: float
    repeats: float
    maximum: float


#: Of other responses, of those that were counted, and of those if acceptance is deterministic.
OTHER, OWN, EXACT = _Precision(0.05, 1.0, 1500.0), _Precision(0.03, 1.0, math.inf), _Precision(0.03, 4.0, math.inf)
#: Ratio of likelihoods up to which a reading is named, too.
ALIKE = 10.0
#: Responses that are not worth recording to distinguish two readings.
_MOST_RESPONSES = 1e5
#: Difference of acceptance by position up to which two readings have the same counters.
SAME = 0.01
#: Relative difference of tokens in steps up to which responses are those that the server counted.
_SAME_TOKENS = 0.03


@dataclass(frozen=True)
class Match:
    """Assessments of all readings, and their replays by the name of the hypothesis.

    Attributes:
        own: the responses are those that the server counted.
        unexplained: they are those, or have as many tokens, but no reading gives exactly what was counted.
        unknown: readings that could not be replayed.
    """

    counted: Counts
    assessments: Sequence[Assessment]
    results: dict[str, TrialResult]
    own: bool
    unexplained: bool = False
    unknown: int = 0

    def named(self) -> list[str]:
        """The most likely hypothesis, and those that these counters do not distinguish from it.

        The latter are those with a likelihood of at least a tenth of its own (a prior is not evidence), and readings
        whose replays have the same counters. If a signature is the most likely, they are those that are not excluded.
        """
        best = self.results.get(self.assessments[0].hypothesis.name)
        if best is None:
            return [hypothesis.name for hypothesis in not_excluded(self.assessments)]
        limit = self.assessments[0].log_likelihood - math.log(ALIKE)
        names = [
            item.hypothesis.name
            for item in self.assessments
            if item.hypothesis.name in self.results and item.log_likelihood >= limit
        ]
        rates = _rates(best)
        same = [name for name, result in self.results.items() if np.abs(_rates(result) - rates).max() < SAME]
        return list(dict.fromkeys([*names, *same]))

    def responses_to_decide(self) -> int | None:
        """Number of counted responses after which all but one of `named` are excluded; None if no number is enough.

        The expected log-likelihood ratio of two readings is the sum of the divergences of their rates, over the drafts
        that reach a position.
        """
        results, needed = [self.results[name] for name in self.named() if name in self.results], 0.0
        for other in results[1:]:
            first, second = (np.clip(_conditional(result), 1e-3, 1 - 1e-3) for result in (results[0], other))
            divergence = first * np.log(first / second) + (1 - first) * np.log((1 - first) / (1 - second))
            counts = results[0].counts
            assert counts is not None
            reached = np.array([counts.drafts, *counts.per_position[:-1]])
            ratio = EXACT.repeats * float((reached * divergence).sum()) / len(counts.by_response)
            needed = max(needed, math.log(ALIKE) / ratio if ratio > 0 else math.inf)
        return math.ceil(needed) if needed < _MOST_RESPONSES else None

    def marginal(self, name: str, position: int) -> Estimate:
        """Pr(tau >= position) of a reading, with an interval over responses."""
        counts = self.results[name].counts
        assert counts is not None
        rows = np.array(counts.by_response)[:, [0, position]]
        log = int(np.count_nonzero(rows[:, 1])) > 1  # without one response there are accepted drafts, too
        return estimate(
            lambda sums: sums[..., 1] / np.maximum(sums[..., 0], 1e-9), rows, log=log, minimum=0.0, maximum=1.0
        )


def match(results: Sequence[TrialResult], acceptance: Acceptance, *, own: bool | None = None) -> Match:
    """Compare the replays of a drafter as configured (the first) and of its misreadings with what a server counted.

    Args:
        own: the server counted the replayed responses, or others; None = unknown.

    Raises:
        UsageError: the source has the mean acceptance length only.
    """
    replayed = {
        result.misconfiguration.mistake or CONFIGURED: result
        for result in results
        if result.counts is not None and result.counts.drafts
    }
    counted = counts_of(acceptance)
    random = any(result.counts.random for result in replayed.values() if result.counts is not None)
    precisions = [OTHER, OWN if random else EXACT]
    if own is not None or not any(_same_tokens(counted, result.counts) for result in replayed.values()):
        precisions = precisions[1:] if own else precisions[:1]
    fits = [_fit(replayed, counted, precision) for precision in precisions]
    equal = any(_same_counts(counted, result.counts) for result in replayed.values())
    chosen = len(fits) - 1 if equal else int(np.argmax([density for density, _ in fits]))
    assessments = fits[chosen][1]
    own = precisions[chosen] is not OTHER
    best = replayed.get(assessments[0].hypothesis.name)
    explained = best is not None and (own or len(fits) == 1)
    if own and not random and best is not None:
        rates = np.array(counted.at_least[1:]) / max(counted.at_least[0], 1e-9)
        both = min(len(rates), len(_rates(best)))
        explained = bool(np.abs(_rates(best)[:both] - rates[:both]).max() < SAME)
    unexplained = (own or len(fits) > 1) and not explained
    return Match(counted, assessments, replayed, own, unexplained, len(results) - len(replayed))


def _fit(replayed: Mapping[str, TrialResult], counted: Counts, precision: _Precision) -> tuple[float, list[Assessment]]:
    """Logarithm of the density of the counters, given that a reading is true, and the assessments."""
    repeats = precision.repeats / _design_effect(replayed) if precision is OTHER else precision.repeats
    at_least = tuple(n * repeats for n in counted.at_least)
    scaled = Counts("", at_least, precision=precision.maximum)
    texts = {name: result.texts.log_likelihood for name, result in replayed.items() if result.texts is not None}
    best = max(texts.values(), default=0.0)
    readings = [
        Hypothesis(
            name,
            result.misconfiguration.cure,
            "",
            (_known(result.counts, precision),),
            prior=float(max(len(replayed) - 1, 1)) if name == CONFIGURED else 1.0,
            evidence=texts.get(name, best) - best,
        )
        for name, result in replayed.items()
        if result.counts is not None
    ]
    shapes = [replace(shape, prior=SHAPE) for shape in faulty_shapes(counted.gamma)]
    assessments = assess([*readings, *shapes], [scaled])
    known = [item for item in assessments if item.hypothesis.name in replayed]
    logs = [item.log_likelihood + math.log(item.hypothesis.prior) for item in known]
    trials = [1 / (1 / n + 1 / precision.maximum) for n in at_least[:-1] if n]
    return float(np.logaddexp.reduce(logs)) + 0.5 * float(np.log(trials).sum()), assessments


def _design_effect(replayed: Mapping[str, TrialResult]) -> float:
    """Variance of the first acceptance rate over responses, as a multiple of that of independent drafts."""
    counts = next(iter(replayed.values())).counts if replayed else None
    if counts is None:
        return 1.0
    drafts, accepted = np.array(counts.by_response).T[:2]
    rate = (accepted.sum() + 0.5) / (drafts.sum() + 1)
    clustered = ((accepted - rate * drafts) ** 2).sum() / (drafts.sum() * rate * (1 - rate))
    return float(max(clustered + counts.random, 1.0))


def _rates(result: TrialResult) -> np.ndarray:
    """Pr(tau >= i) of a replay, i = 1, 2, .. ."""
    assert result.counts is not None
    return result.counts.per_position / result.counts.drafts


def _conditional(result: TrialResult) -> np.ndarray:
    """Conditional acceptance rates of a replay; 0 at positions that no draft reached."""
    marginal = np.array([1.0, *_rates(result)])
    return np.divide(marginal[1:], marginal[:-1], out=np.zeros(len(marginal) - 1), where=marginal[:-1] > 0)


def _same_counts(counted: Counts, counts: EngineCounts | None) -> bool:
    """True if the counters are those of a replay, up to one step at each position."""
    if counts is None or len(counts.per_position) != counted.gamma:
        return False
    ours = np.array([counts.drafts, *counts.per_position])
    return bool(np.abs(ours - np.array(counted.at_least)).max() <= 1.0)


def _same_tokens(counted: Counts, counts: EngineCounts | None) -> bool:
    if counts is None:
        return False
    theirs, ours = sum(counted.at_least), counts.drafts + counts.accepted
    return abs(theirs - ours) <= _SAME_TOKENS * ours


def _known(counts: EngineCounts, precision: _Precision) -> Known:
    """Expected rates, half a draft added to each outcome, and their standard errors as logits."""
    rows = np.array(counts.by_response)
    rates, errors = [], []
    for before, after in zip(rows.T[:-1], rows.T[1:], strict=True):
        drafts, accepted = before.sum(), after.sum()
        rate = (accepted + 0.5) / (drafts + 1)
        variance = ((after - rate * before) ** 2).sum() / (drafts + 1) ** 2 + rate * (1 - rate) / (drafts + 1) ** 2
        error = math.sqrt(variance) / (rate * (1 - rate))
        rates.append(float(rate))
        errors.append(precision.rounding + (float(error) if precision is OTHER or drafts < 1 else 0.0))
    return Known(tuple(rates), tuple(errors))
