"""A small LM that stops drafting when it is no longer sure of itself.

J. Mamou et al., "Dynamic Speculation Lookahead Accelerates Speculative Decoding of Large Language Models",
2024, and the confidence stop of transformers' assisted generation. After drawing a token whose probability
under the drafter's own law is below the threshold, the row stops. The token stays in the draft: a token that
was looked at and thrown away biases the output.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from .small_lm import SmallLM


class DynamicThreshold(SmallLM):
    """The small LM under a confidence policy; gamma is the most it drafts."""

    name = "dynamic-threshold"
    fixed_length = False

    class Config(SmallLM.Config):
        gamma: int = Field(default=10, ge=0, description="most tokens a draft may have")
        threshold: float = Field(0.4, ge=0, le=1, description="stop after a token drawn with less probability")

    config: Config

    def goes_on(self, logits: Tensor, q: Tensor, token: Tensor) -> Tensor:
        if self.sampling.temperature == 0:  # q is one-hot; the model's confidence is its own softmax
            q = logits.float().softmax(-1)
        return q.gather(1, token[:, None]).squeeze(1) >= self.config.threshold

    def _all_stopped(self, going: Tensor) -> bool:
        return not bool(going.any())
