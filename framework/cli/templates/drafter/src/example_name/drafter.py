"""The drafter ``example-name``: copies the tokens after the last occurrence of the current token."""

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
    """Copies from the sequence; stateless."""

    name = "example-name"

    class Config(StrategyConfig):
        gamma: int = Field(default=4, ge=0, le=MOST_LEVELS, description="maximum draft length")

    config: Config

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        # A chain of up to gamma tokens that are not sampled: point masses, without q.
        return DraftTraits(kind=CHAIN, point_mass=True, nodes=config.gamma, on_host=True)

    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        rows = [
            self.guess(history, min(self.config.gamma, limit))  # limit is 0 for a free slot
            for history, limit in zip(sequences.history, sequences.limit, strict=True)
        ]
        return Draft.copied(rows, sequences.device)

    # If guess() is slow on long texts, or if the drafter learns from other sequences (then it defines reset(), and its
    # contract test sets remembers = True), `crossdraft replay` needs the classmethod response_drafts(cls, config,
    # texts, depth): for each (prompt, response), an int64 array [len(response), depth] with the draft at every token,
    # -1 past its end. The page "Your own drafter or verifier" describes it.

    def guess(self, history: Sequence[int], limit: int) -> Sequence[int]:
        """Up to ``limit`` tokens to follow the token ids ``history``. Replace this with your method."""
        for end in range(len(history) - 1, 0, -1) if limit else ():
            if history[end - 1] == history[-1]:
                return history[end : end + limit]
        return []
