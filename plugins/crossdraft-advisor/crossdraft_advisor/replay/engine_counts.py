"""Counters that a serving engine would report for recorded responses, by its `CounterDefinition`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from ..engines.counter_definitions import PREFILL_TOKENS, CounterDefinition
from .response import Response
from .step_chain import start_probs


@dataclass
class EngineCounts:
    """Expected counters of one drafter, verifier and draft length; whole numbers if acceptance is deterministic.

    Attributes:
        definition: of the counters.
        gamma: draft length.
        drafts, draft_tokens: counted steps, and the tokens drafted in them.
        per_position: [gamma], counted steps that accepted at least 1, .., gamma tokens.
        steps, tokens, responses: all steps after the prefill, tokens of the responses, responses.
        unknown: drafted tokens past the end of responses whose acceptance is unknown, because the continuation of the
            response is not recorded; they count as rejected.
        random: acceptance is not deterministic, so the counters of an engine differ from these by chance.
        by_response: drafts, and counted steps that accepted at least 1, .., gamma tokens, of each response.
    """

    definition: CounterDefinition
    gamma: int
    drafts: float = 0.0
    draft_tokens: float = 0.0
    per_position: np.ndarray = field(init=False)
    steps: float = 0.0
    tokens: int = 0
    responses: int = 0
    unknown: float = 0.0
    random: bool = False
    by_response: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.per_position = np.zeros(self.gamma)

    @property
    def accepted(self) -> float:
        return float(self.per_position.sum())

    @property
    def length(self) -> float | None:
        """Mean acceptance length, bonus token included; None without drafts."""
        return 1 + self.accepted / self.drafts if self.drafts else None

    @property
    def rate(self) -> float | None:
        """Share of drafted tokens that were accepted; None without drafts, or if the engine does not report it."""
        return self.accepted / self.draft_tokens if self.draft_tokens and self.definition.rate else None

    @property
    def tokens_per_step(self) -> float | None:
        """The engine's ratio of response tokens and steps, averaged over steps; None if it does not report it."""
        steps = self.steps + self.responses * self.definition.prefill_step
        return self.tokens / steps if steps and self.definition.tokens_per_step else None

    def add(self, survival: np.ndarray, lengths: np.ndarray, size: int, limit: int | None) -> None:
        """Add a response.

        Args:
            survival: [T + C, G], Pr(tau >= i) of a step that starts at each token of the response and of its recorded
                continuation, G >= gamma.
            lengths: int64 [T + C], drafted tokens of that step.
            size: T, tokens of the response.
            limit: maximum length of the response; None if unknown.
        """
        known, definition = len(survival), self.definition
        t, i = np.arange(size), np.arange(1, self.gamma + 1)
        drafted = np.minimum(lengths[:size], self.gamma)
        if definition.shortens and limit is not None:
            drafted = np.minimum(drafted, np.maximum(limit - 1 - t, 0))
        acceptable = np.minimum(drafted, known - t)
        at_least = survival[:size, : self.gamma] * (i <= acceptable[:, None])
        visited = np.zeros(size)  # the first step follows the prefill
        visited[PREFILL_TOKENS:] = start_probs(at_least[None, PREFILL_TOKENS:], np.array([self.gamma]))[0, 0]
        last = np.where(acceptable > 0, at_least[t, np.maximum(acceptable, 1) - 1], 1.0)
        counted = visited if definition.idle_steps else visited * (drafted > 0)
        if definition.accepted == "all":
            self.unknown += float((visited * last * (drafted - acceptable)).sum())
        else:
            ends_draft = (drafted == size - t) & (definition.accepted == "until_end")
            at_least = at_least * (i <= (size - 1 - t + ends_draft)[:, None])
        self.random = self.random or bool(((at_least > 1e-6) & (at_least < 1 - 1e-6)).any())
        accepted = counted @ at_least
        self.by_response.append(np.concatenate([[counted.sum()], accepted]))
        self.drafts += float(counted.sum())
        self.draft_tokens += float((visited * drafted).sum())
        self.per_position += accepted
        self.steps += float(visited.sum())
        self.tokens += size
        self.responses += 1


def with_continuation(response: Response) -> Response:
    """The response with its continuation as further tokens; unchanged if their log P would be unknown."""
    if not len(response.continuation):
        return response
    log_p = response.log_p
    if log_p is not None:
        if response.sampling is None or response.sampling.temperature:
            return response
        log_p = np.concatenate([log_p, np.zeros(len(response.continuation))])
    return replace(response, tokens=[*response.tokens, *response.continuation], log_p=log_p)
