"""The contract of a verifier: the rule that turns (draft, q, p) into an accepted path and one more token.

A verifier is one class in one file: a registered ``name``, a pydantic ``Config``, its ``traits``, and
``verify``. It never sees a model; it sees laws. A lossless verifier keeps the target's distribution for every
draft whose ``q`` is honest, which ``crossdraft certify`` proves by enumeration.
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
from .drafter import DraftTraits, StrategyConfig
from .rng import StepRng
from .sampling import Sampling


@dataclass(frozen=True)
class VerifierTraits:
    """Accepted drafts and guarantees of a verifier.

    Attributes:
        accepts: capabilities of `DraftKind`, of which a draft needs one.
        pairs_only: of drafts without replacement it can judge only two children of the root with a chain below each.
        lossless: whether the output keeps the target's distribution exactly.
        temperature_zero_only: it compares with the target's argmax, so it needs temperature 0.
        stateful: it carries per-row state from one step to the next.
        modifies_target: its state is a modification of the target by the drafter's law, so sampled drafts must be
            replayable (see `DraftTraits`).
    """

    accepts: frozenset[str]
    pairs_only: bool = False
    lossless: bool = True
    temperature_zero_only: bool = False
    stateful: bool = False
    modifies_target: bool = False

    def problem(self) -> str | None:
        """Return the reason why these traits are invalid, as a message; None if they are valid."""
        if not isinstance(self.accepts, frozenset | set) or not all(isinstance(one, str) for one in self.accepts):
            return f"accepts={quoted(self.accepts)}, which is not a set of capabilities (see draft_kind)"
        for key in ("pairs_only", "lossless", "temperature_zero_only", "stateful", "modifies_target"):
            if not isinstance(value := getattr(self, key), bool):
                return f"{key}={quoted(value)}, which is neither True nor False"
        return None

    def accepts_kind(self, kind: DraftKind) -> bool:
        """True if drafts of this ``kind`` can be judged."""
        return bool(self.accepts & kind.capabilities)

    @property
    def kinds(self) -> list[str]:
        """Names of the built-in kinds of draft that can be judged, in alphabetical order."""
        return sorted(name for name, kind in DRAFT_KINDS.items() if self.accepts_kind(kind))


class Verifier(ABC):
    """Base class of all verifiers. Stateless rules implement ``verify`` alone."""

    name: ClassVar[str]
    Config: ClassVar[type[StrategyConfig]] = StrategyConfig
    #: Whose it is for now: the decoder's, which sets it.
    claim: object = None

    def __init__(self, config: StrategyConfig | None = None):
        self.config = config if config is not None else self.Config()

    @classmethod
    @abstractmethod
    def traits(cls, config: Any) -> VerifierTraits:
        """Return the traits of a verifier with this ``config``; decided before any model is loaded."""

    @classmethod
    def wrapped(cls, config: Any) -> Sequence[type[Verifier]]:
        """The rules that one with this ``config`` runs by their names: results depend on their code, too."""
        return ()

    def start(self, row: int) -> None:
        """Slot ``row`` starts a new sequence: forget what was kept for it."""

    @abstractmethod
    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        """Judge every row of ``draft`` against ``p [B, N+1, V]`` (see `Scores`); never synchronises with the host."""

    def held(self, draft: Draft) -> tuple[Tensor, ...]:
        """State that `judge` reads, as tensors on the device; see there."""
        return ()

    def judge(self, draft: Draft, p: Tensor, rng: StepRng, *held: Tensor) -> tuple[Verdict, *tuple[Tensor, ...]]:
        """``verify`` as a function of tensors alone, which can be compiled; returns what `hold` is to be given, too.

        A rule without state need not define it. One with state can be compiled if it does, with `held` and `hold`.
        """
        return (self.verify(draft, p, rng),)

    def hold(self, *new: Tensor) -> None:
        """Keep what `judge` returned after its verdict, until `observe`."""

    def observe(self, accepted: Sequence[int], drafted: Sequence[int]) -> None:
        """The step is over: per slot, tau and the number of drafted nodes, now known on the host."""

    def free(self, row: int) -> None:
        """Slot ``row`` is free."""

    def snapshot(self, row: int) -> Hashable:
        """The state kept for ``row``, hashable, ``None`` if there is none; the certificate merges equal states."""
        return None

    def restore(self, row: int, snapshot: Hashable) -> None:
        """Put back what :meth:`snapshot` returned."""


def incompatible(
    drafter: str, draft: DraftTraits, verifier: str, traits: VerifierTraits, sampling: Sampling
) -> str | None:
    """Return the reason why this pair cannot run, or ``None`` if it can. Decided before any model is loaded."""
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
                f"verifier '{verifier}' modifies later targets by the drafter's law, so it needs drafts of a length "
                "fixed beforehand whose laws depend on the committed tokens alone, which drafter "
                f"'{drafter}' does not promise; use 'block'"
            )
        pair = draft.branching is not None and draft.branching[:1] == (2,) and set(draft.branching[1:]) <= {1}
        if traits.pairs_only and SAMPLED_SIBLINGS in draft.kind.capabilities and not pair:
            return (
                f"verifier '{verifier}' judges a tree without replacement only with branching [2, 1, 1, ...], which "
                f"drafter '{drafter}' does not draw; use 'traversal' or 'specinfer'"
            )
        return None
    accepted = ", ".join(traits.kinds) or "drafts with " + " or ".join(sorted(traits.accepts))
    return f"drafter '{drafter}' makes '{draft.kind}' drafts, but verifier '{verifier}' accepts only: {accepted}"
