"""``online``: a draft model trained on its rejections while requests run.

X. Liu, L. Hu, P. Bailis, A. Cheung, Z. Deng, I. Stoica, H. Zhang, "Online Speculative Decoding", ICML 2024
(arXiv:2310.07177), algorithm 1. At each rejection, the text so far and the target's distribution of the next token go
into a buffer. Every ``every`` steps the draft model takes one step of AdamW on the mean KL(p, q) over the buffer, and
the buffer is cleared.

The q of a step comes from the weights its tokens were drawn with, and updates happen between steps, so lossless
verifiers stay lossless. Differences from the paper: p is the target's distribution at temperature 1, at any sampling
temperature; embedding and head are not trained; cached keys and values of committed tokens are not recomputed after an
update.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from crossdraft import (
    LM,
    Draft,
    DraftContext,
    DraftTraits,
    Sampling,
    Scores,
    Sequences,
    StepRng,
    StrategyConfig,
    Verdict,
)
from crossdraft.drafters.autoregressive.chain_drafter import ChainDrafter
from crossdraft.drafters.draft_model.draft_model import ChainConfig


class Rejected(NamedTuple):
    """A training example from one rejection.

    Attributes:
        sequence: number of the sequence.
        tokens: prompt and output up to the rejected token.
        logits: ``[V]``, the target's logits after ``tokens``.
    """

    sequence: int
    tokens: list[int]
    logits: Tensor


class Online(ChainDrafter):
    """`draft-model` with online distillation; the weights are kept across sequences until `reset`."""

    name = "online"

    class Config(ChainConfig):
        every: int = Field(default=8, ge=1, le=1_000_000, description="steps between updates of the weights")
        buffer: int = Field(default=64, ge=1, le=4096, description="number of latest rejections an update learns from")
        learning_rate: float = Field(
            default=1e-4, gt=0, le=10, description="learning rate of AdamW; an update is one step"
        )

    def __init__(self, config: StrategyConfig, context: DraftContext):
        super().__init__(config, context)
        with torch.inference_mode(False), torch.no_grad():
            self._initial_weights = [weight.detach().clone() for weight in self.learner.weights]
        self._sequence, self._history_lengths = [0] * context.batch_size, [0] * context.batch_size
        self._sequences = 0
        self.reset()

    def slots(self) -> LM:
        self.learner = self.context.load_learner(self.config.model)
        return self.learner.lm

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        return replace(super().traits(config, sampling), replayable=False, adapts=True, shortenable=False)

    def reset(self) -> None:
        """Restore the initial weights and optimiser, and clear the buffer."""
        super().reset()
        self.rejected: deque[Rejected] = deque(maxlen=self.config.buffer)
        self._steps = 0
        with torch.inference_mode(False), torch.no_grad():
            # Master weights in float32: steps are smaller than the resolution of half precision.
            master = [w.to(torch.promote_types(w.dtype, torch.float32), copy=True) for w in self._initial_weights]
            for weight, first in zip(self.learner.weights, self._initial_weights, strict=True):
                weight.copy_(first)
        self._master_weights = [weight.requires_grad_() for weight in master]
        self._optimizer = torch.optim.AdamW(
            self._master_weights, lr=self.config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )

    def start(self, row: int, prompt: Sequence[int], hidden: Tensor | None = None) -> None:
        super().start(row, prompt)
        self._sequences += 1
        self._sequence[row] = self._sequences

    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        self._history_lengths = [len(history) for history in sequences.history]
        return super().propose(sequences, rng)

    def observe(
        self, sequences: Sequences, draft: Draft, verdict: Verdict, accepted: Sequence[int], scores: Scores
    ) -> None:
        super().observe(sequences, draft, verdict, accepted, scores)
        if not draft.width:
            return
        for row, history in enumerate(sequences.history):
            tau, kept = accepted[row], self._history_lengths[row] + accepted[row]
            # A sequence that ended before the rejection, or failed, has no token at that position.
            if tau < self._draft_lengths[row] and len(history) > kept:
                self.rejected.append(Rejected(self._sequence[row], history[:kept], scores.logits[row, tau].clone()))
        self._steps += 1
        if self._steps % self.config.every == 0 and self.rejected:
            self._learn()
            self.rejected.clear()

    def _learn(self) -> None:
        """Take one step on the mean KL(p, q) over the buffer, with one forward pass per sequence."""
        by_sequence: dict[int, list[Rejected]] = {}
        for example in self.rejected:
            by_sequence.setdefault(example.sequence, []).append(example)
        weights = self.learner.weights
        with torch.inference_mode(False), torch.enable_grad():
            for master in self._master_weights:
                master.grad = torch.zeros_like(master)
            for examples in by_sequence.values():
                logits = self.learner.logits(examples[-1].tokens, [len(x.tokens) - 1 for x in examples])
                p, q = _probs(torch.stack([x.logits for x in examples]).clone()), _probs(logits.detach())
                # The gradient of KL(p, q) with respect to the logits of q.
                grad_logits = ((q - p) / len(self.rejected)).to(logits.dtype)
                gradients = torch.autograd.grad(logits, weights, grad_logits, allow_unused=True)
                for master, gradient in zip(self._master_weights, gradients, strict=True):
                    if gradient is not None and master.grad is not None:
                        master.grad += gradient
            torch.nn.utils.clip_grad_norm_(self._master_weights, 1.0)
            self._optimizer.step()
            with torch.no_grad():
                for weight, master in zip(weights, self._master_weights, strict=True):
                    weight.copy_(master)


def _probs(logits: Tensor) -> Tensor:
    """Softmax of ``[n, V]`` logits in at least float32."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
