"""The base class of drafters that draw a chain from a model under a length policy."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from pydantic import Field, model_validator

from ...framework.contracts.draft import Draft, Scores, Sequences, Verdict
from ...framework.contracts.draft_kind import CHAIN
from ...framework.contracts.drafter import DraftContext, DraftTraits, StrategyConfig
from ...framework.contracts.lm import LM
from ...framework.contracts.rng import StepRng
from ...framework.contracts.sampling import Sampling
from ...framework.util.limits import MOST_LEVELS
from .draft_model import DraftModel, LengthPolicy, ModelDrafter, grow_chain
from .policies import POLICIES, Policy, Static


class PolicyConfig(StrategyConfig):
    """Options of a chain under any length policy."""

    gamma: int = Field(
        default=5, ge=0, le=MOST_LEVELS, description="draft length, or its maximum if the policy varies it"
    )
    temperature: float | None = Field(None, ge=0, description="drafting temperature; default: the target's")
    policy: Policy = Field(default=Static(), description=f"length policy: {POLICIES}, e.g. {{name: confidence}}")

    @model_validator(mode="after")
    def _policy_fits(self) -> Any:
        self.lengths(1)
        return self

    def lengths(self, batch_size: int) -> LengthPolicy:
        """Make the policy for B slots. Raises ValueError if its options do not fit gamma."""
        return self.policy.make(self.gamma, batch_size)


class ChainDrafter(ModelDrafter):
    """Autoregressive drafting, one forward pass of a model per token.

    At temperature 0 it drafts the argmax as a point mass, otherwise it samples and returns the distribution q, warped
    like the target's. ``Config`` needs ``gamma``, ``temperature`` and ``lengths``, see `PolicyConfig`.
    """

    config: Any
    policy: LengthPolicy

    def __init__(self, config: StrategyConfig, context: DraftContext):
        super().__init__(config, context)
        self.model = DraftModel(self.slots())
        self.sampling = context.sampling.at(self.config.temperature)
        self.policy = self.config.lengths(context.batch_size)
        self.policy.load(context)
        self._draft_lengths = [0] * context.batch_size

    @abstractmethod
    def slots(self) -> LM:
        """Return B slots of the model that drafts, from ``self.context``."""

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
            shortenable=policy.fixed,
            always_drafts=policy.fixed,
            waits=policy.waits,
        )

    @classmethod
    def remembers(cls, config: Any) -> bool:
        return cls.reset is not ChainDrafter.reset or config.lengths(1).remembers

    def reset(self) -> None:
        self.policy.reset()

    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        self._draft_lengths = self.policy.draft_lengths(sequences.limit, sequences.occupied)
        final_q = self.context.final_q and self.sampling.temperature > 0
        if final_q:  # needed after the last token of a row that its limit cuts short
            rows = zip(sequences.history, sequences.limit, strict=True)
            final_q = any(history and limit < self.policy.gamma for history, limit in rows)
        if not max(self._draft_lengths) and not final_q:
            return Draft.empty(sequences.batch_size, sequences.device)
        root = self.model.root(sequences)
        return grow_chain(
            root, self.model.forward, self._draft_lengths, self.policy, self.sampling, rng, final_q=final_q
        )

    def observe(
        self, sequences: Sequences, draft: Draft, verdict: Verdict, accepted: Sequence[int], scores: Scores
    ) -> None:
        # The last drafted token is fed only for `final_q`; otherwise `DraftModel.root` feeds it once it was accepted.
        self.model.commit(verdict, accepted)
        self.policy.observe(accepted, self._draft_lengths)
