"""A small language model drafts a chain, token by token.

Y. Leviathan, M. Kalman, Y. Matias, "Fast Inference from Transformers via Speculative Decoding", ICML 2023;
C. Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling", 2023. Any model that
shares the target's tokenizer will do. How long a chain is, the length policy says (`autoregressive.policies`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field, model_validator
from torch import Tensor

from ...framework.contracts.draft import Draft, Scores, Sequences, Verdict
from ...framework.contracts.drafter import DraftContext, Drafter, DraftTraits, StrategyConfig, TextLaw
from ...framework.contracts.limits import MOST_LEVELS
from ...framework.contracts.rng import RoundRng
from ...framework.contracts.sampling import Sampling
from ..autoregressive.chains import grow_chain, law_after
from ..autoregressive.draft_model import DraftModel
from ..autoregressive.policies import LengthPolicy, Policy, Static


class ModelConfig(StrategyConfig):
    """The options of every drafter with a small LM."""

    model: str = Field(description="name, directory or Hub id of a model that shares the target's tokenizer")
    temperature: float | None = Field(None, ge=0, description="drafting temperature; default: the target's")


class ChainConfig(ModelConfig):
    """The options of every drafter that draws chains from a small LM. A subclass says which length policy."""

    gamma: int = Field(default=5, ge=0, le=MOST_LEVELS, description="draft length")

    def lengths(self, batch_size: int) -> LengthPolicy:
        """The policy, for B slots. Raises ValueError if it does not fit gamma."""
        return Static().start(self.gamma, batch_size)


class SmallLM(Drafter):
    """Autoregressive drafting with a forward pass of a cheaper model for each token.

    At temperature 0 it takes the argmax and reports a point mass, otherwise it samples and reports the law it
    sampled from, warped like the target's.
    """

    name = "small-lm"

    class Config(ChainConfig):
        policy: Policy = Field(
            default=Static(), description="length policy: static, heuristic or confidence, e.g. {name: confidence}"
        )

        @model_validator(mode="after")
        def _policy_fits(self) -> Any:
            self.lengths(1)
            return self

        def lengths(self, batch_size: int) -> LengthPolicy:
            return self.policy.start(self.gamma, batch_size)

    config: ChainConfig

    def __init__(self, config: StrategyConfig, context: DraftContext):
        super().__init__(config, context)
        self.model = DraftModel(context.load_lm(self.config.model))
        self.sampling = context.sampling.at(self.config.temperature)
        self.policy = self.config.lengths(context.batch_size)
        self._wanted = [0] * context.batch_size

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        point_mass = sampling.at(config.temperature).temperature == 0
        policy = config.lengths(1)
        return DraftTraits(
            drawn="chain",
            point_mass=point_mass,
            nodes=config.gamma,
            replayable=policy.fixed,
            adapts=policy.adapts,
        )

    @property
    def passes(self) -> int:
        return self.model.passes

    def text_law(self) -> TextLaw:
        goes_on = self.policy.goes_on if self.policy.asks else None
        return TextLaw(self.model.lm, self.sampling, goes_on, self.policy.keeps_last)

    def begin(self, row: int, prompt: Sequence[int], hidden: Tensor | None = None) -> None:
        self.model.begin(row, prompt)
        self.policy.begin(row)

    def retire(self, row: int, finish: str | None = None) -> None:
        self.model.retire(row)

    def propose(self, sequences: Sequences, rng: RoundRng) -> Draft:
        self._wanted = self.policy.wanted(sequences.limit)
        one_more = law_after(self.policy, sequences, self.context.final_law, self.sampling.temperature > 0)
        if not max(self._wanted) and not one_more:
            return Draft.empty(sequences.batch_size, sequences.device)
        root = self.model.root(sequences)
        return grow_chain(root, self.model.grow, self._wanted, self.policy, self.sampling, rng, one_more=one_more)

    def observe(
        self, sequences: Sequences, draft: Draft, verdict: Verdict, accepted: Sequence[int], scores: Scores
    ) -> None:
        # The last drafted token is fed only for `final_law`; otherwise it is caught up once it was accepted.
        self.model.keep(verdict, accepted)
        self.policy.observe(accepted, self._wanted)
