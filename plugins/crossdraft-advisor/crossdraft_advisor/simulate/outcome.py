"""Results of simulated policies: means over requests with intervals over independent simulations, and regret."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from crossdraft import Estimate
from crossdraft.runs import estimate, ratio

from .arrivals import ArrivalProcess
from .policies import OracleLengths, StepCost, StepPolicy
from .replica import EngineSettings, Router, StepSums, simulate
from .request import Pool, SimulatedRequest, make_requests

QUANTILE = 0.95  # quantile of the columns ``..._p95``


@dataclass(frozen=True)
class ServiceLevel:
    """A service-level objective of a request."""

    first_token_seconds: float | None = None  # most seconds to the first token; None without a bound
    token_seconds: float | None = None  # most seconds per token after the first

    def met(self, times: RequestTimes) -> np.ndarray:
        """``[n]``, True for the requests that meet all bounds."""
        good = np.ones(len(times.first), dtype=bool)
        if self.first_token_seconds is not None:
            good &= times.first <= self.first_token_seconds
        if self.token_seconds is not None:
            good &= times.later <= self.token_seconds * np.maximum(times.tokens - 1, 1)
        return good


@dataclass(frozen=True)
class RequestTimes:
    """Times of the requests of one simulation, ``[n]`` each."""

    first: np.ndarray  # seconds from arrival to the first token
    later: np.ndarray  # seconds from the first token to the last
    tokens: np.ndarray  # output lengths
    seconds: float  # time from the first arrival to the last token of all requests
    counts: StepSums  # sums over the steps

    @classmethod
    def of(cls, requests: Sequence[SimulatedRequest], counts: StepSums) -> RequestTimes:
        arrival, first, last = (np.array([getattr(r, key) for r in requests]) for key in ("arrival", "first", "last"))
        tokens = np.array([r.output_tokens for r in requests])
        return cls(first - arrival, last - first, tokens, float(last.max() - arrival.min()), counts)


@dataclass(frozen=True)
class PolicyResult:
    """Result of one policy under one arrival process; the fields are the columns of ``crossdraft simulate --csv``.

    An estimate has the columns ``<name>_low`` and ``<name>_high`` also. Names of a run's columns have their meaning.
    """

    policy: Annotated[str, "Policy of the draft lengths."]
    arrivals: Annotated[str, "Arrival process."]
    requests: Annotated[int, "Number of simulated requests."]
    block_efficiency_all_steps: Annotated[
        float, "Tokens emitted per decoding row and step, the prefill's token excluded."
    ]
    drafted_per_step: Annotated[float, "Drafted tokens per decoding row and step."]
    batch_size: Annotated[float, "Mean number of decoding rows of a step."]
    tokens_per_second: Annotated[
        Estimate, "Output tokens per second from the first arrival to the last token, prefill included."
    ]
    first_token_seconds: Annotated[Estimate, "Mean seconds from the arrival of a request to its first token."]
    token_seconds: Annotated[Estimate | None, "Mean seconds per token of a response after its first."]
    latency_seconds: Annotated[Estimate, "Mean seconds from the arrival of a request to its last token."]
    first_token_seconds_p95: Annotated[float, "95th percentile of first_token_seconds over requests."]
    token_seconds_p95: Annotated[float, "95th percentile of token_seconds over requests."]
    goodput: Annotated[Estimate | None, "Requests per second that meet the service-level objective; empty without one."]
    # None for the oracle, and without it
    regret: Annotated[Estimate | None, "Relative excess of latency_seconds over the oracle's, paired by simulation."]


def compare(
    pool: Pool,
    process: ArrivalProcess,
    policies: Sequence[StepPolicy],
    cost: StepCost,
    settings: EngineSettings,
    *,
    requests: int,
    seeds: int,
    service_level: ServiceLevel | None = None,
    replicas: int = 1,
    router: Router = "round-robin",
) -> list[PolicyResult]:
    """Simulate every policy on the same arrivals, responses and random numbers, ``seeds`` times.

    ``requests``: of each simulation. Raises UsageError: a cost curve with too few batch sizes or widths.
    """
    times: dict[str, list[RequestTimes]] = {policy.name: [] for policy in policies}
    for seed in range(seeds):
        for policy in policies:
            random = np.random.default_rng(seed)
            simulated = make_requests(pool, process.draw(requests, random), random)
            counts = simulate(
                simulated, policy, cost, settings, replicas=replicas, router=router, concurrency=process.concurrency
            )
            times[policy.name].append(RequestTimes.of(simulated, counts))
    oracle = next((policy.name for policy in policies if isinstance(policy, OracleLengths)), None)

    def result(policy: str) -> PolicyResult:
        own = times[policy]
        counts = [t.counts for t in own]
        rows = max(sum(c.rows for c in counts), 1)
        first, later = np.concatenate([t.first for t in own]), np.concatenate([t.later for t in own])
        tokens = np.concatenate([t.tokens for t in own])
        longer = tokens > 1
        regret = None
        if oracle is not None and oracle != policy:
            latencies = np.array([[_latency(t) for t in times[name]] for name in (policy, oracle)])
            regret = estimate(lambda s: ratio(s) - 1, latencies.T, log=False)
        slow = float(np.quantile(later[longer] / (tokens[longer] - 1), QUANTILE)) if longer.any() else 0.0
        good = [] if service_level is None else [(service_level.met(t).sum(), t.seconds) for t in own]
        return PolicyResult(
            policy=policy,
            arrivals=process.title,
            requests=len(first),
            block_efficiency_all_steps=sum(c.emitted for c in counts) / rows,
            drafted_per_step=sum(c.drafted for c in counts) / rows,
            batch_size=rows / max(sum(c.steps for c in counts), 1),
            tokens_per_second=_ratio([(t.tokens.sum(), t.seconds) for t in own]),
            first_token_seconds=_ratio([(t.first.sum(), len(t.first)) for t in own]),
            token_seconds=_ratio([(t.later.sum(), (t.tokens - 1).sum()) for t in own]) if longer.any() else None,
            latency_seconds=_ratio([(_latency(t) * len(t.first), len(t.first)) for t in own]),
            first_token_seconds_p95=float(np.quantile(first, QUANTILE)),
            token_seconds_p95=slow,
            goodput=_ratio(good, log=False) if good else None,
            regret=regret,
        )

    return [result(policy.name) for policy in policies]


def _latency(times: RequestTimes) -> float:
    return float((times.first + times.later).mean())


def _ratio(sums: Sequence[tuple[float, float]], log: bool = True) -> Estimate:
    """Ratio of totals over simulations, with its interval; ``log``: see `estimate`."""
    pieces = np.array([(b, a) for a, b in sums], dtype=float)  # the first column is the weight
    return estimate(lambda s: s[..., 1] / s[..., 0], pieces, log=log, minimum=0.0)
