"""The optimal verifier for greedy drafts: the K - 1 most probable children, and one drawn from the rest.

Z. Hu, T. Zheng, V. Viswanathan, Z. Chen, R. A. Rossi, Y. Wu, D. Manocha, H. Huang, "Towards Optimal Multi-draft
Speculative Decoding", ICLR 2025, section 5 (greedy draft sampling).

The drawn child x ~ q (the draft distribution without the others, renormalised) is verified first, as a single draft:
accepted with probability min(1, P(x) / q(x)), else Y ~ norm((P - q)_+); if Y is one of the other children, verification
continues there. This is multi-step sampling with the drawn child before its earlier siblings, and it attains the
optimal-transport bound P(top) + sum_{others} min(P, q) at every node.
"""

from __future__ import annotations

from typing import Any

from ..framework.contracts.draft_kind import ONE_SAMPLED_SIBLING
from ..framework.contracts.verifier import VerifierTraits
from .specinfer import SpecInfer


class GreedyDraftOptimal(SpecInfer):
    """Tries the drawn child first. Lossless; optimal node by node for greedy drafts (K = 1: a chain)."""

    name = "greedy-draft-optimal"

    @classmethod
    def traits(cls, config: Any) -> VerifierTraits:
        return VerifierTraits(accepts=frozenset({ONE_SAMPLED_SIBLING}))

    last_sibling_first = True
