"""Base of drafters that draw a tree from a draft model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ...framework.contracts.drafter import DraftContext, Drafter, StrategyConfig
from ..autoregressive.draft_model import DraftModel


class TreeDrafter(Drafter):
    """A draft model, and the nodes of the last tree that it was fed.

    Args:
        name: of the model, see `DraftContext.load_lm`.
        slack: nodes that are fed and not kept, at most.
    """

    def __init__(self, config: StrategyConfig, context: DraftContext, name: str, slack: int):
        super().__init__(config, context)
        self.model = DraftModel(context.load_lm(name, extra_tokens=slack))
        self._fed_index: Tensor | None = None

    @property
    def passes(self) -> int:
        return self.model.passes

    def prefill(self, prompts: Mapping[int, Sequence[int]]) -> None:
        self.model.prefill(prompts)

    def start(self, row: int, prompt: Sequence[int], hidden: Tensor | None = None) -> None:
        self.model.start(row, prompt)

    def free(self, row: int, finish_reason: str | None = None) -> None:
        self.model.free(row)
