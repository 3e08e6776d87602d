"""Top-k acceptance with a tolerance: accept tokens close to the target's most probable one. Lossy.

H. Xia, T. Ge, P. Wang, S.-Q. Chen, F. Wei, Z. Sui, "Speculative Decoding: Exploiting Speculative Execution for
Accelerating Seq2seq Generation", Findings of EMNLP 2023 (SpecDec).

    accept x  iff  x is among the k most probable tokens of P  and  ln max P - ln P(x) <= tolerance

The deepest path of accepted tokens is kept (ties go to the larger sum of ln P(x)), followed by argmax P. The verifier
is deterministic, a relaxed form of greedy decoding without the target's diversity. P is the warped distribution: use
temperature 1 for the paper's rule. At temperature 0 (P one-hot) it is exact greedy matching, as with k = 1, and, except
for ties, with tolerance 0.
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
from .typical import deepest_accepted


class TopK(Verifier):
    """Accepts the target's k best tokens within a tolerance of the best. Lossy, deterministic; any draft."""

    name = "top-k"

    class Config(StrategyConfig):
        k: int = Field(3, ge=1, description="accept among this many most probable tokens; ties by lowest id")
        tolerance: float = Field(
            1.0, ge=0, description="maximum difference in nats from the most probable token; 1e9 = any"
        )

    config: Config

    @classmethod
    def traits(cls, config: Any) -> VerifierTraits:
        return VerifierTraits(accepts=ANY_TREE, lossless=False)

    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        rows, parents = torch.arange(draft.batch_size, device=p.device)[:, None], draft.parents + 1
        best = p.argmax(-1)
        probs = p[:, :-1] if draft.is_chain else p[rows, parents]
        x = draft.tokens[..., None]
        px = probs.gather(2, x)
        order = torch.arange(p.shape[2], device=p.device)
        rank = ((probs > px) | ((probs == px) & (order < x))).sum(2)
        px = px.squeeze(2).double()
        behind = p[rows, parents, best.gather(1, parents)].double().log() - px.log()
        # An infinite tolerance must not let in what has no probability.
        accepted = (rank < self.config.k) & (behind <= self.config.tolerance) & (px > 0)
        node = deepest_accepted(draft, accepted, px)
        return stop_at(draft, node, best.gather(1, node[:, None] + 1).squeeze(1))
