"""Token verification: accept each drafted token by itself, stop at the first rejection.

Y. Leviathan, M. Kalman, Y. Matias, "Fast Inference from Transformers via Speculative Decoding", ICML 2023,
Algorithm 1; C. Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling", 2023.

    h_i = min(1, P_{i-1}(x_i) / Q_{i-1}(x_i))        tau = (first i with eta_i >= h_i) - 1, or gamma
    Y ~ norm((P_tau - Q_tau)_+) after a rejection,   Y ~ P_gamma otherwise
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..framework.contracts.draft import Draft, Verdict
from ..framework.contracts.draft_kind import SINGLE_CHILD
from ..framework.contracts.rng import StepRng
from ..framework.contracts.verifier import Verifier, VerifierTraits
from ._chain import next_token, ratios


class Token(Verifier):
    """Token-by-token rejection sampling. Lossless; sampled and point-mass chains."""

    name = "token"

    @classmethod
    def traits(cls, config: Any) -> VerifierTraits:
        return VerifierTraits(accepts=frozenset({SINGLE_CHILD}), shortenable=True)

    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        h = ratios(draft, p).clamp_(max=1)
        tau = rng.accept(h).cumprod(1).sum(1)
        return Verdict(tau, next_token(draft, p, tau, rng), survival=h.cumprod(1))
