"""The verifier ``example-name``: samples from the target at every position and accepts matching drafted tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from crossdraft import SINGLE_CHILD, Draft, StepRng, Verdict, Verifier, VerifierTraits


class ExampleName(Verifier):
    """Lossless on any chain: all emitted tokens are sampled from the target."""

    name = "example-name"

    @classmethod
    def traits(cls, config: Any) -> VerifierTraits:
        return VerifierTraits(accepts=frozenset({SINGLE_CHILD}), lossless=True)

    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        """``p [B, N + 1, V]``: the target's distributions after the root and after each of the N drafted tokens."""
        n = draft.width
        samples = torch.stack([rng.draw(p[:, i], index=i) for i in range(n + 1)], 1)  # [B, N + 1]
        tau = ((samples[:, :n] == draft.tokens) & draft.valid).long().cumprod(1).sum(1)  # length of the matching prefix
        return Verdict(tau, samples.gather(1, tau[:, None]).squeeze(1))
