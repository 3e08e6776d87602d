"""The contract of a verifier: (draft, q, p) to an accepted path and one more token.

A verifier is one class in one file: a registered ``name``, a pydantic ``Config``, its ``traits``, and
``verify``, which gets distributions and no model. A lossless verifier keeps the target's distribution for every
draft that meets the contract of ``q``, which ``crossdraft certify`` proves by enumeration.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from ..errors import quoted
from .draft import Draft, Verdict
from .draft_kind import DRAFT_KINDS, SAMPLED_SIBLINGS, DraftKind
from .drafter import DraftTraits, StrategyConfig, no_bool
from .rng import StepRng
from .sampling import Sampling


@dataclass(frozen=True)
class VerifierTraits:
    """Accepted drafts and guarantees of a verifier.

    Attributes:
        accepts: capabilities of `DraftKind`; a draft needs one of them.
        pairs_only: drafts without replacement must be two children of the root with a chain below each.
        lossless: True if the output keeps the target's distribution exactly.
        temperature_zero_only: compares with the target's argmax, so it needs temperature 0.
        stateful: carries per-row state from one step to the next.
        modifies_target: its state is a modification of the target distribution by the draft distribution, so sampled
            drafts must be replayable (see `DraftTraits`).
        shortenable: Pr(tau >= i) of a chain depends neither on the draft after token i nor on earlier steps, so the
            acceptance of shorter drafts follows from that of longer ones, if the drafter is ``shortenable``, too.
    """

    accepts: frozenset[str]
    pairs_only: bool = False
    lossless: bool = True
    temperature_zero_only: bool = False
    stateful: bool = False
    modifies_target: bool = False
    shortenable: bool = False

    def problem(self) -> str | None:
        """Return the reason why these traits are invalid, as a message; None if they are valid."""
        if not isinstance(self.accepts, frozenset | set) or not all(isinstance(name, str) for name in self.accepts):
            return f"accepts={quoted(self.accepts)}, which is not a set of capabilities (see draft_kind)"
        return no_bool(self)

    def accepts_kind(self, kind: DraftKind) -> bool:
        """True if drafts of this ``kind`` can be verified."""
        return bool(self.accepts & kind.capabilities)

    @property
    def kinds(self) -> list[str]:
        """Names of the accepted built-in kinds of draft, in alphabetical order."""
        return sorted(name for name, kind in DRAFT_KINDS.items() if self.accepts_kind(kind))


class Verifier(ABC):
    """Base class of all verifiers. Stateless ones implement only ``traits`` and ``verify``."""

    name: ClassVar[str]
    Config: ClassVar[type[StrategyConfig]] = StrategyConfig
    #: Token of the decoder that uses it, set by the decoder.
    claim: object = None

    def __init__(self, config: StrategyConfig | None = None):
        self.config = config if config is not None else self.Config()

    @classmethod
    @abstractmethod
    def traits(cls, config: Any) -> VerifierTraits:
        """Return the traits of a verifier with this ``config``; decided before any model is loaded."""

    @classmethod
    def wrapped(cls, config: Any) -> Sequence[type[Verifier]]:
        """Verifiers that one with this ``config`` delegates to; their code is part of a result's digest."""
        return ()

    def start(self, row: int) -> None:
        """Reset the state of slot ``row`` for a new sequence."""

    @abstractmethod
    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        """Verify every row of ``draft`` against ``p [B, N+1, V]`` (see `Scores`), without synchronising the host."""

    def state_tensors(self, draft: Draft) -> tuple[Tensor, ...]:
        """State for `verify_with_state`, as tensors on the device."""
        return ()

    def verify_with_state(
        self, draft: Draft, p: Tensor, rng: StepRng, *state: Tensor
    ) -> tuple[Verdict, *tuple[Tensor, ...]]:
        """``verify`` as a pure function of tensors, for compilation; returns the verdict and the new state.

        A stateful verifier can be compiled if it defines this method, `state_tensors` and `store_state`.
        """
        return (self.verify(draft, p, rng),)

    def store_state(self, *state: Tensor) -> None:
        """Store the new state returned by `verify_with_state`, until `observe`."""

    def observe(self, accepted: Sequence[int], drafted: Sequence[int]) -> None:
        """Called after a step with tau and the number of drafted nodes of each slot."""

    def free(self, row: int) -> None:
        """Called when slot ``row`` is freed."""

    def snapshot(self, row: int) -> Hashable:
        """Hashable state of ``row``, ``None`` if stateless; the certificate merges equal states."""
        return None

    def restore(self, row: int, snapshot: Hashable) -> None:
        """Set the state of ``row`` to a result of :meth:`snapshot`."""


def incompatible(
    drafter: str, draft: DraftTraits, verifier: str, traits: VerifierTraits, sampling: Sampling
) -> str | None:
    """Return the reason why this pair cannot run, or ``None`` if it can, before any model is loaded."""
    if traits.temperature_zero_only and sampling.temperature > 0:
        better = "'token' or 'block'" if draft.kind is None or draft.is_chain else "'traversal' or 'specinfer'"
        return (
            f"verifier '{verifier}' compares with the target's argmax and needs temperature 0, but the temperature is "
            f"{sampling.temperature:g}; use {better} for sampling"
        )
    if draft.temperature_zero_only and sampling.temperature > 0:
        return f"drafter '{drafter}' needs temperature 0, but the temperature is {sampling.temperature:g}"
    if draft.kind is None:
        return None
    if traits.accepts_kind(draft.kind):
        if traits.modifies_target and not (draft.point_mass or draft.replayable):
            return (
                f"verifier '{verifier}' modifies the target by the draft distribution, so it needs replayable drafts "
                f"(fixed length, distributions that depend only on the committed tokens), but drafter '{drafter}' "
                "is not replayable; use 'block'"
            )
        pair = draft.branching is not None and draft.branching[:1] == (2,) and set(draft.branching[1:]) <= {1}
        if traits.pairs_only and SAMPLED_SIBLINGS in draft.kind.capabilities and not pair:
            return (
                f"verifier '{verifier}' accepts trees without replacement only with branching [2, 1, 1, ...], which "
                f"drafter '{drafter}' does not draw; use 'traversal' or 'specinfer'"
            )
        return None
    accepted = ", ".join(traits.kinds) or "drafts with " + " or ".join(sorted(traits.accepts))
    return f"drafter '{drafter}' makes '{draft.kind}' drafts, but verifier '{verifier}' accepts only: {accepted}"
