"""Metrics against values computed by hand."""

import math
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from piece_results import made_piece

from crossdraft.framework.metrics.cell_metrics import (
    CategoryMetrics,
    Estimate,
    Metrics,
    StepRecord,
    acceptance,
    block_efficiency,
    compare,
    measure,
    paired_difference,
)
from crossdraft.framework.metrics.component_times import TOO_FEW, CellPieces
from crossdraft.framework.metrics.pieces import Piece, wall_ratio


def steps(*taus: list[int], width: int = 3, limit: int = 9, survival: float | None = None) -> list[StepRecord]:
    """Records with one prompt per list and one step per entry; categories alternate."""
    return [
        StepRecord(p, f"q{p}", "ab"[p % 2], 0, i, tau, tau + 1, width, width, limit, survival)
        for p, prompt in enumerate(taus)
        for i, tau in enumerate(prompt)
    ]


def piece(emitted: int, draft: float = 0.0, target: float = 1.0, prefill: float = 0.5) -> Piece:
    return Piece(emitted, {"prefill": prefill, "draft": draft, "target": target, "verify": 0.0, "rest": 0.0})


def test_by_hand() -> None:
    records = steps([3, 0], [1, 2, 0], survival=1.5)
    metrics = measure(records, [piece(5, draft=1.0), piece(6, target=3.0)], passes=12, gamma=4)
    assert (metrics.tokens, metrics.steps, metrics.sequences) == (11, 5, 2)
    assert metrics.block_efficiency == Estimate(11 / 5)  # two prompts are too few for an interval
    assert metrics.mean_tau == 6 / 5
    assert metrics.acceptance == [3 / 5, 2 / 5, 1 / 5, 0.0]
    assert [estimate.value for estimate in acceptance(records, 4, 4)] == metrics.acceptance
    assert metrics.block_efficiency_expected == 2.5
    assert metrics.target_rows_per_token == 5 * 4 / 11
    assert metrics.nodes_per_step == 3
    assert metrics.shares == {"draft": 1 / 5, "target": 4 / 5, "verify": 0, "rest": 0}
    assert (metrics.decode_seconds, metrics.prefill_seconds) == (5, 1)
    assert metrics.tokens_per_second == metrics.tokens_per_second_wall == 11 / 5
    assert (metrics.steps_cut, metrics.block_efficiency_all_steps, metrics.undisturbed) == (0, 11 / 5, 1.0)
    assert metrics.tokens_per_second_with_prefill == 11 / 6
    assert metrics.by_category == {
        "a": CategoryMetrics(1, Estimate(5 / 2)),
        "b": CategoryMetrics(1, Estimate(6 / 3)),
    }
    assert metrics.drafter_passes == 12
    assert metrics.speed_up is None


def test_tail_counts_for_acceptance_and_not_for_rates() -> None:
    records = steps([3, 0], [1, 2, 0])
    full = piece(5, draft=1.0, target=3.0)
    tailed = measure(records, [Piece(5, full.seconds, tail_emitted=6, tail_seconds=5.5)])
    assert tailed.tokens_per_second == 5 / 4
    assert tailed.shares == {"draft": 1 / 4, "target": 3 / 4, "verify": 0, "rest": 0}
    assert (tailed.decode_seconds, tailed.tail_seconds, tailed.prefill_seconds) == (4, 5.5, 0.5)
    assert tailed.tokens_per_second_with_prefill == 11 / 10
    assert (tailed.tokens, tailed.block_efficiency) == (11, Estimate(11 / 5))
    assert wall_ratio([Piece(5, full.seconds, 6, 5.5)], [piece(5, target=2.0)]) == 0.5


def compared(pieces: list[Piece], plain: list[Piece]) -> tuple[Metrics, Metrics]:
    """Metrics of plain decoding and of a pair in one group."""
    both = [CellPieces("none", "token", plain), CellPieces("a", "token", pieces)]
    metrics = [measure(steps([3, 0], [1], [1, 2, 0]), cell.pieces) for cell in both]
    compare(metrics, both, baseline=0)
    return metrics[0], metrics[1]


def test_speed_up_by_category() -> None:
    pieces = [made_piece(20, 10, "3 0", target=1.0, category="a")] * 3
    pieces += [made_piece(30, 10, "3 0", target=1.0, category="b")] * 3
    base, pair = compared(pieces, [made_piece(10, 10, target=1.0, category=c) for c in "aaabbb"])
    assert pair.speed_up is not None and pair.speed_up.value == pytest.approx(2.5, rel=1e-4)
    results = [pair.by_category[c].speed_up for c in "ab"]
    assert [item.value for item in results if item] == pytest.approx([2.0, 3.0], rel=1e-4)
    assert (base.speed_up, base.withheld, base.tokens_per_second) == (Estimate(1.0), "", pytest.approx(10, rel=1e-4))
    # Pieces that mix categories give no speed-up by category.
    _, pair = compared([replace(p, category="") for p in pieces], [made_piece(10, 10, target=1.0)] * 6)
    assert [results.speed_up for results in pair.by_category.values()] == [None, None]


def test_speed_up_is_withheld_with_its_reason() -> None:
    base, pair = compared([made_piece(20, 10, "3 0", target=4.0, waited=3.0)] * 4, [made_piece(10, 10, target=1.0)] * 4)
    assert (pair.speed_up, pair.withheld, pair.undisturbed) == (None, TOO_FEW, 0.0)
    assert pair.speed_up_wall == pytest.approx(0.5) and pair.tokens_per_second == pair.tokens_per_second_wall == 5.0
    assert base.withheld == ""


def test_turns_are_sequences_and_prompts_are_pieces() -> None:
    records = [StepRecord(0, "q", "a", turn, 0, 1, 2, 1, 1, 9) for turn in range(2)]
    metrics = measure(records, [piece(4)])
    assert (metrics.sequences, metrics.block_efficiency.low) == (2, None)
    assert metrics.block_efficiency_expected is None


def test_steps_that_were_cut_are_left_out() -> None:
    records = [*steps([3, 3, 0], limit=3), *steps([1, 0], limit=2)]
    metrics = measure(records, [piece(12)], depth=3)
    assert metrics.block_efficiency == Estimate(9 / 3) and metrics.steps_cut == 2
    assert metrics.block_efficiency_all_steps == 12 / 5
    assert metrics.mean_tau == 2 and metrics.acceptance == [2 / 3] * 3
    nothing = measure(records, [piece(12)], depth=10)
    assert nothing.block_efficiency == Estimate(12 / 5) and nothing.all_cut and nothing.steps_cut == 5
    assert nothing.by_category["a"].block_efficiency == Estimate(12 / 5) and nothing.by_category["a"].all_cut
    assert not metrics.all_cut and not metrics.by_category["a"].all_cut


def test_few_equal_prompts_do_not_exclude_others() -> None:
    estimate = block_efficiency(steps([1, 1], [1], [1, 1, 1]), 4)
    assert estimate.value == 2.0 and 1.0 < estimate.low < 1.5 and 3.0 < estimate.high < 5.0
    assert block_efficiency(steps([0, 0], [0], [0]), 0) == Estimate(1.0), "plain decoding"
    assert block_efficiency(steps([4, 4], [4], [0, 0, 0]), 4).high == 5.0, "no step emits more than gamma + 1"


def test_interval_is_that_of_ratio() -> None:
    """The delta method agrees with the jackknife on many prompts."""
    lists = [[(7 * i + 3 * j) % 4 for j in range(1 + i % 5)] for i in range(300)]
    estimate = block_efficiency(steps(*lists), 3)
    emitted, counts = [sum(x) + len(x) for x in lists], [len(x) for x in lists]
    ratio = sum(emitted) / sum(counts)
    assert estimate.value == pytest.approx(ratio)
    residuals = [e - ratio * c for e, c in zip(emitted, counts, strict=True)]
    error = math.sqrt(sum(r * r for r in residuals)) / sum(counts)
    assert estimate.low == pytest.approx(ratio - 1.96 * error, abs=0.15 * error)
    assert estimate.high == pytest.approx(ratio + 1.96 * error, abs=0.15 * error)


def test_drafter_prefill_is_drafting_time() -> None:
    piece = Piece(4, {"prefill": 9.0, "draft_prefill": 1.0, "draft": 1.0, "target": 2.0})
    metrics = measure(steps([0]), [piece])
    assert metrics.shares == {"draft": 0.5, "target": 0.5} and metrics.tokens_per_second == 1.0


@pytest.mark.parametrize(
    "steps", [{"0": [[1] * 5]}, {"0 0": [[1] * 4]}, {"0 0": [[1, 1, 1, 1, -1]]}, {"0 0": [["1"] * 5]}, {"0 0": [1]}]
)
def test_steps_of_another_shape_are_refused(steps: Any) -> None:
    good = asdict(made_piece(2, 2, target=1.0))
    assert Piece.from_json(good) == made_piece(2, 2, target=1.0)
    with pytest.raises((TypeError, ValueError)):
        Piece.from_json(good | {"steps": steps})


def test_paired_difference() -> None:
    first, second = steps([2, 2], [0], [1]), steps([1, 1], [0], [1])
    assert paired_difference(first, second).value == pytest.approx(9 / 4 - 7 / 4)
    shifted = steps([3, 3], [1], [2])
    difference = paired_difference(shifted, steps([2, 2], [0], [1]))
    assert difference is not None and difference.value == pytest.approx(1.0) and difference.low is None
    assert paired_difference(first, []) is None


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is not an error
@given(st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=6), min_size=1, max_size=8))
def test_identities(taus: list[list[int]]) -> None:
    records = steps(*taus, width=6)
    metrics = measure(records, [piece(metrics_tokens(records))], gamma=6)
    estimate = metrics.block_efficiency
    assert estimate is not None
    assert estimate.value == pytest.approx(metrics.mean_tau + 1) == pytest.approx(1 + sum(metrics.acceptance))
    assert metrics.acceptance == sorted(metrics.acceptance, reverse=True) and len(metrics.acceptance) == 6
    assert metrics.target_rows_per_token == pytest.approx(7 / estimate.value)
    if estimate.low is not None and estimate.high is not None:
        assert estimate.low <= estimate.high


def metrics_tokens(records: list[StepRecord]) -> int:
    return sum(r.emitted for r in records)
