"""``draft-model-dynamic-tree``: a draft model drafts the dynamic tree of EAGLE-2.

Y. Li, F. Wei, C. Zhang, H. Zhang, "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees", EMNLP
2024, section 4. The shape depends on the drafter's confidence; nodes are chosen by probability, so they are
point masses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field, model_validator

from ...framework.contracts.draft import Draft, Scores, Sequences, Verdict, on_device
from ...framework.contracts.draft_kind import DETERMINISTIC
from ...framework.contracts.drafter import DraftContext, DraftTraits, StrategyConfig
from ...framework.contracts.rng import StepRng
from ...framework.contracts.sampling import Sampling
from ...framework.util.limits import MOST_LEVELS, MOST_NODES, MOST_SIBLINGS
from ..autoregressive.draft_model import DraftModel
from ..autoregressive.trees import check_candidates, dynamic_slack, grow_dynamic
from .tree_drafter import TreeDrafter


class DraftModelDynamicTree(TreeDrafter):
    """Expands the ``top_k`` most probable nodes of each level and keeps the ``nodes`` most probable of all."""

    name = "draft-model-dynamic-tree"

    class Config(StrategyConfig):
        model: str = Field(description="name, directory or Hub id of a model that shares the target's tokenizer")
        depth: int = Field(
            default=4, ge=1, le=MOST_LEVELS, description="levels of the tree, one pass of the draft model each"
        )
        top_k: int = Field(
            default=4, ge=1, le=MOST_SIBLINGS, description="nodes expanded per level, and children per node"
        )
        nodes: int = Field(default=12, ge=1, le=MOST_NODES, description="nodes kept")
        temperature: None = Field(None, description="not used: the ranking does not depend on it")

        @model_validator(mode="after")
        def _enough(self) -> Any:
            check_candidates(self.depth, self.top_k, self.nodes)
            return self

    config: Config

    def __init__(self, config: Any, context: DraftContext):
        slack = dynamic_slack(config.depth, config.top_k, config.nodes)
        super().__init__(config, context, DraftModel(context.load_lm(config.model, extra_tokens=slack)))

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        return DraftTraits(kind=DETERMINISTIC, point_mass=True, nodes=config.nodes, levels=config.depth)

    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        depth = min(self.config.depth, max(sequences.limit))
        self.fed_index = None
        if depth == 0:
            return Draft.empty(sequences.batch_size, sequences.device)
        root, limit = self.model.root(sequences), on_device(sequences.limit, sequences.device)
        top_k = min(self.config.top_k, root.shape[1])
        draft, self.fed_index = grow_dynamic(depth, top_k, self.config.nodes, root, self.model.forward, limit)
        return draft

    def observe(
        self, sequences: Sequences, draft: Draft, verdict: Verdict, accepted: Sequence[int], scores: Scores
    ) -> None:
        if self.fed_index is not None:
            # Only a leaf can be without feeding, so all accepted nodes except the last were fed.
            self.model.commit(verdict, [max(tau - 1, 0) for tau in accepted], self.fed_index)
