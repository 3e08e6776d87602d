"""The contract of a drafter: whatever proposes tokens for the target to check.

A drafter is one class: a registered ``name``, a pydantic ``Config`` (unknown keys are errors), its ``traits``
(decided before any model is loaded), and ``propose``. It sees committed tokens (:class:`Sequences`) and
returns a :class:`Draft`; it does not know which verifier follows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from .checkpoint import Checkpoint, load_checkpoint
from .draft import Draft, Drawn, Scores, Sequences, Verdict
from .rng import RoundRng

if TYPE_CHECKING:
    from .decoding.sampling import Sampling
    from .lm import LM


class StrategyConfig(BaseModel):
    """Base of every drafter's and verifier's ``Config``: a misspelt key is an error, not a silent default."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True)
class DraftTraits:
    """What a drafter with a given config makes.

    Attributes:
        drawn: the shape of its drafts; ``None`` = it never drafts (the autoregressive baseline).
        point_mass: True if its drafts carry no ``q`` (deterministic proposals).
        nodes: the most nodes a draft can have in a row; buffers are made for as many.
        hidden_layers: target layers whose hidden states it needs (0 = embeddings, i = output of layer i,
            negative indices count from the end, a float is a share of the depth rounded down: 0.5 is the middle of
            any target), in the order it wants them in ``Scores.hidden``.
        branching: for a tree in which all nodes of a level have as many children: how many, level by level.
        replayable: the drafts are chains whose laws depend on the committed tokens alone, whose length is fixed
            before the first token is drawn, and which carry the law after their last token where
            `DraftContext.final_law` asks for it. A rule that modifies later targets needs all three.
    """

    drawn: Drawn | None
    point_mass: bool
    nodes: int
    hidden_layers: tuple[float, ...] = ()
    branching: tuple[int, ...] | None = None
    replayable: bool = False


@dataclass
class DraftContext:
    """What a drafter is given to build itself.

    Attributes:
        sampling: the target's sampling parameters; a drafter that samples uses the same warpers.
        batch_size: number of slots B.
        max_length: longest sequence (prompt, output and draft) any slot will hold, in tokens.
        vocab_size: V, the width of every ``q`` row.
        device: where the drafts must live.
        load_lm: ``load_lm(model_name)`` returns an :class:`~crossdraft.framework.lm.LM` with B slots for a
            model that shares the target's tokenizer. Raises ``ModelError`` with a sentence otherwise.
        load_heads: ``load_heads(name)`` returns the :class:`~crossdraft.framework.checkpoint.Checkpoint` of heads made
            for the target. Raises ``ModelError`` with a sentence if there is no such, or it is damaged.
        target_model: the target's own module where there is one (heads share its embedding and head), else ``None``.
        final_law: the verifier wants one more row of ``q`` for every row whose draft is shorter than the drafter's
            own gamma: the law of the token that would have come next (row ``count[b]``).
    """

    sampling: Sampling
    batch_size: int
    max_length: int
    vocab_size: int
    device: torch.device
    load_lm: Callable[[str], LM]
    load_heads: Callable[[str], Checkpoint] = load_checkpoint
    target_model: Any = None
    final_law: bool = False


class Drafter(ABC):
    """Base class of all drafters.

    Life of a slot: ``begin`` with a prompt, then per round ``propose`` and ``observe``, then ``retire``.
    """

    name: ClassVar[str]
    Config: ClassVar[type[StrategyConfig]] = StrategyConfig

    def __init__(self, config: StrategyConfig, context: DraftContext):
        self.config, self.context = config, context

    @classmethod
    @abstractmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        """What a drafter with this ``config`` makes for a target sampled with ``sampling``; loads nothing."""

    def begin(self, row: int, prompt: Sequence[int], hidden: Tensor | None = None) -> None:
        """Slot ``row`` starts a sequence with ``prompt`` (its last token is the first root).

        ``hidden``: ``[len(prompt) - 1, L, H]``, the target's features of all prompt tokens but the last, if
        ``traits.hidden_layers`` asks for any.
        """

    @abstractmethod
    def propose(self, sequences: Sequences, rng: RoundRng) -> Draft:
        """Draft for every slot; no node of row b deeper than ``sequences.limit[b]``, none for free slots."""

    def observe(
        self, sequences: Sequences, draft: Draft, verdict: Verdict, accepted: Sequence[int], scores: Scores
    ) -> None:
        """The round is over: ``sequences`` already hold the emitted tokens; ``accepted[b]`` is tau on the host."""

    def retire(self, row: int) -> None:
        """Slot ``row`` is free again."""

    @property
    def passes(self) -> int:
        """Forward passes of a drafting model made so far (0 for drafters without one)."""
        return 0
