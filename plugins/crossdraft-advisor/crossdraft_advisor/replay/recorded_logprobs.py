"""Plausibility checks of recorded log-probabilities: acceptance is Q / P, so their errors carry over to the replay."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from crossdraft.framework.contracts.sampling import Sampling

from .response import MIN_LOG_P, Response
from .teacher_forcing.draft_scores import DraftScores

#: Lowest plausible mean log P per token at temperatures up to 1. The mean is minus the entropy of the sampled
#: distributions, 1 to 4 nats for language models; 6 is a perplexity of 400.
FLOOR = -6.0
#: The same at higher temperatures, where distributions may be nearly uniform over the vocabulary: e^12 is 160,000.
FLOOR_HOT = -12.0
#: Fewest recorded tokens for a warning.
MIN_TOKENS = 16
#: Largest mean absolute difference per token from the target's log P; bfloat16 rounding changes single ones by 0.3.
MAX_DIFFERENCE = 0.25


@dataclass
class RecordedLogP:
    """Sums of recorded log-probabilities, and of the target's if it was run on the same tokens."""

    tokens: int = 0
    total: float = 0.0
    compared: int = 0
    compared_total: float = 0.0
    own: float = 0.0
    difference: float = 0.0
    hot: bool = False

    def add(self, response: Response, scores: DraftScores) -> None:
        """Add a response; those at temperature 0 or without log-probabilities are ignored."""
        sampling = response.sampling or Sampling()
        if response.log_p is None or not sampling.temperature:
            return
        recorded = np.maximum(np.asarray(response.log_p, dtype=np.float64), MIN_LOG_P)
        self.hot |= sampling.temperature > 1
        self.tokens += len(recorded)
        self.total += float(recorded.sum())
        if scores.own_log_p is not None:
            own = np.maximum(scores.own_log_p, MIN_LOG_P)
            self.compared += len(own)
            self.compared_total += float(recorded.sum())
            self.own += float(own.sum())
            self.difference += float(np.abs(recorded - own).sum())

    @property
    def warning(self) -> str | None:
        """Message if the log-probabilities are not plausible, else None."""
        if self.compared >= MIN_TOKENS and self.difference / self.compared > MAX_DIFFERENCE:
            return (
                "the recorded log-probabilities differ from the target's: "
                f"{self.compared_total / self.compared:.2f} per token instead of "
                f"{self.own / self.compared:.2f} (mean absolute difference "
                f"{self.difference / self.compared:.2f}); check the model, the sampling parameters and the engine that "
                "recorded them, and do not rely on these numbers"
            )
        mean, floor = self.total / max(1, self.tokens), FLOOR_HOT if self.hot else FLOOR
        if self.tokens >= MIN_TOKENS and mean < floor:
            return (
                f"the recorded log-probabilities are implausible: {mean:.2f} per token is below {floor:g}, the minimum "
                "for samples of a language model; check the engine that recorded them with "
                "crossdraft certify-samples, and do not rely on these numbers"
            )
        return None
