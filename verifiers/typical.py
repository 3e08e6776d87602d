"""Typical acceptance: accept tokens that are probable enough under the target. Lossy.

T. Cai, Y. Li, Z. Geng, H. Peng, J. D. Lee, D. Chen, T. Dao, "Medusa: Simple LLM Inference Acceleration Framework
with Multiple Decoding Heads", ICML 2024 (typical acceptance). With the entropy H(P) = -sum_x P(x) ln P(x) in nats:

    accept x  iff  P(x) > min(epsilon, delta exp(-H(P)))

The deepest path of accepted tokens is kept; ties go to the larger sum of ln P(x). The next token is drawn from P
restricted to tokens that pass the same test. q is not used, so any draft is supported. At temperature 0 (P one-hot)
only the argmax passes: exact greedy matching.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from ..framework.contracts.draft import Draft, Verdict
from ..framework.contracts.draft_kind import ANY_TREE
from ..framework.contracts.drafter import StrategyConfig
from ..framework.contracts.rng import StepRng
from ..framework.contracts.verifier import Verifier, VerifierTraits
from ._tree import stop_at


class Typical(Verifier):
    """Accepts tokens above an entropy-dependent threshold. Lossy; any draft."""

    name = "typical"

    class Config(StrategyConfig):
        epsilon: float = Field(0.09, gt=0, le=1, description="a token with more than this probability is accepted")
        # Below 1, because exp(-H(P)) <= max P: the most probable token always passes.
        delta: float = Field(
            0.3, gt=0, lt=1, description="a token with more than this share of exp(-entropy) is accepted"
        )

    config: Config

    @classmethod
    def traits(cls, config: Any) -> VerifierTraits:
        return VerifierTraits(accepts=ANY_TREE, lossless=False)

    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        p = p if p.dtype == torch.float64 else p.float()
        threshold = self.threshold(p)
        rows, parents = torch.arange(draft.batch_size, device=p.device), draft.parents + 1
        px = p[rows[:, None], parents, draft.tokens]
        node = deepest_accepted(draft, px > threshold.gather(1, parents), px)
        target = p[rows, node + 1]
        weights = torch.where(target > threshold.gather(1, node[:, None] + 1), target, 0.0)
        # Empty only by rounding, with a flat distribution and a delta next to 1.
        return stop_at(draft, node, rng.draw(torch.where(weights.sum(1, keepdim=True) > 0, weights, target)))

    def threshold(self, p: Tensor) -> Tensor:
        """``[..]``: the probability that a token must exceed, from ``p [.., V]``."""
        entropy = torch.special.entr(p).sum(-1)
        return (self.config.delta * (-entropy).exp()).clamp(max=self.config.epsilon)


def deepest_accepted(draft: Draft, accepted: Tensor, px: Tensor) -> Tensor:
    """``[B]`` int64: the deepest node that is accepted with all its ancestors, -1 = none.

    Args:
        accepted: ``[B, N]`` bool, the acceptance of each node by itself; padding is ignored.
        px: ``[B, N]``, P(x) of each node, positive if accepted. Ties in depth go to the larger product along the path,
            then to the first node.
    """
    if not draft.width:
        return torch.full_like(draft.count, -1)
    accepted = accepted & draft.valid
    reached = ~(draft.ancestor_mask & ~accepted[:, None]).any(-1)
    depth = torch.where(reached, draft.depth, 0)
    tau = depth.amax(1, keepdim=True)
    log_px = torch.where(accepted, px.double().log(), 0.0)
    joint = (draft.ancestor_mask * log_px[:, None]).sum(-1)
    node = torch.where(reached & (depth == tau), joint, -torch.inf).argmax(1)
    return torch.where(tau.squeeze(1) > 0, node, -1)
