"""The best tree of a fixed shape for its number of nodes: Sequoia's.

Z. Chen, A. May, R. Svirschevski, Y. Huang, M. Ryabinin, Z. Jia, B. Chen, "Sequoia: Scalable, Robust, and Hardware-aware
Speculative Decoding", 2024. What is known is the acceptance vector: how probably the rule accepts
the first child of a node that it accepted, the second, and so on, wherever the node is. A node is then accepted with
the product of these numbers along its path, and a draft has as many accepted tokens as the sum over its nodes says.

The paper finds the tree by a dynamic programme over nodes and depth. Where the vector does not rise, which is asked
for here, a node is never worth more than its parent or its elder sibling: the nodes that are worth most already form a
tree, the programme's, and taking them one after the other finds it (the tests hold it against both).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from heapq import heappop, heappush

from ...framework.util.limits import MOST_SIBLINGS
from .trees import Choices, check_most


def check_acceptance(acceptance: Sequence[float]) -> None:
    """Raise ValueError for what is no acceptance vector: numbers from 0 to 1 that do not rise, with a sum up to 1."""
    check_most(MOST_SIBLINGS, len(acceptance), "numbers of acceptance, one a sibling")
    for rank, number in enumerate(acceptance, 1):
        if not 0 <= number <= 1:
            raise ValueError(f"acceptance of sibling {rank} is {number:g}; write a probability from 0 to 1")
        if rank > 1 and number > acceptance[rank - 2]:
            raise ValueError(
                f"acceptance rises from {acceptance[rank - 2]:g} to {number:g} at sibling {rank}; a later sibling is "
                "judged only where the elder ones were rejected: measure on more prompts, or write their mean for both"
            )
    if (total := math.fsum(acceptance)) > 1 + 1e-9:
        raise ValueError(
            f"acceptance sums to {total:g}; one child of a node is accepted at most, so the sum is at most 1 "
            "(write how often each sibling is the accepted one, not how often it is once the elder ones were rejected)"
        )
    if not any(acceptance):
        raise ValueError("acceptance names no sibling that is ever accepted; write at least one number above 0")


@lru_cache(maxsize=64)
def best_tree(acceptance: tuple[float, ...], nodes: int, depth: int) -> tuple[Choices, float]:
    """The tree with the most accepted tokens on average, of those with so many nodes and levels.

    Args:
        acceptance: how often the first child of an accepted node is the one that is accepted, the second, ...

    Returns:
        its nodes as lists of sibling ranks (see `Shape.choices`), and the expected number of accepted tokens.

    Raises:
        ValueError: no acceptance vector, or there is no tree of so many nodes.
    """
    check_acceptance(acceptance)
    acceptance = tuple(number for number in acceptance if number)
    most = 0
    for level in range(1, depth + 1):
        most += len(acceptance) ** level
        if most >= nodes:
            break
    else:
        raise ValueError(
            f"depth {depth} and {len(acceptance)} siblings with an acceptance above 0 give {most} nodes, not {nodes}"
        )
    # Nodes whose parent and elder sibling are taken; the first is worth most, and of equals it is the highest.
    edge: list[tuple[float, int, tuple[int, ...], float]] = [(-acceptance[0], 1, (0,), 1.0)]
    found: list[tuple[int, ...]] = []
    values: list[float] = []
    while len(found) < nodes:
        minus, level, path, parent = heappop(edge)
        found.append(path)
        values.append(-minus)
        if level < depth:
            heappush(edge, (minus * acceptance[0], level + 1, (*path, 0), -minus))
        if path[-1] + 1 < len(acceptance):
            younger = path[-1] + 1
            heappush(edge, (-parent * acceptance[younger], level, (*path[:-1], younger), parent))
    return tuple(found), math.fsum(values)
