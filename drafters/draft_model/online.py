"""A draft model that learns from the verified tokens while requests run.

X. Liu, L. Hu, P. Bailis, A. Cheung, Z. Deng, I. Stoica, H. Zhang, "Online Speculative Decoding", ICML 2024
(arXiv:2310.07177), algorithm 1. Where a draft was rejected, the text up to there and the target's law of the next token
go into a buffer. Every so many steps the drafter is distilled on the buffer, one step of AdamW down the mean KL(p, q),
and the buffer is empty again.

Each step's q is what its tokens were drawn from, by the weights of that step, and an update comes after a step is
over; so every lossless rule stays lossless. What differs from the paper: laws are the target's at temperature 1 (its
logits), whatever it is sampled at; embedding and head are not trained; keys and values of committed tokens stay those
of the weights that computed them, so that an update costs no pass over them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from ...framework.contracts.draft import Draft, Scores, Sequences, Verdict
from ...framework.contracts.drafter import DraftContext, DraftTraits, StrategyConfig
from ...framework.contracts.lm import LM
from ...framework.contracts.rng import StepRng
from ...framework.contracts.sampling import Sampling
from ..autoregressive.chain_drafter import ChainDrafter
from .draft_model import ChainConfig


class Rejected(NamedTuple):
    """A place where a draft was rejected: the text before it, and what the target says there.

    Attributes:
        sequence: a number that all places of one sequence share.
        tokens: prompt and output up to there.
        logits: ``[V]``, the target's.
    """

    sequence: int
    tokens: list[int]
    logits: Tensor


class Online(ChainDrafter):
    """`draft-model` whose weights learn from rejected tokens; what it learnt is kept across sequences until `reset`."""

    name = "online"

    class Config(ChainConfig):
        every: int = Field(default=8, ge=1, le=1_000_000, description="rounds between updates of its weights")
        buffer: int = Field(
            default=64, ge=1, le=4096, description="most rejections an update learns from: the latest ones"
        )
        learning_rate: float = Field(default=1e-4, gt=0, le=10, description="of AdamW, an update a step")

    def __init__(self, config: StrategyConfig, context: DraftContext):
        super().__init__(config, context)
        with torch.inference_mode(False), torch.no_grad():
            self._begun_with = [weight.detach().clone() for weight in self.learner.weights]
        self._sequence, self._lengths = [0] * context.batch_size, [0] * context.batch_size
        self._sequences = 0
        self.reset()

    def slots(self) -> LM:
        self.learner = self.context.load_learner(self.config.model)
        return self.learner.lm

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        return replace(super().traits(config, sampling), replayable=False, adapts=True)

    def reset(self) -> None:
        """Weights, optimiser and buffer are again those of a new drafter."""
        super().reset()
        self.rejected: deque[Rejected] = deque(maxlen=self.config.buffer)
        self._steps = 0
        with torch.inference_mode(False), torch.no_grad():
            # Steps are smaller than half precision resolves: they add up here.
            wide = [w.to(torch.promote_types(w.dtype, torch.float32), copy=True) for w in self._begun_with]
            for weight, first in zip(self.learner.weights, self._begun_with, strict=True):
                weight.copy_(first)
        self._wide = [weight.requires_grad_() for weight in wide]
        self._optimizer = torch.optim.AdamW(
            self._wide, lr=self.config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )

    def start(self, row: int, prompt: Sequence[int], hidden: Tensor | None = None) -> None:
        super().start(row, prompt)
        self._sequences += 1
        self._sequence[row] = self._sequences

    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        self._lengths = [len(history) for history in sequences.history]
        return super().propose(sequences, rng)

    def observe(
        self, sequences: Sequences, draft: Draft, verdict: Verdict, accepted: Sequence[int], scores: Scores
    ) -> None:
        super().observe(sequences, draft, verdict, accepted, scores)
        if not draft.width:
            return
        for row, history in enumerate(sequences.history):
            tau, kept = accepted[row], self._lengths[row] + accepted[row]
            # One that ended before the rejection, or failed, holds no token that was said there.
            if tau < self._wanted[row] and len(history) > kept:
                self.rejected.append(Rejected(self._sequence[row], history[:kept], scores.logits[row, tau].clone()))
        self._steps += 1
        if self._steps % self.config.every == 0 and self.rejected:
            self._learn()
            self.rejected.clear()

    def _learn(self) -> None:
        """One step down the mean of KL(p, q) over the buffer; one pass for each sequence in it."""
        of: dict[int, list[Rejected]] = {}
        for one in self.rejected:
            of.setdefault(one.sequence, []).append(one)
        weights = self.learner.weights
        with torch.inference_mode(False), torch.enable_grad():
            for wide in self._wide:
                wide.grad = torch.zeros_like(wide)
            for places in of.values():
                logits = self.learner.logits(places[-1].tokens, [len(one.tokens) - 1 for one in places])
                p, q = _law(torch.stack([one.logits for one in places]).clone()), _law(logits.detach())
                # The gradient of KL(p, q) with respect to the logits of q.
                slope = ((q - p) / len(self.rejected)).to(logits.dtype)
                found = torch.autograd.grad(logits, weights, slope, allow_unused=True)
                for wide, gradient in zip(self._wide, found, strict=True):
                    if gradient is not None and wide.grad is not None:
                        wide.grad += gradient
            torch.nn.utils.clip_grad_norm_(self._wide, 1.0)
            self._optimizer.step()
            with torch.no_grad():
                for weight, wide in zip(weights, self._wide, strict=True):
                    weight.copy_(wide)


def _law(logits: Tensor) -> Tensor:
    """``[n, V]``, at temperature 1, in at least float32."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
