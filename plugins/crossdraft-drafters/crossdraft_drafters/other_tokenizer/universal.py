"""``universal``: any language model drafts for any target, also with another tokenizer.

N. Timor, J. Mamou, D. Korat et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
Heterogeneous Vocabularies", ICML 2025, arXiv:2502.05202.

``tli``, token-level intersection: the draft model draws from its distribution restricted to the shared tokens and
renormalised. That is q, in the target's ids, so any chain verifier is lossless.

``slem``, string-level exact match: the draft model's most probable tokens are decoded to text and retokenized for the
target, as point masses, so decoding is lossless.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from crossdraft import (
    CHAIN,
    LM,
    Draft,
    DraftContext,
    DraftTraits,
    ModelError,
    Sampling,
    Scores,
    Sequences,
    StepRng,
    StrategyConfig,
    Verdict,
)
from crossdraft.drafters.autoregressive.chain_drafter import ChainDrafter, PolicyConfig
from crossdraft.drafters.autoregressive.draft_model import grow_chain

from .mutable_tail_lm import MutableTailLM
from .retokenize import LONGEST, Retokenizer
from .token_bytes import TokenBytes, complete, shared_tokens

#: Maximum number of tokens fed before the drafted ones; with more, the slot is prefilled again.
FED = LONGEST + 8


class Universal(ChainDrafter):
    """A model with another tokenizer drafts a chain.

    The draft model reads the text in its own tokens (`Retokenizer`), which may be more than the target's; if they
    exceed its slots or its context length, it reads only the end of the text.
    """

    name = "universal"

    class Config(PolicyConfig):
        model: str = Field(description="name, directory or Hub id of any causal language model")
        mode: Literal["tli", "slem"] = Field(
            "tli",
            description="tli: draw from the shared tokens of both vocabularies; slem: draft text, as point masses",
        )

        @model_validator(mode="after")
        def _greedy_text(self) -> Any:
            if self.mode == "slem" and self.temperature:
                raise ValueError("mode slem drafts the most probable text; leave out the temperature, or use mode tli")
            return self

    config: Config

    def __init__(self, config: StrategyConfig, context: DraftContext):
        super().__init__(config, context)
        self._follower = MutableTailLM(self.model.lm)
        b = context.batch_size
        self._retokenizers: list[Retokenizer | None] = [None] * b
        self._read_start = [0] * b  # index of the first token that the draft model reads
        self._drafted: list[list[int]] = [[] for _ in range(b)]  # the draft model's tokens

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        text, policy = config.mode == "slem", config.lengths(1)
        # Not replayable: the draft model may tokenize a committed draft differently.
        return DraftTraits(
            kind=CHAIN,
            point_mass=text or sampling.at(config.temperature).temperature == 0,
            nodes=config.gamma,
            adapts=policy.adapts,
            nested=not text,
            shortenable=policy.fixed and not text,
            waits=policy.waits + text,  # its tokens are retokenized
        )

    def slots(self) -> LM:
        name, context = self.config.model, self.context
        loaded = context.load_model(name)
        who = f"'{name}' cannot draft for '{context.target_name}'"
        if context.tokenizer is None or loaded.tokenizer is None:
            whose = "target's" if context.tokenizer is None else "draft model's"
            raise ModelError(f"{who}: the {whose} tokenizer is not known, but tokens are compared by their bytes")
        self._target_bytes, self._draft_bytes = TokenBytes(context.tokenizer), TokenBytes(loaded.tokenizer)
        roles = [
            (getattr(context.tokenizer, r), getattr(loaded.tokenizer, r)) for r in ("eos_token_id", "bos_token_id")
        ]
        shared = shared_tokens(self._target_bytes, self._draft_bytes, roles)
        self._draft_ids = {id: own for id, own in shared.items() if id < context.vocab_size}
        common = sum(id in self._target_bytes.pieces for id in self._draft_ids)
        if self.config.mode == "tli" and not common:
            raise ModelError(f"{who} in mode tli: their vocabularies have no common token; use mode: slem")
        for tokens, whose in ((self._target_bytes, "target"), (self._draft_bytes, "draft model")):
            if self.config.mode == "slem" and not tokens.faithful:
                raise ModelError(
                    f"{who} in mode slem: the tokens of the {whose} omit spaces, so they cannot be decoded one by "
                    "one; use mode: tli"
                )
        self._target_ids = {own: id for id, own in self._draft_ids.items()}
        ids = [self._draft_ids.get(id, -1) for id in range(context.vocab_size)]
        self._draft_id_table = torch.tensor(ids, device=context.device)
        self._fallback = next(iter([*self._draft_bytes.specials, *self._draft_bytes.pieces]), 0)
        # Twice as many tokens of the same text, and as many again as a slot needs to move on in the shortest text.
        slot = 2 * context.max_length + self.config.gamma + 2 * FED
        if loaded.context_length is not None:
            slot = min(slot, max(loaded.context_length, context.max_length))
        self._max_read = slot - self.config.gamma - FED
        if self._max_read < FED:
            raise ModelError(
                f"{who}: its context of {loaded.context_length} tokens is too short for drafts of "
                f"{self.config.gamma} tokens; use another draft model, or a smaller gamma"
            )
        unmasked = copy(context)  # constraints are in the target's ids
        unmasked.mask_drafts = False
        return unmasked.load_lm(name, extra_tokens=slot - context.max_length, ids=torch.arange(self._draft_bytes.size))

    # -- the text ---------------------------------------------------------------------------------------------

    def start(self, row: int, prompt: Sequence[int], hidden: Tensor | None = None) -> None:
        text = self._retokenizers[row] = Retokenizer(self._target_bytes, self._draft_bytes, self._draft_ids)
        text.add(prompt)
        self._read_start[row] = -1
        self._fitted_text(row)
        self.policy.start(row)

    def free(self, row: int, finish_reason: str | None = None) -> None:
        self._retokenizers[row] = None
        self.model.free(row)

    def _draft_text(self, row: int) -> tuple[list[int], int]:
        """Tokens that the draft model reads in slot ``row``, and the number of final ones."""
        text = self._retokenizers[row]
        if text is None:
            return [], 0
        ids, settled = text.ids()
        start = self._read_start[row]
        return ids[start:] or [self._fallback], max(settled - start, 0)

    def _fitted_text(self, row: int) -> list[int]:
        """Tokens of `_draft_text`, cut to the slot, which is prefilled again if necessary."""
        text = self._retokenizers[row]
        if text is None:
            return []
        over, step = len(text.ids()[0]) - self._max_read, self._max_read // 2
        start = -(-over // step) * step if over > 0 else 0
        moved, self._read_start[row] = start != self._read_start[row], start
        ids, settled = self._draft_text(row)
        if moved or len(ids) - self.model.lm.lengths[row] > FED:
            self._follower.start(row, ids, settled)
        return ids

    # -- a step ----------------------------------------------------------------------------------------------

    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        self._draft_lengths = self.policy.draft_lengths(sequences.limit, sequences.occupied)
        self._drafted = [[] for _ in self._retokenizers]
        if not max(self._draft_lengths):
            return Draft.empty(sequences.batch_size, sequences.device)
        root = self._follower.root([self._fitted_text(row) for row in range(len(self._retokenizers))], sequences.device)
        if self.config.mode == "tli":
            return grow_chain(self._shared(root), self._grow, self._draft_lengths, self.policy, self.sampling, rng)
        drafted = grow_chain(root, self._follower.forward, self._draft_lengths, self.policy, self.sampling.at(0.0), rng)
        self._drafted = [row[: row[-1]] for row in torch.cat([drafted.tokens, drafted.count[:, None]], 1).tolist()]
        rows = [self._retokenized(row, tokens)[: self._draft_lengths[row]] for row, tokens in enumerate(self._drafted)]
        self._draft_lengths = [len(tokens) for tokens in rows]
        draft = Draft.copied(rows, sequences.device)
        draft.finite = drafted.finite
        return draft

    def observe(
        self, sequences: Sequences, draft: Draft, verdict: Verdict, accepted: Sequence[int], scores: Scores
    ) -> None:
        for row, text in enumerate(self._retokenizers):
            history = sequences.history[row]
            if text is None or not history:
                continue
            new = history[text.count :]
            text.add(new)
            if self.config.mode == "tli":
                self._drafted[row] = [self._draft_ids.get(token, -1) for token in new[: accepted[row]]]
        self._follower.commit([self._draft_text(row) for row in range(len(self._retokenizers))], self._drafted)
        self.policy.observe(accepted, self._draft_lengths)

    def _shared(self, logits: Tensor) -> Tensor:
        """Map the draft model's ``logits [..., V]`` to the target's ids; -inf for tokens that are not shared."""
        return logits[..., self._draft_id_table.clamp(min=0)].masked_fill(self._draft_id_table < 0, -math.inf)

    def _grow(self, tokens: Tensor) -> Tensor:
        return self._shared(self._follower.forward(self._draft_id_table[tokens]))

    def _retokenized(self, row: int, drafted: list[int]) -> list[int]:
        """Convert the drafted tokens of slot ``row`` to the target's."""
        retokenizer, text, ends = self._retokenizers[row], b"", []
        if retokenizer is None:
            return []
        for token in drafted:
            piece = self._draft_bytes.pieces.get(token)
            if piece is None:  # a special token ends the text; keep it if shared
                ends = [self._target_ids[token]] if token in self._target_ids else []
                break
            text += piece
        return [*self._in_vocab(retokenizer.retokenize(text)), *(ends if complete(text) == len(text) else [])]

    def _in_vocab(self, ids: list[int]) -> list[int]:
        """``ids`` before the first one without a logit of the target."""
        invalid = [i for i, id in enumerate(ids) if id >= self.context.vocab_size]
        return ids[: invalid[0]] if invalid else ids
