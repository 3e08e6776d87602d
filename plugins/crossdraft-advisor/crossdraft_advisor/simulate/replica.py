"""Continuous batching on replicas behind a router, step by step.

A replica admits waiting requests in order of arrival while it has free slots. Every step prefills prompt tokens, within
the token budget and after the decoding rows, and decodes each running request whose prompt is in the cache: its draft
is scored and verified, and its tokens arrive at the end of the step. The memory of the cache is assumed to suffice for
all slots, and routing, sampling and streaming to take no time.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, groupby, islice
from typing import Literal

from .policies import StepCost, StepPolicy
from .request import SimulatedRequest

Router = Literal["round-robin", "least-loaded"]


@dataclass(frozen=True)
class EngineSettings:
    """Settings of a replica."""

    batch_size: int  # most running requests
    batched_tokens: int = 2048  # most tokens of a pass; longer prompts are prefilled in chunks
    # the prefill emits the first token, as in serving engines; else the first step does, as in crossdraft's own loop
    first_token: bool = True


@dataclass
class StepSums:
    """Sums over the decoding steps of a simulation."""

    steps: int = 0  # steps with decoding rows; ``rows``: decoding rows of them
    rows: int = 0
    # drafted, emitted: tokens drafted and emitted by decoding rows
    drafted: int = 0
    emitted: int = 0
    seconds: float = 0.0  # of all steps


@dataclass(eq=False)
class Replica:
    """One engine with its queue."""

    settings: EngineSettings
    policy: StepPolicy
    cost: StepCost
    counts: StepSums  # shared by all replicas of a simulation
    # waiting, running: requests without and with a slot
    waiting: deque[SimulatedRequest] = field(default_factory=deque)
    running: list[SimulatedRequest] = field(default_factory=list)
    _decoding: list[SimulatedRequest] = field(default_factory=list)
    _lengths: list[int] = field(default_factory=list)

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.running)

    def start_step(self) -> float:
        """Admit requests and choose the draft lengths. Returns the seconds of the step."""
        settings, cost = self.settings, self.cost
        while self.waiting and len(self.running) < settings.batch_size:
            self.running.append(self.waiting.popleft())
        rows = [r for r in self.running if r.prefilled == r.prompt_tokens]
        prefilling = [r for r in self.running if r.prefilled < r.prompt_tokens]
        if cost.separate:  # whole prompts, whose rows decode in the same step
            prefill_tokens = sum(r.prompt_tokens for r in prefilling)
            for r in prefilling:
                r.prefilled = r.prompt_tokens
            rows = self.running
        lengths, context = [], 0.0
        if rows:
            context = sum(r.prompt_tokens + r.emitted for r in rows) / len(rows)
            lengths = self.policy.lengths(rows, [r.longest() for r in rows], cost, context)
        prefill_rows = len(prefilling)
        if not cost.separate:
            prefill_tokens = prefill_rows = 0
            budget = max(settings.batched_tokens - len(rows) - sum(lengths), 0 if rows else 1)
            for r in prefilling:
                chunk = min(r.prompt_tokens - r.prefilled, budget - prefill_tokens)
                if chunk <= 0:
                    break
                r.prefilled += chunk
                prefill_tokens, prefill_rows = prefill_tokens + chunk, prefill_rows + 1
        seconds = cost.seconds(lengths, context, prefill_tokens, prefill_rows)
        self._decoding, self._lengths = list(rows), lengths
        self.counts.seconds += seconds
        return seconds

    def end_step(self, now: float) -> int:
        """Emit the tokens of the step. Returns the number of requests that ended."""
        counts = self.counts
        counts.steps += bool(self._decoding)
        for r, length in zip(self._decoding, self._lengths, strict=True):
            accepts = r.accepts[r.emitted]
            tau = accepts if accepts < length else length
            if not r.emitted:
                r.first = now
            emitted = min(tau + 1, r.output_tokens - r.emitted)
            r.emitted += emitted
            r.last = now
            r.accepted += tau
            r.tested += tau + (tau < length)
            counts.rows += 1
            counts.drafted += length
            counts.emitted += emitted
        if self.settings.first_token:
            for r in self.running:
                if not r.emitted and r.prefilled == r.prompt_tokens:
                    r.emitted, r.first, r.last = 1, now, now
        before = len(self.running)
        self.running = [r for r in self.running if r.emitted < r.output_tokens]
        return before - len(self.running)


def simulate(
    requests: Sequence[SimulatedRequest],
    policy: StepPolicy,
    cost: StepCost,
    settings: EngineSettings,
    *,
    replicas: int = 1,
    router: Router = "round-robin",
    concurrency: int = 0,
) -> StepSums:
    """Run ``requests``, in order of arrival, to their end; fills in their times.

    ``replicas``: equal engines; each has its own clock and slots; ``concurrency``: if not 0, that many requests run at
    all times: the arrival of the next is the end of another. Raises UsageError: a cost curve with too few batch sizes
    or widths.
    """
    counts = StepSums()
    engines = [Replica(settings, policy, cost, counts) for _ in range(replicas)]
    turns = cycle(range(replicas))
    pending: Iterator[SimulatedRequest] = iter(requests)
    events: list[tuple[float, int]] = []  # end of the step of each busy replica
    busy = [False] * replicas

    def route(request: SimulatedRequest) -> int:
        if router == "round-robin":
            place = next(turns)
        else:
            place = min(range(replicas), key=lambda i: engines[i].load)
        engines[place].waiting.append(request)
        return place

    def start(place: int, now: float) -> None:
        busy[place] = engines[place].load > 0
        if busy[place]:
            heapq.heappush(events, (now + engines[place].start_step(), place))

    def end_step() -> None:
        now, place = heapq.heappop(events)
        ended = engines[place].end_step(now)
        for request in islice(pending, ended if concurrency else 0):
            request.arrival = now
            engines[place].waiting.append(request)
        start(place, now)

    arriving = islice(pending, concurrency) if concurrency else pending
    for now, group in groupby(arriving, key=lambda request: request.arrival):
        while events and events[0][0] < now:
            end_step()
        for place in dict.fromkeys([route(request) for request in group]):
            if not busy[place]:
                start(place, now)
    while events:
        end_step()
    return counts
