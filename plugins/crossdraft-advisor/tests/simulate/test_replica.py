"""Simulated engines against truths that are known in closed form: queues, acceptance, costs, budgets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from crossdraft_advisor.replay.step_chain import StepAcceptance, expected_steps
from crossdraft_advisor.simulate.arrivals import Arrival, ClosedLoop, GammaArrivals
from crossdraft_advisor.simulate.outcome import ServiceLevel, compare
from crossdraft_advisor.simulate.policies import DraftBudget, OracleLengths, StepCost, best_schedule, parse_policy
from crossdraft_advisor.simulate.replica import EngineSettings, simulate
from crossdraft_advisor.simulate.request import Pool, RecordedAcceptance, make_pool, make_requests


class Linear:
    """Seconds of a pass: a fixed part, and a part for each token."""

    def __init__(self, fixed: float, per_token: float = 0.0):
        self.fixed, self.per_token = fixed, per_token

    def seconds(self, batch_size: float, width: float, context: float) -> float:
        return self.fixed + self.per_token * batch_size * width


def response(
    rates: Sequence[float], tokens: int, gamma: int = 4, prompt_tokens: int = 1, ended: bool = False
) -> RecordedAcceptance:
    """A response along which a drafted token is accepted with the rate of its position, cyclically."""
    rate = np.resize(np.asarray(rates, dtype=float), tokens + gamma)
    survival = np.stack([np.cumprod(rate[t : t + gamma]) for t in range(tokens)])
    survival *= np.arange(1, gamma + 1) <= tokens - np.arange(tokens)[:, None]
    steps = StepAcceptance(survival, np.full(tokens, gamma), None if ended else tokens)
    return RecordedAcceptance("r", prompt_tokens, steps)


def results(pool: Pool, process: Any, policies: Sequence[str], cost: StepCost, batch_size: int, **options: Any) -> Any:
    options = {"requests": 200, "seeds": 4, "settings": EngineSettings(batch_size)} | options
    parsed = [parse_policy(text, pool, cost, batch_size) for text in policies]
    return compare(pool, process, parsed, cost, options.pop("settings"), **options)


@pytest.mark.parametrize("load", [0.4, 0.8])
def test_queue_of_single_slot_waits_as_long_as_pollaczek_khinchin(load: float) -> None:
    """One slot and a constant service time: an M/D/1 queue, whose mean waiting time is load / (2 (1 - load))."""
    pool = make_pool([response([0.5], tokens=1)])
    (result,) = results(pool, GammaArrivals(load), ["off"], StepCost(Linear(1.0)), 1, requests=3000, seeds=10)
    expected = 1 + load / (2 * (1 - load))
    assert result.first_token_seconds.low < expected < result.first_token_seconds.high
    assert result.first_token_seconds.value == pytest.approx(expected, rel=0.1)
    assert result.latency_seconds.value == pytest.approx(result.first_token_seconds.value)
    assert result.token_seconds is None


def test_requests_of_one_instant_share_a_step() -> None:
    """Also those that arrive when a step ends."""
    pool, cost = make_pool([response([0.0], tokens=3)]), StepCost(Linear(1.0))
    requests = make_requests(pool, [Arrival(0.0), Arrival(0.0), Arrival(2.0)], np.random.default_rng(0))
    simulate(requests, parse_policy("off", pool, cost, 4), cost, EngineSettings(4))
    assert [r.first for r in requests] == [1.0, 1.0, 3.0] and [r.last for r in requests] == [3.0, 3.0, 5.0]


def test_burstier_arrivals_wait_longer() -> None:
    pool = make_pool([response([0.5], tokens=1)])
    poisson, bursts = (
        results(pool, GammaArrivals(0.5, shape), ["off"], StepCost(Linear(1.0)), 1, requests=1000)[0]
        for shape in (1.0, 0.2)
    )
    assert bursts.first_token_seconds.low > 2 * poisson.first_token_seconds.value
    assert bursts.tokens_per_second.value == pytest.approx(0.5, rel=0.15)


@pytest.mark.parametrize("gamma", [0, 1, 3])
@pytest.mark.parametrize("batch_size", [1, 5])
def test_closed_loop_has_rate_of_independent_acceptance(gamma: int, batch_size: int) -> None:
    """Tokens per step are (1 - a^(gamma+1)) / (1 - a), and a step costs what its tokens cost."""
    rate, target, drafter = 0.7, Linear(1.0, 0.01), Linear(0.1)
    pool, cost = make_pool([response([rate], tokens=2500)]), StepCost(target, drafter)
    policy = f"static:{gamma}" if gamma else "off"
    (result,) = results(pool, ClosedLoop(batch_size), [policy], cost, batch_size, requests=2 * batch_size)
    expected = (1 - rate ** (gamma + 1)) / (1 - rate)
    seconds = 1.0 + 0.01 * batch_size * (1 + gamma) + 0.1 * gamma
    assert result.block_efficiency_all_steps == pytest.approx(expected, rel=0.02)
    assert result.tokens_per_second.value == pytest.approx(batch_size * expected / seconds, rel=0.05)
    assert result.token_seconds.value == pytest.approx(seconds / expected, rel=0.02)
    assert result.drafted_per_step == pytest.approx(gamma, abs=0.01) and result.batch_size <= batch_size


@pytest.mark.parametrize("gamma", [1, 2, 4])
def test_sampled_steps_agree_with_expected_steps_of_replay(gamma: int) -> None:
    """The mean number of steps of a response, over its coins, is that of the Markov chain of replay."""
    random = np.random.default_rng(1)
    recorded = [response(random.random(7), tokens, ended=tokens % 2 == 0) for tokens in (9, 16, 23)]
    pool = make_pool(recorded, start=0)
    requests = make_requests(pool, [Arrival(0.0)] * 6000, random)
    counts = simulate(
        requests, parse_policy(f"static:{gamma}", pool, cost := StepCost(Linear(1.0)), 1), cost,
        EngineSettings(6000, 10**6, first_token=False),
    )  # fmt: skip
    shares = np.bincount([(9, 16, 23).index(r.output_tokens) for r in requests]) / len(requests)
    exact = expected_steps([item.steps for item in recorded], [gamma])
    assert counts.rows / len(requests) == pytest.approx(shares @ exact.steps[:, 0], rel=0.01)
    assert counts.drafted / len(requests) == pytest.approx(shares @ exact.drafted[:, 0], rel=0.02)
    assert counts.emitted == sum(r.output_tokens for r in requests)


def test_shorter_draft_accepts_beginning_of_longer_one() -> None:
    """The coins of a request do not depend on the policy."""
    pool = make_pool([response([0.6], tokens=50)])
    first, second = (make_requests(pool, [Arrival(0.0)], np.random.default_rng(3))[0] for _ in range(2))
    assert first.accepts == second.accepts and set(first.accepts) == {0, 1, 2, 3, 4}


def test_drafts_cost_at_least_the_floor() -> None:
    """0.5 plain steps for two drafted tokens of a row at batch size 1; the curve adds what a batch of 4 costs more."""
    free, priced = StepCost(Linear(1.0, 0.05)), StepCost(Linear(1.0, 0.05), floor=lambda drafted: 1 + 0.25 * drafted)
    assert priced.seconds([0, 0], 10) == free.seconds([0, 0], 10)
    assert priced.seconds([2], 10) == pytest.approx(1.5 * free.seconds([0], 10))
    verified = 0.05 * 4 * 2  # of a batch of 4, in a pass whose first 4 positions are plain
    at_one = (0.05 * 2 / 1.05) * 1.2
    assert priced.seconds([2] * 4, 10) == pytest.approx(1.2 * 1.5 - at_one + verified)
    cheaper = StepCost(Linear(1.0, 0.05), Linear(0.4), floor=lambda drafted: 1.1)
    assert cheaper.seconds([2], 10) == pytest.approx(1.0 + 0.05 * 3 + 2 * 0.4)  # the passes take longer


def test_oracle_bounds_policies_and_drafts_accepted_tokens_only() -> None:
    random = np.random.default_rng(0)
    pool = make_pool([response(random.random(11), 40, ended=True) for _ in range(12)])
    cost = StepCost(Linear(1.0, 0.05), Linear(0.1, 0.01))
    policies = ["off", "static:1", "static:4", "schedule", "budget:8", "oracle"]
    for process in (ClosedLoop(8), GammaArrivals(0.06)):
        *others, oracle = results(pool, process, policies, cost, 8)
        assert oracle.regret is None
        assert oracle.drafted_per_step == pytest.approx(oracle.block_efficiency_all_steps - 1, abs=0.03)
        for other in others:
            assert other.regret.low > 0, other.policy
            assert other.tokens_per_second.value < oracle.tokens_per_second.high


def test_regret_covers_injected_slowdown() -> None:
    """A policy that drafts nothing where every draft is accepted: its latency is exactly known."""
    pool, cost = make_pool([response([1.0], tokens=41)]), StepCost(Linear(1.0))
    off, oracle = results(pool, GammaArrivals(1e-9), ["off", "oracle"], cost, 8, requests=20)
    assert off.latency_seconds.value == pytest.approx(41) and oracle.latency_seconds.value == pytest.approx(9)
    assert off.regret.value == pytest.approx(41 / 9 - 1)


def test_budget_goes_to_requests_that_accept() -> None:
    pool = make_pool([response([0.95], 150), response([0.05], 150)])
    cost = StepCost(Linear(1.0))
    policy = DraftBudget("budget:6", 6, pool.acceptance)
    requests = make_requests(pool, [Arrival(0.0)] * 4, np.random.default_rng(2))
    good = [np.mean(r.accepts) > 2 for r in requests]
    assert 0 < sum(good) < 4
    for r, high in zip(requests, good, strict=True):  # what 50 steps have shown
        r.tested, r.accepted, r.emitted = 60, 57 if high else 3, 1
    lengths = policy.lengths(requests, [r.longest() for r in requests], cost, 1.0)
    assert sum(lengths) == 6
    assert sum(n for n, high in zip(lengths, good, strict=True) if high) == min(6, 4 * sum(good))
    budget, static = results(
        pool, ClosedLoop(4), ["budget:6", "static:2"], StepCost(Linear(1.0, 0.05)), 4, requests=400
    )
    assert budget.drafted_per_step <= 2 and budget.tokens_per_second.low > static.tokens_per_second.high


def test_computed_schedule_is_fastest_static_length_of_every_batch_size() -> None:
    pool = make_pool([response([0.7], tokens=3000)])
    cost = StepCost(Linear(1.0, 0.04), Linear(0.02, 0.001))
    schedule = best_schedule(pool, cost, 40)
    assert schedule.thresholds[0][1] > schedule.thresholds[-1][1]
    for b in (1, 6, 40):
        rates = {gamma: (1 - 0.7 ** (gamma + 1)) / 0.3 / cost.seconds([gamma] * b, pool.context) for gamma in range(5)}
        length = next(gamma for start, gamma in reversed(schedule.thresholds) if start <= b)
        assert rates[length] == pytest.approx(max(rates.values()), rel=0.01)


def test_prompts_are_prefilled_in_chunks_beside_decoding_rows() -> None:
    pool = make_pool([response([0.0], tokens=3, prompt_tokens=25)])
    requests = make_requests(pool, [Arrival(0.0), Arrival(3.5)], np.random.default_rng(0))
    simulate(requests, parse_policy("off", pool, cost := StepCost(Linear(1.0)), 4), cost, EngineSettings(4, 10))
    first, second = requests
    assert [first.first, first.last] == [3.0, 5.0]  # chunks of 10, 10 and 5
    # Steps start at 3 and 4; the second request is prefilled from 4 on, by 9 tokens beside the decoding row.
    assert [second.first, second.last] == [7.0, 9.0]


def test_loop_of_crossdraft_prefills_before_step_and_pads_rows() -> None:
    pool = make_pool([response([1.0], tokens=6, gamma=2, prompt_tokens=7)], start=0)
    cost = StepCost(Linear(1.0, 0.1), padded=True, separate=True)
    (request,) = requests = make_requests(pool, [Arrival(0.0)], np.random.default_rng(0))
    simulate(requests, parse_policy("static:2", pool, cost, 1), cost, EngineSettings(1, first_token=False))
    assert request.first == pytest.approx(1.7 + 1.3) and request.last == pytest.approx(1.7 + 2 * 1.3)
    assert cost.seconds([0, 3], 0) == pytest.approx(1 + 0.1 * 8)
    assert StepCost(Linear(1.0, 0.1)).seconds([0, 3], 0) == pytest.approx(1 + 0.1 * 5)


def test_prefill_curve_adds_to_step_what_its_tokens_cost() -> None:
    cost = StepCost(Linear(1.0, 0.1), prefill=Linear(2.0, 0.5), overhead=0.25)
    assert cost.seconds([], 0, 10, 1) == pytest.approx(2 + 5 + 0.25)
    assert cost.seconds([1], 0, 10, 1) == pytest.approx(1.2 + 7 - 1.1 + 0.25)
    assert StepCost(Linear(1.0, 0.1)).seconds([1], 0, 10, 1) == pytest.approx(1 + 0.1 * 12)
    drafting = StepCost(Linear(1.0), Linear(0.5))
    assert drafting.seconds([], 0, 10, 1) == pytest.approx(1.5)  # the draft model reads the prompt, too


def test_goodput_counts_requests_within_service_level() -> None:
    """Half of the requests have a prompt that takes too long."""
    cost = StepCost(Linear(1.0), prefill=Linear(0.0, 1.0))
    pool = make_pool([response([0.0], 3, prompt_tokens=n) for n in (2, 9)])
    level = ServiceLevel(first_token_seconds=5.0)
    (result,) = results(pool, GammaArrivals(0.001), ["off"], cost, 8, requests=400, service_level=level)
    assert result.goodput.value == pytest.approx(0.0005, rel=0.15)
    strict = ServiceLevel(token_seconds=0.9)
    assert results(pool, GammaArrivals(0.001), ["off"], cost, 8, service_level=strict)[0].goodput.value == 0


@pytest.mark.parametrize("router", ["round-robin", "least-loaded"])
def test_replicas_share_nothing_but_arrivals(router: Any) -> None:
    pool, cost = make_pool([response([0.5], tokens=5)]), StepCost(Linear(1.0))
    requests = make_requests(pool, [Arrival(0.0)] * 3000, np.random.default_rng(0))
    simulate(requests, parse_policy("off", pool, cost, 1), cost, EngineSettings(1), replicas=1500, router=router)
    assert sorted({r.last for r in requests}) == [5.0, 10.0]


def test_least_loaded_router_waits_less_than_turns() -> None:
    pool = make_pool([response([0.0], tokens) for tokens in (2, 40)])
    turns, minimum = (
        results(pool, GammaArrivals(0.15), ["off"], StepCost(Linear(1.0)), 1, replicas=4, router=router)[0]
        for router in ("round-robin", "least-loaded")
    )
    assert minimum.first_token_seconds.high < turns.first_token_seconds.low


def test_trace_lengths_repeat_acceptance_of_response() -> None:
    pool = make_pool([response([0.9, 0.1], tokens=20, gamma=2)])
    requests = make_requests(pool, [Arrival(0.0, 77, 1000), Arrival(0.0, 5, 3)], np.random.default_rng(0))
    assert [r.prompt_tokens for r in requests] == [77, 5] and [len(r.accepts) for r in requests] == [1000, 3]
    assert np.mean(requests[0].accepts) == pytest.approx(0.5 * (0.9 + 0.09) + 0.5 * (0.1 + 0.09), abs=0.08)
    simulate(requests, OracleLengths(), StepCost(Linear(1.0)), EngineSettings(2))
    assert [r.emitted for r in requests] == [1000, 3]
