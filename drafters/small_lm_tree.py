"""A small language model draws a tree of a fixed shape.

Without replacement: W. Jeon et al., "Recursive Speculative Decoding", 2024; Z. Chen et al., "Sequoia: Scalable,
Robust, and Hardware-aware Speculative Decoding", 2024. Top-k trees: T. Cai et al., "Medusa", ICML 2024 (choice
lists). Greedy drafts: Z. Hu et al., "Towards Optimal Multi-draft Speculative Decoding", ICLR 2025.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field, model_validator

from ..framework.decoding.sampling import Sampling
from ..framework.draft import Draft, Scores, Sequences, Verdict, on_device
from ..framework.drafter import DraftContext, DraftTraits, StrategyConfig
from ..framework.rng import RoundRng
from ._growth import DRAWN, Shape, Siblings, grow_fixed
from .small_lm import SmallLM


class SmallLMTree(SmallLM):
    """A tree given by its branching or by choice lists, one pass of the small model a level.

    ``siblings`` says how the children of a node are chosen: ``without-replacement`` (drawn one after the other),
    ``top-k`` (the most probable, point masses) or ``greedy`` (the most probable, and one drawn from the rest).
    At temperature 0 siblings are the top k.
    """

    name = "small-lm-tree"

    class Config(StrategyConfig):
        model: str = Field(description="name, directory or Hub id of a model that shares the target's tokenizer")
        branching: tuple[int, ...] = Field((2, 2, 1), description="children of every node of level 1, 2, ..")
        choices: tuple[tuple[int, ...], ...] | None = Field(
            None, description="instead of branching: nodes as lists of sibling ranks, e.g. [[0], [1], [0, 0]]"
        )
        siblings: Siblings = Field("without-replacement", description="without-replacement, top-k or greedy")
        temperature: float | None = Field(None, ge=0, description="drafting temperature; default: the target's")

        @model_validator(mode="after")
        def _shape(self) -> Any:
            if any(count < 1 for count in self.branching):
                raise ValueError(f"branching must hold positive numbers, got {list(self.branching)}")
            if self.shape.nodes > 4096:
                raise ValueError(f"the tree has {self.shape.nodes} nodes; the most is 4096")
            return self

        @property
        def shape(self) -> Shape:
            if self.choices is not None:
                return Shape.choices(self.choices, contiguous=self.siblings != "top-k")
            return Shape.branching(self.branching)

    config: Config  # type: ignore[assignment]

    def __init__(self, config: StrategyConfig, context: DraftContext):
        super().__init__(config, context)
        self.shape = self.config.shape

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        siblings = cls._chosen(config, sampling)
        return DraftTraits(
            drawn="chain" if config.shape.is_path else DRAWN[siblings],
            point_mass=siblings == "top-k",
            nodes=config.shape.nodes,
            branching=config.branching if config.choices is None else None,
        )

    @classmethod
    def _chosen(cls, config: Any, sampling: Sampling) -> Siblings:
        return "top-k" if sampling.at(config.temperature).temperature == 0 else config.siblings

    def propose(self, sequences: Sequences, rng: RoundRng) -> Draft:
        levels = min(len(self.shape.ranks), max(sequences.limit))
        self._pending, self._fed, self._place = [0] * sequences.batch_size, 0, None
        if levels == 0:
            return Draft.empty(sequences.batch_size, sequences.device)
        shape = Shape(self.shape.parents[:levels], self.shape.ranks[:levels])
        siblings = self._chosen(self.config, self.context.sampling)
        root = self._root(sequences)
        limit = on_device(sequences.limit, sequences.device)
        draft, self._place = grow_fixed(
            shape, siblings, root, lambda tokens, parents: self.lm.grow(tokens, parents)[0], self.sampling, limit, rng
        )
        self._fed = levels - 1
        return draft

    def observe(
        self, sequences: Sequences, draft: Draft, verdict: Verdict, accepted: Sequence[int], scores: Scores
    ) -> None:
        if self._place is not None:
            self._keep(self._place, verdict, [min(tau, self._fed) for tau in accepted])
