"""Logits to probabilities, with the same warpers in the same order for the target's p and a drafter's q.

The warpers are those of transformers. All computations are in float32 (float64 for float64 logits), because a bfloat16
softmax can give a drawn token probability 0. Equal logits give bit-identical rows, so p = q always accepts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, field_validator

from .options import Options

if TYPE_CHECKING:  # this module validates recipes, and importing PyTorch takes seconds
    from torch import Tensor

#: Lowest temperature above 0; logits that are divided by a lower one may overflow.
LEAST_TEMPERATURE = 1e-6


class Sampling(Options):
    """Sampling parameters, with the names and meanings of transformers.

    ``temperature`` 0 is greedy decoding: one-hot at the argmax (lowest id on a tie).
    Other temperatures are at least `LEAST_TEMPERATURE`.
    """

    temperature: float = Field(default=1.0, ge=0, description="sampling temperature; 0 is greedy decoding")
    top_k: int = Field(default=0, ge=0, description="keep the k most probable tokens; 0 = off")
    top_p: float = Field(default=1.0, gt=0, le=1, description="keep the smallest set of tokens with this much mass")
    min_p: float = Field(default=0.0, ge=0, le=1, description="drop tokens below this share of the most probable one")

    @field_validator("temperature")
    @classmethod
    def _exact(cls, value: float) -> float:
        if 0 < value < LEAST_TEMPERATURE:
            raise ValueError(f"should be 0, which is greedy decoding, or at least {LEAST_TEMPERATURE:g}")
        return value

    def at(self, temperature: float | None) -> Sampling:
        """A copy at another temperature; ``None`` = unchanged."""
        return self if temperature is None else self.model_copy(update={"temperature": temperature})

    def probs(self, logits: Tensor) -> Tensor:
        """``logits [..., V]`` -> probabilities ``[..., V]``, float32 (or float64 in, float64 out)."""
        import torch

        from ..util.tensors import AT_ONCE, at_once

        if self.temperature == 0:
            return self.checked_probs(logits)[0]
        warpers, v = self.warpers(), logits.shape[-1]
        rows = logits.reshape(-1, v)  # the shape that warpers accept
        if rows.numel() <= AT_ONCE or torch.compiler.is_compiling():
            return _warped(rows, warpers).view(logits.shape)
        precision = torch.float64 if logits.dtype == torch.float64 else torch.float32
        probs = torch.empty(logits.shape, dtype=precision, device=logits.device)
        for chunk in at_once(len(rows), v):
            probs.view(-1, v)[chunk] = _warped(rows[chunk], warpers)
        return probs

    def checked_probs(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`probs`, and ``[...]`` bool, True for rows of logits without NaN and +inf.

        The check needs no pass over V: NaN spreads over the row of a softmax, and argmax returns its index.
        """
        import torch

        if self.temperature > 0:
            p = self.probs(logits)
            return p, self.sound(p)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        best = logits.argmax(-1, keepdim=True)
        p = torch.zeros_like(logits).scatter_(-1, best, 1.0)
        return p, logits.gather(-1, best).squeeze(-1).abs() < torch.inf

    @staticmethod
    def sound(p: Tensor) -> Tensor:
        """``[...]`` bool: True if probs ``[..., V]`` at a temperature above 0 come from logits without NaN and +inf."""
        return p[..., 0] >= 0

    def warpers(self) -> list:
        """The warpers of transformers, in order; none at temperature 0."""
        from transformers.generation import logits_process as lp

        warpers = []
        if self.temperature == 0:
            return warpers
        if self.temperature != 1:
            warpers.append(lp.TemperatureLogitsWarper(self.temperature))
        if self.top_k:
            warpers.append(lp.TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            warpers.append(lp.TopPLogitsWarper(self.top_p))
        if self.min_p > 0:
            warpers.append(lp.MinPLogitsWarper(self.min_p))
        return warpers


def _warped(rows: Tensor, warpers: list) -> Tensor:
    """Probabilities of ``rows [n, V]`` of logits, in float32 (or float64 in, float64 out)."""
    import torch

    precision = torch.float64 if rows.dtype == torch.float64 else torch.float32
    for i, warper in enumerate(warpers):
        rows = warper(None, rows if i else rows.to(precision))  # these warpers ignore the ids
    # Without warpers, softmax converts the dtype itself.
    return rows.softmax(-1, dtype=precision)
