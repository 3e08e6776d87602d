"""A small LM that stops drafting when it is no longer sure of itself.

``stop: after``. J. Mamou et al., "Dynamic Speculation Lookahead Accelerates Speculative Decoding of Large Language
Models", 2024, and the confidence stop of transformers' assisted generation. After drawing a token whose probability
under the drafter's own law is below the threshold, the row stops. The token stays in the draft: a token that was
looked at and thrown away biases the output.

``stop: before``. The fallback policy of S. Kim et al., "Speculative Decoding with Big Little Decoder", NeurIPS 2023.
The row stops before it draws from a law Q with max_x Q(x) below the threshold. That decision depends on the prefix
alone: given x_1 .. x_i the draft ends after x_i or goes on, whatever x_{i+1} would be, so each token that is kept
still follows its Q and losslessness stands.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ..framework.draft import Draft, Sequences
from ..framework.rng import RoundRng
from .small_lm import SmallLM


class DynamicThreshold(SmallLM):
    """The small LM under a confidence policy; gamma is the most it drafts."""

    name = "dynamic-threshold"
    fixed_length = False

    class Config(SmallLM.Config):
        gamma: int = Field(default=10, ge=0, description="most tokens a draft may have")
        stop: Literal["after", "before"] = Field(
            "after",
            description="after: keep the token that was drawn with less probability than the threshold, then stop; "
            "before: stop instead of drawing where no token has as much",
        )
        threshold: float = Field(
            0.4, ge=0, le=1, description="probability below which a row stops; default 0.6 with stop: before"
        )

        @model_validator(mode="before")
        @classmethod
        def _default_threshold(cls, values: Any) -> Any:
            if isinstance(values, dict) and values.get("stop") == "before":
                return {"threshold": 0.6, **values}
            return values

    config: Config

    def propose(self, sequences: Sequences, rng: RoundRng) -> Draft:
        self._sure: list[Tensor] = []
        draft = super().propose(sequences, rng)
        if self.config.stop == "after" or not draft.width:
            return draft
        # Nobody has looked at the tokens drawn from an unsure law: leaving them out is not drawing them.
        count = torch.minimum(draft.count, torch.stack(self._sure, 1).long().cumprod(1).sum(1))
        width = int(count.max())  # one more look at the device: fewer target rows
        return Draft.chain(draft.tokens[:, :width], count, None if draft.q is None else draft.q[:, :width])

    def goes_on(self, logits: Tensor, q: Tensor, token: Tensor) -> Tensor:
        if self.sampling.temperature == 0:  # q is one-hot; the model's confidence is its own softmax
            q = logits.float().softmax(-1)
        if self.config.stop == "after":
            return q.gather(1, token[:, None]).squeeze(1) >= self.config.threshold
        sure = q.amax(-1) >= self.config.threshold
        self._sure.append(sure)
        return sure

    def _all_stopped(self, going: Tensor) -> bool:
        return not bool(going.any())
