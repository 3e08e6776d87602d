"""Predictions: synthetic numbers with results computed by hand."""

import pytest
from cost_curves import curve, seconds

from crossdraft.framework.cost.prediction import CellStatistics, predict, schedule, stops_paying


def test_predicted_step_by_hand() -> None:
    # Half of the steps draft 4 nodes, half none; two passes of the draft model a step.
    cell = CellStatistics(8, 6.0, 2.5, {0: 0.5, 4: 0.5}, 200, passes=2, draft_seconds=99, other_seconds=3)
    drafter = curve(cost=lambda b, w, c: seconds(b, w, c) / 10)
    result = predict(cell, curve(), drafter)
    target = (seconds(8, 1, 200) + seconds(8, 5, 200)) / 2
    draft = 2 * seconds(8, 1, 200) / 10
    assert (result.target, result.draft, result.other) == (pytest.approx(target), pytest.approx(draft), 3)
    assert result.seconds == pytest.approx(target + draft + 3)
    assert result.tokens_per_second == pytest.approx(6 * 2.5 / (target + draft + 3))
    plain = 6 / (seconds(8, 1, 200) + 3)
    assert result.speed_up == pytest.approx(result.tokens_per_second / plain)


def test_drafts_made_while_target_verifies() -> None:
    cell = CellStatistics(8, 8.0, 2.5, {4: 1.0}, 200, passes=4, other_seconds=3)
    target = seconds(8, 5, 200)
    for share in (0.1, 0.8):  # four passes of the draft model: less than the target's one, and more
        drafter = curve(cost=lambda b, w, c, share=share: seconds(b, w, c) * share)
        draft = 4 * seconds(8, 1, 200) * share
        result = predict(cell, curve(), drafter, overlap=True)
        assert (result.target, result.draft) == (pytest.approx(target), pytest.approx(draft))
        assert result.seconds == pytest.approx(max(target, draft) + 3)
        assert result.tokens_per_second == pytest.approx(8 * 2.5 / result.seconds)
        assert result.speed_up == pytest.approx(result.tokens_per_second * (seconds(8, 1, 200) + 3) / 8)
    assert draft > target


def test_without_drafters_curve_its_measured_time_counts() -> None:
    cell = CellStatistics(1, 1.0, 2.0, {4: 1.0}, 100, passes=4, draft_seconds=7)
    assert predict(cell, curve()).draft == 7


def test_measured_baseline_has_priority() -> None:
    cell = CellStatistics(2, 2.0, 2.0, {4: 1.0}, 100, other_seconds=5)
    baseline = CellStatistics(2, 1.0, 1.0, {0: 1.0}, 300, other_seconds=1)
    result = predict(cell, curve(), baseline=baseline)
    assert result.speed_up == pytest.approx(result.tokens_per_second * (seconds(2, 1, 300) + 1))


def test_plain_decoding_has_speed_up_one() -> None:
    cell = CellStatistics(2, 2.0, 2.0, {4: 1.0}, 100, passes=3, other_seconds=5).plain()
    assert predict(cell, curve(), curve()).speed_up == 1
    assert predict(cell, curve()).tokens_per_second == pytest.approx(2 / (seconds(2, 1, 100) + 5))


def test_tokens_of_chain() -> None:
    chain = CellStatistics.chain(4, 3, 0.5, 100)
    assert chain.tokens_per_step == (1 - 0.5**4) / (1 - 0.5)
    assert (chain.widths, chain.passes, chain.occupied) == ({3: 1.0}, 3, 4)
    assert CellStatistics.chain(1, 3, 1.0, 100).tokens_per_step == 4
    assert CellStatistics.chain(1, 3, 0.0, 100).tokens_per_step == 1


def test_another_batch_size() -> None:
    cell = CellStatistics(2, 1.5, 2.0, {4: 1.0}, 100, passes=3, draft_seconds=1, other_seconds=4).at(8)
    assert (cell.batch_size, cell.occupied, cell.draft_seconds, cell.other_seconds) == (8, 8, 4, 16)
    assert (cell.tokens_per_step, cell.passes) == (2.0, 3)


def test_lengths_that_pay_best_by_hand() -> None:
    """T(B, W) = 10 + 2 B W + B, free drafts, acceptance 1/2: at B = 1 two tokens, 1.75 x 13 / 17, then one."""
    result = schedule(0.5, 4, curve(), None, [8, 1, 2, 100], 100)
    assert result == [(1, 2), (2, 1), (100, 0)]
    assert schedule(0.5, 1, curve(), None, [8, 100], 100) == [(1, 1), (100, 0)], "what is least holds below it, too"
    assert schedule(0.5, 4, curve(), curve(), [1], 100) == [(1, 0)], "a drafter as slow as its target"


@pytest.mark.parametrize(
    ("speed_ups", "expected"),
    [([2, 1.5, 1.0], None), ([2, 0.9, 0.8], 4), ([2, 0.9, 1.1], None), ([0.9, 0.8, 0.7], 1), ([2, 1.5, 0.9], 16)],
)
def test_break_even_batch_size(speed_ups: list[float], expected: int | None) -> None:
    assert stops_paying([1, 4, 16], speed_ups) == expected
    assert stops_paying([16, 4, 1], speed_ups[::-1]) == expected


def test_rows_of_an_engine_draft_independently() -> None:
    """Two rows that draft four tokens with probability 1/4: none, one or both do; the mean nodes of a row count."""
    cell = CellStatistics(1, 1, 1.5, {4: 1.0}, 100, acceptance=(0.2, 0.1, 0.1, 0.1), idle=0.75)
    assert cell.at(1).widths == pytest.approx({0: 0.75, 4: 0.25})
    assert cell.at(2).widths == pytest.approx({0: 9 / 16, 2: 6 / 16, 4: 1 / 16})
    assert cell.plain().at(2).widths == {0: 1.0}
