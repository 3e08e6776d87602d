"""The drafter ``rest``: retrieval-based speculative decoding from a datastore of texts.

Z. He, Z. Zhong, T. Cai, J. D. Lee, D. He, "REST: Retrieval-Based Speculative Decoding", NAACL 2024, sections 3.1 and
3.2: the drafter looks up the longest suffix of the text, of at most ``longest`` tokens, in the datastore. The
continuations of its occurrences form a trie, whose most frequent nodes are the draft tree, of point masses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, model_validator

from crossdraft import (
    CHAIN,
    DETERMINISTIC,
    MOST_LEVELS,
    MOST_NODES,
    Draft,
    DraftContext,
    Drafter,
    DraftTraits,
    Limit,
    Sampling,
    Sequences,
    StepRng,
    StrategyConfig,
    UsageError,
)

from .datastore import MANIFEST, Datastore, tokenizer_sha256
from .trie import best_path, most_frequent

MOST_MATCHED = Limit(256, "the look-up compares as many tokens in every step")
MOST_HITS = Limit(100_000, "each of them is read in every step")


class Rest(Drafter):
    """The most frequent continuations in a datastore, as a tree; or the single best path."""

    name = "rest"

    class Config(StrategyConfig):
        datastore: str = Field(description="directory written by python -m crossdraft_rest build")
        gamma: int = Field(
            default=32, ge=0, le=MOST_NODES, description="maximum number of drafted tokens (64 in the paper)"
        )
        depth: int = Field(default=10, ge=1, le=MOST_LEVELS, description="maximum length of a continuation")
        longest: int = Field(default=16, ge=1, le=MOST_MATCHED, description="longest context looked up, in tokens")
        shortest: int = Field(default=2, ge=1, le=MOST_MATCHED, description="shortest context looked up, in tokens")
        hits: int = Field(
            default=1000,
            ge=1,
            le=MOST_HITS,
            description="maximum number of occurrences that are counted (5000 in the paper)",
        )
        tree: bool = Field(default=True, description="draft a tree, not only the best path")

        @model_validator(mode="after")
        def _ordered(self):
            if self.shortest > self.longest:
                raise ValueError(f"shortest ({self.shortest}) must not exceed longest ({self.longest})")
            return self

    config: Config

    def attach(self, context: DraftContext) -> None:
        super().attach(context)
        path = Path(self.config.datastore).expanduser()
        self._texts = Datastore.open(path)
        context.load_settings(str(path / MANIFEST))  # records its digests, which results depend on
        if self._texts.ids > context.vocab_size:
            raise UsageError(
                f"the datastore {path} holds token ids up to {self._texts.ids - 1}, but the target has only "
                f"{context.vocab_size} tokens; build one with the target's tokenizer"
            )
        digest = context.tokenizer is not None and self._texts.tokenizer
        if digest and tokenizer_sha256(context.tokenizer) != digest:
            raise UsageError(
                f"the datastore {path} was built with another tokenizer than that of target '{context.target_name}'; "
                "build one with the target's"
            )
        if context.tokenizer is not None and not digest:
            raise UsageError(
                f"the datastore {path} was built from token ids, which may not be those of target "
                f"'{context.target_name}'; build one with --tokenizer"
            )

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        levels = min(config.depth, config.gamma)
        if config.tree:
            return DraftTraits(DETERMINISTIC, True, config.gamma, levels=levels, on_host=True)
        return DraftTraits(kind=CHAIN, point_mass=True, nodes=levels, on_host=True)

    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        tokens, parents = [], []
        for history, limit in zip(sequences.history, sequences.limit, strict=True):
            row = self._continuations(history[-self.config.longest :], min(self.config.depth, limit))
            draft = (
                most_frequent(row, self.config.gamma) if self.config.tree else (best_path(row, self.config.gamma), [])
            )
            tokens.append(draft[0])
            parents.append(draft[1])
        return Draft.copied(tokens, sequences.device, parents if self.config.tree else None)

    def _continuations(self, tail: list[int], depth: int) -> np.ndarray:
        """Continuations ``[n, depth]`` of the longest suffix of ``tail`` in the datastore."""
        size, ranks = self._texts.find(tail, self.config.shortest) if depth > 0 else (0, range(0))
        if not size:
            return np.empty((0, 0), dtype=np.int32)
        return self._texts.continuations(size, ranks, self.config.hits, depth)
