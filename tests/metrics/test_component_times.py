"""Component times: by hand, on a simulated disturbed machine, and coverage of speed-up intervals."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from piece_results import made_piece
from simulated_groups import PAIRS, Machine, group, truth

from crossdraft.framework.metrics.component_times import (
    FAULT,
    TOO_FEW,
    CellPieces,
    ComponentTimes,
    Withheld,
    lowest_cluster,
    speed_up_ratio,
)
from crossdraft.framework.metrics.intervals import Estimate
from crossdraft.framework.metrics.pieces import Piece


def cells(*pieces_by_cell: Sequence[Piece]) -> list[CellPieces]:
    """A group of plain decoding and pairs of distinct drafters and verifiers."""
    names = [("none", "token"), ("a", "token"), ("b", "block"), ("c", "block")]
    return [CellPieces(*name, pieces) for name, pieces in zip(names, pieces_by_cell, strict=False)]


def plain(pieces: int = 4, **options: Any) -> list[Piece]:
    return [made_piece(10, 10, target=1.0, **options) for _ in range(pieces)]


def test_by_hand() -> None:
    """Ten steps of 0.1 s per piece; the pair emits twice as many tokens per step of 0.125 s."""
    pair = [made_piece(20, 10, "3 0", draft=0.1, target=1.1, verify=0.05) for _ in range(4)]
    times = ComponentTimes(cells(plain(), pair))
    assert times.seconds(0) == pytest.approx(4.0, rel=1e-4) and times.seconds(1) == pytest.approx(5.0, rel=1e-4)
    result = times.speed_up(1, 0)
    assert isinstance(result, Estimate) and result.value == pytest.approx(1.6, rel=1e-4) and result.low is None
    assert times.undisturbed(0) == times.undisturbed(1) == 1.0


def test_pairs_with_equal_counts_differ_by_their_own_components_only() -> None:
    """Two verifiers with one drafter; a piece of the second was eleven times slower by the clock."""
    drafted = {"draft": 0.1, "target": 1.1}
    first = [made_piece(20, 10, "3 0", verify=0.05, **drafted) for _ in range(4)]
    quiet = made_piece(20, 10, "3 0", verify=0.15, **drafted)
    slow = made_piece(20, 10, "3 0", verify=1.5, draft=1.0, target=12.1)
    group = cells(plain(), first, [quiet, slow, quiet, quiet])
    group[2] = CellPieces("a", "block", group[2].pieces)
    times = ComponentTimes(group)
    assert times.seconds(2) == pytest.approx(4 * 1.35, rel=1e-4) and times.undisturbed(2) == 0.75
    a, b = (times.speed_up(i, 0) for i in (1, 2))
    assert isinstance(a, Estimate) and isinstance(b, Estimate)
    assert (a.value, b.value) == (pytest.approx(2 / 1.25, rel=1e-4), pytest.approx(2 / 1.35, rel=1e-4))


def test_waiting_time_is_excluded() -> None:
    """All steps of a piece were slower by a fifth, which is within the same cluster."""
    waiting = made_piece(20, 10, "3 0", target=1.2, waited=0.2)
    pair = [waiting, *(made_piece(20, 10, "3 0", target=1.0) for _ in range(3))]
    times = ComponentTimes(cells(plain(), pair))
    assert times.seconds(1) == pytest.approx(4.0, rel=1e-4) and times.undisturbed(1) == 0.75
    all_items = [made_piece(20, 10, "3 0", target=2.0, waited=1.0) for _ in range(4)]
    result = ComponentTimes(cells(plain(), all_items))
    assert result.speed_up(1, 0) == Withheld(TOO_FEW) and result.seconds(1) is None and result.undisturbed(1) == 0.0


def test_pair_faster_than_its_block_efficiency_is_fault() -> None:
    fast = [made_piece(20, 10, "3 0", target=0.9) for _ in range(4)]
    assert ComponentTimes(cells(plain(), fast)).speed_up(1, 0) == Withheld(FAULT)
    nearly = [made_piece(20, 10, "3 0", target=0.99) for _ in range(4)]
    assert ComponentTimes(cells(plain(), nearly)).speed_up(1, 0) == Estimate(2.0), "noise: not above the two tokens"


def test_shape_that_was_always_disturbed_contradicts_others() -> None:
    """Plain decoding was disturbed in four of five pieces, passes over four tokens in all of them."""
    base = [made_piece(10, 10, target=1.0 if i == 0 else 2.0) for i in range(5)]
    pair = [made_piece(20, 10, "3 0", target=2.2) for _ in range(5)]
    also = [made_piece(20, 10, "5 0", target=1.1 if i == 0 else 2.2) for i in range(5)]
    times = ComponentTimes(cells(base * 3, pair * 3, also * 3))
    assert times.speed_up(1, 0) == Withheld(TOO_FEW)
    result = times.speed_up(2, 0)
    assert isinstance(result, Estimate) and result.value == pytest.approx(2 / 1.1, rel=1e-3)


def test_rare_shapes_borrow_from_their_neighbours() -> None:
    """A draft of two nodes that occurs once, between drafts of one and three."""
    some = [made_piece(20, 10, "1 0", target=1.0), *(made_piece(20, 10, "3 0", target=1.2) for _ in range(3))]
    some += [made_piece(20, 10, "1 0", target=1.0) for _ in range(2)] + [made_piece(2, 1, "2 0", target=0.6)]
    times = ComponentTimes(cells(plain(7), some))
    assert times.seconds(1) == pytest.approx(6.6 + 0.11, rel=1e-3), "its own pass was disturbed"
    much = [*some[:6], made_piece(20, 40, "2 0", target=24.0)]
    assert ComponentTimes(cells(plain(7), much)).speed_up(1, 0) == Withheld(TOO_FEW)


def test_target_that_resumes_from_drafters_layers_is_another_component() -> None:
    half = [made_piece(20, 10, "3 0 resumed", draft=0.6, target=0.5) for _ in range(4)]
    times = ComponentTimes(cells(plain(), half, [made_piece(20, 10, "3 0", target=1.1) for _ in range(4)]))
    assert times.seconds(1) == pytest.approx(4.4, rel=1e-3) and times.seconds(2) == pytest.approx(4.4, rel=1e-3)


def test_drafters_prefill_counts() -> None:
    def started(seconds: float) -> Piece:
        piece = made_piece(20, 10, "3 0", target=1.0)
        rows = [list(row) for row in piece.steps["3 0"]]
        return Piece(20, piece.seconds, steps={"3 0": [[*rows[0], 100, round(1e6 * seconds)], *rows[1:]]})

    times = ComponentTimes(cells(plain(12), [started(0.05 if i % 2 else 0.5) for i in range(12)]))
    assert times.seconds(1) == pytest.approx(12.6, rel=1e-3), "0.05 s a prompt, ten times that where it was disturbed"


def test_prefill_of_few_tokens_takes_longer_per_token() -> None:
    """A pass of 25 ms, and 0.24 ms for each token."""
    tokens = [12, 40, 90, 200, 500, 850]
    rows = [[[20_000, 110_000, 0, 0, 0]] * 9 + [[20_000, 110_000, 0, 0, 0, n, 25_000 + 240 * n]] for n in tokens]
    times = ComponentTimes(cells(plain(6), [Piece(20, {"target": 1.0}, steps={"3 0": row}) for row in rows]))
    result, seconds = times.speed_up(1, 0), 60 * 0.13 + 6 * 0.025 + 0.00024 * sum(tokens)
    assert isinstance(result, Estimate) and result.value == pytest.approx(120 / seconds / 10, rel=0.01)


def test_categories_have_speed_ups_of_their_own() -> None:
    pair = [made_piece(20 if i < 3 else 30, 10, "3 0", target=1.0) for i in range(6)]
    times = ComponentTimes(cells(plain(6), pair))
    results = [times.speed_up(1, 0, pieces) for pieces in ([0, 1, 2], [3, 4, 5], range(6))]
    assert [item.value for item in results if isinstance(item, Estimate)] == pytest.approx([2.0, 3.0, 2.5], rel=1e-3)


def test_ratio_of_two_runs() -> None:
    pair, slower = ([made_piece(20, 10, "3 0", target=t) for _ in range(4)] for t in (1.1, 2.2))
    a, b = ComponentTimes(cells(plain(), pair)), ComponentTimes(cells(plain(), slower))
    result = speed_up_ratio((b, 1, 0), (a, 1, 0))
    assert isinstance(result, Estimate) and result.value == pytest.approx(0.5, rel=1e-3)
    nothing = ComponentTimes(cells(plain(), [made_piece(20, 10, "3 0") for _ in range(4)][:0]))
    assert speed_up_ratio((a, 1, 0), (nothing, 1, 0)) == Withheld(TOO_FEW)


def test_few_pieces_with_varying_passes_have_a_speed_up() -> None:
    """A batch of 16 finds its 48 prompts in three pieces, of two lengths."""
    random = np.random.default_rng(0)

    def pieces(nodes: int, seconds: float) -> list[Piece]:
        times = seconds * np.exp(0.13 * random.standard_normal((3, 40)))
        steps = [[[0, round(1e6 * s), 0, 0, 0] for s in row] for row in times]
        return [
            Piece(40 + 20 * nodes, {"target": 1.0}, steps={f"{nodes} {i // 2}": row}) for i, row in enumerate(steps)
        ]

    times = ComponentTimes(cells(pieces(0, 0.1), pieces(3, 0.15)))
    result = times.speed_up(1, 0)
    assert isinstance(result, Estimate) and result.value == pytest.approx(2.5 / 1.5, rel=0.04)
    assert min(times.undisturbed(0), times.undisturbed(1)) > 0.85


def test_lowest_cluster() -> None:
    random = np.random.default_rng(0)
    quiet, slow = 1.0 + 0.03 * random.standard_normal(20), 2.0 + 0.2 * random.standard_normal(80)
    result = lowest_cluster(np.concatenate([quiet, slow]))
    assert result is not None and result[0] == pytest.approx(1.0, abs=0.02) and result[1].sum() == 20
    assert lowest_cluster(quiet[:4]) is None, "too few"
    assert lowest_cluster(np.concatenate([quiet[:3], slow])) is None, "three are below it: is it the lowest one?"
    varying = np.exp(0.13 * random.standard_normal(400))
    result = lowest_cluster(varying)
    assert result is not None and result[0] == pytest.approx(1.0, abs=0.03) and (varying < 0.8).sum() > 0.02 * 400
    assert lowest_cluster(np.concatenate([varying, [0.4] * 15])) is None, "fifteen are far below it"
    assert lowest_cluster(np.zeros(0)) is None


# -- coverage -------------------------------------------------------------------------------------------------

QUIET = {"factor": 1.0}
#: A virtual machine, whose passes vary with the memory traffic of others.
VARYING = {"jitter": 0.14}
DISTURBED = [
    {"factor": factor, "busy": busy, "burst": burst, "counted": counted}
    for factor in (2.0, 5.0, 16.0)
    for busy in (0.3, 0.8)
    for burst in (0.0, 3.0, 10.0)
    for counted in (0.0, 0.9)
]


def speed_ups(times: int, pairs: int, prompts: int, machine: dict[str, float]) -> tuple[list[bool], list[float], Any]:
    """Simulate groups: coverage of the true speed-up by each interval, log errors, and reasons of withheld ones."""
    random = np.random.default_rng([pairs, prompts, *(round(10 * x) for x in machine.values())])
    length, off, withheld = [], [], Counter[str]()
    for _ in range(times):
        times_of = ComponentTimes(group(Machine(random, **machine), pairs, prompts))
        for i, pair in enumerate(PAIRS[:pairs], 1):
            result = times_of.speed_up(i, 0)
            if isinstance(result, Withheld):
                withheld[result.reason] += 1
                continue
            assert result.low is not None and result.high is not None
            length.append(result.low <= truth(*pair) <= result.high)
            off.append(float(np.log(result.value / truth(*pair))))
    return length, off, withheld


@pytest.mark.thorough
@pytest.mark.parametrize("machine", [QUIET, VARYING, *DISTURBED[1::5]], ids=str)
def test_disturbances_do_not_decide_speed_ups(machine: dict[str, float]) -> None:
    length, off, withheld = speed_ups(6, 3, 24, machine)
    assert len(length) + withheld.total() == 18
    assert np.mean(length) > 0.75 and abs(np.mean(off)) < 0.05 if len(length) > 9 else withheld[TOO_FEW]


@pytest.mark.slow
@pytest.mark.parametrize("pairs, prompts", [(3, 12), (5, 24), (8, 48)])
@pytest.mark.parametrize("busy", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("factor", [2.0, 5.0, 16.0])
def test_speed_ups_cover(factor: float, busy: float, pairs: int, prompts: int) -> None:
    """With disturbances of single steps and of seconds, with and without kernel counters."""
    machines = [m for m in DISTURBED if (m["factor"], m["busy"]) == (factor, busy)] or [
        QUIET | {"counted": factor},
        VARYING,
    ]
    length, withheld = [], Counter[str]()
    for machine in machines:
        some, off, why = speed_ups(1200 // pairs // len(machines), pairs, prompts, machine)
        length += some
        withheld += why
        print(f"{machine}: {100 * np.mean(some):.1f} % of {len(some)}, off by {100 * np.mean(off):+.1f} %, {dict(why)}")
    share = withheld.total() / (len(length) + withheld.total())
    print(f"x{factor:g} on {busy:.0%}, {pairs} pairs, {prompts} prompts: {np.mean(length):.1%}, {share:.1%} withheld")
    assert 0.925 < np.mean(length) < 0.985
