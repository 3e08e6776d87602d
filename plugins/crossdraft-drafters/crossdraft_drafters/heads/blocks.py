"""The base class of drafters that draft a block in one pass of their head: DFlash, DSpark and parallel EAGLE.

The head is fed the target's features of the newly committed tokens, followed by the block; keys and values of the block
are dropped. If the tokens of a block are not conditioned on each other, their distributions are independent given the
text, and q holds exactly these; if they are (DSpark), q holds the corrected distribution of each draw.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Self

from pydantic import Field, model_validator
from torch import Tensor

from crossdraft import (
    CHAIN,
    MOST_LEVELS,
    Draft,
    DraftContext,
    DraftTraits,
    Sampling,
    Sequences,
    StepRng,
    StrategyConfig,
    UsageError,
    on_device,
)
from crossdraft.drafters.autoregressive.draft_model import LengthPolicy, grow_chain
from crossdraft.drafters.autoregressive.policies import POLICIES, Policy, Static
from crossdraft.heads import FeatureReader, expand_vocab

#: Maximum draft length if gamma is not set.
MOST_BLOCK = 16


class BlockConfig(StrategyConfig):
    """Options of the block drafters."""

    model: str = Field(description="name, directory or Hub id of the drafter's checkpoint")
    layers: tuple[int, ...] | None = Field(
        None,
        description="the target's hidden states that the head reads (0 = embeddings, i = output of layer i, -1 = "
        "output of the final norm); the error message without it lists those of the checkpoint",
    )
    gamma: int | None = Field(
        None,
        ge=0,
        le=MOST_LEVELS,
        description=f"draft length; default: the whole block, at most {MOST_BLOCK}",
    )
    policy: Policy = Field(default=Static(), description=f"length policy: {POLICIES}, e.g. {{name: confidence}}")
    temperature: float | None = Field(None, ge=0, description="drafting temperature; default: the target's")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        self.make_policy(1)
        return self

    @property
    def max_gamma(self) -> int:
        """Maximum draft length."""
        return MOST_BLOCK if self.gamma is None else self.gamma

    def make_policy(self, batch_size: int, gamma: int | None = None) -> LengthPolicy:
        """Make the length policy. Raises ValueError if its options do not fit ``gamma`` (default: `max_gamma`)."""
        return self.policy.make(self.max_gamma if gamma is None else gamma, batch_size)


class BlockDrafter(FeatureReader):
    """Base of the block drafters. A subclass loads its head, feeds it, and defines `block`."""

    Config = BlockConfig
    config: BlockConfig

    def __init__(self, config: StrategyConfig, context: DraftContext):
        super().__init__(config, context)
        own, block = self.config, self.block()
        if block is not None and own.gamma is not None and own.gamma > block:
            raise UsageError(
                f"drafter '{self.name}': gamma is {own.gamma}, but the blocks of '{own.model}' draft {block} tokens; "
                f"write at most {block}"
            )
        gamma = own.max_gamma if block is None else min(own.max_gamma, block)
        try:
            self.policy = own.make_policy(context.batch_size, gamma)
        except ValueError as error:
            raise UsageError(f"drafter '{self.name}' drafts {gamma} tokens with '{own.model}': {error}") from None
        self.policy.load(context)
        #: Maximum number of features per row and pass: the tokens that a step commits.
        self._max_features = gamma + 1
        self.lm = context.slots(
            self.head, extra_tokens=self._max_features + (gamma + 1 if block is None else block + 1)
        )
        # Rotary positions may exceed the training length; the target's context length bounds every sequence.
        self.lm.context_length = None

    @abstractmethod
    def block(self) -> int | None:
        """Number of tokens that a block drafts; ``None`` = any number."""

    @abstractmethod
    def feed(self, sequences: Sequences, features: list[Tensor], steps: int) -> tuple[Tensor, Tensor | None]:
        """Feed and commit each row's ``features [n, H]``, 0 <= n <= `_max_features`, followed by a block of ``steps``.

        Returns:
            logits ``[B, steps or more, Vd]`` of the block, and its states, if `next_logits` needs them.
        """

    def next_logits(self, logits: Tensor, states: Tensor | None) -> Callable[[Tensor], Tensor]:
        """Return a function from a drawn token ``[B, 1]`` to the logits ``[B, 1, Vd]`` of the block's next one.

        ``logits`` and ``states`` are those of `feed`. The base class ignores the token.
        """
        rows = iter(logits.split(1, 1))
        return lambda token: next(rows)

    def can_draft(self, sequences: Sequences) -> list[bool]:
        """True for rows with enough context to draft."""
        return [True] * sequences.batch_size

    @classmethod
    def layers(cls, config: Any) -> tuple[float, ...]:
        return config.layers or ()

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        # Never replayable: q depends on where the step started, since features up to there are the target's.
        policy = config.make_policy(1)
        return DraftTraits(
            kind=CHAIN,
            point_mass=sampling.at(config.temperature).temperature == 0,
            nodes=config.max_gamma,
            hidden_layers=cls.layers(config),
            adapts=policy.adapts,
            waits=policy.waits,
        )

    @classmethod
    def remembers(cls, config: Any) -> bool:
        return config.make_policy(1).remembers

    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        ready = self.can_draft(sequences)
        limit = [limit if able else 0 for limit, able in zip(sequences.limit, ready, strict=True)]
        self._draft_lengths = self.policy.draft_lengths(limit, sequences.occupied)
        steps = max(self._draft_lengths)
        if not steps:
            return Draft.empty(sequences.batch_size, sequences.device)
        features = self._pop_pending()
        while max(map(len, features)) > self._max_features:  # after steps without drafts, which feed nothing
            counts = [max(min(len(row) - self._max_features, self._max_features), 0) for row in features]
            self.feed(sequences, [row[:n] for row, n in zip(features, counts, strict=True)], 1)
            features = [row[n:] for row, n in zip(features, counts, strict=True)]
        next_logits = self.next_logits(*self.feed(sequences, features, steps))
        ids, vocab_size = self.head.target_ids, self.context.vocab_size

        def expand(token: Tensor) -> Tensor:
            return expand_vocab(next_logits(token), ids, vocab_size)

        roots = on_device([h[-1] if h else 0 for h in sequences.history], sequences.device)
        draft = grow_chain(expand(roots[:, None])[:, 0], expand, self._draft_lengths, self.policy, self.sampling, rng)
        if draft.finite is not None and not all(ready):  # the logits of other rows are meaningless
            draft.finite = draft.finite | ~on_device(ready, sequences.device).bool()
        return draft
