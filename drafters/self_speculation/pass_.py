"""PaSS: the target drafts several tokens in one pass, behind learnt look-ahead embeddings.

G. Monea, A. Joulin, E. Grave, "PaSS: Parallel Speculative Sampling", 2023, arXiv:2311.13581. Behind the text x stand
look-ahead embeddings e_1 .. e_L, which are all that is learnt. One pass of the target over x and them says

    q_1 = p(. | x),   q_{1+j} = p(. | x, e_1 .. e_j),   j = 1 .. L,

so a draft has up to L + 1 tokens: the first one's law is the target's own, and it is accepted but for rounding. Given x
the tokens are independent of one another, and exactly these laws are reported.

A step is two passes of the target: this one, and the verification. The pass here runs in a fork that knows the
embeddings as tokens of its own (`LM.fork`): it attends over what the target computed for committed tokens, and what it
writes itself is overwritten or masked once the target verifies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from ...framework.contracts.draft import Draft, Sequences, on_device
from ...framework.contracts.draft_kind import CHAIN
from ...framework.contracts.drafter import DraftContext, Drafter, DraftTraits, StrategyConfig
from ...framework.contracts.rng import StepRng
from ...framework.contracts.sampling import Sampling
from ...framework.errors import UsageError
from ...framework.util.limits import MOST_LEVELS
from .own_layers import depth_of, target_of
from .pass_weights import read_embeddings

#: A draft is at most this long unless gamma says so.
MOST_TOKENS = 16


class Pass(Drafter):
    """A chain that one pass of the target draws; at temperature 0 the argmax of each position, a point mass."""

    name = "pass"

    class Config(StrategyConfig):
        model: str = Field(description="name, directory or Hub id of look-ahead embeddings made for the target")
        gamma: int | None = Field(
            None,
            ge=0,
            le=MOST_LEVELS,
            description="tokens drafted: one by the target itself, and one behind each embedding; default: all, "
            f"{MOST_TOKENS} at most",
        )

    config: Config

    def attach(self, context: DraftContext) -> None:
        super().attach(context)
        model, target = context.target_model, target_of(context, self.name)
        embeddings = read_embeddings(
            context.load_heads(self.config.model),
            size=None if model is None else model.get_input_embeddings().weight.shape[1],
            sha256=context.target_sha256,
        )
        most = len(embeddings) + 1
        self.depth = min(most, MOST_TOKENS) if self.config.gamma is None else self.config.gamma
        if self.depth > most:
            raise UsageError(
                f"drafter 'pass' is to draft {self.depth} tokens, but '{self.config.model}' has {most - 1} look-ahead "
                f"embeddings, for {most} tokens; shorten gamma"
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
        finite = sound.all(1) | (limit == 0)  # what is said of a free slot means nothing
        if sampling.temperature == 0:
            return Draft.chain(q.argmax(-1), limit, finite=finite)
        tokens = torch.stack([rng.draw(q[:, i], "draft", i) for i in range(steps)], 1)
        return Draft.chain(tokens, limit, q, finite=finite)
