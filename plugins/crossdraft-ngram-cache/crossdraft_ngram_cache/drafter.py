"""The drafter ``ngram-cache``: proposes what followed the last tokens most often, in any sequence so far.

No model and no law: counts of n-grams over prompts and outputs (the dynamic cache of lookup decoding), with thresholds
that keep guesses back which were seen too rarely or compete with others. `prompt-lookup` copies from one sequence; this
remembers all of them, so that it pays where the same phrases come again: templates, code, one domain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field, model_validator
from torch import Tensor

from crossdraft import (
    CHAIN,
    MOST_LEVELS,
    Draft,
    DraftContext,
    Drafter,
    DraftTraits,
    Sampling,
    Scores,
    Sequences,
    StepRng,
    StrategyConfig,
    Verdict,
)

#: The longest n-gram there may be: each token is counted after every one of them.
LONGEST = 16


class NgramCache(Drafter):
    """Counts over all sequences. Its memory is the instance's: hold one, and the next call begins with it."""

    name = "ngram-cache"

    class Config(StrategyConfig):
        gamma: int = Field(default=6, ge=0, le=MOST_LEVELS, description="most tokens a draft may have")
        max_ngram: int = Field(default=4, ge=1, le=LONGEST, description="longest context looked up, in tokens")
        min_ngram: int = Field(default=2, ge=1, le=LONGEST, description="shortest context looked up, in tokens")
        min_count: int = Field(default=1, ge=1, description="how often a follower must have been seen")
        min_share: float = Field(default=0.5, ge=0, le=1, description="and in which share of its context's occurrences")
        size: int = Field(default=500_000, ge=1, description="most contexts remembered; those seen last stay")

        @model_validator(mode="after")
        def _ordered(self):
            if self.min_ngram > self.max_ngram:
                raise ValueError(f"min_ngram ({self.min_ngram}) must not exceed max_ngram ({self.max_ngram})")
            return self

    config: Config

    def __init__(self, config: StrategyConfig | None = None, context: DraftContext | None = None):
        super().__init__(config, context)
        #: Per context, how often each token followed it; in the order in which contexts were last seen.
        self.followers: dict[tuple[int, ...], dict[int, int]] = {}
        #: Per slot, how many tokens of its sequence are counted.
        self._counted: dict[int, int] = {}

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        return DraftTraits(kind=CHAIN, point_mass=True, nodes=config.gamma)

    def reset(self) -> None:
        self.followers.clear()

    def start(self, row: int, prompt: Sequence[int], hidden: Tensor | None = None) -> None:
        self._counted[row] = 0
        self._count(row, prompt)

    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        rows = [
            self.guess(history, min(self.config.gamma, limit))
            for history, limit in zip(sequences.history, sequences.limit, strict=True)
        ]
        return Draft.copied(rows, sequences.device)

    def observe(
        self, sequences: Sequences, draft: Draft, verdict: Verdict, accepted: Sequence[int], scores: Scores
    ) -> None:
        for row, history in enumerate(sequences.history):
            if history:
                self._count(row, history)

    def guess(self, history: Sequence[int], most: int) -> list[int]:
        """At most ``most`` tokens that are likely to follow ``history``, one after the other."""
        tail, found = list(history[-self.config.max_ngram :]), []
        while len(found) < most and (token := self._follower(tail)) is not None:
            found.append(token)
            tail = [*tail, token][-self.config.max_ngram :]
        return found

    def _follower(self, tail: Sequence[int]) -> int | None:
        """The most frequent follower of the longest context that passes the thresholds; None if there is none."""
        for n in range(min(self.config.max_ngram, len(tail)), self.config.min_ngram - 1, -1):
            counts = self.followers.get(tuple(tail[-n:]))
            if counts:
                best = max(counts, key=counts.__getitem__)
                if counts[best] >= max(self.config.min_count, self.config.min_share * sum(counts.values())):
                    return best
        return None

    def _count(self, row: int, history: Sequence[int]) -> None:
        """Count what came to a slot's sequence since the last time."""
        for end in range(self._counted[row], len(history)):
            for n in range(self.config.min_ngram, min(self.config.max_ngram, end) + 1):
                context = tuple(history[end - n : end])
                counts = self.followers.pop(context, None) or {}
                counts[history[end]] = counts.get(history[end], 0) + 1
                self.followers[context] = counts
        self._counted[row] = len(history)
        while len(self.followers) > self.config.size:
            del self.followers[next(iter(self.followers))]
