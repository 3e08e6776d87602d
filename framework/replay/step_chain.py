"""From the acceptance of one step to the steps of whole responses: where steps start is a Markov chain.

A step that starts at token t and accepts tau tokens ends at t + tau + 1. With Pr_t(tau = i) known from the text, the
probability v(t) that some step starts at t follows from left to right: v(0) = 1 and v(t + i + 1) gains v(t) Pr_t(tau =
i). Sums over v are expectations over everything that was drafted and tossed, given the responses: a run's own figures
with less variance (Rao-Blackwell). All draft lengths come from the same numbers: a shorter draft is the longer one,
cut.

As in a run, block efficiency counts the steps in which a draft of gamma tokens had room, which is known before
anything is drafted (`metrics.free`). An end-of-sequence token that is accepted ends its step, without a bonus token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

#: Tokens of a batch, padding included: small arrays stay in the processor's cache.
BATCH = 4096


@dataclass(frozen=True)
class Acceptance:
    """One response as a drafter and a rule see it.

    Attributes:
        survival: float64 [T, G], Pr(tau >= i | output) of a step that starts at each token, see `identities.survival`.
        lengths: int64 [T], tokens that are drafted there, at most G.
        limit: most tokens that the response could have had, at least T; None if nothing but its own end ended it.
    """

    survival: np.ndarray
    lengths: np.ndarray
    limit: int | None


@dataclass(frozen=True)
class Steps:
    """What is expected of n responses, by draft length: one column for each gamma, n rows.

    Attributes:
        tokens: [n, gammas], their lengths (the same in every column).
        steps: of all of them; ``drafted`` tokens, those that are accepted (``taken``) and ``rows`` of the target in
            these, a row and a step a sequence.
        counted, emitted: the steps in which a draft of gamma tokens had room, and the tokens that these emit.
        accepted: [n, gammas, G], sum over the counted steps of Pr(tau >= i).
    """

    tokens: np.ndarray
    steps: np.ndarray
    drafted: np.ndarray
    taken: np.ndarray
    counted: np.ndarray
    emitted: np.ndarray
    accepted: np.ndarray

    @property
    def rows(self) -> np.ndarray:
        """Positions that the target evaluates: the drafted ones and a root a step."""
        return self.drafted + self.steps


def law_of_tau(survival: np.ndarray, gammas: Sequence[int] | np.ndarray) -> np.ndarray:
    """Pr(tau = i) for i = 0 .. G, ``[.., gammas, G + 1]``, from Pr(tau >= i), ``[.., G]`` for i = 1 .. G."""
    depth, order = survival.shape[-1], np.array(gammas)[:, None]
    at_least = np.concatenate([np.ones((*survival.shape[:-1], 1)), survival, np.zeros((*survival.shape[:-1], 1))], -1)
    i = np.arange(depth + 1)
    return (at_least[..., None, :-1] * (i <= order)) - (at_least[..., None, 1:] * (i < order))


def expected(responses: Sequence[Acceptance], gammas: Sequence[int]) -> Steps:
    """The `Steps` of responses, in their order, at each draft length of ``gammas`` (from 1 to G)."""
    order = sorted(range(len(responses)), key=lambda i: len(responses[i].survival))
    parts, places, batch = [], [], []
    for i in order:
        longest = len(responses[i].survival)  # the batch's, because they come by length
        if batch and (len(batch) + 1) * longest > BATCH:
            parts.append(_expected([responses[j] for j in batch], gammas))
            places += batch
            batch = []
        batch.append(i)
    if batch:
        parts.append(_expected([responses[j] for j in batch], gammas))
        places += batch
    back = np.argsort(places)
    return Steps(*(np.concatenate([getattr(part, f.name) for part in parts])[back] for f in fields(Steps)))


def _expected(responses: Sequence[Acceptance], gammas: Sequence[int]) -> Steps:
    """Those of a few responses of like length."""
    gamma = np.array(gammas)
    n, depth = len(responses), responses[0].survival.shape[1]
    size = np.array([len(one.survival) for one in responses])
    limit = np.array([np.iinfo(np.int64).max if one.limit is None else one.limit for one in responses])
    longest = int(size.max())
    survival, lengths = np.zeros((n, longest, depth)), np.zeros((n, longest), dtype=np.int64)
    for row, one in enumerate(responses):
        survival[row, : size[row]], lengths[row, : size[row]] = one.survival, one.lengths
    t, i = np.arange(longest), np.arange(1, depth + 1)
    room = limit[:, None] - 1 - t  # most tokens that a draft may have
    survival *= i <= np.minimum(room, size[:, None] - t)[..., None]

    certain = not np.any((survival > 0) & (survival < 1))
    visited = (_walked if certain else _visited)(survival, gamma) * (t < size[:, None])[:, None]

    counted = visited * (room[:, None] >= gamma[:, None])
    bonus = i <= (size[:, None] - 1 - t)[..., None]  # after an accepted last token comes nothing
    emits = 1 + np.cumsum(survival * bonus, -1)[..., gamma - 1]  # [n, T, gammas]
    drafts = np.minimum(np.minimum(lengths, room)[:, None], gamma[:, None])
    return Steps(
        tokens=np.broadcast_to(size[:, None], (n, len(gamma))).astype(float),
        steps=visited.sum(-1),
        drafted=(visited * drafts).sum(-1),
        taken=(visited @ survival * (i <= gamma[:, None])).sum(-1),
        counted=counted.sum(-1),
        emitted=(counted * emits.transpose(0, 2, 1)).sum(-1),
        accepted=counted @ survival * (i <= gamma[:, None]),
    )


def _visited(survival: np.ndarray, gamma: np.ndarray) -> np.ndarray:
    """v, ``[n, gammas, T]``: the probability that a step starts at each token, from Pr(tau >= i) ``[n, T, G]``."""
    n, longest, depth = survival.shape
    found = np.zeros((n, len(gamma), longest + depth + 1))  # with what lies beyond the end
    found[:, :, 0] = 1
    piece = max(1, BATCH // n)  # of a long response: a step has gammas times G numbers
    for start in range(0, longest, piece):
        jumps = law_of_tau(survival[:, start : start + piece], gamma)  # [n, piece, gammas, G + 1]
        for t in range(jumps.shape[1]):
            here = start + t
            found[:, :, here + 1 : here + depth + 2] += found[:, :, here, None] * jumps[:, t]
    return found[:, :, :longest]


def _walked(survival: np.ndarray, gamma: np.ndarray) -> np.ndarray:
    """The same where nothing is left to chance, as for a point mass: all ways are walked at once, step by step."""
    n, longest, _ = survival.shape
    after = np.minimum(survival.sum(-1).astype(np.int64)[:, None], gamma[:, None]) + 1 + np.arange(longest)
    after = np.concatenate([np.minimum(after, longest), np.full((n, len(gamma), 1), longest)], -1)
    found = np.zeros(after.shape)
    ways = np.arange(n * len(gamma)) * (longest + 1)
    at, after, flat = ways.copy(), after.ravel() + np.repeat(ways, longest + 1), found.reshape(-1)
    while (at < ways + longest).any():
        flat[at] = 1
        at = after[at]
    return found[:, :, :longest]
