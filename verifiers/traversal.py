"""Traversal verification: block verification on a tree, from the leaves to the root.

Y. Weng, Q. Hu, X. Chen, L. Liu, D. Mei, H. Qiu, J. Tian, Z. Shi, "Traversal Verification for Speculative Tree
Decoding", NeurIPS 2025.

The credit a of a node is the probability that the node, or something below it, has to be accepted given the
draft down to it; the root has a = 1. With p = P(node), for its children t_1, t_2, .. drawn from q_1, q_2, ..:

    credit of child j    a_j = min(1, a p(t_j) / q_j(t_j))
    once it has failed   S = sum_x (a p - q_j)_+,   a <- S / (S + 1 - a),   p <- norm((a p - q_j)_+)

Nodes are visited depth first, children before their parent; each is accepted with the credit that its failed
children left it. The first one accepted ends the visit and Y ~ its p. All credits depend on the draft alone,
so they are computed first (top down), and the coins are tossed afterwards (bottom up). One child per node is
block verification.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..framework.contracts.draft import Draft, Verdict, take_rows
from ..framework.contracts.rng import RoundRng
from ..framework.contracts.verifier import Verifier, VerifierTraits
from ._tree_rules import Children, choose, ratio, residual, stop_at


class Traversal(Verifier):
    """Judges whole branches. Lossless on any tree; i.i.d. sequences are merged into distinct children."""

    name = "traversal"

    @classmethod
    def traits(cls, config: Any) -> VerifierTraits:
        return VerifierTraits(drawn=frozenset({"chain", "iid", "without_replacement", "greedy_draft", "deterministic"}))

    def verify(self, draft: Draft, p: Tensor, rng: RoundRng) -> Verdict:
        children = Children(draft)
        rows = torch.arange(draft.batch_size, device=p.device)
        law = p.clone()  # of every node, index node + 1
        credit = torch.ones(draft.batch_size, draft.width + 1, dtype=torch.float64, device=p.device)
        for j in range(len(children)):
            parent, valid = children.parent[:, j] + 1, children.valid[:, j]
            a, before = credit[rows, parent], take_rows(law, parent)
            q = children.law(j, before)
            credit[:, j + 1] = torch.where(valid, (a * ratio(before, q, children.token[:, j])).clamp(max=1), 0.0)
            after, s = residual(before, q, a)
            left = s + (1 - a)
            updated = torch.where(left > 0, s / left, 1.0)
            credit[rows, parent] = torch.where(valid, updated, a)
            law[rows, parent] = choose(valid, after, before)
        at, searching = torch.full_like(rows, -1), torch.ones_like(rows, dtype=torch.bool)
        for step, node in enumerate(self.leaves_first(draft).unbind(1)):
            h = torch.where(searching, credit[rows, node + 1], 0.0)
            accepted = rng.accept(h[:, None], index=step).squeeze(1)
            at = torch.where(accepted, node, at)
            searching = searching & ~accepted
        return stop_at(draft, at, rng.draw(take_rows(law, at + 1)))

    @staticmethod
    def leaves_first(draft: Draft) -> Tensor:
        """``[B, N]`` int64: the nodes in the order of a depth-first visit that reports a node after its children."""
        if not draft.width:
            return draft.tokens
        size = draft.lineage.sum(1)  # nodes of each subtree
        before = 1 + (draft.elder * size[:, None]).sum(2)  # itself and the subtrees of its elder siblings
        entered = (draft.lineage * before[:, None]).sum(2)  # position at which the visit enters it, from 1
        left = entered - draft.depth + size
        return torch.where(draft.valid, left, left + 2 * draft.width).argsort(1)
