"""Draft-length policies (``policy`` of the drafters), evaluated from one replay of the longest draft.

*Confidence.* A draft stops at a token of low probability, so its length follows from the probabilities of the drafted
and the most probable tokens: teacher-forced scores give the acceptance, sampled drafts (`scoring.sample_drafts`) the
number of drafted tokens.

*Heuristic* (J. Gante, "Assisted Generation", 2023). Longer after a fully accepted draft, shorter after any other: the
length is a second state variable of the Markov chain of steps (`step_chain`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from .step_chain import StepAcceptance, Steps, expected_steps

#: Change of the draft length after a fully accepted draft, and after any other.
MORE, FEWER = 2, 1


def confident(
    log_q: np.ndarray, log_top: np.ndarray, threshold: float, stop: Literal["after", "before"] = "after"
) -> np.ndarray:
    """Draft lengths, int64 [T], under a confidence policy of at most G tokens.

    Args:
        log_q: [T, G], log Q of the drafted tokens; at temperature 0 equal to ``log_top``.
        log_top: [T, G], the largest log Q, see `DraftScores`.
        threshold: a probability.
        stop: ``after`` the first token below the threshold, which is kept; ``before`` the first distribution without a
            token that reaches it.
    """
    with np.errstate(under="ignore"):
        unsure = np.exp(log_q if stop == "after" else log_top) < threshold
    first = np.where(unsure.any(1), unsure.argmax(1) + (stop == "after"), unsure.shape[1])
    return np.minimum(first, unsure.shape[1]).astype(np.int64)


def oracle(responses: Sequence[StepAcceptance], gammas: Sequence[int]) -> Steps:
    """`Steps` of drafts that contain the accepted tokens only, at most gamma: a bound on every length policy."""
    result = expected_steps(responses, gammas)
    return replace(result, drafted=result.taken)


def heuristic(responses: Sequence[StepAcceptance], gamma: int, start: int) -> Steps:
    """`Steps` of responses under the heuristic policy, one column.

    Args:
        responses: from a static replay of at least ``gamma`` tokens.
        gamma: largest draft length.
        start: draft length of the first step of a sequence.
    """
    result = [_heuristic(response, gamma, start) for response in responses]
    totals = np.array([numbers for *numbers, _ in result])
    tokens, steps, drafted, taken, counted, emitted, idle = (totals[:, i : i + 1] for i in range(7))
    accepted = np.stack([values for *_, values in result])[:, None]
    return Steps(tokens, steps, drafted, taken, counted, emitted, accepted, idle)


def _heuristic(
    response: StepAcceptance, gamma: int, start: int
) -> tuple[float, float, float, float, float, float, float, np.ndarray]:
    t, depth = response.survival.shape
    limit = np.iinfo(np.int64).max if response.limit is None else response.limit
    at_least = np.concatenate([np.ones((t, 1)), response.survival, np.zeros((t, 1))], 1)
    reached = np.zeros((t + depth + 2, gamma + 1))  # Pr(a step starts at t while the length is L)
    reached[0, start] = 1
    tokens = steps = drafted = taken = counted = emitted = idle = 0.0
    accepted = np.zeros(depth)
    for start in range(t):
        max_draft_len = limit - 1 - start
        bonus = np.arange(1, depth + 1) <= t - 1 - start  # an accepted last token has no bonus token
        for length in np.flatnonzero(reached[start]):
            weight, n = reached[start, length], int(min(length, max_draft_len, response.lengths[start]))
            maximum = min(n, t - start)  # acceptable tokens
            tau = at_least[start, : maximum + 1] - np.append(at_least[start, 1 : maximum + 1], 0)
            ends = start + 1 + np.arange(maximum + 1)
            shorter = max(1, length - FEWER) if n else length
            whole = max(1, min(n + MORE, gamma)) if n else length
            reached[ends[:n], shorter] += weight * tau[:n]
            reached[ends[n:], whole] += weight * tau[n:]
            if response.starts is not None and not response.starts[start]:
                continue
            survival = response.survival[start] * (np.arange(1, depth + 1) <= maximum)
            emits = weight * (1 + (survival * bonus).sum())
            tokens += emits
            steps += weight
            drafted += weight * n
            taken += weight * at_least[start, 1 : maximum + 1].sum()
            if max_draft_len >= gamma:
                counted += weight
                emitted += emits
                accepted += weight * survival
                idle += weight * (n == 0)
    return float(t) if response.starts is None else tokens, steps, drafted, taken, counted, emitted, idle, accepted
