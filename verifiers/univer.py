"""UniVer: conditional optimal transport on a tree of greedy drafts, composed from the root to the leaves.

Y. Weng, Q. Hu, T. Yairi, "UniVer: A Unified Perspective for Multi-step and Multi-draft Speculative Decoding", 2026.

The credit a of a node is the probability that the node, or something below it, has to be accepted; the root has a = 1.
The children of a node with the distribution P are the most probable tokens u_1, .., u_{m-1} and u_m, drawn from the
rest, q. The transport between aP and q divides the probability among them:

    Z = 1 - a + sum_x (a P(x) - q(x))_+          (the probability that u_m is not accepted by its transport)
    p(u_m) = min(1, a P(u_m) / q(u_m)),   p(u_k) = (1 - p(u_m)) (a P(u_k) - q(u_k))_+ / Z

and the credit of each child is its share, given that its earlier siblings fail: p(u_j) / (1 - sum_{i<j} p(u_i)). Nodes
are visited as in traversal verification, children before their parent. If all children of a node fail, it fails with
probability (1 - a) / (1 - a + S), S = sum_x (a P - q)_+(x) over the tokens that are not children, and otherwise
emits Y ~ norm((a P - q)_+) among those.

At every node the children together get all of the mass that the optimal transport of Hu et al. (2025) gives them. With
one child per node this is block verification.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..framework.contracts.draft import Draft
from ..framework.contracts.draft_kind import ONE_SAMPLED_SIBLING
from ..framework.contracts.verifier import VerifierTraits
from ..framework.util.static_trees import TreeShape
from ..framework.util.tensors import counting
from ._chain import total
from ._tree import at_token
from .traversal import Traversal


class UniVer(Traversal):
    """Divides each node's credit among its children at once. Lossless; greedy drafts (one child: `block`)."""

    name = "univer"

    @classmethod
    def traits(cls, config: Any) -> VerifierTraits:
        return VerifierTraits(accepts=frozenset({ONE_SAMPLED_SIBLING}))

    def shares_and_rests(self, draft: Draft, p: Tensor, shape: TreeShape | None) -> tuple[Tensor, Tensor]:
        if not draft.width:
            return super().shares_and_rests(draft, p, shape)
        number = counting(draft.width, p.device)
        credits = torch.zeros(p.shape[:2], dtype=torch.float64, device=p.device)
        credits[:, 0] = 1
        shares, rests = [], 1 - credits
        inner = draft.width if shape is None else sum(map(sum, shape[:-1]))
        for node in range(-1, inner):
            children = draft.valid & (draft.parents == node)
            parent, drawn = children.any(1), torch.where(children, number, 0).amax(1)
            credit = credits[:, node + 1]
            share = p[:, node + 1] * credit[:, None].to(p.dtype)
            q = draft.q_of(drawn, share) * parent[:, None].to(p.dtype)
            token = draft.tokens.gather(1, drawn[:, None]).squeeze(1)
            first = torch.where(parent, at_token(share, token) / at_token(q, token), 0.0).clamp(max=1)
            left = (share - q).clamp_(min=0)
            others = children & (number != drawn[:, None])
            mass = (total(left) + 1 - credit).clamp(min=torch.finfo(p.dtype).tiny)
            divided = left.gather(1, draft.tokens).double() * ((1 - first) / mass)[:, None]
            divided = torch.where(others, divided, 0.0).scatter_add(1, drawn[:, None], first[:, None])
            before = divided.cumsum(1) - divided
            given_failures = (divided / (1 - before)).nan_to_num(0.0, posinf=1.0).clamp(0, 1)
            credits[:, 1:] = torch.where(children, given_failures, credits[:, 1:])
            taken = torch.zeros_like(left).scatter_add_(1, draft.tokens, others.to(p.dtype))
            left = left * (1 - taken)
            rest = (1 - credit) / (total(left) + 1 - credit).clamp(min=torch.finfo(p.dtype).tiny)
            shares.append(left)
            rests[:, node + 1] = torch.where(parent, rest, 1 - credit)
        if inner < draft.width:
            rests[:, inner + 1 :] = 1 - credits[:, inner + 1 :]
        return torch.stack(shares, 1), rests
