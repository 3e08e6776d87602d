"""A small language model draws a tree of a fixed shape.

Without replacement: W. Jeon et al., "Recursive Speculative Decoding", 2024; Z. Chen et al., "Sequoia: Scalable,
Robust, and Hardware-aware Speculative Decoding", 2024. Top-k trees: T. Cai et al., "Medusa", ICML 2024 (choice
lists). Greedy drafts: Z. Hu et al., "Towards Optimal Multi-draft Speculative Decoding", ICLR 2025.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field, model_validator
from torch import Tensor

from ...framework.contracts.draft import Draft, Scores, Sequences, Verdict, on_device
from ...framework.contracts.drafter import DraftContext, Drafter, DraftTraits, StrategyConfig
from ...framework.contracts.rng import RoundRng
from ...framework.contracts.sampling import Sampling
from ..autoregressive.draft_model import DraftModel
from ..autoregressive.trees import DRAWN, Choices, Shape, Siblings, grow_fixed, tree_shape
from .small_lm import ModelConfig


class SmallLMTree(Drafter):
    """A tree given by its branching or by choice lists, one pass of the small model a level.

    ``siblings`` says how the children of a node are chosen: ``without-replacement`` (drawn one after the other),
    ``top-k`` (the most probable, point masses) or ``greedy`` (the most probable, and one drawn from the rest).
    At temperature 0 siblings are the top k.
    """

    name = "small-lm-tree"

    class Config(ModelConfig):
        branching: tuple[int, ...] = Field((2, 2, 1), description="children of every node of level 1, 2, ..")
        choices: Choices | None = Field(
            None, description="instead of branching: nodes as lists of sibling ranks, e.g. [[0], [1], [0, 0]]"
        )
        siblings: Siblings = Field("without-replacement", description="without-replacement, top-k or greedy")

        @model_validator(mode="after")
        def _fits(self) -> Any:
            self.shape()
            return self

        def shape(self) -> Shape:
            return tree_shape(self.branching, self.choices, contiguous=self.siblings != "top-k")

        def chosen(self, target: Sampling) -> Siblings:
            return "top-k" if target.at(self.temperature).temperature == 0 else self.siblings

    config: Config

    def __init__(self, config: StrategyConfig, context: DraftContext):
        super().__init__(config, context)
        self.model = DraftModel(context.load_lm(self.config.model))
        self.sampling = context.sampling.at(self.config.temperature)
        self.shape = self.config.shape()
        self.siblings: Siblings = self.config.chosen(context.sampling)
        self._place: Tensor | None = None

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        siblings, shape = config.chosen(sampling), config.shape()
        return DraftTraits(
            drawn="chain" if shape.is_path else DRAWN[siblings],
            point_mass=siblings == "top-k",
            nodes=shape.nodes,
            levels=len(shape.ranks),
            branching=config.branching if config.choices is None else None,
        )

    @property
    def passes(self) -> int:
        return self.model.passes

    def begin(self, row: int, prompt: Sequence[int], hidden: Tensor | None = None) -> None:
        self.model.begin(row, prompt)

    def retire(self, row: int, finish: str | None = None) -> None:
        self.model.retire(row)

    def propose(self, sequences: Sequences, rng: RoundRng) -> Draft:
        levels = min(len(self.shape.ranks), max(sequences.limit))
        self._place = None
        if levels == 0:
            return Draft.empty(sequences.batch_size, sequences.device)
        shape, root = self.shape.cut(levels), self.model.root(sequences)
        limit = on_device(sequences.limit, sequences.device)
        draft, self._place = grow_fixed(shape, self.siblings, root, self.model.grow, self.sampling, limit, rng)
        self._levels = levels - 1
        return draft

    def observe(
        self, sequences: Sequences, draft: Draft, verdict: Verdict, accepted: Sequence[int], scores: Scores
    ) -> None:
        if self._place is not None:
            self.model.keep(verdict, accepted, self._place, self._levels)
