"""From the occurrences of a context to a draft: the most frequent paths, and their scores."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from . import compiled
from .history import END, History


@dataclass(frozen=True)
class Speculation:
    """A draft of the maximum length for its match.

    Attributes:
        tokens: in descending order of probability; a chain in its own order.
        parents: index of each token's parent, -1 = the root.
        score: sum of the estimated probabilities: the expected number of accepted tokens.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    score: float = 0.0

    def cut(self, nodes: int, levels: int) -> Speculation:
        """Return the first ``nodes`` tokens within the first ``levels`` levels."""
        tokens, parents, depth, new = [], [], [], {-1: -1}
        for i, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            level = depth[parent] + 1 if parent >= 0 else 1
            depth.append(level)
            if level <= levels and len(tokens) < nodes:
                new[i] = len(tokens)
                tokens.append(token)
                parents.append(new[parent])
        return Speculation(tokens, parents, self.score)


def speculate(
    histories: Sequence[History], tail: Sequence[int], factor: float, min_prob: float, tree: bool
) -> Speculation:
    """Return the best draft after ``tail`` over all matches in all histories.

    A match of m tokens gives a draft of at most ``factor`` * m tokens. Ties go to the first history, then to the
    longest match (G. Oliaro et al., SuffixDecoding, section 3).
    """
    if not tree:
        return _chain(histories, tail, factor, min_prob)
    best = Speculation()
    for history in histories:
        for chain in history.chains(tail):
            # Probabilities are at most 1, so a budget up to the best score cannot win.
            if (longest := int(factor * chain.maximum)) <= best.score:
                break
            lengths, continuations = history.matches(chain, tail, longest)
            rows = continuations.tolist()
            for length in sorted(set(lengths), reverse=True):
                if (budget := int(factor * length)) <= best.score:
                    break
                draft = _tree([row for row, n in zip(rows, lengths, strict=True) if n >= length], budget, min_prob)
                if draft.score > best.score:
                    best = draft
    return best


def _chain(histories: Sequence[History], tail: Sequence[int], factor: float, min_prob: float) -> Speculation:
    """Best chain over all matches in all histories."""
    text, score, tokens = np.asarray(tail, dtype=np.int64), 0.0, []
    for history in histories:
        best = np.empty(int(factor * history.depth) + 1, dtype=np.int64)
        n, score = compiled.chain(
            history.links, text, len(text), history.depth, history.occurrences, factor, min_prob, score, best
        )
        tokens = best[:n].tolist() if n else tokens
    return Speculation(tokens, list(range(-1, len(tokens) - 1)), score)


def _tree(rows: list[list[int]], budget: int, min_prob: float) -> Speculation:
    """Select the most probable nodes one after the other; ties go to the one found first."""
    tokens: list[int] = []
    parents: list[int] = []
    score, order = 0.0, count()
    frontier: list[tuple[float, int, int, int, int, list[list[int]]]] = []

    def children(parent: int, level: int, probability: float, rows: list[list[int]]) -> None:
        for token, group in _groups(rows, level).items():
            joint = probability * len(group) / len(rows)
            if joint >= min_prob:
                heapq.heappush(frontier, (-joint, next(order), parent, token, level, group))

    children(-1, 0, 1.0, rows)
    while frontier and len(tokens) < budget:
        negative, _, parent, token, level, group = heapq.heappop(frontier)
        tokens.append(token)
        parents.append(parent)
        score -= negative
        if level + 1 < len(group[0]):
            children(len(tokens) - 1, level + 1, -negative, group)
    return Speculation(tokens, parents, score)


def _groups(rows: list[list[int]], index: int) -> dict[int, list[list[int]]]:
    """Group rows by their token at ``index``, without rows that have ended."""
    groups: dict[int, list[list[int]]] = {}
    for row in rows:
        if row[index] != END:
            groups.setdefault(row[index], []).append(row)
    return groups
