"""Decisions and schedules from finished cells and cost curves."""

import math
from typing import Any, ClassVar

import pytest
from advise_runs import GOOD, POOR, cell, curves
from crossdraft_advisor import Acceptance, Engine, Schedule, Settings
from crossdraft_advisor.advise.candidates import Candidate, imported, of_run
from crossdraft_advisor.advise.decision import decide, schedule_for
from crossdraft_advisor.engines.engine import Range
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdraft.framework.cost.finished_cells import predictions
from crossdraft.framework.cost.prediction import CellStatistics, predict
from crossdraft.framework.errors import UsageError
from crossdraft.framework.runs.records import CellResult

TARGET, DRAFT, _ = curves()


class Fixed(Engine):
    name = "fixed"
    read_from = "nowhere"
    methods: ClassVar[dict[str, str]] = {"draft-model": "s", "prompt-lookup": "p"}

    def export(self, schedule: Schedule) -> Settings:
        return Settings("")


class Scheduled(Fixed):
    name = "scheduled"

    def scheduled(self, acceptance: Acceptance) -> bool:
        return True


class Single(Fixed):
    name = "single"
    most_sequences = 1


def chain(rates: tuple[float, ...], **about: Any) -> Candidate:
    known = {"drafter": "draft-model", "model": "d", "verifier": "token", "temperature": 1.0, "refusal": ""}
    (result,) = imported([Acceptance(rates, "here", **(known | about))], TARGET, DRAFT, 200)
    return result


# -- candidates ------------------------------------------------------------------------------------------------


def test_acceptance_of_cell() -> None:
    (result,), notes = of_run([cell(None), cell(GOOD)], "run", curves())
    acceptance = result.acceptance
    assert notes == [] and acceptance.rows == ((4, 4, 3, 3), (4, 4, 4, 3), (4, 3, 3, 3))
    assert acceptance.marginal == (11 / 12, 10 / 12, 9 / 12) and not acceptance.refusal and acceptance.chain
    assert (acceptance.drafter, acceptance.model, acceptance.verifier, acceptance.temperature) == (
        *("draft-model", "d", "token"),
        1.0,
    )
    assert acceptance.point_mass is False and dict(acceptance.options) == {"gamma": 3}
    (greedy,), _ = of_run([cell(None, temperature=0.0), cell(GOOD, temperature=0.0)], "run", curves())
    assert greedy.acceptance.point_mass is True


def test_cell_is_predicted_as_report_predicts_it() -> None:
    results = [result for b in (1, 4) for result in (cell(None, b), cell(GOOD, b), cell(POOR, b, verifier="block"))]
    predicted = predictions(results, curves())
    actual, _ = of_run(results, "run", curves())
    for candidate, same in zip(actual, (results[1::3], results[2::3]), strict=True):
        for result in same:
            theirs = predicted[result.config.hash]
            ours = candidate.predict(result.config.batch_size, 3)
            assert ours.seconds == pytest.approx(theirs.seconds) and ours.target == pytest.approx(theirs.target)


def test_shorter_drafts_cost_and_emit_less() -> None:
    (result,), _ = of_run([cell(None), cell(GOOD)], "run", curves())
    assert result.gammas == (1, 2, 3)
    one = result.predict(8, 1)
    assert one.draft == pytest.approx(DRAFT.seconds(8, 1, 100), rel=0.2)
    tokens = 1 + result.acceptance.cut(1).marginal[0]
    assert one.tokens_per_second == pytest.approx(8 * tokens / one.seconds)
    interval = result.speed_up(8, 1)
    assert interval.low is not None and interval.high is not None
    assert interval.low < interval.value < interval.high
    with pytest.raises(UsageError):
        result.speed_up(8, 4)


def test_omitted_cells_are_noted() -> None:
    short = cell(GOOD)
    short.metrics.block_efficiency = None  # type: ignore[union-attr]
    failed = CellResult(cell(GOOD, verifier="block").config, error="it broke")
    results = [cell(None), short, cell(GOOD, verifier="lenient"), failed]
    result, notes = of_run(results, "run", curves())
    assert result == [] and sorted(note.split(": ")[1] for note in notes) == [
        "draft-model drafted no tokens and is omitted",
        "draft-model × block failed and is omitted",
        "lenient is omitted",
    ]
    result, notes = of_run([cell(GOOD)], "run", [])
    assert result == [] and "run crossdraft cost --target m" in notes[0]


def test_trees_and_non_causal_verifiers_are_not_cut() -> None:
    sequences = cell(GOOD, drafter="prompt-lookup")
    assert of_run([cell(None), sequences], "run", curves())[0][0].gammas == (1, 2, 3)
    (result,), _ = of_run([cell(None), cell(GOOD, verifier="greedy-block")], "run", curves())
    assert result.gammas == (3,)
    assert chain((0.5, 0.4), refusal="it depends").gammas == (2,)


def test_titles_of_several_sequences() -> None:
    results = [cell(None), cell(GOOD, drafter="draft-model-iid", verifier="specinfer", K=2)]
    (result,), _ = of_run(results, "run", curves())
    assert result.title == "draft-model-iid (K 2)" and result.gammas == (3,) and not result.acceptance.chain
    step = decide([result], 1)
    assert step.best.gamma == 3 and step.runner_up is None


def test_times_of_run_are_ignored_on_another_machine() -> None:
    names: list[str] = []

    def drafter(name: str) -> Any:
        names.append(name)
        return DRAFT

    results = [cell(None), cell(GOOD), cell(POOR, drafter="prompt-lookup")]
    result, _ = of_run(results, "run", [], (TARGET, drafter))
    assert names == ["d"]
    moved = result[0].predict(1, 3)
    assert moved.other == 0 and moved.draft == pytest.approx(3 * DRAFT.seconds(1, 1, 100), rel=0.01)
    assert result[1].predict(1, 3).draft == 0


# -- decisions -------------------------------------------------------------------------------------------------


def test_best_and_runner_up() -> None:
    result, _ = of_run([cell(None), cell(GOOD), cell(POOR, model="e")], "run", curves())
    step = decide(result, 1)
    assert step.draft and step.best.candidate.acceptance.model == "d" and step.best.gamma == 3
    assert step.runner_up is not None and step.runner_up.candidate.acceptance.model == "e"
    assert step.best.speed_up.value > step.runner_up.speed_up.value
    separate = decide(result[:1], 1)
    assert separate.runner_up is not None and separate.runner_up.gamma == 2  # of the same pair, because no other exists
    with pytest.raises(UsageError, match="no candidates"):
        decide([], 1)


def test_drafting_is_switched_off_if_it_does_not_pay() -> None:
    """At B = 64 every drafted token costs as much as a decoded one."""
    candidates = [chain((0.6, 0.3), rows=((100, 60, 30), (100, 61, 30), (100, 59, 30)))]
    assert decide(candidates, 1).draft and decide(candidates, 1).sure
    off = decide(candidates, 64)
    assert not off.draft and off.sure and off.best.speed_up.value < 1
    exact = decide([chain((0.6, 0.3))], 1).best.speed_up  # no counts: the interval of the cost only
    assert exact.low is not None and math.log(exact.value / exact.low) == pytest.approx(0.15)


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=5),
    st.sampled_from([1, 3, 8, 20, 64]),
    st.sampled_from([None, 100, 300]),
)
@settings(max_examples=30, deadline=None)
def test_best_length_by_hand(conditional: list[float], b: int, context: float | None) -> None:
    acceptance = Acceptance.from_conditional(conditional, "here", refusal="")
    (result,) = imported([acceptance], TARGET, DRAFT, 200)
    plain = TARGET.seconds(b, 1, context or 200)
    by_hand = []
    for gamma in range(1, acceptance.gamma + 1):
        seconds = TARGET.seconds(b, gamma + 1, context or 200) + gamma * DRAFT.seconds(b, 1, context or 200)
        by_hand.append((1 + sum(acceptance.cut(gamma).marginal)) * plain / seconds)
    assert decide([result], b, context).best.speed_up.value == pytest.approx(max(by_hand))


def test_measured_lengths_are_preferred() -> None:
    """A measurement at gamma 2 is preferred to the prediction from gamma 3."""
    two = chain((0.9, 0.9))
    choices = {2: two, 3: chain((0.5, 0.1, 0.1))}
    step = decide(list(choices.values()), 1)
    assert step.best.candidate is two
    assert step.runner_up is not None and (step.runner_up.candidate is two or step.runner_up.gamma != 2)


# -- one server ------------------------------------------------------------------------------------------------


def by_hand(candidate: Candidate, b: int) -> int:
    return max((0, *candidate.gammas), key=lambda g: candidate.speed_up(b, g).value if g else 1.0)


@given(st.lists(st.floats(0.2, 1), min_size=1, max_size=4))
@settings(max_examples=20, deadline=None)
def test_schedule_is_best_length_at_every_batch_size(conditional: list[float]) -> None:
    result = chain(Acceptance.from_conditional(conditional, "x").marginal)
    schedule = schedule_for([result], Scheduled(), [1, 16, 64]).schedule
    assert schedule.ranges[0].low == 1 and schedule.ranges[-1].high == 64
    starts = [r.low for r in schedule.ranges[1:]]
    assert starts == [r.high + 1 for r in schedule.ranges[:-1]]
    for r in schedule.ranges:
        assert {by_hand(result, b) for b in (r.low, r.high)} == {r.gamma}
    assert all(a.gamma != b.gamma for a, b in zip(schedule.ranges, schedule.ranges[1:], strict=False))


def test_one_length_for_all_batch_sizes() -> None:
    result = chain((0.8, 0.7, 0.6, 0.5))
    schedule = schedule_for([result], Fixed(), [1, 64]).schedule
    (only,) = schedule.ranges
    scores = {g: result.speed_up(1, g).value * result.speed_up(64, g).value if g else 1.0 for g in (0, 1, 2, 3, 4)}
    assert only == Range(1, 64, max(scores, key=lambda g: scores[g]))
    assert schedule_for([chain((0.1,))], Fixed(), [64]).schedule.gamma == 0
    assert schedule_for([result], Single(), [1, 64]).schedule.ranges == (Range(1, 1, 4),)
    with pytest.raises(UsageError, match="use --batch-size 1"):
        schedule_for([result], Single(), [2])


def test_unsupported_candidates() -> None:
    able, unable = chain((0.5, 0.4)), chain((0.9, 0.8), drafter="medusa")
    schedule = schedule_for([able, unable], Scheduled(), [1])
    assert schedule.candidate is able and list(schedule.unsupported) == [unable.pair]
    with pytest.raises(UsageError, match="fixed supports none of the candidates: it has no drafter medusa"):
        schedule_for([unable], Fixed(), [1])


def test_predictions_take_cell_of_nearest_batch_size() -> None:
    cells = {b: CellStatistics(b, b, 2.0, {1: 1.0}, 200, 1, other_seconds=b / 1000, acceptance=(1.0,)) for b in (1, 16)}
    result = Candidate(Acceptance((1.0,), "x"), TARGET, None, cells, {})
    assert result.predict(3, 1).other == pytest.approx(3 / 1000)  # of one row, times three
    cells[16] = CellStatistics(16, 16, 2.0, {1: 1.0}, 200, 1, other_seconds=1.0, acceptance=(1.0,))
    result = Candidate(Acceptance((1.0,), "x"), TARGET, None, cells, {})
    assert result.predict(5, 1).other == pytest.approx(1.0 * 5 / 16)
    assert result.predict(16, 1) == predict(cells[16], TARGET, None)
