"""A drafter that draws a chain from a draft model under a length policy: all but where the model comes from."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field, model_validator
from torch import Tensor

from ...framework.contracts.draft import Draft, Scores, Sequences, Verdict
from ...framework.contracts.draft_kind import CHAIN
from ...framework.contracts.drafter import DraftContext, Drafter, DraftTraits, StrategyConfig
from ...framework.contracts.lm import LM
from ...framework.contracts.rng import StepRng
from ...framework.contracts.sampling import Sampling
from ...framework.util.limits import MOST_LEVELS
from .chains import grow_chain, law_after
from .draft_model import DraftModel
from .length_policy import LengthPolicy
from .policies import POLICIES, Policy, Static


class PolicyConfig(StrategyConfig):
    """The options of a chain under any policy."""

    gamma: int = Field(default=5, ge=0, le=MOST_LEVELS, description="draft length, or the most that the policy drafts")
    temperature: float | None = Field(None, ge=0, description="drafting temperature; default: the target's")
    policy: Policy = Field(default=Static(), description=f"length policy: {POLICIES}, e.g. {{name: confidence}}")

    @model_validator(mode="after")
    def _policy_fits(self) -> Any:
        self.lengths(1)
        return self

    def lengths(self, batch_size: int) -> LengthPolicy:
        """The policy, for B slots. Raises ValueError if it does not fit gamma."""
        return self.policy.make(self.gamma, batch_size)


class ChainDrafter(Drafter):
    """Autoregressive drafting with a forward pass of a model for each token.

    At temperature 0 it takes the argmax and reports a point mass, otherwise it samples and reports the law it
    sampled from, warped like the target's. Its ``Config`` has ``gamma``, ``temperature`` and ``lengths``, as
    `PolicyConfig` has them.
    """

    config: Any

    def __init__(self, config: StrategyConfig, context: DraftContext):
        super().__init__(config, context)
        self.model = DraftModel(self.slots())
        self.sampling = context.sampling.at(self.config.temperature)
        self.policy: LengthPolicy = self.config.lengths(context.batch_size)
        self.policy.load(context)
        self._wanted = [0] * context.batch_size

    @abstractmethod
    def slots(self) -> LM:
        """B slots of the model that drafts, from ``self.context``."""

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        point_mass = sampling.at(config.temperature).temperature == 0
        policy = config.lengths(1)
        return DraftTraits(
            kind=CHAIN,
            point_mass=point_mass,
            nodes=config.gamma,
            replayable=policy.fixed,
            adapts=policy.adapts,
        )

    @classmethod
    def remembers(cls, config: Any) -> bool:
        return cls.reset is not ChainDrafter.reset or config.lengths(1).remembers

    def reset(self) -> None:
        self.policy.reset()

    @property
    def passes(self) -> int:
        return self.model.passes

    def prefill(self, prompts: Mapping[int, Sequence[int]]) -> None:
        self.model.prefill(prompts)

    def start(self, row: int, prompt: Sequence[int], hidden: Tensor | None = None) -> None:
        self.model.start(row, prompt)
        self.policy.start(row)

    def free(self, row: int, finish_reason: str | None = None) -> None:
        self.model.free(row)

    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        self._wanted = self.policy.wanted(sequences.limit, sequences.occupied)
        one_more = law_after(self.policy, sequences, self.context.final_q, self.sampling.temperature > 0)
        if not max(self._wanted) and not one_more:
            return Draft.empty(sequences.batch_size, sequences.device)
        root = self.model.root(sequences)
        return grow_chain(root, self.model.forward, self._wanted, self.policy, self.sampling, rng, one_more=one_more)

    def observe(
        self, sequences: Sequences, draft: Draft, verdict: Verdict, accepted: Sequence[int], scores: Scores
    ) -> None:
        # The last drafted token is fed only for `final_q`; otherwise it is caught up once it was accepted.
        self.model.commit(verdict, accepted)
        self.policy.observe(accepted, self._wanted)
