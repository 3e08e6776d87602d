"""The drafter ``ngram-cache``: drafts the most frequent continuation of the last tokens in all sequences so far.

Counts n-grams over prompts and outputs (the dynamic cache of lookup decoding), with thresholds on count and share of a
continuation. `prompt-lookup` copies from one sequence; this drafter remembers all of them, which pays for recurring
phrases: templates, code, one domain. Drafts are point masses.
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

#: Maximum length of an n-gram; each token is counted once per length.
LONGEST = 16


class NgramCache(Drafter):
    """N-gram counts over all sequences, kept as long as the instance."""

    name = "ngram-cache"

    class Config(StrategyConfig):
        gamma: int = Field(default=6, ge=0, le=MOST_LEVELS, description="maximum draft length")
        max_ngram: int = Field(default=4, ge=1, le=LONGEST, description="longest context looked up, in tokens")
        min_ngram: int = Field(default=2, ge=1, le=LONGEST, description="shortest context looked up, in tokens")
        min_count: int = Field(default=1, ge=1, description="minimum count of a continuation")
        min_share: float = Field(
            default=0.5, ge=0, le=1, description="minimum share of a continuation among the occurrences of its context"
        )
        size: int = Field(
            default=500_000, ge=1, description="maximum number of contexts; the least recently seen are dropped"
        )

        @model_validator(mode="after")
        def _ordered(self):
            if self.min_ngram > self.max_ngram:
                raise ValueError(f"min_ngram ({self.min_ngram}) must not exceed max_ngram ({self.max_ngram})")
            return self

    config: Config

    def __init__(self, config: StrategyConfig | None = None, context: DraftContext | None = None):
        super().__init__(config, context)
        #: Per context, the count of each next token; in the order in which contexts were last seen.
        self.followers: dict[tuple[int, ...], dict[int, int]] = {}
        #: Per slot, the number of counted tokens.
        self._counted: dict[int, int] = {}

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        return DraftTraits(kind=CHAIN, point_mass=True, nodes=config.gamma, on_host=True)

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

    def guess(self, history: Sequence[int], maximum: int) -> list[int]:
        """Return at most ``maximum`` likely next tokens after ``history``."""
        tail, tokens = list(history[-self.config.max_ngram :]), []
        while len(tokens) < maximum and (token := self._follower(tail)) is not None:
            tokens.append(token)
            tail = [*tail, token][-self.config.max_ngram :]
        return tokens

    def _follower(self, tail: Sequence[int]) -> int | None:
        """Most frequent next token of the longest context that passes the thresholds, or None."""
        for n in range(min(self.config.max_ngram, len(tail)), self.config.min_ngram - 1, -1):
            counts = self.followers.get(tuple(tail[-n:]))
            if counts:
                best = max(counts, key=counts.__getitem__)
                if counts[best] >= max(self.config.min_count, self.config.min_share * sum(counts.values())):
                    return best
        return None

    def _count(self, row: int, history: Sequence[int]) -> None:
        """Count the new tokens of a slot's sequence."""
        for end in range(self._counted[row], len(history)):
            for n in range(self.config.min_ngram, min(self.config.max_ngram, end) + 1):
                context = tuple(history[end - n : end])
                counts = self.followers.pop(context, None) or {}
                counts[history[end]] = counts.get(history[end], 0) + 1
                self.followers[context] = counts
        self._counted[row] = len(history)
        while len(self.followers) > self.config.size:
            del self.followers[next(iter(self.followers))]
