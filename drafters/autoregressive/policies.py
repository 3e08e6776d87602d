"""How long a draft should be: policies that every autoregressive drafter takes, as ``policy: {name: ..., ...}``.

``static``: gamma tokens, always.

``confidence``, ``stop: after``. J. Mamou et al., "Dynamic Speculation Lookahead Accelerates Speculative Decoding of
Large Language Models", 2024, and the confidence stop of transformers' assisted generation. After drawing a token
whose probability under the drafter's own law is below the threshold, the row stops. The token stays in the draft: a
token that was looked at and thrown away biases the output.

``confidence``, ``stop: before``. The fallback policy of S. Kim et al., "Speculative Decoding with Big Little Decoder",
NeurIPS 2023. The row stops before it draws from a law Q with max_x Q(x) below the threshold. That decision depends on
the prefix alone: given x_1 .. x_i the draft ends after x_i or goes on, whatever x_{i+1} would be, so each token that is
kept still follows its Q and losslessness stands.

``heuristic``. The schedule ``heuristic_transient`` of transformers' assisted generation (J. Gante, "Assisted
Generation: a new direction toward low-latency text generation", 2023): two tokens more after a step in which
everything drafted was accepted, else one fewer, at least one. The length is settled before the first token is drawn,
by steps that are over: given the committed tokens and the length, a step is a static one, so losslessness stands.

``learnt-threshold``: ``confidence`` with a threshold that follows from which drafted tokens were accepted
(`learnt_threshold`). ``disco``: after each token a trained classifier is asked (`disco`). ``batch-size``: a length
for each number of sequences that are decoded side by side (`batch_size`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from torch import Tensor

from ...framework.contracts.drafter import StrategyConfig
from .batch_size import BatchSize
from .disco import Disco
from .learnt_threshold import LearntThreshold
from .length_policy import LengthPolicy

#: Tokens more after a draft that was accepted whole, and fewer after another.
MORE, FEWER = 2, 1
#: Tokens of a sequence's first draft under the heuristic, where there is no other wish.
START = 5


class ConfidenceLength(LengthPolicy):
    """Until the drafter is unsure."""

    fixed, asks = False, True

    def __init__(self, gamma: int, batch_size: int, threshold: float, stop: Literal["after", "before"]):
        super().__init__(gamma, batch_size)
        self.threshold, self.keeps_last = threshold, stop == "after"

    def goes_on(self, logits: Tensor, q: Tensor, token: Tensor) -> Tensor:
        if self.keeps_last:
            return q.gather(1, token[:, None]).squeeze(1) >= self.threshold
        return q.amax(-1) >= self.threshold


class HeuristicLength(LengthPolicy):
    """After the fate of the last draft."""

    fixed, adapts = False, True

    def __init__(self, gamma: int, batch_size: int, start: int | None):
        super().__init__(gamma, batch_size)
        self._start = start or min(START, gamma)
        self._length = [self._start] * batch_size

    def start(self, row: int) -> None:
        self._length[row] = self._start

    def wanted(self, limit: Sequence[int], rows: int) -> list[int]:
        return [min(pair) for pair in zip(limit, self._length, strict=True)]

    def observe(self, accepted: Sequence[int], wanted: Sequence[int]) -> None:
        for row, (tau, drafted) in enumerate(zip(accepted, wanted, strict=True)):
            if drafted:
                after = drafted + MORE if tau == drafted else self._length[row] - FEWER
                self._length[row] = max(1, min(after, self.gamma))


class Static(StrategyConfig):
    """gamma tokens."""

    name: Literal["static"] = "static"

    def make(self, gamma: int, batch_size: int) -> LengthPolicy:
        return LengthPolicy(gamma, batch_size)


class Confidence(StrategyConfig):
    """Until the drafter is unsure; gamma is the most."""

    name: Literal["confidence"] = "confidence"
    stop: Literal["after", "before"] = Field(
        "after",
        description="after: keep the token that was drawn with less probability than the threshold, then stop; "
        "before: stop instead of drawing where no token has as much",
    )
    threshold: float | None = Field(
        None, ge=0, le=1, description="probability below which a row stops; default 0.4, with stop: before 0.6"
    )

    def make(self, gamma: int, batch_size: int) -> LengthPolicy:
        default = 0.4 if self.stop == "after" else 0.6
        return ConfidenceLength(gamma, batch_size, default if self.threshold is None else self.threshold, self.stop)


class Heuristic(StrategyConfig):
    """More after a draft that was accepted whole, else fewer; gamma is the most."""

    name: Literal["heuristic"] = "heuristic"
    start_length: int | None = Field(
        None, ge=1, description=f"tokens of a sequence's first draft; default {START}, or gamma if it is less"
    )

    def make(self, gamma: int, batch_size: int) -> LengthPolicy:
        if self.start_length is not None and self.start_length > gamma:
            raise ValueError(
                f"start_length ({self.start_length}) is more than gamma ({gamma}), the most a draft may have"
            )
        return HeuristicLength(gamma, batch_size, self.start_length)


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


#: Their names, for people.
POLICIES = "static, heuristic, confidence, learnt-threshold, disco or batch-size"
#: The key ``policy`` of a drafter's config: a name, or a mapping with ``name`` and the policy's own keys.
Policy = Annotated[
    Static | Confidence | Heuristic | LearntThreshold | Disco | BatchSize,
    Field(discriminator="name"),
    BeforeValidator(_named),
]
