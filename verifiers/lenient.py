"""Lenient token verification: a token may become up to 1/l times as probable as under the target. Lossy.

Y. Leviathan, M. Kalman, Y. Matias, "Fast Inference from Transformers via Speculative Decoding", ICML 2023,
appendix A.5.

    h_i = min(1, P_{i-1}(x_i) / (l Q_{i-1}(x_i)))        tau = (first i with eta_i >= h_i) - 1, or gamma
    Y ~ norm((P_tau - l Q_tau)_+) after a rejection,     Y ~ P_gamma otherwise

The paper defines the test and states that no token becomes more than 1/l times as probable as under the target; with
this residual the statement holds at every position. l = 1 is token verification.

At temperature 0 the paper applies lenience before the argmax: x passes if P(x) >= l max P. A verifier reads P after
warping, which is one-hot at temperature 0, so this is exact greedy matching there; use a low temperature instead.
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
from ._chain import next_token, ratios


class Lenient(Verifier):
    """Token verification with lenience l. Lossy for l < 1; sampled and point-mass chains."""

    name = "lenient"

    class Config(StrategyConfig):
        lenience: float = Field(
            0.5, gt=0, le=1, description="l: no token gets more than 1/l times its probability; 1 = token verification"
        )

    config: Config

    @classmethod
    def traits(cls, config: Any) -> VerifierTraits:
        return VerifierTraits(accepts=frozenset({SINGLE_CHILD}), lossless=False)

    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        lenience = self.config.lenience
        h = (ratios(draft, p) / lenience).clamp(max=1)
        tau = rng.accept(h).cumprod(1).sum(1)
        # norm((P / l - Q)_+) is the residual above.
        minus = (tau < draft.count).double() * lenience
        return Verdict(tau, next_token(draft, p, tau, rng, minus), survival=h.cumprod(1))
