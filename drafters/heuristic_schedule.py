"""A small LM that drafts more after a draft was accepted whole, and less after one that was not.

The schedule ``heuristic_transient`` of transformers' assisted generation (J. Gante, "Assisted Generation: a new
direction toward low-latency text generation", 2023): two tokens more after a round in which everything drafted was
accepted, else one fewer, at least one. It is what J. Mamou et al., "Dynamic Speculation Lookahead Accelerates
Speculative Decoding of Large Language Models", 2024, compare with.

The length of a draft is settled before its first token is drawn, by rounds that are over: given the committed tokens
and the length, a round is one of the static small LM, so losslessness stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pydantic import Field, model_validator
from torch import Tensor

from ..framework.draft import Draft, Scores, Sequences, Verdict
from ..framework.drafter import DraftContext, StrategyConfig
from ..framework.rng import RoundRng
from .small_lm import SmallLM

#: Tokens more after a draft that was accepted whole, and fewer after another.
MORE, FEWER = 2, 1
#: Tokens of the first draft, where there is no other wish.
START = 5


class HeuristicSchedule(SmallLM):
    """The small LM with a length that follows the last round's fate; every sequence has its own."""

    name = "heuristic-schedule"
    fixed_length = False

    class Config(SmallLM.Config):
        gamma: int = Field(default=20, ge=1, description="most tokens a draft may have")
        start: int | None = Field(
            default=None, ge=1, description=f"tokens of a sequence's first draft; null: {START}, or gamma if it is less"
        )

        @model_validator(mode="after")
        def _start_fits(self) -> HeuristicSchedule.Config:
            if self.start is not None and self.start > self.gamma:
                raise ValueError(f"start ({self.start}) is more than gamma ({self.gamma}), the most a draft may have")
            return self

    config: Config

    def __init__(self, config: StrategyConfig, context: DraftContext):
        super().__init__(config, context)
        self._start = self.config.start or min(START, self.config.gamma)
        self._length = [self._start] * context.batch_size
        self._allowed = list(self._length)

    def begin(self, row: int, prompt: Sequence[int], hidden: Tensor | None = None) -> None:
        super().begin(row, prompt, hidden)
        self._length[row] = self._start

    def propose(self, sequences: Sequences, rng: RoundRng) -> Draft:
        self._allowed = [min(pair) for pair in zip(sequences.limit, self._length, strict=True)]
        return super().propose(replace(sequences, limit=self._allowed), rng)

    def observe(
        self, sequences: Sequences, draft: Draft, verdict: Verdict, accepted: Sequence[int], scores: Scores
    ) -> None:
        super().observe(sequences, draft, verdict, accepted, scores)
        for row, (tau, drafted) in enumerate(zip(accepted, self._allowed, strict=True)):
            if drafted:
                after = drafted + MORE if tau == drafted else self._length[row] - FEWER
                self._length[row] = max(1, min(after, self.config.gamma))
