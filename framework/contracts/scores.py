"""Scores of a draft by the target: dense, with the target distributions in memory, or chunked, computed on demand."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..util.tensors import at_once, take_rows


class Scores(ABC):
    """Result of one forward pass of the target over a draft.

    Attributes:
        p: ``[B, N+1, V]`` target distributions after the root (index 0) and after node i (index i+1), warped by the
            sampling parameters; float32 (float64 on exact models). Verifiers never write into it.
        logits: ``[B, N+1, V]`` output of the model in its own precision, before temperature, top-k and top-p: rank
            tokens by these at temperature 0, where p is one-hot.
        hidden: ``[B, N+1, L, H]`` hidden states of the layers requested by the drafter, or ``None``.
        resume_matches: ``[B]`` bool, False if the fork of `Draft.resume_from` was fed other tokens than the draft
            holds; ``None`` if no fork was resumed.
    """

    p: Tensor
    logits: Tensor
    hidden: Tensor | None
    resume_matches: Tensor | None

    @abstractmethod
    def prob_of(self, positions: Tensor, tokens: Tensor) -> Tensor:
        """``[B, n]`` probabilities of ``tokens [B, n]``, each under the distribution at ``positions [B, n]`` of p."""


@dataclass
class DenseScores(Scores):
    """Scores whose distributions are one tensor in memory."""

    p: Tensor
    logits: Tensor
    hidden: Tensor | None = None
    resume_matches: Tensor | None = None

    def prob_of(self, positions: Tensor, tokens: Tensor) -> Tensor:
        return self.p.flatten(1).gather(1, torch.add(tokens, positions, alpha=self.p.shape[2]))


@dataclass
class ChunkedScores(Scores):
    """Scores too large to keep: ``probs`` computes distributions from logits, each time they are read."""

    probs: Callable[[Tensor], Tensor]
    logits: Tensor
    hidden: Tensor | None = None
    resume_matches: Tensor | None = None

    @property
    def p(self) -> Tensor:  # type: ignore[override]
        return self.probs(self.logits)

    def prob_of(self, positions: Tensor, tokens: Tensor) -> Tensor:
        (b, n), v = positions.shape, self.logits.shape[2]
        return torch.cat(
            [
                self.probs(take_rows(self.logits[rows], positions[rows])).gather(2, tokens[rows][..., None]).squeeze(2)
                for rows in at_once(b, n * v)
            ]
        )
