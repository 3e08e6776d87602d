"""``grammar``: the tokens that a constraint leaves no choice about, as point masses.

If the grammar permits only one token, its probability is 1 and every verifier accepts it. The idea is the fast-forward
of guidance and the jump-forward decoding of SGLang (L. Zheng et al., NeurIPS 2024, arXiv:2312.07104), as a draft, so
that the target's distribution is kept token for token.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from ..framework.contracts.draft import Draft, Sequences
from ..framework.contracts.draft_kind import CHAIN
from ..framework.contracts.drafter import Drafter, DraftTraits, StrategyConfig
from ..framework.contracts.rng import StepRng
from ..framework.contracts.sampling import Sampling
from ..framework.util.limits import MOST_LEVELS


class GrammarDrafter(Drafter):
    """Tokens implied by the constraint of a sequence; nothing without one."""

    name = "grammar"

    class Config(StrategyConfig):
        gamma: int = Field(default=16, ge=0, le=MOST_LEVELS, description="most tokens a draft may have")

    config: Config

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        return DraftTraits(kind=CHAIN, point_mass=True, nodes=config.gamma, on_host=True)

    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        constraints, gamma = self.context.constraints, self.config.gamma
        if constraints is None:
            return Draft.empty(sequences.batch_size, sequences.device)
        drafts = [constraints.implied(row, min(gamma, limit)) for row, limit in enumerate(sequences.limit)]
        return Draft.copied(drafts, sequences.device)
