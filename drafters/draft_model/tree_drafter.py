"""Base of drafters that draw a tree, or several sequences, from a draft model."""

from __future__ import annotations

from torch import Tensor

from ...framework.contracts.drafter import DraftContext, StrategyConfig
from ..autoregressive.draft_model import DraftModel, ModelDrafter


class TreeDrafter(ModelDrafter):
    """A draft model, and the nodes of the last tree that it was fed.

    Attributes:
        fed_index: ``[B, N]``, see `DraftModel.commit`; None if the last draft needs none.
    """

    def __init__(self, config: StrategyConfig, context: DraftContext, model: DraftModel):
        super().__init__(config, context)
        self.model = model
        self.fed_index: Tensor | None = None
