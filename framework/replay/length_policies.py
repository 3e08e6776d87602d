"""Policies of how long a draft should be, from one replay of the longest: see ``policy`` of the drafters.

*Confidence.* Along the drafted tokens, a row stops where the drafter is unsure: what a threshold does follows from the
probabilities of the tokens and of the most probable ones. Along the response that says which tokens can be accepted,
along drafts that were drawn (`force.drafted`) how many are drafted.

*Heuristic* (J. Gante, "Assisted Generation", 2023). More after a draft that was accepted whole, fewer after another:
the length is a second state of the chain that steps are (`steps`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from .step_chain import Acceptance, Steps, expected

#: Tokens more after a draft that was accepted whole, and fewer after another, as the heuristic policy has it.
MORE, FEWER = 2, 1


def confident(
    log_q: np.ndarray, log_top: np.ndarray, threshold: float, stop: Literal["after", "before"] = "after"
) -> np.ndarray:
    """int64 [T], tokens of each draft under a confidence policy that drafts at most G.

    Args:
        log_q: [T, G], log Q of the drafted tokens; at temperature 0 ``log_top`` again, which is what those are.
        log_top: [T, G], of the most probable ones, see `Forced`.
        threshold: of probability.
        stop: ``after`` the first token below it, which is kept; ``before`` the first law without one that reaches it.
    """
    with np.errstate(under="ignore"):
        unsure = np.exp(log_q if stop == "after" else log_top) < threshold
    first = np.where(unsure.any(1), unsure.argmax(1) + (stop == "after"), unsure.shape[1])
    return np.minimum(first, unsure.shape[1]).astype(np.int64)


def oracle(responses: Sequence[Acceptance], gammas: Sequence[int]) -> Steps:
    """The `Steps` of drafts that are just as long as what will be accepted, at most gamma: the best length known after
    the fact. A bound on what a policy could save, no method."""
    found = expected(responses, gammas)
    return replace(found, drafted=found.taken)


def heuristic(responses: Sequence[Acceptance], gamma: int, start: int) -> Steps:
    """The `Steps` of responses under the heuristic policy: one column.

    Args:
        responses: from a static replay at least ``gamma`` deep.
        gamma: most tokens of a draft.
        start: tokens of a sequence's first one.
    """
    found = [_heuristic(one, gamma, start) for one in responses]
    size = np.array([[float(len(one.survival))] for one in responses])
    totals = np.array([numbers for *numbers, _ in found])
    steps, drafted, taken, counted, emitted = (totals[:, i : i + 1] for i in range(5))
    return Steps(size, steps, drafted, taken, counted, emitted, np.stack([accepted for *_, accepted in found])[:, None])


def _heuristic(one: Acceptance, gamma: int, start: int) -> tuple[float, float, float, float, float, np.ndarray]:
    t, depth = one.survival.shape
    limit = np.iinfo(np.int64).max if one.limit is None else one.limit
    at_least = np.concatenate([np.ones((t, 1)), one.survival, np.zeros((t, 1))], 1)
    reached = np.zeros((t + depth + 2, gamma + 1))  # Pr(a step starts at t while the length is L)
    reached[0, start] = 1
    steps = drafted = taken = counted = emitted = 0.0
    accepted = np.zeros(depth)
    for at in range(t):
        room = limit - 1 - at
        bonus = np.arange(1, depth + 1) <= t - 1 - at  # after an accepted last token comes nothing
        for length in np.flatnonzero(reached[at]):
            weight, n = reached[at, length], int(min(length, room, one.lengths[at]))
            most = min(n, t - at)  # that can be accepted
            tau = at_least[at, : most + 1] - np.append(at_least[at, 1 : most + 1], 0)
            ends = at + 1 + np.arange(most + 1)
            shorter = max(1, length - FEWER) if n else length
            whole = max(1, min(n + MORE, gamma)) if n else length
            reached[ends[:n], shorter] += weight * tau[:n]
            reached[ends[n:], whole] += weight * tau[n:]
            steps += weight
            drafted += weight * n
            taken += weight * at_least[at, 1 : most + 1].sum()
            if room >= gamma:
                survival = one.survival[at] * (np.arange(1, depth + 1) <= most)
                counted += weight
                emitted += weight * (1 + (survival * bonus).sum())
                accepted += weight * survival
    return steps, drafted, taken, counted, emitted, accepted
