"""Hypotheses about what a server computes: each reading of a drafter, replayed, against what the server counted.

The expected rates of a reading are those of its replay, by the engine's own definition of its counters: x_i is normal
around their logit, with the standard error over responses. The server's own responses have the same error, so that its
drafts count as fewer trials. If the responses are those that were counted (they have as many tokens in steps),
acceptance is known up to rounding and chance (`OWN`), and without chance if it is deterministic (`EXACT`).

Likelihoods compare readings with each other. Two things show that none of them may be true. Each reading is tested by
itself: the counters have to lie inside of its predictive intervals at all positions, which a true reading fails in
`LEVEL` of the cases, and the target has to generate the responses for its prompts; a reading that fails has no share.
And a cause that is not in the list (`UNLISTED`) has a prior of its own, and the rates of the drafter as configured
behind a shift of unknown size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.stats import norm, t

from crossdraft import Estimate

from ..engines.acceptance import Acceptance, conditional_rates
from ..replay.engine_counts import EngineCounts
from .hypothesis import Around, Assessment, Counts, Curve, Hypothesis, Known, assess, not_excluded
from .signatures import counts_of, faulty_shapes
from .trials import TrialResult

CONFIGURED = "as configured"  # name of the reading of the files
UNLISTED = "a cause that is not in the list"  # name of the hypothesis that no reading is true
LEVEL = 0.01  # probability with which a true reading fails its test
#: Standard deviations of the shift of logit h_i that an unlisted cause has, equally likely.
_SHIFTS = (0.5, 1.0, 2.0)
SHAPE = 0.25  # prior of a signature beside the readings: it describes a fault, and a reading explains it


@dataclass(frozen=True)
class _Precision:
    """Precision of the counters of the replayed responses."""

    rounding: float  # standard error of logit h_i by rounding
    repeats: float  # number of times that a drafted token counts as a trial
    maximum: float  # trials as which many drafts count
    # prior of `UNLISTED`, in those of a reading. Unlisted causes are many, and counters of other responses are little
    # more than one number, how low acceptance is; few of them pass the test of a reading on its own.
    unlisted: float


#: Of other responses, of those that were counted, and of those if acceptance is deterministic.
OTHER = _Precision(0.05, 1.0, 1500.0, 120.0)
OWN, EXACT = _Precision(0.03, 1.0, math.inf, 20.0), _Precision(0.03, 4.0, math.inf, 8.0)
ALIKE = 10.0  # ratio of likelihoods up to which a reading is named, too
_MOST_RESPONSES = 1e5  # responses that are not worth recording to distinguish two readings
SAME = 0.01  # difference of acceptance by position up to which two readings have the same counters
#: Relative difference of tokens in steps up to which responses are those that the server counted.
_SAME_TOKENS = 0.01


@dataclass(frozen=True)
class Match:
    """Assessments of all readings, and their replays by the name of the hypothesis."""

    counted: Counts
    assessments: Sequence[Assessment]
    results: dict[str, TrialResult]
    own: bool  # the responses are those that the server counted
    # of each reading, ``[3, gamma]``: Pr(tau >= i), and the bounds that the counters have to lie in
    intervals: Mapping[str, np.ndarray]
    unknown: int = 0  # readings that could not be replayed

    def named(self) -> list[str]:
        """The most likely hypothesis, and those that these counters do not distinguish from it.

        The latter are readings that fit and have a likelihood of at least a tenth of its own (a prior is not evidence)
        or the same counters, and a cause that is not in the list with a tenth of its share. If that or a signature is
        the most likely, they are what is not excluded, and the likeliest readings that fit.
        """
        first = self.assessments[0]
        best = self.results.get(first.hypothesis.name)
        near = math.log(ALIKE)
        if best is None:
            names = [hypothesis.name for hypothesis in not_excluded(self.assessments)]
            fitting = [item for item in self.assessments if item.hypothesis.name in self.results and item.share]
            likeliest = max((item.log_likelihood for item in fitting), default=0.0)
            names += [item.hypothesis.name for item in fitting if item.log_likelihood >= likeliest - near]
            return list(dict.fromkeys(names))
        rates = _rates(best)
        names = [first.hypothesis.name]
        for item in self.assessments[1:]:
            name = item.hypothesis.name
            if name == UNLISTED:
                alike = item.share * ALIKE > first.share
            elif name not in self.results or not self.fits(name):
                continue
            else:
                same = np.abs(_rates(self.results[name]) - rates).max() < SAME
                texts = first.hypothesis.evidence - item.hypothesis.evidence
                alike = first.log_likelihood - item.log_likelihood <= near or (same and texts <= near)
            names += [name] * bool(alike)
        return names

    def responses_to_decide(self) -> int | None:
        """Number of counted responses after which all but one of `named` are excluded; None if no number is enough.

        The expected log-likelihood ratio of two readings is the sum of the divergences of their rates, over the drafts
        that reach a position.
        """
        results, needed = [self.results[name] for name in self.named() if name in self.results], 0.0
        for other in results[1:]:
            first, second = (
                np.clip(conditional_rates(_rates(result)), 1e-3, 1 - 1e-3) for result in (results[0], other)
            )
            divergence = first * np.log(first / second) + (1 - first) * np.log((1 - first) / (1 - second))
            counts = results[0].counts
            assert counts is not None
            reached = np.array([counts.drafts, *counts.per_position[:-1]])
            ratio = EXACT.repeats * float((reached * divergence).sum()) / len(counts.by_response)
            needed = max(needed, math.log(ALIKE) / ratio if ratio > 0 else math.inf)
        return math.ceil(needed) if needed < _MOST_RESPONSES else None

    def expected(self, name: str, position: int) -> Estimate:
        """Pr(tau >= position) of a reading, with the interval that the counters have to lie in."""
        rate, low, high = self.intervals[name][:, position - 1]
        return Estimate(float(rate), float(low), float(high))

    def fits(self, name: str) -> bool:
        """True if the counters lie inside of the intervals of a reading at all positions, and it explains the texts."""
        return not _failure(self.results[name], self.counted, self.intervals[name])

    @property
    def unexplained(self) -> bool:
        """True if no reading fits."""
        return not any(map(self.fits, self.results))


def match(results: Sequence[TrialResult], acceptance: Acceptance, *, own: bool | None = None) -> Match:
    """Compare the replays of a drafter as configured (the first) and of its misreadings with what a server counted.

    ``own``: the server counted the replayed responses, or others; None = unknown. Raises UsageError: the source has the
    mean acceptance length only.
    """
    replayed = {
        result.misconfiguration.mistake or CONFIGURED: result
        for result in results
        if result.counts is not None and result.counts.drafts
    }
    counted = counts_of(acceptance)
    all_counts = [result.counts for result in replayed.values() if result.counts is not None]
    random = any(counts.random for counts in all_counts)
    if own is None:
        theirs, ours = sum(counted.at_least), [counts.drafts + counts.accepted for counts in all_counts]
        own = any(abs(theirs - tokens) <= _SAME_TOKENS * tokens for tokens in ours)
    precision = OTHER if not own else OWN if random else EXACT
    intervals = {name: _interval(result, counted, precision) for name, result in replayed.items()}
    assessments = _assessed(replayed, intervals, counted, precision)
    return Match(counted, assessments, replayed, own, intervals, len(results) - len(replayed))


def _assessed(
    replayed: Mapping[str, TrialResult], intervals: Mapping[str, np.ndarray], counted: Counts, precision: _Precision
) -> list[Assessment]:
    repeats = precision.repeats / _design_effect(replayed) if precision is OTHER else precision.repeats
    scaled = Counts("", tuple(n * repeats for n in counted.at_least), precision=precision.maximum)
    failures = {name: _failure(result, counted, intervals[name]) for name, result in replayed.items()}
    texts = {name: result.texts.log_likelihood for name, result in replayed.items() if result.texts is not None}
    best, readings = max(texts.values(), default=0.0), []
    for name, result in replayed.items():
        prior = 0.0 if failures[name] else 1.0
        if name == CONFIGURED:
            prior *= len(replayed) - 1 + precision.unlisted / 2
        known, evidence = _known(result.counts, precision), texts.get(name, best) - best
        readings.append(Hypothesis(name, result.misconfiguration.cure, "", (known,), prior=prior, evidence=evidence))
    # If the prompts are others, so is the fault.
    evidence = readings[0].evidence if readings and any(reading.prior for reading in readings) else 0.0
    curves: list[Curve] = [Curve()]
    if readings:
        known = _known(next(iter(replayed.values())).counts, precision)
        curves += [Around(known.rates, known.errors, spread) for spread in _SHIFTS]
    shapes = [replace(shape, prior=SHAPE, evidence=evidence) for shape in faulty_shapes(counted.gamma)]
    meaning = "the server computes what no reading describes, such as another checkpoint (--or-model)"
    unlisted = Hypothesis(UNLISTED, meaning, "", curves, prior=precision.unlisted, evidence=evidence)
    return [
        replace(item, against=failures.get(item.hypothesis.name, item.against))
        for item in assess([*readings, *shapes], [scaled], unlisted)
    ]


def _failure(result: TrialResult, counted: Counts, interval: np.ndarray) -> str:
    """The test that a reading fails, in words; empty if it fits."""
    if result.texts is not None and result.texts.foreign:
        return "the target does not generate the responses for these prompts"
    return _outside(counted, interval)


def _interval(result: TrialResult, counted: Counts, precision: _Precision) -> np.ndarray:
    """Pr(tau >= i) of a replay, and the bounds that the counters of a server that computes the same lie in.

    Bounds of all positions hold together with a probability of 1 - `LEVEL`. Those for other responses contain the
    variance over responses, of the replay and of the server; those for the same ones chance and rounding, of which the
    share of their tokens that are not the target's choice at temperature 0 is a measure.
    """
    counts, texts = result.counts, result.texts
    assert counts is not None
    rows, server = np.array(counts.by_response), counted.at_least[0]
    drafts, accepted = rows[:, :1], rows[:, 1:]
    total, tail = float(drafts.sum()), LEVEL / 2 / accepted.shape[1]
    rates = accepted.sum(0) / total
    if precision is EXACT:
        rounding = 1.0 if texts is None or texts.share is None else 2 * (1 - texts.share)
        tolerance = max(min(SAME, rounding + 3 / server), 1.5 / server)
        return np.clip([rates, rates - tolerance, rates + tolerance], 0.0, 1.0)
    smoothed = (accepted.sum(0) + 0.5) / (total + 1)
    chance = smoothed * (1 - smoothed)
    if precision is OTHER:
        clustered = ((accepted - smoothed * drafts) ** 2).sum(0) / total * len(rows) / max(len(rows) - 1, 1)
        variance = np.maximum(clustered + counts.random * chance, chance) * (1 / total + 1 / server)
        quantile = t.isf(tail, max(len(rows) - 1, 1))
    else:
        variance, quantile = chance / server + (SAME / 2) ** 2, norm.isf(tail)
    # Wilson's interval, with as many drafts as give this variance.
    square = quantile**2 * variance / chance
    center, half = rates + square / 2, np.sqrt(square * rates * (1 - rates) + square**2 / 4)
    return np.array([rates, (center - half) / (1 + square), (center + half) / (1 + square)])


def _outside(counted: Counts, interval: np.ndarray) -> str:
    """The counter that is farthest outside of its interval, in words; empty if all lie inside."""
    both = min(counted.gamma, interval.shape[1])
    rates = np.array(counted.at_least[1 : both + 1]) / max(counted.at_least[0], 1e-9)
    _, low, high = interval[:, :both]
    beyond = np.maximum(low - rates, rates - high)
    worst = int(beyond.argmax())
    if beyond[worst] <= 1e-9:
        return ""
    return f"{rates[worst]:.3f} at position {worst + 1}; {low[worst]:.3f} to {high[worst]:.3f} expected"


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


def _known(counts: EngineCounts | None, precision: _Precision) -> Known:
    """Expected rates, half a draft added to each outcome, and their standard errors as logits."""
    assert counts is not None
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
