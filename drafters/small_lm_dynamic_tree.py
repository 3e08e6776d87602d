"""A small language model drafts the dynamic tree of EAGLE-2.

Y. Li, F. Wei, C. Zhang, H. Zhang, "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees", EMNLP
2024, section 4. The shape follows the drafter's confidence; nodes are point masses, because they are chosen by
their probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field, model_validator

from ..framework.decoding.sampling import Sampling
from ..framework.draft import Draft, Scores, Sequences, Verdict, on_device
from ..framework.drafter import DraftTraits, StrategyConfig
from ..framework.rng import RoundRng
from ._growth import grow_dynamic
from .small_lm import SmallLM


class SmallLMDynamicTree(SmallLM):
    """Expands the ``top_k`` most probable nodes of each level, keeps the ``nodes`` most probable of all."""

    name = "small-lm-dynamic-tree"

    class Config(StrategyConfig):
        model: str = Field(description="name, directory or Hub id of a model that shares the target's tokenizer")
        depth: int = Field(default=4, ge=1, description="levels of the tree, one pass of the small model each")
        top_k: int = Field(default=4, ge=1, description="nodes expanded per level, and children of each")
        nodes: int = Field(default=12, ge=1, description="nodes kept")
        temperature: None = Field(None, description="ranking does not depend on it")

        @model_validator(mode="after")
        def _enough(self) -> Any:
            candidates = self.top_k + (self.depth - 1) * self.top_k**2
            if self.nodes > candidates:
                raise ValueError(f"depth {self.depth} and top_k {self.top_k} give {candidates} nodes, not {self.nodes}")
            return self

    config: Config  # type: ignore[assignment]

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        return DraftTraits(drawn="deterministic", point_mass=True, nodes=config.nodes)

    def propose(self, sequences: Sequences, rng: RoundRng) -> Draft:
        depth = min(self.config.depth, max(sequences.limit))
        self._pending, self._fed, self._place = [0] * sequences.batch_size, 0, None
        if depth == 0:
            return Draft.empty(sequences.batch_size, sequences.device)
        root = self._root(sequences)
        top_k = min(self.config.top_k, root.shape[1])
        draft, self._place = grow_dynamic(
            depth,
            top_k,
            self.config.nodes,
            root,
            lambda tokens, parents: self.lm.grow(tokens, parents)[0],
            on_device(sequences.limit, sequences.device),
        )
        return draft

    def observe(
        self, sequences: Sequences, draft: Draft, verdict: Verdict, accepted: Sequence[int], scores: Scores
    ) -> None:
        if self._place is not None:
            # Only leaves may never have been fed, so all but the last accepted node are kept for certain.
            self._keep(self._place, verdict, [max(tau - 1, 0) for tau in accepted])
