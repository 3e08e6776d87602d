"""``learnt-threshold``: stop if the drafter is unsure, with a threshold learnt from accepted and rejected tokens.

The default of transformers' assisted generation since 4.46: J. Mamou, O. Pereg, J. Gante, L. Tunstall, D. Korat, N.
Timor, M. Wasserblat, "Faster Assisted Generation with Dynamic Speculation", 2024 (the stop, with 0.4), and the
adaptive threshold added later. For every verified drafted token, its probability q and its acceptance are recorded.
After a step the threshold becomes the probability that, as the cut of a classifier "accepted", minimises

    fpr + 3 (1 - tpr),

fpr the share of rejected tokens above the threshold (drafted in vain), tpr the share of accepted ones: stopping too
early weighs three times as much as drafting in vain. The initial threshold holds until more than `ENOUGH` tokens, both
accepted and rejected, were recorded.

The token at which a row stops stays in the draft, and the threshold depends on earlier steps only, so decoding stays
lossless. Two things differ from transformers: the threshold is kept across prompts, as its documentation has it (5.23
resets it with each call), and shared by all rows of a batch; and only the last ``window`` tokens count, which bounds
the time of a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from ...framework.contracts.drafter import StrategyConfig
from .draft_model import LengthPolicy

#: Number of recorded tokens above which the threshold moves, and the weight of stopping too early against drafting in
#: vain: both as in transformers.
ENOUGH, TOO_EARLY = 5, 3.0


class LearntThresholdLength(LengthPolicy):
    """Stops below a threshold that is shared by all rows and updated after every step.

    Attributes:
        threshold: the current probability below which a row stops.
    """

    fixed, stops_early, adapts, remembers = False, True, True, True

    def __init__(self, gamma: int, batch_size: int, start: float, window: int):
        super().__init__(gamma, batch_size)
        self._start, self._window = start, window
        self.reset()

    def reset(self) -> None:
        self.threshold = self._start
        self._judged: deque[tuple[float, bool]] = deque(maxlen=self._window)  # probability, accepted
        self._step: list[Tensor] = []

    def draft_lengths(self, limit: Sequence[int], rows: int) -> list[int]:
        self._step = []
        return super().draft_lengths(limit, rows)

    def should_continue(self, logits: Tensor, q: Tensor, token: Tensor) -> Tensor:
        probability = q.gather(1, token[:, None]).squeeze(1)
        self._step.append(probability.to("cpu", non_blocking=True))  # has arrived when the step is observed
        return probability >= self.threshold

    def observe(self, accepted: Sequence[int], lengths: Sequence[int]) -> None:
        if not self._step:
            return
        rows = torch.stack(self._step, 1).double().tolist()
        for row, tau, length in zip(rows, accepted, lengths, strict=True):
            stops = (i + 1 for i, probability in enumerate(row) if not probability >= self.threshold)
            drafted = min(next(stops, len(row)), length)
            # Tokens after the first rejected one were not verified.
            pairs = [(probability, i < tau) for i, probability in enumerate(row[: min(tau + 1, drafted)])]
            self._judged += [pair for pair in pairs if np.isfinite(pair[0])]
        self._step = []
        probabilities, matches = np.array([p for p, _ in self._judged]), np.array([m for _, m in self._judged])
        if len(matches) > ENOUGH and matches.any() and not matches.all():
            self.threshold = best_threshold(probabilities, matches)


def best_threshold(probabilities: np.ndarray, matches: np.ndarray) -> float:
    """The probability that minimises fpr + 3 (1 - tpr) as a threshold; the largest on ties.

    Args:
        probabilities: ``[n]``, of drafted tokens.
        matches: ``[n]`` bool, True if accepted; both values must occur.
    """
    thresholds = np.unique(probabilities)[::-1]
    predicted = probabilities >= thresholds[:, None]
    tpr = (predicted & matches).sum(1) / matches.sum()
    fpr = (predicted & ~matches).sum(1) / (~matches).sum()
    return float(thresholds[np.argmin(fpr + TOO_EARLY * (1 - tpr))])


class LearntThreshold(StrategyConfig):
    """Up to gamma tokens, until the drafter is unsure; the threshold is learnt from accepted and rejected tokens."""

    name: Literal["learnt-threshold"] = "learnt-threshold"
    threshold: float = Field(0.4, ge=0, le=1, description="initial probability below which a row stops")
    window: int = Field(1000, ge=10, le=100_000, description="number of latest verified tokens to learn from")

    def make(self, gamma: int, batch_size: int) -> LengthPolicy:
        return LearntThresholdLength(gamma, batch_size, self.threshold, self.window)
