"""What the target says about a draft. Ground floor: imports nothing of ours but small operations on tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .tensors import at_once, take_rows


@dataclass
class Scores:
    """What one forward pass of the target says about a draft.

    Attributes:
        p: ``[B, N+1, V]`` the target's law after the root (index 0) and after node i (index i+1), warped by
            the sampling parameters, float32 (float64 on exact models). Verifiers never write into it. Where it would
            be too large to lie there for a round, it is given as a function of ``logits``, and made by who reads it.
        logits: ``[B, N+1, V]`` what the model said, in its own precision and before any warping: what to rank tokens by
            at temperature 0, where p is one-hot.
        hidden: ``[B, N+1, L, H]`` hidden states of the layers the drafter asked for, else ``None``.
        finite: ``[B]`` bool, False where a logit was NaN.
        taken_up: ``[B]`` bool, False where the fork of `Draft.begun` was fed other tokens than the draft holds;
            ``None`` = nothing was taken up.
    """

    p: Tensor
    finite: Tensor
    logits: Tensor
    hidden: Tensor | None = None
    taken_up: Tensor | None = None

    def said(self, places: Tensor, tokens: Tensor) -> Tensor:
        """``[B, n]``: P of ``tokens [B, n]``, each at one of p's ``places [B, n]``."""
        if isinstance(self._p, Tensor):
            return self._p.flatten(1).gather(1, torch.add(tokens, places, alpha=self._p.shape[2]))
        (b, n), law, v = places.shape, self._p, self.logits.shape[2]
        found = [
            law(take_rows(self.logits[rows], places[rows])).gather(2, tokens[rows][..., None]).squeeze(2)
            for rows in at_once(b, n * v)
        ]
        return torch.cat(found)

    @property
    def made(self) -> bool:
        """Whether p lies there."""
        return isinstance(self._p, Tensor)

    # p is what was given, or is made of it.
    def _give(self, p: Any) -> None:
        self._p = p

    def _made(self) -> Tensor:
        return self._p if isinstance(self._p, Tensor) else self._p(self.logits)


Scores.p = property(Scores._made, Scores._give)  # type: ignore[assignment]
