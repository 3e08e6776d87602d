"""Greedy verification at temperature 0: keep drafted tokens while they are the target's argmax.

M. Stern, N. Shazeer, J. Uszkoreit, "Blockwise Parallel Decoding for Deep Autoregressive Models", NeurIPS 2018,
section 3. On a tree: descend while a child has the argmax token of its parent; the bonus token is the argmax of
the last node. Deterministic, so no residual is drawn.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..framework.contracts.draft import Draft, Verdict
from ..framework.contracts.draft_kind import ANY_TREE
from ..framework.contracts.rng import StepRng
from ..framework.contracts.verifier import Verifier, VerifierTraits


class Greedy(Verifier):
    """Exact match with the target's argmax. Lossless at temperature 0; any draft."""

    name = "greedy"

    @classmethod
    def traits(cls, config: Any) -> VerifierTraits:
        return VerifierTraits(accepts=ANY_TREE, temperature_zero_only=True, shortenable=True)

    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        best = p.argmax(-1)
        if not draft.width:
            return Verdict(torch.zeros_like(best[:, 0]), best[:, 0])
        matches = (draft.tokens == best.gather(1, draft.parents + 1)) & draft.valid
        if draft.is_chain:
            tau = matches.long().cumprod(1).sum(1)
            return Verdict(tau, best.gather(1, tau[:, None]).squeeze(1))
        reached = ~(draft.ancestor_mask & ~matches[:, None]).any(-1)
        tau, node = torch.where(reached, draft.depth, 0).max(1)
        node = torch.where(tau > 0, node, -1)
        return Verdict(tau, best.gather(1, node[:, None] + 1).squeeze(1), path=draft.path_to(node))
