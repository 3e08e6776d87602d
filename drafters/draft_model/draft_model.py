"""A draft model drafts a chain, token by token.

Y. Leviathan, M. Kalman, Y. Matias, "Fast Inference from Transformers via Speculative Decoding", ICML 2023;
C. Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling", 2023. Any model that
shares the target's tokenizer will do. How long a chain is, the length policy says (`autoregressive.policies`).
"""

from __future__ import annotations

from pydantic import Field

from ...framework.contracts.drafter import StrategyConfig, TextDistribution
from ...framework.contracts.lm import LM
from ...framework.util.limits import MOST_LEVELS
from ..autoregressive.chain_drafter import ChainDrafter, PolicyConfig
from ..autoregressive.length_policy import LengthPolicy
from ..autoregressive.policies import Static


class ModelConfig(StrategyConfig):
    """The options of every drafter with a draft model."""

    model: str = Field(description="name, directory or Hub id of a model that shares the target's tokenizer")
    temperature: float | None = Field(None, ge=0, description="drafting temperature; default: the target's")


class ChainConfig(ModelConfig):
    """The options of every drafter that draws chains from a draft model. A subclass says which length policy."""

    gamma: int = Field(default=5, ge=0, le=MOST_LEVELS, description="draft length")

    def lengths(self, batch_size: int) -> LengthPolicy:
        """The policy, for B slots. Raises ValueError if it does not fit gamma."""
        return Static().make(self.gamma, batch_size)


class DraftModelChain(ChainDrafter):
    """Autoregressive drafting with a forward pass of a cheaper model for each token."""

    name = "draft-model"

    class Config(PolicyConfig, ModelConfig):
        """A draft model under any policy."""

    def slots(self) -> LM:
        return self.context.load_lm(self.config.model)

    def text_distribution(self) -> TextDistribution | None:
        if not self.policy.anywhere:
            return None
        goes_on = self.policy.goes_on if self.policy.asks else None
        return TextDistribution(self.model.lm, self.sampling, goes_on, self.policy.keeps_last)
