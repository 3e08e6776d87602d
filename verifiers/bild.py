"""Rollback: accept the draft up to the first token with too much surprise under the target. Lossy.

S. Kim, K. Mangalam, S. Moon, J. Malik, M. W. Mahoney, A. Gholami, K. Keutzer, "Speculative Decoding with Big
Little Decoder", NeurIPS 2023 (BiLD, the rollback policy).

    the first x_i with -ln P_{i-1}(x_i) > rollback  and  x_i != argmax P_{i-1}  is replaced by argmax P_{i-1}

The rest of the draft is dropped; argmax P_gamma follows a draft that is accepted whole. The verifier is deterministic.
P is the warped distribution: use temperature 1 for the paper's rule. At temperature 0 (P one-hot) it is exact greedy
matching, as with rollback 0.

The paper's other half, the fallback that ends a draft if the draft model is unsure, belongs to the drafter:
``draft-model`` with ``policy: {name: confidence, stop: before}`` and ``temperature: 0``.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field
from torch import Tensor

from ..framework.contracts.draft import Draft, Verdict
from ..framework.contracts.draft_kind import SINGLE_CHILD
from ..framework.contracts.drafter import StrategyConfig
from ..framework.contracts.rng import StepRng
from ..framework.contracts.verifier import Verifier, VerifierTraits


class BiLD(Verifier):
    """Accepts tokens below a threshold of surprise. Lossy, deterministic; sampled and point-mass chains."""

    name = "bild"

    class Config(StrategyConfig):
        rollback: float = Field(
            5.0, ge=0, allow_inf_nan=False, description="nats of surprise above which a token is replaced"
        )

    config: Config

    @classmethod
    def traits(cls, config: Any) -> VerifierTraits:
        return VerifierTraits(accepts=frozenset({SINGLE_CHILD}), lossless=False)

    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        best = p.argmax(-1)
        surprise = -p[:, :-1].gather(2, draft.tokens[..., None]).squeeze(2).double().log()
        kept = ((surprise <= self.config.rollback) | (draft.tokens == best[:, :-1])) & draft.valid
        tau = kept.long().cumprod(1).sum(1)
        return Verdict(tau, best.gather(1, tau[:, None]).squeeze(1))
