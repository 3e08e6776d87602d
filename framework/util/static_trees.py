"""Static trees, fixed before drafting and equal in all rows, and the tensors that follow from their shape.

The shape is the number of children of each node, level by level: ``((4,), (2, 2, 2, 2))`` has 4 + 8 nodes. Nodes are
numbered level by level, the children of a parent adjacent.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from .tensors import on_device

TreeShape = tuple[tuple[int, ...], ...]
#: A node and its children; the root is -1.
Family = tuple[int, list[int]]


def tree_families(children: TreeShape) -> list[list[Family]]:
    """Per level, the parents on the level above, each with its children."""
    above, levels, first = [-1], [], 0
    for counts in children:
        level = []
        for parent, count in zip(above, counts, strict=True):
            level.append((parent, list(range(first, first + count))))
            first += count
        levels.append([family for family in level if family[1]])
        above = [node for _, nodes in level for node in nodes]
    return levels


def nodes_of(children: TreeShape) -> int:
    return sum(map(sum, children))


def parents_of(children: TreeShape) -> list[int]:
    """The parent of every node, -1 = the root."""
    return [parent for level in tree_families(children) for parent, nodes in level for _ in nodes]


def _paths(children: TreeShape) -> list[list[int]]:
    """The path from below the root to the root (empty), to node 0, 1, ..."""
    paths: list[list[int]] = [[]]
    for node, parent in enumerate(parents_of(children)):
        paths.append([*paths[parent + 1], node])
    return paths


def _padded_paths(children: TreeShape) -> list[list[int]]:
    return [[*path, *[-1] * (len(children) - len(path))] for path in _paths(children)]


def _ancestor_mask(children: TreeShape) -> list[list[bool]]:
    return [[other in path for other in range(nodes_of(children))] for path in _paths(children)[1:]]


def _inner_nodes(children: TreeShape) -> list[int]:
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
    rank = {node: i for i, node in enumerate(order)}
    return [rank[node] for node in range(nodes_of(children))]


_CONSTANTS = {
    "parents": parents_of,
    "depth": lambda children: [len(path) for path in _paths(children)],
    "paths": _padded_paths,
    "ancestor_mask": _ancestor_mask,
    "leaves first": _leaves_first,
    "fed": _inner_nodes,
}


def tree_constant(children: TreeShape, name: str, device: torch.device) -> Tensor:
    """A tensor that follows from the shape, cached on ``device``.

    ``parents [N]`` int64; ``depth [N + 1]`` int64 of the root (0), node 0, ...; ``paths [N + 1, levels]`` int64, the
    nodes on the path to each of these, padded with -1; ``ancestor_mask [N, N]`` bool, node j is node i or one of its
    ancestors; ``leaves first [N]`` int64, the post-order rank of each node; ``fed [N]`` int64, the index of each node,
    -1 on the last level.
    """
    if torch.compiler.is_compiling():
        return torch.tensor(_CONSTANTS[name](children), device=device)
    return _cached_constant(children, name, device)


@lru_cache(maxsize=256)
def _cached_constant(children: TreeShape, name: str, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # a training step may use it later
        return on_device(_CONSTANTS[name](children), device, None)


def problem(children: Sequence[Sequence[int]], nodes: int) -> str | None:
    """The reason why ``children`` is not the shape of a tree with ``nodes`` nodes; None if it is."""
    above = 1
    for level, counts in enumerate(children):
        if len(counts) != above or min(counts, default=0) < 0:
            return f"names the children of {len(counts)} nodes on level {level}, which has {above}"
        above = sum(counts)
    total = sum(map(sum, children))
    return None if total == nodes else f"has {total} nodes, but the draft {nodes}"
