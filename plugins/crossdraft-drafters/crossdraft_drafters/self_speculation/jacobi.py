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
from torch import Tensor

from crossdraft.framework.contracts.draft import Draft, Scores, Sequences, Verdict
from crossdraft.framework.contracts.draft_kind import CHAIN
from crossdraft.framework.contracts.drafter import DraftContext, Drafter, DraftTraits, StrategyConfig
from crossdraft.framework.contracts.rng import StepRng
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.util.limits import MOST_LEVELS


class Jacobi(Drafter):
    """A guess of gamma tokens for every sequence, initialised by repeating the last token."""

    name = "jacobi"

    class Config(StrategyConfig):
        gamma: int = Field(default=5, ge=1, le=MOST_LEVELS, description="number of guessed tokens, the paper's block")

    config: Config

    def attach(self, context: DraftContext) -> None:
        super().attach(context)
        #: Per slot, the guess of the tokens after the root, and the number of tokens of the last draft.
        self._guess: list[list[int]] = [[] for _ in range(context.batch_size)]
        self._drafted = [0] * context.batch_size

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        return DraftTraits(kind=CHAIN, point_mass=True, nodes=config.gamma, adapts=True, waits=1)

    def start(self, row: int, prompt: Sequence[int], hidden: Tensor | None = None) -> None:
        self._guess[row] = []

    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        drafts = []
        for history, limit, guess in zip(sequences.history, sequences.limit, self._guess, strict=True):
            length = min(self.config.gamma, limit) if history else 0
            last = (guess or history)[-1:]
            drafts.append((guess + last * self.config.gamma)[:length])
        self._drafted = [len(draft) for draft in drafts]
        return Draft.copied(drafts, sequences.device)

    def observe(
        self, sequences: Sequences, draft: Draft, verdict: Verdict, accepted: Sequence[int], scores: Scores
    ) -> None:
        best = scores.logits.argmax(-1).tolist()  # after the root (0) and after drafted token i (i)
        for row, (tau, drafted) in enumerate(zip(accepted, self._drafted, strict=True)):
            # best[tau] is the guess of the new root; the next guesses follow it.
            self._guess[row] = best[row][tau + 1 : drafted + 1]

    def free(self, row: int, finish_reason: str | None = None) -> None:
        self._guess[row] = []
