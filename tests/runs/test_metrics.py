"""Metrics against values computed by hand."""

import math
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crossdraft.framework.runs.metrics import (
    CategoryMetrics,
    Estimate,
    Metrics,
    RoundRecord,
    block_efficiency,
    compare,
    measure,
    paired_difference,
)
from crossdraft.framework.runs.pace import Piece, quiet_seconds, speed_up


def rounds(*taus: list[int], width: int = 3, limit: int = 9, survival: float | None = None) -> list[RoundRecord]:
    """One prompt a list, one round an entry; categories alternate."""
    return [
        RoundRecord(p, f"q{p}", "ab"[p % 2], 0, i, tau, tau + 1, width, width, limit, survival)
        for p, prompt in enumerate(taus)
        for i, tau in enumerate(prompt)
    ]


def piece(emitted: int, draft: float = 0.0, target: float = 1.0, prefill: float = 0.5) -> Piece:
    return Piece(emitted, {"prefill": prefill, "draft": draft, "target": target, "verify": 0.0, "rest": 0.0})


def test_by_hand() -> None:
    records = rounds([3, 0], [1, 2, 0], survival=1.5)
    metrics = measure(records, [piece(5, draft=1.0), piece(6, target=3.0)], passes=12, gamma=4)
    assert (metrics.tokens, metrics.rounds, metrics.sequences) == (11, 5, 2)
    assert metrics.block_efficiency == Estimate(11 / 5)  # two prompts are too few for an interval
    assert metrics.mean_tau == 6 / 5
    assert metrics.acceptance == [3 / 5, 2 / 5, 1 / 5, 0.0]
    assert metrics.block_efficiency_expected == 2.5
    assert metrics.target_rows_per_token == 5 * 4 / 11
    assert metrics.nodes_per_round == 3
    assert metrics.shares == {"draft": 1 / 5, "target": 4 / 5, "verify": 0, "rest": 0}
    assert (metrics.decode_seconds, metrics.prefill_seconds) == (5, 1)
    assert metrics.tokens_per_second == metrics.tokens_per_second_wall == 11 / 5
    assert (metrics.rounds_cut, metrics.block_efficiency_all_rounds, metrics.busy) == (0, 11 / 5, 1.0)
    assert metrics.tokens_per_second_with_prefill == 11 / 6
    assert metrics.by_category == {
        "a": CategoryMetrics(1, Estimate(5 / 2)),
        "b": CategoryMetrics(1, Estimate(6 / 3)),
    }
    assert metrics.drafter_passes == 12
    assert metrics.speed_up is None


def test_the_tail_counts_for_acceptance_and_not_for_rates() -> None:
    records = rounds([3, 0], [1, 2, 0])
    full = piece(5, draft=1.0, target=3.0)
    tailed = measure(records, [Piece(5, full.seconds, tail_emitted=6, tail_seconds=5.5)])
    assert tailed.tokens_per_second == 5 / 4
    assert tailed.shares == {"draft": 1 / 4, "target": 3 / 4, "verify": 0, "rest": 0}
    assert (tailed.decode_seconds, tailed.tail_seconds, tailed.prefill_seconds) == (4, 5.5, 0.5)
    assert tailed.tokens_per_second_with_prefill == 11 / 10
    assert (tailed.tokens, tailed.block_efficiency) == (11, Estimate(11 / 5))
    assert speed_up([Piece(5, full.seconds, 6, 5.5)], [piece(5, target=2.0)]) == Estimate(0.5)


def test_speed_up_by_category() -> None:
    metrics = measure(rounds([3, 0], [1], [1, 2, 0]), [piece(1)])
    a = [replace(piece(4, target=t), category="a") for t in (1.0, 2.0, 4.0)]
    b = replace(piece(6, target=2.0), category="b")
    base_a = [replace(piece(4, target=3.0), category="a")] * 3
    compare(metrics, [*a, b], [*base_a, replace(piece(6, target=1.0), category="b")])
    assert metrics.speed_up is not None and metrics.speed_up.value == pytest.approx(10 / 9)
    first, second = metrics.by_category["a"].speed_up, metrics.by_category["b"].speed_up
    assert first is not None and first.value == pytest.approx(9 / 7)
    assert first.low is not None and first.high is not None and 0.1 < first.low < 9 / 7 < first.high
    assert second == Estimate(0.5)  # one piece, no interval
    # Pieces that mix categories tell nothing of any one of them.
    compare(metrics, [piece(4)], [piece(4, target=2.0)])
    assert metrics.speed_up == Estimate(2.0)
    assert [found.speed_up for found in metrics.by_category.values()] == [None, None]


def test_turns_are_sequences_and_prompts_are_pieces() -> None:
    records = [RoundRecord(0, "q", "a", turn, 0, 1, 2, 1, 1, 9) for turn in range(2)]
    metrics = measure(records, [piece(4)])
    assert (metrics.sequences, metrics.block_efficiency.low) == (2, None)
    assert metrics.block_efficiency_expected is None


def test_rounds_that_were_cut_are_left_out() -> None:
    records = [*rounds([3, 3, 0], limit=3), *rounds([1, 0], limit=2)]
    metrics = measure(records, [piece(12)], depth=3)
    assert metrics.block_efficiency == Estimate(9 / 3) and metrics.rounds_cut == 2
    assert metrics.block_efficiency_all_rounds == 12 / 5
    assert metrics.mean_tau == 2 and metrics.acceptance == [2 / 3] * 3
    nothing = measure(records, [piece(12)], depth=10)
    assert nothing.block_efficiency is None and nothing.rounds_cut == 5
    assert nothing.by_category["a"].block_efficiency is None
    assert Metrics.from_json(nothing.to_json()) == nothing


def test_a_constant_has_no_interval() -> None:
    """Pieces that do not differ say nothing about how they might."""
    assert block_efficiency(rounds([1, 1], [1], [1, 1, 1])) == Estimate(2.0)


def test_the_interval_is_that_of_the_ratio() -> None:
    """The delta method agrees with the jackknife on many prompts."""
    lists = [[(7 * i + 3 * j) % 4 for j in range(1 + i % 5)] for i in range(300)]
    estimate = block_efficiency(rounds(*lists))
    emitted, counts = [sum(x) + len(x) for x in lists], [len(x) for x in lists]
    ratio = sum(emitted) / sum(counts)
    assert estimate.value == pytest.approx(ratio)
    residuals = [e - ratio * c for e, c in zip(emitted, counts, strict=True)]
    error = math.sqrt(sum(r * r for r in residuals)) / sum(counts)
    assert estimate.low == pytest.approx(ratio - 1.96 * error, abs=0.15 * error)
    assert estimate.high == pytest.approx(ratio + 1.96 * error, abs=0.15 * error)


def timed(emitted: int, *seconds: float, shape: str = "0 0") -> Piece:
    return Piece(emitted, {"target": sum(seconds), "prefill": 9.0}, rounds={shape: list(seconds)})


def test_what_disturbs_a_few_rounds_does_not_change_the_speed_up() -> None:
    quiet = [timed(10, *[1.0] * 10) for _ in range(4)]
    disturbed = [timed(10, *[1.0] * 8, 7.0, 7.0), *quiet[1:]]
    metrics = measure(rounds([0]), disturbed)
    assert metrics.tokens_per_second == pytest.approx(1.0) and metrics.tokens_per_second_wall == 40 / 52
    assert metrics.busy == pytest.approx(52 / 40)
    base = [timed(10, *[2.0] * 10) for _ in range(4)]
    compare(metrics, disturbed, base)
    assert metrics.speed_up is not None and metrics.speed_up.value == pytest.approx(2.0)
    assert metrics.speed_up_wall == pytest.approx(80 / 52)


def test_what_rounds_waited_for_a_processor_is_taken_off() -> None:
    """A neighbour that is there all the time, which no share of the rounds escapes."""
    lost = [0.5, 3.0, 1.0, 2.0, 0.25]
    busy = Piece(5, {"target": 5 + sum(lost)}, rounds={"0 0": [1 + w for w in lost]}, waited={"0 0": lost})
    fast = Piece(1, {"target": 0.9}, rounds={"1 0": [0.9]})
    assert quiet_seconds([busy, fast]) == {"0 0": 1.0, "1 0": 0.9}
    # What was waited by two threads at a time counts twice; no round is faster than the fastest undisturbed one.
    twice = Piece(5, {"target": 30.0}, rounds={"0 0": [6.0] * 5}, waited={"0 0": [10.0] * 5})
    assert quiet_seconds([twice, fast]) == {"0 0": 0.9, "1 0": 0.9}
    assert quiet_seconds([twice]) == {"0 0": 6.0}, "nothing was undisturbed: nothing is known"
    # Enough undisturbed rounds of a shape speak for it alone.
    quiet = Piece(4, {"target": 4.4}, rounds={"0 0": [1.1] * 4})
    assert quiet_seconds([busy, quiet]) == {"0 0": pytest.approx(1.1)}
    assert measure(rounds([0]), [busy, fast]).tokens_per_second == pytest.approx(6 / 5.9)


def test_rounds_of_each_shape_have_their_own_pace() -> None:
    piece = Piece(4, {"target": 12.0}, rounds={"0 0": [1.0, 1.0], "5 0": [5.0, 5.0]})
    assert measure(rounds([0]), [piece]).busy == 1.0


def test_drafter_prefill_is_drafting_time() -> None:
    piece = Piece(4, {"prefill": 9.0, "draft_prefill": 1.0, "draft": 1.0, "target": 2.0})
    metrics = measure(rounds([0]), [piece])
    assert metrics.shares == {"draft": 0.5, "target": 0.5} and metrics.tokens_per_second == 1.0


def test_speed_up_is_paired_by_piece() -> None:
    base = [piece(10, target=t) for t in (1.0, 2.0, 4.0)]  # the machine slows down
    twice = [piece(20, target=t) for t in (1.0, 2.0, 4.0)]
    assert speed_up(twice, base) == Estimate(2.0)
    assert speed_up(base, base) == Estimate(1.0)
    assert speed_up(twice[:2], base[:2]) == Estimate(2.0)
    assert speed_up([piece(20, target=2.0)], [piece(10, target=3.0)]).value == pytest.approx(3.0)


def test_paired_difference() -> None:
    first, second = rounds([2, 2], [0], [1]), rounds([1, 1], [0], [1])
    assert paired_difference(first, second).value == pytest.approx(9 / 4 - 7 / 4)
    shifted = rounds([3, 3], [1], [2])
    difference = paired_difference(shifted, rounds([2, 2], [0], [1]))
    assert difference is not None and difference.value == pytest.approx(1.0) and difference.low is None
    assert paired_difference(first, []) is None


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no error
@given(st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=6), min_size=1, max_size=8))
def test_identities(taus: list[list[int]]) -> None:
    records = rounds(*taus, width=6)
    metrics = measure(records, [piece(metrics_tokens(records))], gamma=6)
    estimate = metrics.block_efficiency
    assert estimate is not None
    assert estimate.value == pytest.approx(metrics.mean_tau + 1) == pytest.approx(1 + sum(metrics.acceptance))
    assert metrics.acceptance == sorted(metrics.acceptance, reverse=True) and len(metrics.acceptance) == 6
    assert metrics.target_rows_per_token == pytest.approx(7 / estimate.value)
    if estimate.low is not None and estimate.high is not None:
        assert estimate.low <= estimate.high
    assert Metrics.from_json(metrics.to_json()) == metrics


def metrics_tokens(records: list[RoundRecord]) -> int:
    return sum(r.emitted for r in records)
