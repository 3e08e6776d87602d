"""Diagnosis of low acceptance: common misconfigurations, each undone and replayed on the same responses.

min(1, Q/P), averaged over responses sampled from the target, is an unbiased estimate of the overlap sum_v min(P, Q) at
a position. A misconfiguration is a likely cause if undoing it clearly increases block efficiency.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from crossdraft import CrossdraftError, Estimate, Misconfiguration, UsageError
from crossdraft.models import Configured
from crossdraft.runs import LEAST_PIECES

from ..engines.counter_definitions import CounterDefinition
from ..intervals import pieces_needed
from ..replay.aggregate import Row, Tally, difference
from ..replay.engine_counts import EngineCounts
from ..replay.replay import Candidate, replay, verifiers_for
from ..replay.response import Response
from ..replay.teacher_forcing.lazy_models import SharedPasses, Target
from ..replay.teacher_forcing.scoring import ScoringRequest, with_gamma
from .text_fit import TextFit, fit_texts

CLEAR = 0.2  # relative increase of accepted tokens per step above which a misconfiguration is a likely cause


@dataclass(frozen=True)
class Trial:
    """A misconfiguration to undo, and the target and responses to replay it on.

    ``drafter``: drafts in place of the configured one.
    """

    misconfiguration: Misconfiguration
    target: Target
    responses: Sequence[Response]
    drafter: Configured | None = None


@dataclass(frozen=True)
class TrialResult:
    """Result of a trial."""

    misconfiguration: Misconfiguration
    gamma: int
    tally: Tally | None = None  # of drafts of gamma tokens; None if the trial failed, see ``reason``
    # increase of block efficiency over the drafter as configured, with an interval over prompts; None for the drafter
    # itself, and if either block efficiency is missing
    gain: Estimate | None = None
    reason: str = ""
    warning: str | None = None  # about the recorded log-probabilities of the responses
    # the counters of an engine for these drafts, if they were requested; ``texts``: the fit of the responses to the
    # target
    counts: EngineCounts | None = None
    texts: TextFit | None = None

    @property
    def row(self) -> Row | None:
        return None if self.tally is None else self.tally.row(self.gamma)


def run_trials(
    drafter: Configured, trials: Sequence[Trial], gamma: int, definition: CounterDefinition | None = None
) -> Iterator[TrialResult]:
    """Replay ``trials``: the first is the drafter as configured, the others are compared with it by prompt.

    ``gamma``: draft length; heads with fewer tokens draft their maximum; ``definition``: also compute the counters of
    this engine. Raises UsageError: the drafter cannot be replayed or does not draft chains. Raises CrossdraftError: the
    drafter fails to load and no trial changes its heads.
    """
    first: Tally | None = None
    fits: dict[tuple[int, int], TextFit] = {}
    for number, trial in enumerate(trials):
        try:
            gamma, tally, warning, counts = _tally(drafter, trial, gamma, definition)
        except CrossdraftError as error:
            if number == 0 and (
                isinstance(error, UsageError) or all(result.misconfiguration.change is None for result in trials)
            ):
                raise
            yield TrialResult(trial.misconfiguration, gamma, reason=str(error))
            continue
        gain = difference(tally, gamma, first, gamma) if first is not None else None
        first = tally if number == 0 else first
        key = id(trial.target.loaded), id(trial.responses)
        pairs = zip(trial.responses, trials[0].responses, strict=False)
        if definition is not None and key not in fits and all(a.tokens is b.tokens for a, b in pairs):
            fits[key] = fit_texts(trial.target, trial.responses)
        texts = fits.get(key)
        yield TrialResult(trial.misconfiguration, gamma, tally, gain, warning=warning, counts=counts, texts=texts)


def likely_causes(results: Sequence[TrialResult]) -> list[TrialResult]:
    """Trials that gain more than `CLEAR` with an interval above 0, the largest gain first."""
    base, clear = results[0].row, _clear(results)

    def explains(result: TrialResult) -> bool:
        if result.row is None or result.row.block_efficiency is None:
            return False
        if base is None:  # the drafter as configured failed
            return True
        low, _ = _interval(results, result)
        return result.gain is not None and result.gain.value > clear and low is not None and low > 0

    def gain(result: TrialResult) -> float:
        return result.gain.value if result.gain is not None else 0.0

    return sorted((result for result in results[1:] if explains(result)), key=gain, reverse=True)


def inconclusive(results: Sequence[TrialResult]) -> list[TrialResult]:
    """Trials that are neither `likely_causes` nor shown to gain less than `CLEAR`."""
    likely, clear = likely_causes(results), _clear(results)
    open_trials: list[TrialResult] = []
    for result in results[1:]:
        _, high = _interval(results, result)
        if result not in likely and result.row is not None and (high is None or high > clear):
            open_trials.append(result)
    return open_trials


def responses_needed(results: Sequence[TrialResult]) -> int | None:
    """Approximate number of responses that would decide all `inconclusive` trials; None if it cannot be estimated.

    A trial is decided if its interval excludes 0 or excludes a clear gain, whichever is farther from the estimate.
    """
    groups, clear, needed = _pieces(results), _clear(results), 0.0
    for result in inconclusive(results):
        low, high = _interval(results, result)
        if result.gain is None or low is None or high is None:
            return None
        if (distance := max(abs(result.gain.value), abs(clear - result.gain.value))) == 0:
            return None
        needed = max(needed, pieces_needed((high - low) / 2, distance, groups))
    return max(math.ceil(needed), groups + 1)


def _clear(results: Sequence[TrialResult]) -> float:
    """Gain in block efficiency above which a trial is a likely cause."""
    base = results[0].row
    return CLEAR * (base.block_efficiency.value - 1) if base is not None and base.block_efficiency is not None else 0.0


def _pieces(results: Sequence[TrialResult]) -> int:
    return len(results[0].tally.groups.category) if results[0].tally is not None else 0


def _interval(results: Sequence[TrialResult], result: TrialResult) -> tuple[float | None, float | None]:
    """Interval of a gain, capped at the largest possible one; a point if enough prompts differ by the same amount."""
    base = results[0].row
    if result.gain is None or base is None or base.block_efficiency is None:
        return None, None
    largest_gain = base.gamma + 1 - base.block_efficiency.value
    if result.gain.low is None and _pieces(results) >= LEAST_PIECES:
        return result.gain.value, result.gain.value
    return result.gain.low, largest_gain if result.gain.high is None else min(result.gain.high, largest_gain)


def _tally(
    drafter: Configured, trial: Trial, gamma: int, definition: CounterDefinition | None
) -> tuple[int, Tally, str | None, EngineCounts | None]:
    cls, options = trial.drafter or drafter
    sampling = trial.target.sampling
    config = cls.Config(**{**options.model_dump(exclude_unset=True), **trial.misconfiguration.options})
    traits = cls.traits(config, sampling)
    if not traits.is_chain:
        raise UsageError(
            f"drafter '{cls.name}' does not draft single chains with these options, and only those are replayed; "
            "choose options of a chain, or diagnose counters without a model: crossdraft diagnose --counters SOURCE"
        )
    config = with_gamma(cls, config, gamma)
    gamma = min(gamma, cls.traits(config, sampling).depth)
    change = trial.misconfiguration.change
    passes = SharedPasses(trial.target if change is None else trial.target.with_heads(change))
    index = passes.add(ScoringRequest((cls, config), gamma))
    verifier = next(iter(verifiers_for(cls.name, (cls, config), (), (1,), sampling)))
    candidate = Candidate(cls.name, (cls, config), {verifier: (1,)}, (gamma,), passes.scores(index))
    results = replay(trial.responses, [candidate], definition=definition)
    return gamma, candidate.tallies[verifier, 1], results.log_p.warning, candidate.counts.get((verifier, gamma))
