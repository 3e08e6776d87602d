"""No drafter: plain autoregressive decoding in the same loop, the baseline of every speed-up."""

from __future__ import annotations

from typing import Any

from ..framework.contracts.draft import Draft, Sequences
from ..framework.contracts.drafter import Drafter, DraftTraits
from ..framework.contracts.rng import StepRng
from ..framework.contracts.sampling import Sampling


class NoDrafter(Drafter):
    """Drafts nothing; the verifier draws one token from the target's distribution."""

    name = "none"

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        return DraftTraits(kind=None, point_mass=True, nodes=0)

    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        return Draft.empty(sequences.batch_size, sequences.device)
