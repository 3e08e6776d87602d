"""The verifier ``by-shape``: selects the verifier by the kind of draft.

A comparison of different kinds of draft under one verifier favours some of them. This verifier uses a good one for
each: block verification for chains, K-SEQ for independent sequences, traversal verification for trees without
replacement, and so on. It wraps existing verifiers.
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
    """Lossless on any draft: the kind of draft determines the verifier, and each verifier is lossless."""

    name = "by-shape"

    class Config(StrategyConfig):
        chain: str = Field(default="block", description="verifier for chains")
        iid: str = Field(default="spectr", description="verifier for K independent sequences")
        delayed_iid: str = Field(default="traversal", description="verifier for K sequences after a common one")
        without_replacement: str = Field(default="traversal", description="verifier for trees without replacement")
        greedy_draft: str = Field(default="greedy-draft-optimal", description="verifier for greedy siblings")
        deterministic: str = Field(default="sample-match", description="verifier for trees of point masses")

        @model_validator(mode="after")
        def _each_fits(self):
            for shape in DRAFT_KINDS:
                if reason := misfit(shape, getattr(self, shape)):
                    raise ValueError(f"'{getattr(self, shape)}' cannot verify '{shape}' drafts here: {reason}")
            return self

    config: Config

    def __init__(self, config: StrategyConfig | None = None):
        super().__init__(config)
        self.verifiers = {shape: make_verifier(getattr(self.config, shape)) for shape in DRAFT_KINDS}

    @classmethod
    def traits(cls, config: Any) -> VerifierTraits:
        return VerifierTraits(accepts=ANY_TREE)

    @classmethod
    def wrapped(cls, config: Any) -> list[type[Verifier]]:
        return [type(make_verifier(getattr(config, shape))) for shape in DRAFT_KINDS]

    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        verifier = self.verifiers.get(draft.kind.name)
        if verifier is None:  # a kind of another plug-in
            verifier = next(v for v in self.verifiers.values() if v.traits(v.config).accepts_kind(draft.kind))
        return verifier.verify(draft, p, rng)


def misfit(shape: str, name: str) -> str | None:
    """Reason why the verifier ``name`` does not fit drafts of kind ``shape``; None if it does."""
    try:
        verifier = make_verifier(name)
    except CrossdraftError as error:
        return str(error)
    traits = verifier.traits(verifier.config)
    if not traits.accepts_kind(DRAFT_KINDS[shape]):
        return f"it supports {', '.join(traits.kinds)}"
    if not traits.lossless:
        return "it is lossy"
    if traits.temperature_zero_only:
        return "it needs temperature 0"
    if traits.stateful:
        return "it keeps state between steps, and the next draft may be of another kind"
    if traits.pairs_only and shape == "without_replacement":
        return "it supports only two children of the root"
    return None
