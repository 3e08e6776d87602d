"""What drafters share that draft a whole block in one pass of their head: DFlash, DSpark and parallel EAGLE.

The head is fed the target's features of the tokens that were committed since, and the block behind them; what it
computes for the block is dropped again. Where a token of the block is told nothing of the tokens before it, their laws
are independent given the text, and exactly these are reported; where it is told (DSpark), the law that is reported is
the corrected one that the token was drawn from.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Self

from pydantic import Field, model_validator
from torch import Tensor

from ...framework.contracts.draft import Draft, Sequences, on_device
from ...framework.contracts.draft_kind import CHAIN
from ...framework.contracts.drafter import DraftContext, DraftTraits, StrategyConfig
from ...framework.contracts.rng import StepRng
from ...framework.contracts.sampling import Sampling
from ...framework.errors import UsageError
from ...framework.util.limits import MOST_LEVELS
from ..autoregressive.chains import grow_chain
from ..autoregressive.length_policy import LengthPolicy
from ..autoregressive.policies import POLICIES, Policy, Static
from .feature_head import widened
from .feature_reader import FeatureReader

#: A block is at most this long unless gamma says so.
MOST_BLOCK = 16


class BlockConfig(StrategyConfig):
    """Options of the drafters of blocks."""

    model: str = Field(description="name, directory or Hub id of the drafter's checkpoint")
    layers: tuple[int, ...] | None = Field(
        None,
        description="the target's hidden states that it reads (0 = embeddings, i = output of layer i); a refusal says "
        "which ones its checkpoint names",
    )
    gamma: int | None = Field(
        None,
        ge=0,
        le=MOST_LEVELS,
        description=f"draft length; default: the whole block, {MOST_BLOCK} at most",
    )
    policy: Policy = Field(default=Static(), description=f"length policy: {POLICIES}, e.g. {{name: confidence}}")
    temperature: float | None = Field(None, ge=0, description="drafting temperature; default: the target's")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        self.started(1)
        return self

    @property
    def most(self) -> int:
        """The longest draft there can be."""
        return MOST_BLOCK if self.gamma is None else self.gamma

    def started(self, batch_size: int, gamma: int | None = None) -> LengthPolicy:
        """The length policy. Raises ValueError for options that do not fit ``gamma``, `most` by default."""
        return self.policy.make(self.most if gamma is None else gamma, batch_size)


class BlockDrafter(FeatureReader):
    """Base of the drafters of blocks: a subclass loads its head, feeds it, and says what a block is."""

    Config = BlockConfig
    config: BlockConfig

    def __init__(self, config: StrategyConfig, context: DraftContext):
        super().__init__(config, context)
        own, block = self.config, self.block()
        if block is not None and own.gamma is not None and own.gamma > block:
            raise UsageError(
                f"drafter '{self.name}' is to draft {own.gamma} tokens, but the blocks of '{own.model}' hold {block}; "
                "shorten gamma"
            )
        gamma = own.most if block is None else min(own.most, block)
        try:
            self.policy = own.started(context.batch_size, gamma)
        except ValueError as error:
            raise UsageError(f"drafter '{self.name}' drafts {gamma} tokens with '{own.model}': {error}") from None
        self.policy.load(context)
        #: Features that a row is fed at most in a pass: what a step commits.
        self._most = gamma + 1
        self.lm = context.slots(self.head, room=self._most + (gamma + 1 if block is None else block + 1))
        # Rotary positions go on beyond the length they were trained on; the target's context bounds every sequence.
        self.lm.context_length = None

    @abstractmethod
    def block(self) -> int | None:
        """Tokens that a block of the head drafts; ``None`` = as many as one likes."""

    @abstractmethod
    def feed(self, sequences: Sequences, features: list[Tensor], steps: int) -> tuple[Tensor, Tensor | None]:
        """Feed and keep each row's ``features [n, H]``, 0 of them to `_most`, with a block of ``steps`` behind them.

        Returns:
            logits ``[B, steps or more, Vd]`` of the block's drafts, and what else `following` reads of them.
        """

    def following(self, logits: Tensor, states: Tensor | None) -> Callable[[Tensor], Tensor]:
        """What says the logits ``[B, 1, Vd]`` of the block's next token, once it is told the token ``[B, 1]`` before.

        ``logits`` and ``states`` as `feed` returned them. Here: the logits as they are, whatever was drawn.
        """
        rows = iter(logits.split(1, 1))
        return lambda token: next(rows)

    def drafts(self, sequences: Sequences) -> list[bool]:
        """Which rows know enough to draft."""
        return [True] * sequences.batch_size

    @classmethod
    def layers(cls, config: Any) -> tuple[float, ...]:
        return config.layers or ()

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        # Never replayable: where a step started decides which features are the target's, and with it the laws.
        return DraftTraits(
            kind=CHAIN,
            point_mass=sampling.at(config.temperature).temperature == 0,
            nodes=config.most,
            hidden_layers=cls.layers(config),
            adapts=config.started(1).adapts,
        )

    @classmethod
    def remembers(cls, config: Any) -> bool:
        return config.started(1).remembers

    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        able = self.drafts(sequences)
        limit = [most if some else 0 for most, some in zip(sequences.limit, able, strict=True)]
        self._wanted = self.policy.wanted(limit, sequences.occupied)
        steps = max(self._wanted)
        if not steps:
            return Draft.empty(sequences.batch_size, sequences.device)
        features = self._taken()
        while max(map(len, features)) > self._most:  # steps without drafts, in which nothing was fed
            early = [max(min(len(row) - self._most, self._most), 0) for row in features]
            self.feed(sequences, [row[:n] for row, n in zip(features, early, strict=True)], 1)
            features = [row[n:] for row, n in zip(features, early, strict=True)]
        following = self.following(*self.feed(sequences, features, steps))
        ids, vocab_size = self.head.target_ids, self.context.vocab_size

        def expand(token: Tensor) -> Tensor:
            return widened(following(token), ids, vocab_size)

        roots = on_device([h[-1] if h else 0 for h in sequences.history], sequences.device)
        draft = grow_chain(expand(roots[:, None])[:, 0], expand, self._wanted, self.policy, self.sampling, rng)
        if draft.finite is not None and not all(able):  # the logits of a row that knows too little mean nothing
            draft.finite = draft.finite | ~on_device(able, sequences.device).bool()
        return draft
