"""Traversal verification: block verification on a tree, from the leaves to the root.

Y. Weng, Q. Hu, X. Chen, L. Liu, D. Mei, H. Qiu, J. Tian, Z. Shi, "Traversal Verification for Speculative Tree
Decoding", NeurIPS 2025.

The credit a of a node is the probability that the node, or something below it, has to be accepted given the
draft down to it; the root has a = 1. With p = P(node), for its children t_1, t_2, .. drawn from q_1, q_2, ..:

    credit of child j    a_j = min(1, a p(t_j) / q_j(t_j))
    once it has failed   S = sum_x (a p - q_j)_+,   a <- S / (S + 1 - a),   p <- norm((a p - q_j)_+)

Nodes are visited depth first, children before their parent; each is accepted with the credit left by its failed
children. The first accepted node ends the visit and Y ~ its p. Credits depend on the draft only, so they are computed
first (top down), and the coins are tossed afterwards (bottom up). With one child per node this is block verification.

Each node stores its *share* a p, and its *rest* 1 - a. A failure divides both:

    d = S + 1 - a,   a p <- (a p - q_j)_+ / d,   1 - a <- (1 - a) / d
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..framework.contracts.draft import Draft, Verdict
from ..framework.contracts.draft_kind import ANY_TREE
from ..framework.contracts.rng import StepRng, first_accepted
from ..framework.contracts.verifier import Verifier, VerifierTraits
from ..framework.util.static_trees import TreeShape, tree_constant, tree_families
from ..framework.util.tensors import columns, take_rows
from ._chain import total
from ._tree import at_token, choose, draft_probs_of, stop_at


class Traversal(Verifier):
    """Verifies whole branches bottom-up. Lossless on any tree; i.i.d. sequences are merged into distinct children."""

    name = "traversal"

    @classmethod
    def traits(cls, config: Any) -> VerifierTraits:
        return VerifierTraits(accepts=ANY_TREE)

    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        shape = ((1,),) * draft.width if draft.is_chain else draft.children
        shares, rests = self.shares_and_rests(draft, p, shape)
        order = leaves_first(draft, shape)
        visited = first_accepted(rng, (1 - rests[:, 1:]).gather(1, order))
        node = functional.pad(order, (0, 1), value=-1).gather(1, visited[:, None]).squeeze(1)
        # A leaf keeps P; so does a node without mass, which ends the visit only by rounding.
        n = shares.shape[1]
        target, weights = take_rows(p, node + 1), take_rows(shares, (node + 1).clamp(max=n - 1))
        at_end = (weights.sum(1) <= 0) | (node + 1 >= n)
        return stop_at(draft, node, rng.draw(choose(at_end, target, weights)))

    def shares_and_rests(self, draft: Draft, p: Tensor, shape: TreeShape | None) -> tuple[Tensor, Tensor]:
        """Shares ``[B, n, V]`` of the root and the first nodes, at least all with children; rests ``[B, N + 1]``."""
        return node_by_node(draft, p) if shape is None else level_by_level(draft, p, shape)


def level_by_level(draft: Draft, p: Tensor, shape: TreeShape) -> tuple[Tensor, Tensor]:
    """Shares ``[B, M + 1, V]`` of the root and the M nodes before the last level, rests ``[B, N + 1]`` of all nodes.

    Children of different parents are verified in parallel, siblings one after the other.
    """
    branches = _BranchVerifier(draft, p)
    shares = {node: p[:, node + 1] for node in range(-1, sum(map(sum, shape[:-1])))}
    rests = {-1: torch.zeros(draft.batch_size, dtype=torch.float64, device=p.device)}
    for level in tree_families(shape):
        level.sort(key=lambda family: -len(family[1]))  # parents with more children first
        parents = [parent for parent, _ in level]
        rest = torch.stack([rests[parent] for parent in parents], 1)
        share = columns(p, [parent + 1 for parent in parents]) * (1 - rest)[..., None].to(p.dtype)
        for rank in range(len(level[0][1])):
            nodes = [children[rank] for _, children in level if rank < len(children)]
            credit, share, rest = branches(nodes, share[:, : len(nodes)], rest[:, : len(nodes)])
            uncredited = 1 - credit
            for i, (node, parent) in enumerate(zip(nodes, parents, strict=False)):
                rests[node], rests[parent], shares[parent] = uncredited[:, i], rest[:, i], share[:, i]
    in_order = [rests[node] for node in range(-1, draft.width)]
    return torch.stack(list(shares.values()), 1), torch.stack(in_order, 1)


def node_by_node(draft: Draft, p: Tensor) -> tuple[Tensor, Tensor]:
    """`level_by_level` for a tree whose shape the host does not know; shares ``[B, N + 1, V]`` of all nodes."""
    branches, rows = _BranchVerifier(draft, p), torch.arange(draft.batch_size, device=p.device)[:, None]
    shares, rests = p.clone(), torch.zeros(p.shape[:2], dtype=torch.float64, device=p.device)
    for node in range(draft.width):
        parent = draft.parents[:, node : node + 1] + 1
        credit, share, rest = branches([node], take_rows(shares, parent), rests.gather(1, parent))
        shares[rows, parent] = share
        shares[:, node + 1] *= credit.to(p.dtype)
        rests.scatter_(1, parent, rest)
        rests[:, node + 1 : node + 2] = 1 - credit
    return shares, rests


class _BranchVerifier:
    """Verification of ``nodes``, one child of each of n parents.

    Returns their credits, and the parents' shares and rests if they fail.
    """

    def __init__(self, draft: Draft, p: Tensor):
        self._draft, self._off = draft, ~draft.valid
        self._on = draft.valid.to(p.dtype)[..., None]

    def __call__(self, nodes: Sequence[int], share: Tensor, rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``share [B, n, V]`` and ``rest [B, n]`` float64 of the parents; invalid nodes change nothing."""
        token, off = columns(self._draft.tokens, nodes), columns(self._off, nodes)
        q = draft_probs_of(self._draft, nodes, share)
        credit = (at_token(share, token) / at_token(q, token)).clamp_(max=1).masked_fill_(off, 0.0)
        left = torch.addcmul(share, q, columns(self._on, nodes), value=-1).clamp_(min=0)
        # The mass is 0 if the draft cannot fail.
        mass = (total(left) + rest).masked_fill_(off, 1.0).clamp_(min=torch.finfo(left.dtype).tiny)
        return credit, left.div_(mass[..., None].to(left.dtype)), rest / mass


def leaves_first(draft: Draft, shape: TreeShape | None) -> Tensor:
    """``[B, N]`` int64: the nodes in depth-first postorder, children before their parent."""
    if not draft.width:
        return draft.tokens
    if shape is not None:
        left = tree_constant(shape, "leaves first", draft.tokens.device)
    else:
        size = draft.ancestor_mask.sum(1)  # nodes of each subtree
        before = 1 + (draft.earlier_siblings * size[:, None]).sum(2)  # itself and the subtrees of its earlier siblings
        entered = (draft.ancestor_mask * before[:, None]).sum(2)  # position in preorder, from 1
        left = entered - draft.depth + size
    return torch.add(left, ~draft.valid, alpha=2 * draft.width).argsort(1)
