"""Plausibility of recorded log-probabilities: acceptance is Q / P, so a replay is as wrong as they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..contracts.sampling import Sampling
from .response import LEAST, Response
from .teacher_forcing.forced_draft import Forced

#: Mean log P a token below which no language model's own samples are plausible, at temperatures up to 1. The mean is
#: minus the entropy of the distributions that were drawn from; those of language models are 1 to 4 nats, and 6 is a
#: perplexity of 400. It is far above -log V, which no sampler can have in the mean.
FLOOR = -6.0
#: The same at higher temperatures, where distributions may be as flat as the vocabulary is large: e^12 is 160,000.
FLOOR_HOT = -12.0
#: Fewer recorded tokens decide nothing.
FEWEST = 16
#: Mean absolute difference from the target's own, a token, that is no rounding: bfloat16 changes single ones by 0.3.
DIFFERENT = 0.25


@dataclass
class RecordedLogP:
    """Sums over recorded log-probabilities, and over those of the target if it was run on the same tokens."""

    tokens: int = 0
    total: float = 0.0
    compared: int = 0
    compared_total: float = 0.0
    own: float = 0.0
    apart: float = 0.0
    hot: bool = False

    def add(self, response: Response, forced: Forced) -> None:
        """Add a response; one at temperature 0, or without log-probabilities, counts nowhere."""
        sampling = response.sampling or Sampling()
        if response.log_p is None or not sampling.temperature:
            return
        recorded = np.maximum(np.asarray(response.log_p, dtype=np.float64), LEAST)
        self.hot |= sampling.temperature > 1
        self.tokens += len(recorded)
        self.total += float(recorded.sum())
        if forced.own_log_p is not None:
            own = np.maximum(forced.own_log_p, LEAST)
            self.compared += len(own)
            self.compared_total += float(recorded.sum())
            self.own += float(own.sum())
            self.apart += float(np.abs(recorded - own).sum())

    @property
    def warning(self) -> str | None:
        """A sentence if the log-probabilities are not plausible."""
        if self.compared >= FEWEST and self.apart / self.compared > DIFFERENT:
            return (
                "the recorded log-probabilities are not those of the target: "
                f"{self.compared_total / self.compared:.2f} a token, where the target has "
                f"{self.own / self.compared:.2f} (mean absolute difference "
                f"{self.apart / self.compared:.2f}); check the model, the sampling parameters and the engine that "
                "recorded them, and do not rely on these numbers"
            )
        mean, floor = self.total / max(1, self.tokens), FLOOR_HOT if self.hot else FLOOR
        if self.tokens >= FEWEST and mean < floor:
            return (
                f"the recorded log-probabilities are implausible: {mean:.2f} a token, below {floor:g}, is lower than a "
                "language model's own samples have; check the engine that recorded them with crossdraft certify "
                "--samples, and do not rely on these numbers"
            )
        return None
