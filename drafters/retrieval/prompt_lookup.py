"""``prompt-lookup``: copy the continuation of an earlier occurrence of the current suffix.

A. Saxena, "Prompt Lookup Decoding", 2023. The drafter looks up the longest suffix of at most ``max_ngram`` tokens
that occurred before and drafts the tokens that followed it, as point masses. Like transformers and unlike the
original, it uses continuations shorter than gamma, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, model_validator
from torch import Tensor

from ...framework.contracts.draft import Draft, Scores, Sequences, Verdict
from ...framework.contracts.draft_kind import CHAIN
from ...framework.contracts.drafter import DraftContext, Drafter, DraftTraits, StrategyConfig
from ...framework.contracts.rng import StepRng
from ...framework.contracts.sampling import Sampling
from ...framework.util.limits import MOST_LEVELS


class NgramIndex:
    """Continuations of the n-grams of a growing sequence, of the first and latest occurrence; O(1) per token."""

    def __init__(self, min_ngram: int, max_ngram: int):
        self.sizes = range(max_ngram, min_ngram - 1, -1)
        self.tokens: list[int] = []
        # n-gram -> (start of the first continuation, start of the latest one)
        self.continuations: dict[tuple[int, ...], tuple[int, int]] = {}

    def extend(self, new: Sequence[int]) -> None:
        for token in new:
            # N-grams that end at the previous token get their continuation now: the current suffix is never in the
            # index, so it cannot match itself.
            end = len(self.tokens)
            for n in self.sizes:
                if n <= end:
                    gram = tuple(self.tokens[end - n :])
                    first, _ = self.continuations.get(gram, (end, end))
                    self.continuations[gram] = (first, end)
            self.tokens.append(token)

    def lookup(self, match: str, length: int) -> list[int]:
        """Return at most ``length`` tokens that followed the longest suffix in the index."""
        for n in self.sizes:
            if n <= len(self.tokens) and (starts := self.continuations.get(tuple(self.tokens[-n:]))):
                start = starts[0] if match == "first" else starts[1]
                return self.tokens[start : start + length]
        return []


class PromptLookup(Drafter):
    """N-gram copying from the prompt and the output so far."""

    name = "prompt-lookup"

    class Config(StrategyConfig):
        gamma: int = Field(default=10, ge=0, le=MOST_LEVELS, description="most tokens a draft may have")
        max_ngram: int = Field(default=3, ge=1, le=MOST_LEVELS, description="longest suffix looked up, in tokens")
        min_ngram: int = Field(default=1, ge=1, le=MOST_LEVELS, description="shortest suffix looked up, in tokens")
        match: Literal["first", "latest"] = Field("latest", description="the occurrence whose continuation is copied")

        @model_validator(mode="after")
        def _ordered(self):
            if self.min_ngram > self.max_ngram:
                raise ValueError(f"min_ngram ({self.min_ngram}) must not exceed max_ngram ({self.max_ngram})")
            return self

    config: Config

    def attach(self, context: DraftContext) -> None:
        super().attach(context)
        self._index: list[NgramIndex | None] = [None] * context.batch_size

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        return DraftTraits(kind=CHAIN, point_mass=True, nodes=config.gamma, on_host=True, shortenable=True)

    def start(self, row: int, prompt: Sequence[int], hidden: Tensor | None = None) -> None:
        index = self._index[row] = NgramIndex(self.config.min_ngram, self.config.max_ngram)
        index.extend(prompt)

    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        drafts = [
            index.lookup(self.config.match, min(self.config.gamma, limit)) if index is not None else []
            for index, limit in zip(self._index, sequences.limit, strict=True)
        ]
        return Draft.copied(drafts, sequences.device)

    def observe(
        self, sequences: Sequences, draft: Draft, verdict: Verdict, accepted: Sequence[int], scores: Scores
    ) -> None:
        for index, history in zip(self._index, sequences.history, strict=True):
            if index is not None:
                index.extend(history[len(index.tokens) :])

    def free(self, row: int, finish_reason: str | None = None) -> None:
        self._index[row] = None
