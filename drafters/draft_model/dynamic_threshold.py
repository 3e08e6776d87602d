"""``dynamic-threshold``: the short form of ``draft-model`` with ``policy: {name: confidence}``.

J. Mamou et al., "Dynamic Speculation Lookahead Accelerates Speculative Decoding of Large Language Models", 2024; the
rule stands in `autoregressive.policies`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ...framework.util.limits import MOST_LEVELS
from ..autoregressive.policies import Confidence, LengthPolicy
from .draft_model import ChainConfig, DraftModelChain


class DynamicThreshold(DraftModelChain):
    """The draft model under a confidence policy; gamma is the most it drafts."""

    name = "dynamic-threshold"

    class Config(ChainConfig):
        gamma: int = Field(default=10, ge=0, le=MOST_LEVELS, description="most tokens a draft may have")
        stop: Literal["after", "before"] = Field("after", description=Confidence.model_fields["stop"].description)
        threshold: float | None = Field(None, ge=0, le=1, description=Confidence.model_fields["threshold"].description)

        def lengths(self, batch_size: int) -> LengthPolicy:
            return Confidence(stop=self.stop, threshold=self.threshold).make(self.gamma, batch_size)
