"""Simulated requests: each follows the acceptance of one recorded response along its text.

Given a response, a step that starts at token t accepts at least i drafted tokens with a probability that replay
computes, Pr(tau >= i) (`StepAcceptance.survival`). One uniform number for each (request, t) decides tau for every draft
length: tau at length gamma is the minimum of gamma and tau at the longest draft. So one replay serves all lengths, and
policies are compared on the same arrivals, responses and random numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..replay.replay import Candidate, replay
from ..replay.response import Response
from ..replay.step_chain import StepAcceptance, Steps, expected_steps
from .arrivals import Arrival


@dataclass(frozen=True)
class RecordedAcceptance:
    """Acceptance along one recorded response, and the length of its prompt."""

    id: str
    prompt_tokens: int
    steps: StepAcceptance


@dataclass(frozen=True)
class Pool:
    """Recorded responses that simulated requests are drawn from, with their means."""

    responses: tuple[RecordedAcceptance, ...]
    gamma: int  # the longest draft
    tokens_per_step: tuple[float, ...]  # expected tokens of a step by draft length, 0 to gamma
    drafted_per_step: tuple[float, ...]  # expected drafted tokens of a step by draft length
    acceptance: float  # Pr(tau >= 1) of a step with a draft, the prior of a request's acceptance rate

    @property
    def context(self) -> float:
        """Mean context length of a step, halfway through the responses."""
        return float(np.mean([item.prompt_tokens + len(item.steps.lengths) / 2 for item in self.responses]))


def read_pool(responses: Iterable[Response], candidate: Candidate, start: int = 1) -> Pool:
    """Replay ``candidate``, with one verifier and one sequence per draft, and keep the acceptance at every token.

    ``start``: token at which the first step of a response starts, see `make_pool`.
    """
    heads: list[tuple[str, int]] = []
    acceptances: list[StepAcceptance] = []

    def read() -> Iterable[Response]:
        for response in responses:
            heads.append((response.id, len(response.prompt)))
            yield response

    def keep(items: Sequence[StepAcceptance], gammas: Sequence[int]) -> Steps:
        acceptances.extend(items)
        return candidate.steps(items, gammas)

    replay(read(), [replace(candidate, steps=keep)])
    return make_pool([RecordedAcceptance(*head, steps) for head, steps in zip(heads, acceptances, strict=True)], start)


def make_pool(responses: Sequence[RecordedAcceptance], start: int = 1) -> Pool:
    """Create a pool and its means.

    ``start``: token at which the first step of a response starts: 1 if the prefill emits a token, else 0.
    """
    gamma = responses[0].steps.survival.shape[1]
    shifted = [
        StepAcceptance(item.survival[start:], item.lengths[start:], None if item.limit is None else item.limit - start)
        for item in (response.steps for response in responses)
        if len(item.lengths) > start
    ]
    tokens, drafted, acceptance = np.ones(gamma), np.zeros(gamma), 0.0
    if shifted:
        steps = expected_steps(shifted, range(1, gamma + 1))
        tokens, drafted = (values.sum(0) / steps.steps.sum(0) for values in (steps.tokens, steps.drafted))
        drafts = np.concatenate([item.lengths for item in shifted]) > 0
        first = np.concatenate([item.survival[:, 0] for item in shifted])
        acceptance = float(first[drafts].mean()) if drafts.any() else 0.0
    return Pool(tuple(responses), gamma, (1.0, *tokens.tolist()), (0.0, *drafted.tolist()), acceptance)


class SimulatedRequest:
    """A request and its state in a simulation; times are in seconds."""

    def __init__(self, arrival: Arrival, recorded: RecordedAcceptance, random: np.random.Generator):
        steps, size = recorded.steps, len(recorded.steps.lengths)
        self.arrival, self.first, self.last = arrival.seconds, 0.0, 0.0
        self.prompt_tokens = arrival.prompt_tokens or recorded.prompt_tokens
        self.output_tokens = arrival.output_tokens or size
        # The maximum length of the output cuts drafts; None if the engine knows no limit.
        self.limit = steps.limit if arrival.output_tokens is None else arrival.output_tokens
        survival, lengths = steps.survival, steps.lengths
        if self.output_tokens > size:  # repeat the positions whose drafts do not end with the response
            index = np.arange(self.output_tokens) % max(size - survival.shape[1], 1)
            survival, lengths = survival[index], lengths[index]
        coins = random.random((self.output_tokens, 1))
        # Tokens that the longest draft from each token on accepts, and those that it has.
        self.accepts = (survival[: self.output_tokens] > coins).sum(1).tolist()
        self.drafts = lengths[: self.output_tokens].tolist()
        self.emitted = self.prefilled = 0  # tokens so far, and tokens of the prompt in the cache
        self.accepted = self.tested = 0  # drafted tokens accepted so far, and accepted or rejected first

    def longest(self) -> int:
        """The longest draft of the next step."""
        drafts = self.drafts[self.emitted]
        return drafts if self.limit is None else min(drafts, max(self.limit - 1 - self.emitted, 0))


def make_requests(pool: Pool, arrivals: Sequence[Arrival], random: np.random.Generator) -> list[SimulatedRequest]:
    """Requests with responses drawn from the pool with replacement, each with its own random numbers."""
    choices = random.integers(len(pool.responses), size=len(arrivals))
    return [
        SimulatedRequest(arrival, pool.responses[choice], random)
        for arrival, choice in zip(arrivals, choices, strict=True)
    ]
