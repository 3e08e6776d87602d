"""Length policies of the autoregressive drafters, option ``policy: {name: ..., ...}``.

``static``: always gamma tokens.

``confidence``, ``stop: after``. J. Mamou et al., "Dynamic Speculation Lookahead Accelerates Speculative Decoding of
Large Language Models", 2024, and the confidence stop of transformers' assisted generation. The row stops after
drawing a token with q(token) below the threshold. The token stays in the draft: discarding a token because of its
value biases the output.

``confidence``, ``stop: before``. The fallback policy of S. Kim et al., "Speculative Decoding with Big Little Decoder",
NeurIPS 2023. The row stops before it draws from a distribution Q with max_x Q(x) below the threshold. The decision
depends on the prefix x_1 .. x_i only, not on x_{i+1}, so every drafted token follows its Q and decoding stays lossless.

``heuristic``. The schedule ``heuristic_transient`` of transformers' assisted generation (J. Gante, "Assisted
Generation: a new direction toward low-latency text generation", 2023): two tokens more after a
step that accepted the whole draft, else one fewer, at least one. The length is fixed before the first token is drawn,
from earlier steps: given the committed tokens and the length, a step is a static one, so decoding stays lossless.

``learnt-threshold``: ``confidence`` with a threshold learnt from accepted and rejected tokens (`learnt_threshold`).
``disco``: a trained classifier decides after each token (`disco`). ``batch-size``: a length for each number of running
sequences (`batch_size`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from torch import Tensor

from ...framework.contracts.drafter import StrategyConfig
from .batch_size import BatchSize
from .disco import Disco
from .draft_model import LengthPolicy
from .learnt_threshold import LearntThreshold

#: Change of the length after a draft that was accepted whole, and after any other.
MORE, FEWER = 2, 1
#: Default length of a sequence's first draft under ``heuristic``.
START = 5


class ConfidenceLength(LengthPolicy):
    """Stops when the drafter's probability falls below a threshold."""

    fixed, stops_early = False, True

    def __init__(self, gamma: int, batch_size: int, threshold: float, stop: Literal["after", "before"]):
        super().__init__(gamma, batch_size)
        self.threshold, self.keeps_last = threshold, stop == "after"

    def should_continue(self, logits: Tensor, q: Tensor, token: Tensor) -> Tensor:
        if self.keeps_last:
            return q.gather(1, token[:, None]).squeeze(1) >= self.threshold
        return q.amax(-1) >= self.threshold


class HeuristicLength(LengthPolicy):
    """Follows the acceptance of the last draft."""

    fixed, adapts = False, True

    def __init__(self, gamma: int, batch_size: int, start: int | None):
        super().__init__(gamma, batch_size)
        self._start = start or min(START, gamma)
        self._length = [self._start] * batch_size

    def start(self, row: int) -> None:
        self._length[row] = self._start

    def draft_lengths(self, limit: Sequence[int], rows: int) -> list[int]:
        return [min(pair) for pair in zip(limit, self._length, strict=True)]

    def observe(self, accepted: Sequence[int], lengths: Sequence[int]) -> None:
        for row, (tau, drafted) in enumerate(zip(accepted, lengths, strict=True)):
            if drafted:
                length = drafted + MORE if tau == drafted else self._length[row] - FEWER
                self._length[row] = max(1, min(length, self.gamma))


class Static(StrategyConfig):
    """Always gamma tokens."""

    name: Literal["static"] = "static"

    def make(self, gamma: int, batch_size: int) -> LengthPolicy:
        return LengthPolicy(gamma, batch_size)


class Confidence(StrategyConfig):
    """Up to gamma tokens, until the drafter is unsure."""

    name: Literal["confidence"] = "confidence"
    stop: Literal["after", "before"] = Field(
        "after",
        description="after: keep the token drawn with probability below the threshold, then stop; "
        "before: do not draw if no token reaches the threshold",
    )
    threshold: float | None = Field(
        None, ge=0, le=1, description="probability below which a row stops; default: 0.4, with stop: before 0.6"
    )

    def make(self, gamma: int, batch_size: int) -> LengthPolicy:
        default = 0.4 if self.stop == "after" else 0.6
        return ConfidenceLength(gamma, batch_size, default if self.threshold is None else self.threshold, self.stop)


class Heuristic(StrategyConfig):
    """Longer after a draft that was accepted whole, else shorter; at most gamma."""

    name: Literal["heuristic"] = "heuristic"
    start_length: int | None = Field(
        None, ge=1, description=f"tokens of a sequence's first draft; default: {START}, at most gamma"
    )

    def make(self, gamma: int, batch_size: int) -> LengthPolicy:
        if self.start_length is not None and self.start_length > gamma:
            raise ValueError(f"start_length ({self.start_length}) is more than gamma ({gamma}); write at most gamma")
        return HeuristicLength(gamma, batch_size, self.start_length)


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


#: Their names, as text.
POLICIES = "static, heuristic, confidence, learnt-threshold, disco or batch-size"
#: The option ``policy`` of a drafter: a name, or a mapping with ``name`` and the policy's own options.
Policy = Annotated[
    Static | Confidence | Heuristic | LearntThreshold | Disco | BatchSize,
    Field(discriminator="name"),
    BeforeValidator(_named),
]
