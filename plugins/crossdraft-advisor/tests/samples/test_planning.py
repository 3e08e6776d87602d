"""Stated numbers of questions and draws, against simulations with an injected bias."""

from collections import Counter

import numpy as np
import pytest
from crossdraft_advisor.samples.sampler_verdict import POWER, ScorePlan, draws_to_exclude, draws_to_show
from simulated_samplers import power_law_probs, tail_to_tail, tv, verdict_of

from crossdraft.framework.cli import main as cli

REPEATS = 2000


def share_significant(questions: int, score: float, difference: float, seed: int) -> float:
    """Share of repetitions in which the scores of two independent runs differ at level 0.05."""
    random = np.random.default_rng(seed)
    a, b = (random.binomial(questions, p, REPEATS) / questions for p in (score, score - difference))
    error = np.sqrt((a * (1 - a) + b * (1 - b)) / questions)
    return float((np.abs(a - b) > 1.96 * error).mean())


@pytest.mark.parametrize("questions, score", [(164, 0.5), (1319, 0.62), (1319, 0.9), (14042, 0.7)])
def test_visible_difference_of_scores(questions: int, score: float) -> None:
    plan = ScorePlan(questions, score)
    assert share_significant(questions, score, plan.visible, 0) == pytest.approx(POWER, abs=0.045)
    assert share_significant(questions, score, 0.0, 1) == pytest.approx(0.05, abs=0.02)
    assert plan.needed(plan.visible) == pytest.approx(questions, rel=1e-2)


def test_paired_grades_need_fewer_questions() -> None:
    """Two runs of fixed probabilities per question: the share of changed grades is all that counts."""
    random = np.random.default_rng(2)
    p = random.beta(0.4, 0.25, 1319)
    changed = float(2 * (p * (1 - p)).mean())
    plan = ScorePlan(1319, float(p.mean()), changed)
    assert plan.visible < 0.8 * ScorePlan(1319, float(p.mean())).visible
    a, b = (random.random((REPEATS, 1319)) < p for _ in range(2))
    noise = (a.mean(1) - b.mean(1)).std()
    assert plan.visible == pytest.approx((1.96 + 1.2816) * noise, rel=0.05)


def test_draws_show_injected_bias() -> None:
    deviation, repeats = 0.15, 60
    draws = draws_to_show(deviation)
    probs = power_law_probs(draws, 128, 0)
    biased = tail_to_tail(probs, deviation)
    assert tv(probs, biased) == pytest.approx(deviation, rel=0.01)
    outcomes = Counter(verdict_of(probs, biased, 1, 0.02, seed).outcome for seed in range(repeats))
    assert outcomes["no"] >= (POWER - 0.1) * repeats, outcomes


def test_draws_show_least_visible_bias_with_stated_power() -> None:
    """A shift between the halves of all distributions has the least divergence of its total variation."""
    draws, repeats = draws_to_show(0.1), 120
    probs = np.full((draws, 64), 1 / 64)
    biased = probs * np.repeat([0.8, 1.2], 32)
    assert tv(probs, biased) == pytest.approx(0.1)
    outcomes = Counter(verdict_of(probs, biased, 1, 0.02, seed).outcome for seed in range(repeats))
    assert 0.82 * repeats <= outcomes["no"] <= 0.99 * repeats, outcomes


def test_draws_exclude_bias_of_exact_sampler() -> None:
    deviation, repeats = 0.1, 60
    draws = draws_to_exclude(deviation)
    probs = np.full((1, 64), 1 / 64)  # of which the temperature has no part in the verdict
    rows = np.repeat(probs, draws, 0)
    outcomes = Counter(verdict_of(rows, rows, 1, deviation, seed).outcome for seed in range(repeats))
    assert outcomes["yes"] >= (POWER - 0.1) * repeats and outcomes["no"] <= 2, outcomes


def test_bias_of_half_the_size_takes_four_times_the_draws() -> None:
    assert draws_to_show(0.01) == pytest.approx(4 * draws_to_show(0.02), rel=1e-3)
    assert draws_to_exclude(0.01) == pytest.approx(4 * draws_to_exclude(0.02), rel=0.1)


def test_command_prints_both_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["certify-samples", "--questions", "1319", "--score", "0.62"]) == 0
    out = capsys.readouterr().out
    assert "6.2 points" in out and f"{draws_to_show(0.02):,} tokens" in out
    assert cli.main(["certify-samples", "--questions", "1319", "--score", "0.62", "--json"]) == 0
    assert f'"questions_needed": {ScorePlan(1319, 0.62).needed(0.02)}' in capsys.readouterr().out
    assert cli.main(["certify-samples", "--questions", "10", "--score", "0.5", "--changed", "0.51"]) == 2
    assert "--changed must be at most 0.5, got 0.51" in capsys.readouterr().err
    assert cli.main(["certify-samples", "--questions", "10"]) == 2
    assert "give FILE, the draws to test" in capsys.readouterr().err
