"""The gate's false alarms and its power, on simulated prompts with an injected drop."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from crossdraft_advisor.gate import POWER, Sample, checked, planned

GAMMA, STEPS, REPEATS = 4, 30, 400


def sample(random: Any, rates: np.ndarray, drop: float = 0.0, named: bool = True, steps: int = STEPS) -> Sample:
    """Prompts of ``rates [n]`` whose tokens per step, ``1 + 4 rate`` on average, are less by ``drop``."""
    rates = ((1 - drop) * (1 + GAMMA * rates) - 1) / GAMMA
    tokens = steps + random.binomial(GAMMA * steps, rates)
    names = tuple(str(i) for i in range(len(rates))) if named else ()
    return Sample("pair", [(float(n), float(steps)) for n in tokens], names)


def rates_of(random: Any, prompts: int) -> np.ndarray:
    return random.beta(6, 4, prompts)


def outcomes(prompts: int, drop: float, limit: float, paired: bool = True) -> Counter[str]:
    random, counts = np.random.default_rng(0), Counter[str]()
    for _ in range(REPEATS):
        rates = rates_of(random, prompts)
        others = rates if paired else rates_of(random, prompts)
        check = checked(sample(random, rates, named=paired), sample(random, others, drop, paired), limit)
        assert check.paired == paired and check.pieces == prompts
        counts[check.outcome] += 1
    return counts


def detectable(prompts: int, paired: bool = True) -> float:
    """The mean of the stated detectable drops."""
    random, drops = np.random.default_rng(1), []
    for _ in range(100):
        rates = rates_of(random, prompts)
        others = rates if paired else rates_of(random, prompts)
        check = checked(sample(random, rates, named=paired), sample(random, others, named=paired), 0.05)
        assert check.detectable is not None
        drops.append(check.detectable)
    return float(np.mean(drops))


@pytest.mark.thorough
@pytest.mark.parametrize("prompts, paired", [(20, True), (80, True), (80, False)])
def test_drop_is_detected_with_stated_power(prompts: int, paired: bool) -> None:
    drop = detectable(prompts, paired)
    share = outcomes(prompts, drop, limit=drop, paired=paired)["drop"] / REPEATS
    assert share > POWER - 0.03, (drop, share)
    larger = outcomes(prompts, 1.5 * drop, limit=drop, paired=paired)["drop"] / REPEATS
    assert larger > 0.98, (drop, larger)


@pytest.mark.thorough
@pytest.mark.parametrize("prompts, paired", [(20, True), (80, True), (80, False)])
def test_unchanged_code_passes(prompts: int, paired: bool) -> None:
    limit = detectable(prompts, paired)
    counts = outcomes(prompts, 0.0, limit, paired)
    assert counts["drop"] / REPEATS <= 0.025 + 3 * (0.025 / REPEATS) ** 0.5
    assert counts["pass"] / REPEATS > POWER - 0.03, counts


def test_few_prompts_are_undecided() -> None:
    counts = outcomes(6, 0.0, limit=0.005)
    assert counts["undecided"] > 0.8 * REPEATS and counts["drop"] <= 0.025 * REPEATS + 8


def test_pairing_needs_fewer_prompts() -> None:
    assert detectable(80, paired=True) < 0.6 * detectable(80, paired=False)


def test_stated_number_of_prompts_suffices() -> None:
    random = np.random.default_rng(2)
    rates = rates_of(random, 12)
    needed = checked(sample(random, rates), sample(random, rates), 0.03).needed
    assert needed is not None
    assert detectable(needed) == pytest.approx(0.03, rel=0.4)  # known from 12 prompts only


def test_plan_is_that_of_independent_measurements() -> None:
    random = np.random.default_rng(3)
    rates = rates_of(random, 200)
    plan = planned(sample(random, rates), 0.05)
    assert plan.current is None and plan.detectable == pytest.approx(detectable(200, paired=False), rel=0.15)
    assert plan.outcome == ("pass" if plan.detectable <= 0.05 else "undecided")


def test_identical_prompts_pass_and_two_do_not_suffice() -> None:
    random = np.random.default_rng(4)
    same = sample(random, rates_of(random, 5))
    check = checked(same, same, 0.01)
    assert (check.outcome, check.detectable, check.needed) == ("pass", 0.0, 3)
    few = sample(random, rates_of(random, 2))
    check = checked(few, few, 0.01)
    assert (check.outcome, check.detectable, check.needed) == ("undecided", None, None)
    worse = Sample("pair", [(0.9 * tokens, steps) for tokens, steps in same.rows], same.names)
    assert checked(same, worse, 0.05).outcome == "drop"
    assert checked(worse, same, 0.05).outcome == "pass"


def test_drop_within_limit_passes() -> None:
    random = np.random.default_rng(5)
    rates = rates_of(random, 400)
    check = checked(sample(random, rates), sample(random, rates, 0.02), 0.05)
    assert check.change.high is not None and check.change.high < 0 and check.outcome == "pass"
