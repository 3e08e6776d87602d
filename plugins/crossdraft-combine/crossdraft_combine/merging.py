"""Merging the trees of one slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class MergedTree:
    """A merged tree, with the positions of the nodes of each source tree.

    Attributes:
        tokens, parents: of its nodes, parents first, -1 = the root.
        indices: ``indices[i][j]``: index of node j of tree i, -1 = dropped.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    indices: list[list[int]] = field(default_factory=list)


def merge_trees(trees: Sequence[Sequence[tuple[int, int]]], maximum: int) -> MergedTree:
    """Merge trees round-robin, one node each; nodes with the same path of tokens are one.

    Args:
        trees: token and parent of each node, parents first; token -1 = invalid node.
        maximum: maximum number of nodes of the result.
    """
    result = MergedTree(indices=[[-1] * len(tree) for tree in trees])
    nodes: dict[tuple[int, int], int] = {}
    for turn in range(max(map(len, trees), default=0)):
        for tree, indices in zip(trees, result.indices, strict=True):
            if turn >= len(tree):
                continue
            token, parent = tree[turn]
            merged_parent = indices[parent] if parent >= 0 else -1
            if token < 0 or (parent >= 0 and merged_parent < 0):
                continue
            if (merged_parent, token) not in nodes:
                if len(result.tokens) == maximum:
                    continue
                nodes[merged_parent, token] = len(result.tokens)
                result.tokens.append(token)
                result.parents.append(merged_parent)
            indices[turn] = nodes[merged_parent, token]
    return result
