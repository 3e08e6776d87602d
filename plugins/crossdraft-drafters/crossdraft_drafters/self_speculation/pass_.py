"""``pass``: PaSS, the target drafts several tokens in one pass with learnt look-ahead embeddings.

G. Monea, A. Joulin, E. Grave, "PaSS: Parallel Speculative Sampling", 2023, arXiv:2311.13581. The text x is
followed by look-ahead embeddings e_1 .. e_L, the only trained parameters. One pass of the target computes

    q_1 = p(. | x),   q_{1+j} = p(. | x, e_1 .. e_j),   j = 1 .. L,

so a draft has up to L + 1 tokens; the first one follows the target's own distribution and is accepted up to rounding.
Given x the tokens are independent.

A step is two passes of the target: this one, and verification. The drafting pass runs in a fork with the embeddings as
additional tokens (`LM.fork`): it attends to the target's cache of committed tokens, and its own entries are overwritten
or masked in verification.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from crossdraft import (
    CHAIN,
    MOST_LEVELS,
    Checkpoint,
    Draft,
    DraftContext,
    Drafter,
    DraftTraits,
    Sampling,
    Sequences,
    StepRng,
    StrategyConfig,
    UsageError,
    on_device,
)

from .own_layers import depth_of, target_of
from .pass_weights import read_embeddings

#: Maximum draft length if gamma is not set.
MOST_TOKENS = 16


class Pass(Drafter):
    """A chain drawn in one pass of the target; at temperature 0 the argmax of each position, a point mass."""

    name = "pass"

    class Config(StrategyConfig):
        model: str = Field(description="name, directory or Hub id of look-ahead embeddings made for the target")
        gamma: int | None = Field(
            None,
            ge=0,
            le=MOST_LEVELS,
            description="draft length, at most one more than there are embeddings; default: that, "
            f"at most {MOST_TOKENS}",
        )

    config: Config

    def attach(self, context: DraftContext) -> None:
        super().attach(context)
        model, target = context.target_model, target_of(context, self.name)
        weight = None if model is None else model.get_input_embeddings().weight

        def read(checkpoint: Checkpoint) -> Tensor:
            size = None if weight is None else weight.shape[1]
            embeddings = read_embeddings(checkpoint, size=size, sha256=context.target_sha256)
            return embeddings if weight is None else embeddings.to(weight.device, weight.dtype)

        embeddings = context.load_module(context.load_heads(self.config.model), read, Pass)
        longest = len(embeddings) + 1
        self.depth = min(longest, MOST_TOKENS) if self.config.gamma is None else self.config.gamma
        if self.depth > longest:
            raise UsageError(
                f"drafter 'pass': gamma is {self.depth}, but '{self.config.model}' has {longest - 1} look-ahead "
                f"embeddings, for {longest} tokens; write at most {longest}"
            )
        self.lm = target.fork(range(depth_of(model) or MOST_LEVELS), embeddings=embeddings)

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        return DraftTraits(
            kind=CHAIN,
            point_mass=sampling.temperature == 0,
            nodes=MOST_TOKENS if config.gamma is None else config.gamma,
        )

    @property
    def passes(self) -> int:
        return self.lm.passes

    def start(self, row: int, prompt: Sequence[int], hidden: Tensor | None = None) -> None:
        self.lm.start(row, prompt)

    def free(self, row: int, finish_reason: str | None = None) -> None:
        self.lm.free(row)

    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        limits = [min(limit, self.depth) for limit in sequences.limit]
        steps = max(limits)
        if steps == 0:
            return Draft.empty(sequences.batch_size, sequences.device)
        first = self.context.vocab_size  # the id of the first embedding
        fed = [[history[-1] if history else 0, *range(first, first + steps - 1)] for history in sequences.history]
        logits, _ = self.lm.forward(on_device(fed, sequences.device))
        limit = on_device(limits, sequences.device)
        sampling = self.context.sampling
        q, sound = sampling.checked_probs(logits)
        finite = sound.all(1) | (limit == 0)  # logits of a free slot are meaningless
        if sampling.temperature == 0:
            return Draft.chain(q.argmax(-1), limit, finite=finite)
        tokens = torch.stack([rng.draw(q[:, i], "draft", i) for i in range(steps)], 1)
        return Draft.chain(tokens, limit, q, finite=finite)
