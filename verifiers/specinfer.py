"""Multi-step speculative sampling (recursive rejection sampling) on a token tree.

X. Miao et al., "SpecInfer: Accelerating Generative LLM Serving with Tree-based Speculative Inference and
Verification", ASPLOS 2024, Algorithm 2; without replacement: W. Jeon et al., "Recursive Speculative Decoding",
2024, and Z. Chen et al., "Sequoia", 2024.

At a node whose children t_1, t_2, .. were drawn from q_1, q_2, .. (each given its earlier siblings):

    p_1 = P(node),  accept t_j with probability min(1, p_j(t_j) / q_j(t_j)) and go on there,
    else p_{j+1} = norm((p_j - q_j)_+);  if all children are rejected, or at a leaf, Y ~ p_{k+1}.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from ..framework.contracts.draft import Draft, Verdict, take_rows
from ..framework.contracts.draft_kind import ANY_TREE
from ..framework.contracts.rng import StepRng
from ..framework.contracts.verifier import Verifier, VerifierTraits
from ._tree import Children, choose, is_empty, likelihood_ratio, residual, stop_at


class SpecInfer(Verifier):
    """Tries children one after the other. Lossless on any tree; equal tokens of i.i.d. sequences count separately."""

    name = "specinfer"

    @classmethod
    def traits(cls, config: Any) -> VerifierTraits:
        return VerifierTraits(accepts=ANY_TREE, shortenable=True)

    last_sibling_first: ClassVar[bool] = False

    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        children = Children(draft, with_copies=True, last_sibling_first=self.last_sibling_first)
        rows = torch.arange(draft.batch_size, device=p.device)
        node, target = torch.full_like(rows, -1), p[:, 0]
        for j in range(len(children)):
            examined = children.valid[:, j] & (children.parent[:, j] == node)
            if is_empty(examined):
                continue
            q = children.q(j, target)
            h = torch.where(examined, likelihood_ratio(target, q, children.token[:, j]).clamp(max=1), 0.0)
            accepted = rng.accept(h[:, None], index=j).squeeze(1)
            node = torch.where(accepted, children.node[:, j], node)
            target = choose(examined & ~accepted, residual(target, q)[0], target)
            target = choose(accepted, take_rows(p, node + 1), target)
        return stop_at(draft, node, rng.draw(target))
