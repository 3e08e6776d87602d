"""The verifier ``example-name``: draws from the target at every position, and keeps drafted tokens that were drawn."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from crossdraft import SINGLE_CHILD, Draft, StepRng, Verdict, Verifier, VerifierTraits


class ExampleName(Verifier):
    """Lossless on any chain: what it emits was drawn from the target's law, whatever the draft was."""

    name = "example-name"

    @classmethod
    def traits(cls, config: Any) -> VerifierTraits:
        return VerifierTraits(accepts=frozenset({SINGLE_CHILD}), lossless=True)

    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        """``p [B, N + 1, V]`` is the target's law after the root and after each of the N drafted tokens."""
        n = draft.width
        drawn = torch.stack([rng.draw(p[:, i], index=i) for i in range(n + 1)], 1)  # [B, N + 1]
        tau = ((drawn[:, :n] == draft.tokens) & draft.valid).long().cumprod(1).sum(1)  # equal from the first one on
        return Verdict(tau, drawn.gather(1, tau[:, None]).squeeze(1))
