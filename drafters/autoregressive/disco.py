"""``disco``: a small classifier decides after each drafted token whether to draft another one.

J. Mamou, O. Pereg, D. Korat, M. Berchansky, N. Timor, M. Wasserblat, R. Schwartz, "Dynamic Speculation Lookahead
Accelerates Speculative Decoding of Large Language Models", 2024, section 3. The classifier reads the
drafter's distribution, its entropy, the probability of the token and its position in the draft, and returns the
probability that the target accepts the token; below a threshold the row stops. ``crossdraft train disco`` trains one
for a target and a draft model.

The token at which a row stops stays in the draft, as with ``confidence``, so decoding stays lossless.
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
from .draft_model import LengthPolicy

#: The value of ``kind`` in checkpoints of `crossdraft train disco`.
KIND = "disco"


def features(q: Tensor, token: Tensor, position: Tensor, top: int) -> Tensor:
    """The classifier's input for drafted tokens: ``[n, top + 3]`` float32.

    The ``top`` largest probabilities of ``q [n, V]``, in descending order; its entropy divided by log V; the
    probability of ``token [n]``; and its ``position [n]`` in the draft, divided by gamma.
    """
    q = q.float()
    best = q.topk(min(top, q.shape[1])).values
    best = torch.nn.functional.pad(best, (0, top - best.shape[1]))
    entropy = torch.special.entr(q).sum(1) / math.log(max(q.shape[1], 2))
    return torch.cat([best, torch.stack([entropy, q.gather(1, token[:, None])[:, 0], position.float()], 1)], 1)


class Classifier(StrategyConfig):
    """A two-layer network stored as JSON: P(accepted) = sigmoid(w2 . relu(W1 x + b1) + b2).

    Attributes:
        top: see `features`.
        weight1: ``[hidden, top + 3]``; bias1, weight2: ``[hidden]``.
        threshold: the decision threshold with the best F1.
        gamma: the draft length that positions are divided by.
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
        """Read the checkpoint ``name``. Raises UsageError if ``settings`` are of another kind, or damaged."""
        if settings.get("kind") != KIND:
            raise UsageError(f"{name} is not a checkpoint of {KIND}; crossdraft train {KIND} writes one")
        try:
            classifier = cls(**{key: settings[key] for key in cls.model_fields})
        except (KeyError, ValidationError):
            raise UsageError(f"{name} is damaged: it does not hold a classifier of two layers") from None
        hidden, width = len(classifier.bias1), classifier.top + 3
        shapes = [len(classifier.weight1), len(classifier.weight2), *({len(row) for row in classifier.weight1} or {0})]
        if not hidden or shapes != [hidden, hidden, width]:
            raise UsageError(f"{name} is damaged: its layers are not {hidden} x {width} and 1 x {hidden}")
        return classifier


class DiscoLength(LengthPolicy):
    """Stops when the predicted probability of acceptance falls below a threshold."""

    fixed, stops_early, position_free = False, True, False

    def __init__(self, gamma: int, batch_size: int, checkpoint: str, threshold: float | None):
        super().__init__(gamma, batch_size)
        self._checkpoint, self._threshold, self._position = checkpoint, threshold, 0

    def load(self, context: DraftContext) -> None:
        classifier = Classifier.of(self._checkpoint, context.load_settings(self._checkpoint))
        layers = (classifier.weight1, classifier.bias1, classifier.weight2, classifier.bias2)
        self._weight1, self._bias1, self._weight2, self._bias2 = (
            torch.tensor(layer, dtype=torch.float32, device=context.device) for layer in layers
        )
        self._top, self._gamma = classifier.top, classifier.gamma
        self.threshold = classifier.threshold if self._threshold is None else self._threshold

    def draft_lengths(self, limit: Sequence[int], rows: int) -> list[int]:
        self._position = 0
        return super().draft_lengths(limit, rows)

    def should_continue(self, logits: Tensor, q: Tensor, token: Tensor) -> Tensor:
        position = torch.full_like(token, self._position) / self._gamma
        self._position += 1
        hidden = (features(q, token, position, self._top) @ self._weight1.T + self._bias1).relu()
        return (hidden @ self._weight2 + self._bias2).sigmoid() >= self.threshold


class Disco(StrategyConfig):
    """Up to gamma tokens, until a trained classifier expects a rejection."""

    name: Literal["disco"] = "disco"
    checkpoint: str = Field(description="directory written by crossdraft train disco")
    threshold: float | None = Field(
        None, ge=0, le=1, description="probability of acceptance below which a row stops; default: the checkpoint's"
    )

    def make(self, gamma: int, batch_size: int) -> LengthPolicy:
        return DiscoLength(gamma, batch_size, self.checkpoint, self.threshold)
