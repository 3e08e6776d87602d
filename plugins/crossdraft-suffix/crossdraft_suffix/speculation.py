"""From the occurrences of a context to a draft: the paths that were followed most often, and what they promise."""

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
    """A draft, as long as its match allows.

    Attributes:
        tokens: in the order in which they are worth having; in a chain one after the other.
        parents: the place of each token's parent, -1 = the root.
        score: the sum of their probabilities, as counts estimate them: how many tokens will be accepted.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    score: float = 0.0

    def cut(self, nodes: int, levels: int) -> Speculation:
        """The first ``nodes`` of its tokens that are no deeper than ``levels``."""
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
    """The best draft after ``tail`` that any match in any of some histories gives.

    A match of m tokens gives a draft of at most ``factor`` * m. Of equally good ones the first history's is taken,
    then that of the longest match (G. Oliaro et al., SuffixDecoding, section 3).
    """
    if not tree:
        return _chain(histories, tail, factor, min_prob)
    best = Speculation()
    for history in histories:
        for chain in history.chains(tail):
            # No probability is more than 1, so a budget that is no more than the best score cannot win.
            if (longest := int(factor * chain.most)) <= best.score:
                break
            lengths, follows = history.matches(chain, tail, longest)
            rows = follows.tolist()
            for length in sorted(set(lengths), reverse=True):
                if (budget := int(factor * length)) <= best.score:
                    break
                found = _tree([row for row, n in zip(rows, lengths, strict=True) if n >= length], budget, min_prob)
                if found.score > best.score:
                    best = found
    return best


def _chain(histories: Sequence[History], tail: Sequence[int], factor: float, min_prob: float) -> Speculation:
    """The best path along the most frequent continuations."""
    text, score, tokens = np.asarray(tail, dtype=np.int64), 0.0, []
    for one in histories:
        best = np.empty(int(factor * one.depth) + 1, dtype=np.int64)
        n, score = compiled.chain(one.links, text, len(text), one.depth, one.occurrences, factor, min_prob, score, best)
        tokens = best[:n].tolist() if n else tokens
    return Speculation(tokens, list(range(-1, len(tokens) - 1)), score)


def _tree(rows: list[list[int]], budget: int, min_prob: float) -> Speculation:
    """The most probable node that is left, time and again; of equals the one that was found first."""
    tokens: list[int] = []
    parents: list[int] = []
    score, order = 0.0, count()
    waiting: list[tuple[float, int, int, int, int, list[list[int]]]] = []

    def children(parent: int, level: int, probability: float, rows: list[list[int]]) -> None:
        for token, mine in _groups(rows, level).items():
            one = probability * len(mine) / len(rows)
            if one >= min_prob:
                heapq.heappush(waiting, (-one, next(order), parent, token, level, mine))

    children(-1, 0, 1.0, rows)
    while waiting and len(tokens) < budget:
        negative, _, parent, token, level, mine = heapq.heappop(waiting)
        tokens.append(token)
        parents.append(parent)
        score -= negative
        if level + 1 < len(mine[0]):
            children(len(tokens) - 1, level + 1, -negative, mine)
    return Speculation(tokens, parents, score)


def _groups(rows: list[list[int]], at: int) -> dict[int, list[list[int]]]:
    """Rows by their token at a place, those that have ended apart."""
    groups: dict[int, list[list[int]]] = {}
    for row in rows:
        if row[at] != END:
            groups.setdefault(row[at], []).append(row)
    return groups
