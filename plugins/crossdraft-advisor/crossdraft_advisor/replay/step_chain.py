"""Expected steps of whole responses from the acceptance of single steps: step starts form a Markov chain.

A step that starts at token t and accepts tau tokens ends at t + tau + 1. Given Pr_t(tau = i), the probability v(t)
that a step starts at t is computed from left to right: v(0) = 1, and v(t + i + 1) gains v(t) Pr_t(tau = i). Sums over v
are expectations over drafts and verifier decisions given the responses, so they estimate the metrics of a run with less
variance (Rao-Blackwell). A shorter draft is a prefix of the longer one, so one pass serves all draft lengths.

As in a run, block efficiency counts the steps with enough remaining tokens for a draft of gamma, which is known before
drafting (`metrics.free`). An accepted end-of-sequence token ends its step without a bonus token.

Draft-length policies (``policy`` of the drafters) are evaluated from one replay of the longest draft.

*Confidence.* A draft stops at a token of low probability, so its length follows from the probabilities of the drafted
and the most probable tokens: teacher-forced scores give the acceptance, sampled drafts (`scoring.sample_drafts`) the
number of drafted tokens.

*Heuristic* (J. Gante, "Assisted Generation", 2023). Longer after a fully accepted draft, shorter after any other: the
length is a second state variable of the Markov chain of steps (`step_chain`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

BATCH = 4096  # tokens of a batch, padding included; small arrays stay in the CPU cache


@dataclass(frozen=True)
class StepAcceptance:
    """Acceptance of one response by a drafter and a verifier."""

    # float64 [T, G], Pr(tau >= i | output) of a step that starts at each token, see `acceptance_formulas.survival`
    survival: np.ndarray
    lengths: np.ndarray  # int64 [T], drafted tokens of that step, at most G
    # maximum length of the response, at least T; None if it was ended by an end-of-sequence token only
    limit: int | None
    # bool [T], tokens at which steps are counted, and ``tokens`` are those that these emit; None = all
    starts: np.ndarray | None = None


@dataclass(frozen=True)
class Steps:
    """Expected steps of n responses: n rows, one column for each gamma."""

    tokens: np.ndarray  # [n, gammas], response lengths (equal in all columns unless ``starts`` selects steps)
    # number of steps; ``drafted`` and accepted (``taken``) tokens, and target positions (``rows``) in them
    steps: np.ndarray
    drafted: np.ndarray
    taken: np.ndarray
    # counted, emitted: steps with enough remaining tokens for a draft of gamma, and the tokens that they emit
    counted: np.ndarray
    emitted: np.ndarray
    accepted: np.ndarray  # [n, gammas, G], sum of Pr(tau >= i) over the counted steps
    idle: np.ndarray  # counted steps without a draft

    @property
    def rows(self) -> np.ndarray:
        """Positions evaluated by the target: the drafted ones and one root per step."""
        return self.drafted + self.steps


def tau_distribution(survival: np.ndarray, gammas: Sequence[int] | np.ndarray) -> np.ndarray:
    """Pr(tau = i) for i = 0 .. G, ``[.., gammas, G + 1]``, from Pr(tau >= i), ``[.., G]`` for i = 1 .. G."""
    depth, order = survival.shape[-1], np.array(gammas)[:, None]
    at_least = np.concatenate([np.ones((*survival.shape[:-1], 1)), survival, np.zeros((*survival.shape[:-1], 1))], -1)
    i = np.arange(depth + 1)
    return (at_least[..., None, :-1] * (i <= order)) - (at_least[..., None, 1:] * (i < order))


def expected_steps(responses: Sequence[StepAcceptance], gammas: Sequence[int]) -> Steps:
    """`Steps` of the responses, in order, at each draft length in ``gammas`` (1 to G)."""
    order = sorted(range(len(responses)), key=lambda i: len(responses[i].survival))
    parts, positions, batch = [], [], []
    for i in order:
        longest = len(responses[i].survival)  # of the batch: responses are sorted by length
        if batch and (len(batch) + 1) * longest > BATCH:
            parts.append(_expected_batch([responses[j] for j in batch], gammas))
            positions += batch
            batch = []
        batch.append(i)
    if batch:
        parts.append(_expected_batch([responses[j] for j in batch], gammas))
        positions += batch
    back = np.argsort(positions)
    return Steps(*(np.concatenate([getattr(part, f.name) for part in parts])[back] for f in fields(Steps)))


def _expected_batch(responses: Sequence[StepAcceptance], gammas: Sequence[int]) -> Steps:
    gamma = np.array(gammas)
    n, depth = len(responses), responses[0].survival.shape[1]
    size = np.array([len(response.survival) for response in responses])
    limit = np.array([np.iinfo(np.int64).max if response.limit is None else response.limit for response in responses])
    longest = int(size.max())
    survival, lengths = np.zeros((n, longest, depth)), np.zeros((n, longest), dtype=np.int64)
    for row, response in enumerate(responses):
        survival[row, : size[row]], lengths[row, : size[row]] = response.survival, response.lengths
    t, i = np.arange(longest), np.arange(1, depth + 1)
    max_draft = limit[:, None] - 1 - t  # maximum draft length
    survival *= i <= np.minimum(max_draft, size[:, None] - t)[..., None]

    certain = not np.any((survival > 0) & (survival < 1))
    visited = (_visited_deterministic if certain else start_probs)(survival, gamma) * (t < size[:, None])[:, None]
    for row, response in enumerate(responses):
        if response.starts is not None:
            visited[row, :, : size[row]] *= response.starts

    counted = visited * (max_draft[:, None] >= gamma[:, None])
    bonus = i <= (size[:, None] - 1 - t)[..., None]  # an accepted last token has no bonus token
    emits = 1 + np.cumsum(survival * bonus, -1)[..., gamma - 1]  # [n, T, gammas]
    drafts = np.minimum(np.minimum(lengths, max_draft)[:, None], gamma[:, None])
    tokens = np.broadcast_to(size[:, None], (n, len(gamma))).astype(float)
    if responses[0].starts is not None:
        tokens = (visited * emits.transpose(0, 2, 1)).sum(-1)
    return Steps(
        tokens=tokens,
        steps=visited.sum(-1),
        drafted=(visited * drafts).sum(-1),
        taken=(visited @ survival * (i <= gamma[:, None])).sum(-1),
        counted=counted.sum(-1),
        emitted=(counted * emits.transpose(0, 2, 1)).sum(-1),
        accepted=counted @ survival * (i <= gamma[:, None]),
        idle=(counted * (drafts == 0)).sum(-1),
    )


def start_probs(survival: np.ndarray, gamma: np.ndarray) -> np.ndarray:
    """v, ``[n, gammas, T]``: the probability that a step starts at each token, from Pr(tau >= i) ``[n, T, G]``."""
    n, longest, depth = survival.shape
    visits = np.zeros((n, len(gamma), longest + depth + 1))  # padded past the end
    visits[:, :, 0] = 1
    chunk = max(1, BATCH // n)  # tokens per chunk: jumps has gammas x G numbers per token
    for start in range(0, longest, chunk):
        jumps = tau_distribution(survival[:, start : start + chunk], gamma)  # [n, piece, gammas, G + 1]
        for t in range(jumps.shape[1]):
            position = start + t
            visits[:, :, position + 1 : position + depth + 2] += visits[:, :, position, None] * jumps[:, t]
    return visits[:, :, :longest]


def _visited_deterministic(survival: np.ndarray, gamma: np.ndarray) -> np.ndarray:
    """`start_probs` of deterministic acceptance, as for point masses: follow all paths step by step."""
    n, longest, _ = survival.shape
    after = np.minimum(survival.sum(-1).astype(np.int64)[:, None], gamma[:, None]) + 1 + np.arange(longest)
    after = np.concatenate([np.minimum(after, longest), np.full((n, len(gamma), 1), longest)], -1)
    visits = np.zeros(after.shape)
    offsets = np.arange(n * len(gamma)) * (longest + 1)
    nodes, after, flat = offsets.copy(), after.ravel() + np.repeat(offsets, longest + 1), visits.reshape(-1)
    while (nodes < offsets + longest).any():
        flat[nodes] = 1
        nodes = after[nodes]
    return visits[:, :, :longest]


MORE, FEWER = 2, 1  # change of the draft length after a fully accepted draft, and after any other


def confident(log_q: np.ndarray, threshold: float) -> np.ndarray:
    """Draft lengths, int64 [T]: up to the first token of a probability below ``threshold``, which is kept.

    ``log_q [T, G]``: log Q of the drafted tokens; at temperature 0 the largest one, see `DraftScores.log_top`.
    """
    with np.errstate(under="ignore"):
        unsure = np.exp(log_q) < threshold
    return np.where(unsure.any(1), unsure.argmax(1) + 1, unsure.shape[1]).astype(np.int64)


def oracle(responses: Sequence[StepAcceptance], gammas: Sequence[int]) -> Steps:
    """`Steps` of drafts that contain the accepted tokens only, at most gamma: a bound on every length policy."""
    result = expected_steps(responses, gammas)
    return replace(result, drafted=result.taken)


def heuristic(responses: Sequence[StepAcceptance], gamma: int, start: int) -> Steps:
    """`Steps` under the heuristic policy, one column, of responses from a static replay of ``gamma`` tokens or more."""
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
