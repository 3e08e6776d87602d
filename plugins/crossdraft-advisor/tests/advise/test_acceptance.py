"""Acceptance by position: conventions, shorter drafts, intervals."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from crossdraft_advisor.engines.acceptance import Acceptance
from crossdraft_advisor.shorter_drafts import by_runs
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdraft.framework.errors import UsageError

RATES = st.lists(st.floats(0.01, 1), min_size=1, max_size=8)


def test_two_conventions() -> None:
    result = Acceptance((0.5, 0.25, 0.2), "x")
    assert result.conditional == (0.5, 0.5, 0.8) and result.gamma == 3
    assert result.block_efficiency().value == pytest.approx(1.95)
    assert Acceptance((0.5, 0.0, 0.0), "x").conditional == (0.5, 0.0, 0.0)


@settings(max_examples=30)
@given(RATES)
def test_conditional_and_back(rates: list[float]) -> None:
    acceptance = Acceptance.from_conditional(rates, "x")
    assert acceptance.conditional == pytest.approx(rates)
    assert Acceptance.from_conditional(acceptance.conditional, "x").marginal == pytest.approx(acceptance.marginal)


@pytest.mark.parametrize(
    "marginal, message",
    [
        ((0.5, 1.2), "1.2, which is not a probability"),
        ((math.nan,), "position 1 is nan"),
        ((-0.1,), "not a probability"),
        ((0.5, 0.6), "increases from 0.5 to 0.6 at position 2"),
        ((), "length of None is not possible"),
    ],
)
def test_invalid_acceptance(marginal: tuple[float, ...], message: str) -> None:
    with pytest.raises(UsageError, match=f"here: .*{message}"):
        Acceptance(marginal, "here")
    if marginal and marginal[-1] > 1:
        with pytest.raises(UsageError, match="conditional rate at position 2"):
            Acceptance.from_conditional(marginal, "here")


def runs_of(rates: list[float], count: int, rng: np.random.Generator) -> np.ndarray:
    """Lengths of ``count`` runs: positions at which the drafter is right, before the wrong one that ends each run."""
    conditional = np.array([*rates, *[rates[-1]] * 200])
    return np.logical_and.accumulate(rng.random((count, 200)) < conditional[:200], 1).sum(1)


def counted(runs: np.ndarray, gamma: int) -> tuple[float, ...]:
    """Steps, and those with tau >= i, that decode the runs with drafts of ``gamma`` tokens, step by step."""
    taus = [min(left, gamma) for run in runs.tolist() for left in range(run, -1, -gamma - 1)]
    return (float(len(taus)), *(float(sum(tau >= i for tau in taus)) for i in range(1, gamma + 1)))


@settings(max_examples=15, deadline=None)
@given(st.lists(st.floats(0.05, 0.9), min_size=1, max_size=6), st.integers(0, 5))
def test_shorter_drafts_of_known_runs(rates: list[float], shorter: int) -> None:
    """Steps of K tokens are counted; what follows for shorter drafts is counted on the same runs."""
    longest = len(rates)
    gamma = max(longest - shorter, 1)
    runs = runs_of(rates, 20_000, np.random.default_rng(0))
    steps, *accepted = counted(runs, longest)
    rate = np.array(accepted) / steps
    result = by_runs(rate, gamma)
    steps, *accepted = counted(runs, gamma)
    assert result == pytest.approx(np.array(accepted) / steps, abs=0.01)
    assert by_runs(rate, longest) == pytest.approx(rate, abs=1e-9)


@given(RATES, st.integers(1, 8), st.integers(1, 40))
def test_shorter_drafts_of_any_rates(rates: list[float], gamma: int, drafts: int) -> None:
    """Also of few drafts, none or all of which are accepted: a distribution, inside its interval."""
    counts = np.minimum.accumulate([round(drafts * rate) for rate in rates])
    result = Acceptance.from_rows([(drafts, *counts)], "x", refusal="").cut(min(gamma, len(rates)))
    be = result.block_efficiency()
    assert result.gamma == min(gamma, len(rates))  # the rates were checked by the constructor
    assert be.low is not None and be.high is not None and 1 <= be.low <= be.value <= be.high <= result.gamma + 1
    assert be.low < be.high


#: One model and server with drafts of eight tokens and of one (vllm#48892, GSM8K, temperature 0).
MTP8 = (11043, 8410, 6800, 5660, 4686, 4020, 3417, 3006, 2612)
MTP1 = (26407, 22021)


def test_measured_pair_of_lengths() -> None:
    result = Acceptance.from_rows([MTP8], "x", refusal="").cut(1)
    be, measured = result.block_efficiency(), 1 + MTP1[1] / MTP1[0]
    assert be.value == pytest.approx(1.8159282, abs=1e-6)
    assert be.low is not None and be.high is not None and be.low <= measured <= be.high
    assert be.value > 1 + MTP8[1] / MTP8[0], "a plain cut is too low"
    assert be.high - be.low < 0.14
    assert result.interval_assumes.endswith("derived from drafts of 8 tokens")


def test_lengths_that_do_not_follow() -> None:
    result = Acceptance.from_rows([(10, 8, 4), (20, 10, 6), (30, 20, 10)], "x", refusal="", idle=0.5)
    assert result.drafts == 60 and result.marginal == (38 / 60, 20 / 60)
    assert result.cut(2) is result
    cut = result.cut(1)
    assert cut.cut(1) is cut and cut.longer is result
    assert cut.idle == pytest.approx(0.5 * cut.block_efficiency().value / result.block_efficiency().value)
    for gamma in (0, 3):
        with pytest.raises(UsageError, match=r"was measured with 2 tokens; the acceptance of .* does not follow"):
            result.cut(gamma)
    with pytest.raises(UsageError, match="shorter drafts does not follow: the drafter or the verifier is unknown"):
        Acceptance((0.5, 0.2), "x").cut(1)
    with pytest.raises(UsageError, match="no drafts were counted"):
        Acceptance.from_rows([(0, 0)], "x")


def test_acceptance_from_only_length() -> None:
    result = Acceptance((), "x", length=2.5, rows=((10, 15), (10, 14), (10, 16)))
    assert result.block_efficiency().value == 2.5
    acceptance = result.with_constant_rate(4)
    a = acceptance.marginal[0]
    assert acceptance.marginal == pytest.approx([a**i for i in (1, 2, 3, 4)])
    assert acceptance.block_efficiency().value == pytest.approx(2.5) and "assumed" in acceptance.remarks[0]
    assert acceptance.block_efficiency().low == pytest.approx(result.block_efficiency().low)
    assert Acceptance((), "x", length=1.0).with_constant_rate(2).marginal == (0.0, 0.0)
    assert Acceptance((), "x", length=3.0).with_constant_rate(2).marginal == (1.0, 1.0)
    with pytest.raises(UsageError, match=r"cannot emit 2\.5"):
        result.with_constant_rate(1)
    with pytest.raises(UsageError, match="a constant rate is not needed"):
        acceptance.with_constant_rate(4)
    with pytest.raises(UsageError, match="not the acceptance by position"):
        result.cut(1)


def test_interval_over_pieces_is_jackknife_of_their_ratio() -> None:
    rows = [(10, 8, 4), (20, 10, 6), (30, 20, 10), (15, 9, 2)]
    result = Acceptance.from_rows(rows, "x").block_efficiency()
    n = len(rows)
    total = [sum(column) for column in zip(*rows, strict=True)]
    centre = Fraction(total[0] + total[1] + total[2], total[0])
    left = [Fraction(sum(total) - sum(row), total[0] - row[0]) for row in rows]
    error = math.sqrt((n - 1) / n * sum((math.log(item) - math.log(centre)) ** 2 for item in left))
    assert result.low is not None and result.high is not None
    assert result.value == pytest.approx(float(centre))
    assert math.log(result.high / result.low) > 2 * 1.96 * error  # Student's t is wider than the normal distribution
    assert result.low >= 1.0 and result.high <= 3.0


def test_interval_of_only_counts_covers() -> None:
    """Independent drafts: 19 of 20 intervals hold the truth."""
    rng, rates = np.random.default_rng(0), np.array([0.7, 0.4, 0.3])
    probs = -np.diff(np.array([1.0, *rates, 0.0]))
    hits = 0
    for _ in range(400):
        tau = rng.choice(4, size=200, p=probs)
        row = (200, *(float((tau >= i).sum()) for i in (1, 2, 3)))
        result = Acceptance.from_rows([row], "x").block_efficiency()
        assert result.low is not None and result.high is not None
        hits += result.low <= 1 + rates.sum() <= result.high
    assert 0.92 <= hits / 400 <= 0.98


@pytest.mark.parametrize(
    "about, message",
    [
        ({}, "of the cost only"),
        ({"drafts": 50}, "50 independent drafts"),
        ({"rows": ((1, 1), (1, 0), (2, 1)), "pieces": "responses"}, "3 independent responses"),
    ],
)
def test_assumption_of_interval(about: dict[str, Any], message: str) -> None:
    assert message in Acceptance((0.5,), "x", **about).interval_assumes
