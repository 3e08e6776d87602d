"""Trees that are settled before anything is drawn, the same in every row: what follows from their shape alone.

A tree is given by how many children each node has, level by level: ``((4,), (2, 2, 2, 2))`` has 4 + 8 nodes, which
stand level by level, the children of one parent side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

TreeShape = tuple[tuple[int, ...], ...]
#: A node and its children; the root is -1.
Family = tuple[int, list[int]]


def tree_families(children: TreeShape) -> list[list[Family]]:
    """Per level, the nodes of the level above that have children, with these."""
    above, found, first = [-1], [], 0
    for counts in children:
        level = []
        for parent, count in zip(above, counts, strict=True):
            level.append((parent, list(range(first, first + count))))
            first += count
        found.append([family for family in level if family[1]])
        above = [node for _, nodes in level for node in nodes]
    return found


def nodes_of(children: TreeShape) -> int:
    return sum(map(sum, children))


def parents_of(children: TreeShape) -> list[int]:
    """The parent of every node, -1 = the root."""
    return [parent for level in tree_families(children) for parent, nodes in level for _ in nodes]


def _ways(children: TreeShape) -> list[list[int]]:
    """The nodes from the root's child down to the root (none), to node 0, 1, ..."""
    ways: list[list[int]] = [[]]
    for node, parent in enumerate(parents_of(children)):
        ways.append([*ways[parent + 1], node])
    return ways


def _paths(children: TreeShape) -> list[list[int]]:
    return [[*way, *[-1] * (len(children) - len(way))] for way in _ways(children)]


def _lineage(children: TreeShape) -> list[list[bool]]:
    return [[other in way for other in range(nodes_of(children))] for way in _ways(children)[1:]]


def _fed(children: TreeShape) -> list[int]:
    nodes, last = nodes_of(children), sum(children[-1]) if children else 0
    return [node if node < nodes - last else -1 for node in range(nodes)]


def _leaves_first(children: TreeShape) -> list[int]:
    below = {parent: nodes for level in tree_families(children) for parent, nodes in level}
    order: list[int] = []

    def visit(node: int) -> None:
        for child in below.get(node, []):
            visit(child)
        order.append(node)

    visit(-1)
    place = {node: i for i, node in enumerate(order)}
    return [place[node] for node in range(nodes_of(children))]


_MADE = {
    "parents": parents_of,
    "depth": lambda children: [len(way) for way in _ways(children)],
    "paths": _paths,
    "ancestor_mask": _lineage,
    "leaves first": _leaves_first,
    "fed": _fed,
}


def tree_constant(children: TreeShape, what: str, device: torch.device) -> Tensor:
    """What follows from the shape, on ``device``; copied there once.

    ``parents [N]`` int64; ``depth [N + 1]`` int64 of the root (0), node 0, ...; ``paths [N + 1, levels]`` int64, the
    nodes down to each of these, padded with -1; ``lineage [N, N]`` bool, node j is node i or one of its ancestors;
    ``leaves first [N]`` int64, each node's place in a depth-first visit that reports a node after its children; ``fed
    [N]`` int64, its number, -1 on the last level.
    """
    if torch.compiler.is_compiling():
        return torch.tensor(_MADE[what](children), device=device)
    return _kept(children, what, device)


@lru_cache(maxsize=256)
def _kept(children: TreeShape, what: str, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # a later training step may use it, too
        return torch.tensor(_MADE[what](children), device=device)


def problem(children: Sequence[Sequence[int]], nodes: int) -> str | None:
    """Why ``children`` cannot be those of a tree with so many nodes, for people; None if they can."""
    above = 1
    for level, counts in enumerate(children):
        if len(counts) != above or min(counts, default=0) < 0:
            return f"names the children of {len(counts)} nodes on level {level}, which has {above}"
        above = sum(counts)
    total = sum(map(sum, children))
    return None if total == nodes else f"has {total} nodes, but the draft {nodes}"
