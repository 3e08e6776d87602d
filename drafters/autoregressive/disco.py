"""``disco``: a small classifier decides after each drafted token whether another one is drafted.

J. Mamou, O. Pereg, D. Korat, M. Berchansky, N. Timor, M. Wasserblat, R. Schwartz, "Dynamic Speculation Lookahead
Accelerates Speculative Decoding of Large Language Models", 2024, section 3. From the drafter's law of the token, its
entropy, the token itself and its place in the draft the classifier says how probably the target accepts it; below a
threshold the row stops. ``crossdraft train disco`` makes one for a target and a draft model.

The token after which a row stops stays in the draft, as with ``confidence``, so losslessness stands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from pydantic import Field, ValidationError
from torch import Tensor

from ...framework.contracts.drafter import DraftContext, StrategyConfig
from ...framework.errors import UsageError
from .length_policy import LengthPolicy

#: What `crossdraft train disco` writes under ``kind``.
KIND = "disco"


def features(q: Tensor, token: Tensor, place: Tensor, top: int) -> Tensor:
    """What the classifier reads of drafted tokens: ``[n, top + 3]`` float32.

    The ``top`` largest probabilities of ``q [n, V]``, largest first; its entropy, as a share of the largest there can
    be; the probability of ``token [n]``; and its ``place [n]`` in the draft, as a share of gamma.
    """
    q = q.float()
    best = q.topk(min(top, q.shape[1])).values
    best = torch.nn.functional.pad(best, (0, top - best.shape[1]))
    entropy = torch.special.entr(q).sum(1) / math.log(max(q.shape[1], 2))
    return torch.cat([best, torch.stack([entropy, q.gather(1, token[:, None])[:, 0], place.float()], 1)], 1)


class Classifier(StrategyConfig):
    """Two layers, as JSON holds them: P(accepted) = sigmoid(w2 . relu(W1 x + b1) + b2).

    Attributes:
        top: see `features`.
        weight1: ``[hidden, top + 3]``; bias1, weight2: ``[hidden]``.
        threshold: at which its yes or no is right most often, by F1.
        gamma: the draft length that places are shares of.
    """

    top: int = Field(ge=1, le=4096)
    weight1: list[list[float]]
    bias1: list[float]
    weight2: list[float]
    bias2: float
    threshold: float = Field(ge=0, le=1)
    gamma: int = Field(ge=1, le=4096)

    @classmethod
    def of(cls, name: str, settings: dict[str, Any]) -> Classifier:
        """That of a checkpoint ``name``. Raises UsageError for settings of something else, or damaged ones."""
        if settings.get("kind") != KIND:
            raise UsageError(f"{name} holds no settings of {KIND}; crossdraft train {KIND} writes them")
        try:
            found = cls(**{key: settings[key] for key in cls.model_fields})
        except (KeyError, ValidationError):
            raise UsageError(f"{name} is damaged: it holds no classifier of two layers") from None
        hidden, width = len(found.bias1), found.top + 3
        shapes = [len(found.weight1), len(found.weight2), *({len(row) for row in found.weight1} or {0})]
        if not hidden or shapes != [hidden, hidden, width]:
            raise UsageError(f"{name} is damaged: its layers are not {hidden} x {width} and 1 x {hidden}")
        return found


class DiscoLength(LengthPolicy):
    """Until the classifier says no."""

    fixed, asks, anywhere = False, True, False

    def __init__(self, gamma: int, batch_size: int, checkpoint: str, threshold: float | None):
        super().__init__(gamma, batch_size)
        self._checkpoint, self._threshold, self._place = checkpoint, threshold, 0

    def load(self, context: DraftContext) -> None:
        found = Classifier.of(self._checkpoint, context.load_settings(self._checkpoint))
        layers = (found.weight1, found.bias1, found.weight2, found.bias2)
        self._weight1, self._bias1, self._weight2, self._bias2 = (
            torch.tensor(layer, dtype=torch.float32, device=context.device) for layer in layers
        )
        self._top, self._places = found.top, found.gamma
        self.threshold = found.threshold if self._threshold is None else self._threshold

    def wanted(self, limit: Sequence[int], rows: int) -> list[int]:
        self._place = 0
        return super().wanted(limit, rows)

    def goes_on(self, logits: Tensor, q: Tensor, token: Tensor) -> Tensor:
        place = torch.full_like(token, self._place) / self._places
        self._place += 1
        hidden = (features(q, token, place, self._top) @ self._weight1.T + self._bias1).relu()
        return (hidden @ self._weight2 + self._bias2).sigmoid() >= self.threshold


class Disco(StrategyConfig):
    """Until a trained classifier expects the target to reject; gamma is the most."""

    name: Literal["disco"] = "disco"
    checkpoint: str = Field(description="a directory that crossdraft train disco has written")
    threshold: float | None = Field(
        None, ge=0, le=1, description="probability of acceptance below which a row stops; default: the checkpoint's"
    )

    def make(self, gamma: int, batch_size: int) -> LengthPolicy:
        return DiscoLength(gamma, batch_size, self.checkpoint, self.threshold)
