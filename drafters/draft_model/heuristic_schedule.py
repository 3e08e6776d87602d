"""``heuristic-schedule``: the short form of ``draft-model`` with ``policy: {name: heuristic}``.

J. Gante, "Assisted Generation: a new direction toward low-latency text generation", 2023; the rule stands in
`autoregressive.policies`.
"""

from __future__ import annotations

from pydantic import Field, model_validator

from ...framework.util.limits import MOST_LEVELS
from ..autoregressive.policies import START, Heuristic, LengthPolicy
from .draft_model import ChainConfig, DraftModelChain


class HeuristicSchedule(DraftModelChain):
    """The draft model with a length that follows the last step's fate; every sequence has its own."""

    name = "heuristic-schedule"

    class Config(ChainConfig):
        gamma: int = Field(default=20, ge=1, le=MOST_LEVELS, description="most tokens a draft may have")
        start: int | None = Field(
            default=None, ge=1, description=f"tokens of a sequence's first draft; null: {START}, or gamma if it is less"
        )

        @model_validator(mode="after")
        def _start_fits(self) -> HeuristicSchedule.Config:
            if self.start is not None and self.start > self.gamma:
                raise ValueError(f"start ({self.start}) is more than gamma ({self.gamma}), the most a draft may have")
            return self

        def lengths(self, batch_size: int) -> LengthPolicy:
            return Heuristic(start_length=self.start).make(self.gamma, batch_size)
