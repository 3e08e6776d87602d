"""The verifier ``by-shape``: judges every draft by the rule that its shape asks for.

A table that compares drafters of different shapes under one rule compares them under a rule that suits one. This
one column is each at its best: block verification for chains, K-SEQ for independent sequences, traversal verification
for trees without replacement, and so on. It wraps rules that are there, and adds none of its own.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator
from torch import Tensor

from crossdraft import (
    ANY_TREE,
    DRAFT_KINDS,
    CrossdraftError,
    Draft,
    StepRng,
    StrategyConfig,
    Verdict,
    Verifier,
    VerifierTraits,
    make_verifier,
)


class ByShape(Verifier):
    """Lossless on any draft: which rule judges a step follows from the draft's shape alone, and each is lossless."""

    name = "by-shape"

    class Config(StrategyConfig):
        chain: str = Field(default="block", description="the rule for chains")
        iid: str = Field(default="spectr", description="the rule for K independent sequences")
        without_replacement: str = Field(default="traversal", description="the rule for trees without replacement")
        greedy_draft: str = Field(default="greedy-draft-optimal", description="the rule for greedy siblings")
        deterministic: str = Field(default="sample-match", description="the rule for trees that nothing was drawn for")

        @model_validator(mode="after")
        def _each_fits(self):
            for shape in DRAFT_KINDS:
                if reason := misfit(shape, getattr(self, shape)):
                    raise ValueError(f"'{getattr(self, shape)}' cannot judge '{shape}' drafts here: {reason}")
            return self

    config: Config

    def __init__(self, config: StrategyConfig | None = None):
        super().__init__(config)
        self.rules = {shape: make_verifier(getattr(self.config, shape)) for shape in DRAFT_KINDS}

    @classmethod
    def traits(cls, config: Any) -> VerifierTraits:
        return VerifierTraits(accepts=ANY_TREE)

    @classmethod
    def wrapped(cls, config: Any) -> list[type[Verifier]]:
        return [type(make_verifier(getattr(config, shape))) for shape in DRAFT_KINDS]

    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        rule = self.rules.get(draft.kind.name)
        if rule is None:  # a kind of another plug-in
            rule = next(rule for rule in self.rules.values() if rule.traits(rule.config).accepts_kind(draft.kind))
        return rule.verify(draft, p, rng)


def misfit(shape: str, name: str) -> str | None:
    """Why the rule called ``name`` cannot stand for ``shape``; None if it can."""
    try:
        rule = make_verifier(name)
    except CrossdraftError as error:
        return str(error)
    traits = rule.traits(rule.config)
    if not traits.accepts_kind(DRAFT_KINDS[shape]):
        return f"it judges {', '.join(traits.kinds)}"
    if not traits.lossless:
        return "it is lossy"
    if traits.temperature_zero_only:
        return "it needs temperature 0"
    if traits.stateful:
        return "it carries state from step to step, and the next draft may have another shape"
    if traits.pairs_only and shape == "without_replacement":
        return "it judges two children of the root alone"
    return None
