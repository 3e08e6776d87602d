"""Sequoia's optimal static tree for a number of nodes.

Z. Chen, A. May, R. Svirschevski, Y. Huang, M. Ryabinin, Z. Jia, B. Chen, "Sequoia: Scalable, Robust, and Hardware-aware
Speculative Decoding", 2024. The acceptance vector holds the probability that the verifier accepts the first child of
an accepted node, the second, and so on, for any node. A node is then accepted with the product of these numbers on its
path, and the expected number of accepted tokens is the sum over all nodes.

The paper finds the tree by dynamic programming over nodes and depth. If the vector does not increase, which is required
here, a node has at most the value of its parent and of its earlier siblings, so the most valuable nodes already form
a tree, and greedy selection finds it (the tests compare it with dynamic programming and with enumeration).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from ...framework.util.limits import MOST_SIBLINGS
from .trees import Choices, best_paths, check_most


def check_acceptance(acceptance: Sequence[float]) -> None:
    """Raise ValueError unless the numbers are in [0, 1], do not increase and sum to at most 1."""
    check_most(MOST_SIBLINGS, len(acceptance), "numbers of acceptance, one a sibling")
    for rank, number in enumerate(acceptance, 1):
        if not 0 <= number <= 1:
            raise ValueError(f"acceptance of sibling {rank} is {number:g}; write a probability from 0 to 1")
        if rank > 1 and number > acceptance[rank - 2]:
            raise ValueError(
                f"acceptance rises from {acceptance[rank - 2]:g} to {number:g} at sibling {rank}; a later sibling is "
                "tried only if the earlier ones were rejected: measure on more prompts, or write their mean for both"
            )
    if (total := math.fsum(acceptance)) > 1 + 1e-9:
        raise ValueError(
            f"acceptance sums to {total:g}; at most one child of a node is accepted, so the sum is at most 1 "
            "(write how often each sibling is the accepted one, not how often it is after earlier ones were rejected)"
        )
    if not any(acceptance):
        raise ValueError("acceptance is 0 for all siblings; write at least one number above 0")


@lru_cache(maxsize=64)
def best_tree(acceptance: tuple[float, ...], nodes: int, depth: int) -> tuple[Choices, float]:
    """Return the tree with the most expected accepted tokens for a number of ``nodes`` and a maximum ``depth``.

    Args:
        acceptance: for each child of an accepted node, the probability that it is the accepted one.

    Returns:
        the nodes as lists of sibling ranks (see `TreeTemplate.choices`), and the expected number of accepted tokens.

    Raises:
        ValueError: acceptance is not valid, or no tree has that many nodes.
    """
    check_acceptance(acceptance)
    acceptance = tuple(number for number in acceptance if number)
    capacity = 0
    for level in range(1, depth + 1):
        capacity += len(acceptance) ** level
        if capacity >= nodes:
            break
    else:
        raise ValueError(
            f"depth {depth} and {len(acceptance)} siblings of acceptance above 0 give {capacity} nodes, not {nodes}"
        )
    choices = best_paths([acceptance] * depth, nodes)
    return choices, math.fsum(math.prod(acceptance[rank] for rank in path) for path in choices)
