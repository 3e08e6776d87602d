"""The posterior of the seconds of a step."""

import math

import pytest
from crossdraft_advisor.cost.step_cost import SpeedPoint, StepCost, speed_up_of
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdraft.framework.errors import UsageError
from crossdraft.framework.util.estimate import Estimate

NOT_MEASURED = float("nan")


def point(gamma: float, seconds: float, batch_size: float = 1.0) -> SpeedPoint:
    return SpeedPoint(batch_size, gamma, NOT_MEASURED, seconds, 100, "speeds.csv:2")


def test_prior_is_as_wide_as_published_series() -> None:
    ratio = StepCost().ratio(3)
    assert ratio.low is not None
    assert ratio.high is not None
    assert ratio.low < 1.2 < ratio.value < 2.5 < ratio.high


def test_two_lengths_and_plain_give_the_line_between_them() -> None:
    speeds = [point(0, 0.010), point(2, 0.013), point(6, 0.019)]  # 1 + 0.15 gamma
    for gamma in (2, 3, 4, 5, 6):
        assert StepCost.from_speeds(speeds, 1).ratio(gamma).value == pytest.approx(1 + 0.15 * gamma, rel=0.01)


@settings(max_examples=15, deadline=None)
@given(st.floats(0.9, 2.0), st.floats(0.05, 0.4), st.integers(1, 3), st.integers(4, 8))
def test_each_measurement_narrows_the_interval(a: float, b: float, short: int, long: int) -> None:
    def width(*gammas: int) -> float:
        ratio = StepCost(gammas, tuple(a + b * gamma for gamma in gammas)).ratio(long)
        assert ratio.low is not None
        assert ratio.high is not None
        return math.log(ratio.high / ratio.low)

    assert width() > width(short) > width(short, long) * 0.999
    ratio = StepCost((short, long), (a + b * short, a + b * long)).ratio(long)
    assert ratio.low is not None
    assert ratio.high is not None
    assert ratio.low < a + b * long < ratio.high


def test_without_plain_the_unit_of_the_lengths_is_irrelevant() -> None:
    slow, fast = (StepCost((1, 5), (k * 1.2, k * 2.0), plain_known=False).ratio(3) for k in (1, 1000))
    assert slow.value == pytest.approx(fast.value, rel=1e-3)
    one = StepCost((4,), (0.02,), plain_known=False)
    assert one.ratio(4) == StepCost().ratio(4)


def test_distant_batch_size_widens_interval() -> None:
    speeds = [point(0, 0.010), point(2, 0.013), point(6, 0.019)]
    near, far = (StepCost.from_speeds(speeds, b).ratio(4) for b in (1, 64))
    assert far.high is not None
    assert near.high is not None
    assert far.high > near.high


@settings(max_examples=15, deadline=None)
@given(st.floats(1, 9), st.integers(1, 8))
def test_speed_up_is_at_most_block_efficiency(tokens: float, gamma: int) -> None:
    tokens = min(tokens, gamma + 1.0)
    ratio = StepCost((gamma,), (0.5,)).ratio(gamma)
    speed_up = speed_up_of(Estimate(tokens, tokens * 0.95, tokens * 1.05), ratio, gamma + 1)
    assert speed_up.high is not None
    assert speed_up.value <= speed_up.high <= gamma + 1


def test_impossible_speeds_are_refused() -> None:
    with pytest.raises(UsageError, match=r"speeds\.csv:2"):
        StepCost.from_speeds([point(0, 0.01), point(2, 0.0)], 1)
    with pytest.raises(UsageError, match="not possible"):
        StepCost((2,), (math.inf,))


def test_published_example_is_inside_interval() -> None:
    """Llama-3.1-8B with EAGLE-3 on one H100: six drafted tokens, 3.46 a step, speed-up 1.68 (vllm#20780)."""
    tokens = Estimate(3.46, 3.42, 3.50)
    measured = 7.07 / 4.20
    ratios = {2: 2.36 * 4.32 / 7.07, 7: 3.54 * 4.29 / 7.07}
    for known in ((), (2,), (2, 7)):
        speed_up = speed_up_of(tokens, StepCost(known, tuple(ratios[g] for g in known)).ratio(6), 7)
        assert speed_up.low is not None
        assert speed_up.high is not None
        assert speed_up.low < measured < speed_up.high
