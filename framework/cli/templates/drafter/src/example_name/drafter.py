"""The drafter ``example-name``: proposes what followed the last token, where that token stood before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from crossdraft import (
    CHAIN,
    MOST_LEVELS,
    Draft,
    Drafter,
    DraftTraits,
    Sampling,
    Sequences,
    StepRng,
    StrategyConfig,
)


class ExampleName(Drafter):
    """Copies from a sequence's own past. It keeps nothing, so it has nothing to forget."""

    name = "example-name"

    class Config(StrategyConfig):
        gamma: int = Field(default=4, ge=0, le=MOST_LEVELS, description="most tokens a draft may have")

    config: Config

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        # A chain of at most gamma tokens that no law drew: they are point masses, and the draft has no q.
        return DraftTraits(kind=CHAIN, point_mass=True, nodes=config.gamma)

    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        rows = [
            self.guess(history, min(self.config.gamma, limit))  # limit is 0 for a free slot
            for history, limit in zip(sequences.history, sequences.limit, strict=True)
        ]
        return Draft.copied(rows, sequences.device)

    def guess(self, history: Sequence[int], most: int) -> Sequence[int]:
        """At most ``most`` tokens that may follow ``history``, token ids whose last is the root. Yours begins here."""
        for end in range(len(history) - 1, 0, -1) if most else ():
            if history[end - 1] == history[-1]:
                return history[end : end + most]
        return []
