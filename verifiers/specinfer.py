"""Multi-step speculative sampling (recursive rejection sampling) on a token tree.

X. Miao et al., "SpecInfer: Accelerating Generative LLM Serving with Tree-based Speculative Inference and
Verification", ASPLOS 2024, Algorithm 2; without replacement: W. Jeon et al., "Recursive Speculative Decoding",
2024, and Z. Chen et al., "Sequoia", 2024.

At a node whose children t_1, t_2, .. were drawn from q_1, q_2, .. (each given its elder siblings):

    p_1 = P(node),  accept t_j with probability min(1, p_j(t_j) / q_j(t_j)) and go on there,
    else p_{j+1} = norm((p_j - q_j)_+);  if all children are rejected (or there is none) Y ~ p_{k+1}.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from ..framework.contracts.draft import Draft, Verdict, take_rows
from ..framework.contracts.draft_kind import ANY_TREE
from ..framework.contracts.rng import StepRng
from ..framework.contracts.verifier import Verifier, VerifierTraits
from ._tree_rules import Children, choose, none, ratio, residual, stop_at


class SpecInfer(Verifier):
    """Tries the children one after the other. Lossless on any tree; i.i.d. sequences keep their multiplicity."""

    name = "specinfer"

    @classmethod
    def traits(cls, config: Any) -> VerifierTraits:
        return VerifierTraits(accepts=ANY_TREE)

    youngest_first: ClassVar[bool] = False

    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        children = Children(draft, with_copies=True, youngest_first=self.youngest_first)
        rows = torch.arange(draft.batch_size, device=p.device)
        at, law = torch.full_like(rows, -1), p[:, 0]
        for j in range(len(children)):
            examined = children.valid[:, j] & (children.parent[:, j] == at)
            if none(examined):
                continue
            q = children.q(j, law)
            h = torch.where(examined, ratio(law, q, children.token[:, j]).clamp(max=1), 0.0)
            accepted = rng.accept(h[:, None], index=j).squeeze(1)
            at = torch.where(accepted, children.node[:, j], at)
            law = choose(examined & ~accepted, residual(law, q)[0], law)
            law = choose(accepted, take_rows(p, at + 1), law)
        return stop_at(draft, at, rng.draw(law))
