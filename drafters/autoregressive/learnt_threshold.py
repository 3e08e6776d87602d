"""``learnt-threshold``: stop where the drafter is unsure, and learn from the steps what unsure is.

The default of transformers' assisted generation since 4.46: J. Mamou, O. Pereg, J. Gante, L. Tunstall, D. Korat, N.
Timor, M. Wasserblat, "Faster Assisted Generation with Dynamic Speculation", 2024 (the stop, with 0.4), and the
adaptation of the threshold that followed it there. Of every drafted token that was judged, its probability under the
drafter's own law and whether it was accepted are kept. After a step the threshold becomes the probability that, as
the cut of a classifier "accepted", has the least

    fpr + 3 (1 - tpr),

fpr the share of rejected tokens above it (drafted in vain), tpr the share of accepted ones: of the mistakes, stopping
too early weighs three quarters. Before there are more than `ENOUGH` tokens, of both kinds, the threshold is where it
started.

The token after which a row stops stays in the draft, and the threshold was settled by steps that are over; so
losslessness stands. Two things differ from transformers: what was learnt is kept across prompts, as its documentation
has it (5.23 forgets it with each call), by all rows of a batch, and only the last ``window`` tokens count, so that a
step takes as long after a day as after a minute.
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
from .length_policy import LengthPolicy

#: Tokens of which there have to be more before anything is learnt, and what stopping too early weighs against drafting
#: in vain: both as transformers has them.
ENOUGH, TOO_EARLY = 5, 3.0


class LearntThresholdLength(LengthPolicy):
    """Until the drafter is unsure; a threshold for all rows, which every step moves.

    Attributes:
        threshold: the probability below which a row stops now.
    """

    fixed, asks, adapts, remembers = False, True, True, True

    def __init__(self, gamma: int, batch_size: int, start: float, window: int):
        super().__init__(gamma, batch_size)
        self._start, self._window = start, window
        self.reset()

    def reset(self) -> None:
        self.threshold = self._start
        self._judged: deque[tuple[float, bool]] = deque(maxlen=self._window)  # probability, accepted
        self._step: list[Tensor] = []

    def wanted(self, limit: Sequence[int], rows: int) -> list[int]:
        self._step = []
        return super().wanted(limit, rows)

    def goes_on(self, logits: Tensor, q: Tensor, token: Tensor) -> Tensor:
        self._step.append(q.gather(1, token[:, None]).squeeze(1))
        return self._step[-1] >= self.threshold

    def observe(self, accepted: Sequence[int], wanted: Sequence[int]) -> None:
        if not self._step:
            return
        rows = torch.stack(self._step, 1).double().tolist()
        for said, tau, most in zip(rows, accepted, wanted, strict=True):
            stops = (i + 1 for i, probability in enumerate(said) if not probability >= self.threshold)
            drafted = min(next(stops, len(said)), most)
            # Behind the first token that was rejected nothing was judged.
            judged = [(probability, i < tau) for i, probability in enumerate(said[: min(tau + 1, drafted)])]
            self._judged += [one for one in judged if np.isfinite(one[0])]
        self._step = []
        probabilities, matches = np.array([p for p, _ in self._judged]), np.array([m for _, m in self._judged])
        if len(matches) > ENOUGH and matches.any() and not matches.all():
            self.threshold = best_threshold(probabilities, matches)


def best_threshold(probabilities: np.ndarray, matches: np.ndarray) -> float:
    """The probability that, as a threshold, has the least fpr + 3 (1 - tpr); of several the largest.

    Args:
        probabilities: ``[n]``, of drafted tokens.
        matches: ``[n]`` bool, which of them were accepted; some, and not all.
    """
    thresholds = np.unique(probabilities)[::-1]
    above = probabilities >= thresholds[:, None]
    tpr = (above & matches).sum(1) / matches.sum()
    fpr = (above & ~matches).sum(1) / (~matches).sum()
    return float(thresholds[np.argmin(fpr + TOO_EARLY * (1 - tpr))])


class LearntThreshold(StrategyConfig):
    """Until the drafter is unsure, which is learnt from what was accepted; gamma is the most."""

    name: Literal["learnt-threshold"] = "learnt-threshold"
    threshold: float = Field(0.4, ge=0, le=1, description="probability below which a row stops, to begin with")
    window: int = Field(1000, ge=10, le=100_000, description="the last so many judged tokens are learnt from")

    def make(self, gamma: int, batch_size: int) -> LengthPolicy:
        return LearntThresholdLength(gamma, batch_size, self.threshold, self.window)
