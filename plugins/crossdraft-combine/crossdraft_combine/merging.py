"""Several trees of one slot as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Merged:
    """A tree, and where the nodes of each tree that it was made of are.

    Attributes:
        tokens, parents: of its nodes, parents first, -1 = the root.
        places: ``places[i][j]``: the place of node j of tree i, -1 = it is not there.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    places: list[list[int]] = field(default_factory=list)


def merged(trees: Sequence[Sequence[tuple[int, int]]], most: int) -> Merged:
    """Merge trees: nodes with the same tokens from the root on are one. They take turns, a node each.

    Args:
        trees: token and parent of each node, parents first; token -1 = there is no such node.
        most: nodes of the result. What is there already costs none.
    """
    found = Merged(places=[[-1] * len(tree) for tree in trees])
    known: dict[tuple[int, int], int] = {}
    for turn in range(max(map(len, trees), default=0)):
        for tree, places in zip(trees, found.places, strict=True):
            if turn >= len(tree):
                continue
            token, parent = tree[turn]
            above = places[parent] if parent >= 0 else -1
            if token < 0 or (parent >= 0 and above < 0):
                continue
            if (above, token) not in known:
                if len(found.tokens) == most:
                    continue
                known[above, token] = len(found.tokens)
                found.tokens.append(token)
                found.parents.append(above)
            places[turn] = known[above, token]
    return found
