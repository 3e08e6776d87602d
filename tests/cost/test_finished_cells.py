"""Statistics and predictions of finished cells, on synthetic numbers."""

import tarfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from cost_curves import HERE, curve, piece, rows, seconds

from crossdraft.drafters.retrieval.prompt_lookup import PromptLookup
from crossdraft.framework.cost.curve import CostCurve
from crossdraft.framework.cost.finished_cells import (
    BatchStep,
    batch_steps,
    curves_of,
    last_paying,
    predicted,
    predictions,
    statistics,
)
from crossdraft.framework.cost.load_run import read_run
from crossdraft.framework.cost.prediction import CellStatistics, predict
from crossdraft.framework.errors import UsageError
from crossdraft.framework.metrics.cell_metrics import Estimate, Metrics, StepRecord, measure
from crossdraft.framework.metrics.pieces import Piece
from crossdraft.framework.recipe.recipe import CellConfig, Strategy
from crossdraft.framework.runs.records import CellResult
from crossdraft.verifiers.greedy import Greedy


def test_steps_of_batch_by_hand() -> None:
    # Two slots. Piece one: prompts 0 and 1, prompt 2 takes the slot of 1; then the second turn of prompt 0.
    records = [*rows(0, 0, [2, 2]), *rows(1, 0, [3]), *rows(2, 0, [1, 1, 1]), *rows(0, 1, [2]), *rows(3, 0, [5])]
    steps = batch_steps(records, [10, 20, 5, 30, 7], [piece(12), piece(5)], 2)
    assert steps == [
        BatchStep(2, 2, 20, 5),
        BatchStep(2, 2, 12, 3),
        BatchStep(1, 2, 6, 1),
        BatchStep(1, 2, 7, 1),
        BatchStep(1, 2, 30, 2),
        BatchStep(1, 2, 7, 5),
    ]
    tail = Piece(8, piece(8).seconds, tail_emitted=4, tail_seconds=3.0)  # both parts are of the same piece
    assert batch_steps(records, [10, 20, 5, 30, 7], [tail, piece(5)], 2) == steps


def test_replayed_schedule_is_loops(tiny_model: Any, decoder: Any) -> None:
    model = tiny_model("llama")
    loop = decoder(model, PromptLookup, {"gamma": 3}, Greedy, batch_size=3, max_new_tokens=20, eos=(5, 11))
    prompts = [[3, 4, 3, 4, 3, 4, 7 + i][: 3 + i % 4] for i in range(8)]
    responses = sorted(loop.run(prompts), key=lambda response: response.index)
    records = [
        StepRecord(r.index, str(r.index), "a", 0, i, x.tau, x.emitted, x.nodes, x.width, x.limit)
        for r in responses
        for i, x in enumerate(r.steps)
    ]
    emitted = sum(len(r.tokens) for r in responses)
    steps = batch_steps(records, [len(p) for p in prompts], [piece(emitted)], 3)
    assert len(steps) == loop.batch_steps
    assert sum(r.occupied * (r.nodes + 1) for r in steps) == loop.target_rows
    assert sum(r.occupied for r in steps) == len(records)
    assert sum(r.emitted for r in steps) == emitted
    assert len({r.occupied for r in steps}) > 1  # the batch ran empty towards the end


def result(baseline: bool = False, error: bool = False, b: int = 2, passes: int = 8, sha: str = "abc") -> CellResult:
    drafter = Strategy(
        name="none" if baseline else "draft-model", config={} if baseline else {"model": "d", "gamma": 2}
    )
    config = CellConfig(target="m", batch_size=b, drafter=drafter, verifier=Strategy(name="token"))
    if error:
        return CellResult(config, error="no")
    width = 0 if baseline else 2
    emitted = [1, 1, 1, 1] if baseline else [2, 2]
    records = [*rows(0, 0, emitted, width), *rows(1, 0, emitted, width)]
    pieces = [piece(sum(r.emitted for r in records))]
    metrics: Metrics = measure(records, pieces, 0 if baseline else passes)
    models = {"m": {"sha256": sha, "source": ""}, **({} if baseline else {"d": {"sha256": "def", "source": ""}})}
    provenance = {"models": models, "dtype": "float32", "device": "cpu (toy)", "torch": "2.0", "threads": 2}
    responses = [{"question_id": f"q{i}", "turn": 0, "prompt_tokens": n} for i, n in enumerate((100, 60))]
    return CellResult(
        config, metrics=metrics, records=records, pieces=pieces, responses=responses, provenance=provenance
    )


def test_statistics_of_cell() -> None:
    actual = statistics(result())
    assert actual == CellStatistics(
        batch_size=2,
        occupied=2.0,
        tokens_per_step=2.0,
        widths={2: 1.0},
        context=101.0,  # the longest row: 100, then 102
        passes=4.0,
        draft_seconds=0.5,
        other_seconds=1.5,
        acceptance=(1.0,),
    )
    assert statistics(result(error=True)) is None


def test_statistics_of_engine_skip_responses_without_steps() -> None:
    """The prefill of an engine emits the first token, which may end the response."""
    cell = result()
    cell.responses.insert(1, {"question_id": "q7", "turn": 0, "prompt_tokens": 900})
    assert statistics(cell) == statistics(result())


def test_statistics_count_steps_that_rate_counts() -> None:
    cell = result()
    cell.records = [*rows(0, 0, [2, 2]), *rows(1, 0, [1, 3, 3, 2])]  # two steps of both rows, a tail of two of one
    cell.pieces = [Piece(8, piece(8).seconds, tail_emitted=5, tail_seconds=7.0)]
    cell.metrics = measure(cell.records, cell.pieces, passes=16)
    assert cell.metrics.tokens_per_second == 8 / 8
    actual = statistics(cell)
    assert actual is not None
    assert (actual.occupied, actual.tokens_per_step, actual.context) == (2.0, 8 / 4, 101.0)
    assert (actual.passes, actual.draft_width) == (4.0, 1.0)
    assert (actual.draft_seconds, actual.other_seconds) == (0.5, 1.5)


def test_pass_of_several_tokens_row() -> None:
    cell = result(passes=2)  # 2 nodes a step from one pass
    actual = statistics(cell)
    assert actual is not None and (actual.passes, actual.draft_width) == (1.0, 2.0)
    assert predict(actual, curve(), curve()).draft == pytest.approx(seconds(2, 2, 101))


def test_cells_of_an_engine_have_no_curve_of_crossdraft() -> None:
    cell, measured = result(), [curve(), curve(sha256="def")]
    assert curves_of(cell, measured) == tuple(measured)
    config = cell.config.model_copy(update={"engine": Strategy(name="vllm")})
    assert curves_of(replace(cell, config=config), measured) == (None, None)


def priced(b: int, speed_up: float | Estimate, baseline: bool = False) -> CellResult:
    cell = result(baseline, b=b)
    assert cell.metrics is not None
    cell.metrics.speed_up = speed_up if isinstance(speed_up, Estimate) else Estimate(speed_up, speed_up, speed_up)
    return cell


@pytest.mark.parametrize(
    ("speed_ups", "curves", "expected"),
    [
        ({1: 1.5, 2: 1.0}, [], 2),
        ({1: 0.9, 2: 0.8}, [], 0),
        ({1: Estimate(1.5)}, [], 0),  # no interval
        ({1: Estimate(1.04, 0.97, 1.12)}, [], 0),  # no difference was shown
        ({1: Estimate(1.2, 1.1, 1.3), 2: Estimate(1.04, 0.97, 1.12)}, [], 1),
        ({2: 1.5, 8: 0.8}, [], 2),
        ({2: 1.5, 8: 0.8}, [curve(cost=lambda b, w, c: 22.0 + 4 * b * w)], 5),
        ({2: 1.5, 8: 0.8}, [curve(cost=lambda b, w, c: 100.0)], 7),
        ({2: 1.5, 8: 0.8}, [curve(cost=lambda b, w, c: w * 100.0)], 2),
        ({2: 1.5, 8: 0.8}, [curve(batch_sizes=(1,), cost=lambda b, w, c: 100.0)], 2),  # unknown
    ],
)
def test_last_batch_size_that_pays(speed_ups: dict[int, Any], curves: list[CostCurve], expected: int) -> None:
    results = {b: priced(b, speed_up) for b, speed_up in speed_ups.items()}
    baselines = {b: priced(b, 1.0, baseline=True) for b in speed_ups}
    assert last_paying(results, baselines, curves) == expected


def test_prediction_next_to_measurement() -> None:
    curves = [curve(), curve(sha256="def", cost=lambda b, w, c: 1.0), curve(sha256="xyz")]
    base = result(baseline=True)
    actual = predicted(result(), curves, base)
    assert actual is not None and base.metrics is not None
    assert (actual.target, actual.draft, actual.other) == (pytest.approx(seconds(2, 3, 101)), 4.0, 1.5)
    assert actual.tokens_per_second == pytest.approx(4 / (seconds(2, 3, 101) + 5.5))
    assert actual.speed_up == pytest.approx(actual.tokens_per_second / base.metrics.tokens_per_second)
    plain = predicted(base, curves, base)
    assert plain is not None and plain.speed_up == 1


def test_predictions_have_no_sign(tmp_path: Path) -> None:
    """Predicted over measured speed-ups of the recorded run with 15 pairs at three batch sizes."""
    with tarfile.open(Path(__file__).parents[1] / "fixtures" / "multi-draft.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = (tmp_path / "runs").iterdir()
    run = read_run(folder)
    by_hash = predictions(run.summary.results, run.summary.curves)
    errors = [
        by_hash[r.config.hash].speed_up / r.metrics.speed_up.value - 1
        for r in run.summary.results
        if r.metrics is not None and r.metrics.speed_up is not None and not r.config.is_baseline
    ]
    assert len(errors) == 15 and median(abs(error) for error in errors) < 0.05
    assert min(errors) < 0 < max(errors) < 0.1 and abs(median(errors)) < 0.03


def test_prediction_needs_target_curve() -> None:
    assert predicted(result(), []) is None
    assert predicted(result(sha="other"), [curve()]) is None
    assert predicted(result(), [curve(dtype="bfloat16")]) is None
    assert predicted(result(), [curve(device=HERE | {"threads": 1})]) is None
    unknown = result()
    del unknown.provenance["threads"]
    assert predicted(unknown, [curve()]) is None
    assert predicted(result(error=True), [curve()]) is None


def test_drafter_without_curve_keeps_its_measured_time() -> None:
    actual = predicted(result(), [curve()])
    assert actual is not None and actual.draft == 0.5
    actual = predicted(result(passes=0), [curve(), curve(sha256="def")])
    assert actual is not None and actual.draft == 0.5


def test_small_curve_has_no_prediction(caplog: Any) -> None:
    small = curve(batch_sizes=(1,))
    with pytest.raises(UsageError, match="a single batch size, 1"):
        predicted(result(), [small])
    assert predictions([result(b=1), result(b=2)], [small]).keys() == {result(b=1).config.hash}
    assert "a single batch size, 1, and does not extend to 2" in caplog.text
