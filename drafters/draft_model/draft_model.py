"""``draft-model``: a draft model drafts a chain, token by token.

Y. Leviathan, M. Kalman, Y. Matias, "Fast Inference from Transformers via Speculative Decoding", ICML 2023;
C. Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling", 2023. Any model with
the target's tokenizer works. The length policy (`autoregressive.policies`) sets the length of a chain.
"""

from __future__ import annotations

from pydantic import Field

from ...framework.contracts.drafter import StrategyConfig, TextDistribution
from ...framework.contracts.lm import LM
from ...framework.util.limits import MOST_LEVELS
from ..autoregressive.chain_drafter import ChainDrafter, PolicyConfig
from ..autoregressive.draft_model import LengthPolicy
from ..autoregressive.policies import Static


class ModelConfig(StrategyConfig):
    """Options of all drafters with a draft model."""

    model: str = Field(description="name, directory or Hub id of a model that shares the target's tokenizer")
    temperature: float | None = Field(None, ge=0, description="drafting temperature; default: the target's")


class ChainConfig(ModelConfig):
    """Options of drafters that draw chains of a static length from a draft model."""

    gamma: int = Field(default=5, ge=0, le=MOST_LEVELS, description="draft length")

    def lengths(self, batch_size: int) -> LengthPolicy:
        """Make the policy for B slots."""
        return Static().make(self.gamma, batch_size)


class DraftModelChain(ChainDrafter):
    """Autoregressive drafting with a smaller model, one forward pass per token."""

    name = "draft-model"

    class Config(PolicyConfig, ModelConfig):
        """Options of a draft model under any length policy."""

    def slots(self) -> LM:
        return self.context.load_lm(self.config.model)

    def text_distribution(self) -> TextDistribution | None:
        if not self.policy.position_free:
            return None
        should_continue = self.policy.should_continue if self.policy.stops_early else None
        return TextDistribution(self.model.lm, self.sampling, should_continue, self.policy.keeps_last)
