"""Base of drafters that draw a tree, or several sequences, from a draft model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ...framework.contracts.drafter import DraftContext, Drafter, StrategyConfig
from ..autoregressive.draft_model import DraftModel


class TreeDrafter(Drafter):
    """A draft model, and the nodes of the last tree that it was fed.

    Attributes:
        fed_index: ``[B, N]``, see `DraftModel.commit`; None if the last draft needs none.
    """

    def __init__(self, config: StrategyConfig, context: DraftContext, model: DraftModel):
        super().__init__(config, context)
        self.model = model
        self.fed_index: Tensor | None = None

    @property
    def passes(self) -> int:
        return self.model.passes

    def prefill(self, prompts: Mapping[int, Sequence[int]]) -> None:
        self.model.prefill(prompts)

    def start(self, row: int, prompt: Sequence[int], hidden: Tensor | None = None) -> None:
        self.model.start(row, prompt)

    def free(self, row: int, finish_reason: str | None = None) -> None:
        self.model.free(row)
