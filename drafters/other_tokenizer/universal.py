"""Any language model drafts for any target: the two need not have the same tokenizer.

N. Timor, J. Mamou, D. Korat et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
Heterogeneous Vocabularies", ICML 2025, arXiv:2502.05202.

``tli``, token-level intersection: the draft model draws from its law restricted to the tokens that both vocabularies
have, renormalised. That restricted law is q, in the target's ids, so any rule for chains verifies it.

``slem``, string-level exact match: the draft model's most probable tokens become text, and the text becomes tokens
of the target, which are point masses. What the drafter was fed to draft them does not matter for losslessness.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ...framework.contracts.draft import Draft, Scores, Sequences, Verdict
from ...framework.contracts.draft_kind import CHAIN
from ...framework.contracts.drafter import DraftContext, DraftTraits, StrategyConfig
from ...framework.contracts.lm import LM
from ...framework.contracts.rng import StepRng
from ...framework.contracts.sampling import Sampling
from ...framework.errors import ModelError
from ..autoregressive.chain_drafter import ChainDrafter, PolicyConfig
from ..autoregressive.chains import grow_chain
from .mutable_tail_lm import Follower
from .retokenize import LONGEST, Retelling
from .token_bytes import Spelling, complete, same_tokens

#: Most tokens that a slot is fed before what is drafted; where there are more, it is filled anew.
FED = LONGEST + 8


class Universal(ChainDrafter):
    """A model with another tokenizer drafts a chain.

    The draft model reads the text in its own tokens (`Retelling`), so that it may hold more of them than the target
    does; where they do not fit its slots or its context, it reads the end of the text alone.
    """

    name = "universal"

    class Config(PolicyConfig):
        model: str = Field(description="name, directory or Hub id of any causal language model")
        mode: Literal["tli", "slem"] = Field(
            "tli",
            description="tli: draw from the tokens that both vocabularies have; slem: draft text, as a point mass",
        )

        @model_validator(mode="after")
        def _greedy_text(self) -> Any:
            if self.mode == "slem" and self.temperature:
                raise ValueError("mode slem drafts the most probable text; leave out the temperature, or take mode tli")
            return self

    config: Config

    def __init__(self, config: StrategyConfig, context: DraftContext):
        super().__init__(config, context)
        self._follower = Follower(self.model.lm)
        b = context.batch_size
        self._rows: list[Retelling | None] = [None] * b
        self._from = [0] * b  # where what is read of each text begins
        self._said: list[list[int]] = [[] for _ in range(b)]  # of slem: the draft model's tokens

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        text, policy = config.mode == "slem", config.lengths(1)
        # Not replayable: once a draft is committed, the draft model may read its text in other tokens.
        return DraftTraits(
            kind=CHAIN,
            point_mass=text or sampling.at(config.temperature).temperature == 0,
            nodes=config.gamma,
            adapts=policy.adapts,
            nested=not text,
        )

    def slots(self) -> LM:
        name, context = self.config.model, self.context
        found = context.load_model(name)
        who = f"'{name}' cannot draft for '{context.target_name}'"
        if context.tokenizer is None or found.tokenizer is None:
            whose = "target's" if context.tokenizer is None else "draft model's"
            raise ModelError(f"{who}: the {whose} tokenizer is not known, and tokens are compared by what they spell")
        self._theirs, self._mine = Spelling(context.tokenizer), Spelling(found.tokenizer)
        roles = [(getattr(context.tokenizer, r), getattr(found.tokenizer, r)) for r in ("eos_token_id", "bos_token_id")]
        twins = same_tokens(self._theirs, self._mine, roles)
        self._twins = {id: own for id, own in twins.items() if id < context.vocab_size}
        common = sum(id in self._theirs.pieces for id in self._twins)
        if self.config.mode == "tli" and not common:
            raise ModelError(f"{who} in mode tli: their vocabularies have no token in common; take mode: slem")
        for spelling, whose in ((self._theirs, "target"), (self._mine, "draft model")):
            if self.config.mode == "slem" and not spelling.faithful:
                raise ModelError(
                    f"{who} in mode slem: the tokens of the {whose} do not say where spaces are, so no text can be "
                    "made of them one by one; take mode: tli"
                )
        self._back = {own: id for id, own in self._twins.items()}
        ids = [self._twins.get(id, -1) for id in range(context.vocab_size)]
        self._own = torch.tensor(ids, device=context.device)
        self._fallback = next(iter([*self._mine.specials, *self._mine.pieces]), 0)
        slot = 2 * context.max_length + FED  # the same text may have twice as many tokens
        if found.context_length is not None:
            slot = min(slot, max(found.context_length, context.max_length))
        self._most = slot - self.config.gamma - FED
        if self._most < FED:
            raise ModelError(
                f"{who}: its context of {found.context_length} tokens leaves no room beside drafts of "
                f"{self.config.gamma}; take another draft model, or a smaller gamma"
            )
        return context.load_lm(name, room=slot - context.max_length, ids=torch.arange(self._mine.size))

    # -- the text ---------------------------------------------------------------------------------------------

    def start(self, row: int, prompt: Sequence[int], hidden: Tensor | None = None) -> None:
        told = self._rows[row] = Retelling(self._theirs, self._mine, self._twins)
        told.add(prompt)
        self._from[row] = -1
        self._filled(row)
        self.policy.start(row)

    def free(self, row: int, finish_reason: str | None = None) -> None:
        self._rows[row] = None
        self.model.free(row)

    def _read(self, row: int) -> tuple[list[int], int]:
        """What the draft model reads in slot ``row``, and how much of that will never change."""
        told = self._rows[row]
        if told is None:
            return [], 0
        ids, settled = told.ids()
        start = self._from[row]
        return ids[start:] or [self._fallback], max(settled - start, 0)

    def _filled(self, row: int) -> list[int]:
        """The same, in a slot that it fits."""
        told = self._rows[row]
        if told is None:
            return []
        over, step = len(told.ids()[0]) - self._most, self._most // 2
        start = -(-over // step) * step if over > 0 else 0
        moved, self._from[row] = start != self._from[row], start
        ids, settled = self._read(row)
        if moved or len(ids) - self.model.lm.lengths[row] > FED:
            self._follower.start(row, ids, settled)
        return ids

    # -- a step ----------------------------------------------------------------------------------------------

    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        self._draft_lengths = self.policy.draft_lengths(sequences.limit, sequences.occupied)
        self._said = [[] for _ in self._rows]
        if not max(self._draft_lengths):
            return Draft.empty(sequences.batch_size, sequences.device)
        root = self._follower.root([self._filled(row) for row in range(len(self._rows))], sequences.device)
        if self.config.mode == "tli":
            return grow_chain(self._shared(root), self._grow, self._draft_lengths, self.policy, self.sampling, rng)
        drafted = grow_chain(root, self._follower.forward, self._draft_lengths, self.policy, self.sampling.at(0.0), rng)
        counts = drafted.count.tolist()
        self._said = [tokens[:n] for tokens, n in zip(drafted.tokens.tolist(), counts, strict=True)]
        rows = [self._respelt(row, said)[: self._draft_lengths[row]] for row, said in enumerate(self._said)]
        self._draft_lengths = [len(tokens) for tokens in rows]
        draft = Draft.copied(rows, sequences.device)
        draft.finite = drafted.finite
        return draft

    def observe(
        self, sequences: Sequences, draft: Draft, verdict: Verdict, accepted: Sequence[int], scores: Scores
    ) -> None:
        for row, told in enumerate(self._rows):
            history = sequences.history[row]
            if told is None or not history:
                continue
            new = history[told.told :]
            told.add(new)
            if self.config.mode == "tli":
                self._said[row] = [self._twins.get(token, -1) for token in new[: accepted[row]]]
        self._follower.commit([self._read(row) for row in range(len(self._rows))], self._said)
        self.policy.observe(accepted, self._draft_lengths)

    def _shared(self, logits: Tensor) -> Tensor:
        """Of the draft model's ``logits [..., V]`` those of tokens that both have, at the target's ids."""
        return logits[..., self._own.clamp(min=0)].masked_fill(self._own < 0, -math.inf)

    def _grow(self, tokens: Tensor) -> Tensor:
        return self._shared(self._follower.forward(self._own[tokens]))

    def _respelt(self, row: int, said: list[int]) -> list[int]:
        """The target's tokens for what the draft model said in slot ``row``."""
        told, text, ends = self._rows[row], b"", []
        if told is None:
            return []
        for token in said:
            piece = self._mine.pieces.get(token)
            if piece is None:  # a special token ends the text, if the target has it, too
                ends = [self._back[token]] if token in self._back else []
                break
            text += piece
        return [*self._known(told.respelt(text)), *(ends if complete(text) == len(text) else [])]

    def _known(self, ids: list[int]) -> list[int]:
        """``ids`` up to the first that the target has no logit for."""
        unknown = [i for i, id in enumerate(ids) if id >= self.context.vocab_size]
        return ids[: unknown[0]] if unknown else ids
