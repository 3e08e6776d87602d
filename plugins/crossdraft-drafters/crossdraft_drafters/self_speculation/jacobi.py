"""``jacobi``: Jacobi decoding, with the target's own guesses of the last step as the draft.

A. Santilli, S. Severino, E. Postolache, V. Maiorca, M. Mancusi, R. Marin, E. Rodolà, "Accelerating Transformer
Inference for Translation via Parallel Decoding", ACL 2023, algorithm 1. Greedy decoding of m tokens is the solution
of

    y_i = argmax p(. | y_<i, x),   i = 1 .. m,

and a pass of the target over a guess y^(k) is one step of the Jacobi iteration to it, y_i^(k+1) = argmax p(. |
y_<i^(k), x). Here the pass is the verification: the guess is drafted as a point mass, its accepted prefix has
converged, and the target's argmax after the rest is the next guess. At temperature 0 this is the paper's algorithm;
sampled text keeps its distribution, with the same argmax guesses. The simplest form of `lookahead`, without window and
pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field
from torch import Tensor, cat

from crossdraft import (
    CHAIN,
    MOST_LEVELS,
    Draft,
    DraftContext,
    Drafter,
    DraftTraits,
    Sampling,
    Scores,
    Sequences,
    StepRng,
    StrategyConfig,
    Verdict,
    on_device,
)


class Jacobi(Drafter):
    """A guess of gamma tokens for every sequence, initialised by repeating the last token."""

    name = "jacobi"

    class Config(StrategyConfig):
        gamma: int = Field(default=5, ge=1, le=MOST_LEVELS, description="number of guessed tokens, the paper's block")

    config: Config

    def attach(self, context: DraftContext) -> None:
        super().attach(context)
        #: The target's argmax after the root and each node of the last draft, ``[B, N + 1]``; it stays on the device.
        self._best: Tensor | None = None
        #: Per slot, the columns of ``_best`` that guess the tokens after the root, and the length of the last draft.
        self._guess = [range(0)] * context.batch_size
        self._drafted = [0] * context.batch_size

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        return DraftTraits(kind=CHAIN, point_mass=True, nodes=config.gamma, adapts=True)

    def start(self, row: int, prompt: Sequence[int], hidden: Tensor | None = None) -> None:
        self._guess[row] = range(0)

    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        b, gamma = sequences.batch_size, self.config.gamma
        rows = zip(sequences.history, sequences.limit, strict=True)
        self._drafted = [min(gamma, limit) if history else 0 for history, limit in rows]
        width = max(self._drafted)
        # The guess, its last token repeated. Column 0 is the last committed token, column i + 1 that of `_best`.
        index = [[min(g.start + i, g.stop - 1) + 1 if g else 0 for i in range(width)] for g in self._guess]
        tokens = on_device([history[-1:] or [0] for history in sequences.history], sequences.device)
        if self._best is not None:
            tokens = cat([tokens, self._best], 1)
        return Draft.chain(tokens.gather(1, on_device(index, sequences.device).view(b, width)), self._drafted)

    def observe(
        self, sequences: Sequences, draft: Draft, verdict: Verdict, accepted: Sequence[int], scores: Scores
    ) -> None:
        self._best = scores.logits.argmax(-1)  # after the root (0) and after drafted token i (i)
        # best[tau] is the guess of the new root; the next guesses follow it.
        self._guess = [range(tau + 1, n + 1) for tau, n in zip(accepted, self._drafted, strict=True)]

    def free(self, row: int, finish_reason: str | None = None) -> None:
        self._guess[row] = range(0)
