"""Cost curves and predictions: synthetic numbers with results computed by hand; tiny models for what measures."""

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from crossdraft.drafters.prompt_lookup import PromptLookup
from crossdraft.framework import cli
from crossdraft.framework.bench import cost
from crossdraft.framework.bench.cost import (
    BatchRound,
    CellStatistics,
    CostCurve,
    Point,
    batch_rounds,
    find_curve,
    last_paying,
    measure_passes,
    predict,
    predicted,
    predictions,
    save_curve,
    statistics,
    stops_paying,
    stored_curves,
)
from crossdraft.framework.bench.metrics import Chunk, Estimate, Metrics, RoundRecord, measure
from crossdraft.framework.bench.recipe import CellConfig, Strategy
from crossdraft.framework.bench.records import CellResult
from crossdraft.framework.errors import UsageError
from crossdraft.verifiers.greedy import Greedy

HERE = {"device": "cpu (toy)", "torch": "2.0", "threads": 2}


def seconds(b: float, width: float, context: float) -> float:
    """Linear in each argument, so that interpolation reproduces it."""
    return 10 + 2 * b * width + b * context / 100


def curve(
    batch_sizes: Sequence[int] = (1, 2, 8),
    widths: Sequence[int] = (1, 2, 5),
    contexts: Sequence[int] = (100, 300),
    cost: Any = seconds,
    **about: Any,
) -> CostCurve:
    points = [Point(b, w, c, t := cost(b, w, c), t - 1, t + 1) for b, w, c in product(batch_sizes, widths, contexts)]
    given = {"model": "m", "sha256": "abc", "dtype": "float32", "device": HERE, **about}
    return CostCurve(points=tuple(points), **given)


# -- the curve --------------------------------------------------------------------------------------------------


def test_measured_points_are_reproduced() -> None:
    made = curve()
    for point in made.points:
        assert made.seconds(*point[:3]) == point.median


@pytest.mark.parametrize("at", [(1, 3, 100), (5, 1, 300), (4, 2, 150), (6, 4, 250)])
def test_between_points_it_is_linear(at: tuple[float, float, float]) -> None:
    assert curve().seconds(*at) == pytest.approx(seconds(*at))


@pytest.mark.parametrize("at", [(16, 5, 300), (8, 17, 300), (8, 5, 1000), (32, 33, 2000)])
def test_beyond_the_last_point_the_last_piece_goes_on(at: tuple[float, float, float]) -> None:
    assert curve().seconds(*at) == pytest.approx(seconds(*at))


def test_below_the_first_point_its_value_counts() -> None:
    assert curve().seconds(1, 1, 10) == seconds(1, 1, 100)


def test_a_kink_is_kept_and_a_falling_end_does_not_go_on() -> None:
    steps = {1: 10.0, 2: 30.0, 5: 27.0}
    made = curve(cost=lambda b, w, c: steps[w])
    assert made.seconds(1, 1.5, 100) == 20
    assert made.seconds(1, 3, 100) == 29
    assert made.seconds(1, 50, 100) == 27


def test_one_value_on_an_axis_cannot_be_left() -> None:
    made = curve(batch_sizes=(1,), contexts=(100,))
    assert made.seconds(1, 2, 900) == seconds(1, 2, 100)  # one context stands for all
    with pytest.raises(UsageError, match=r"one batch size, 1, and cannot say what 4 costs.*--batch-size 1,4"):
        made.seconds(4, 2, 100)


def test_holes_are_refused() -> None:
    with pytest.raises(ValueError, match="every combination"):
        CostCurve("m", "abc", "float32", HERE, curve().points[:-1])
    with pytest.raises(ValueError, match="every combination"):
        CostCurve("m", "abc", "float32", HERE, ())


def test_covers() -> None:
    made = curve()
    assert made.covers([1, 8], [5], [100, 300])
    assert not made.covers([1, 4], [5], [100])
    assert not made.covers([1], [5], [128])


def test_a_kept_curve_is_found_again(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setenv("CROSSDRAFT_CACHE", str(tmp_path))
    assert stored_curves() == []
    first, other = curve(), curve(sha256="def")
    save_curve(first)
    save_curve(other)
    newer = curve(cost=lambda b, w, c: 1.0, measured="later")
    save_curve(newer)  # the same weights on the same device: the later one stays
    found = stored_curves()
    assert sorted(c.measured for c in found) == ["", "later"]
    assert find_curve(found, "abc", "float32", HERE) == newer
    assert find_curve(found, "abc", "float32", {"device": "cpu (toy)"}) == newer
    assert find_curve(found, "abc", "bfloat16", HERE) is None
    assert find_curve(found, "abc", "float32", HERE | {"threads": 4}) is None
    (tmp_path / "costs" / "broken.json").write_text('{"points": 1}', encoding="utf-8")
    assert len(stored_curves()) == 2
    assert "broken.json cannot be read" in caplog.text


# -- prediction -------------------------------------------------------------------------------------------------


def test_predicted_round_by_hand() -> None:
    # Half of the rounds draft 4 nodes, half none; two passes of the drafting model a round.
    cell = CellStatistics(8, 6.0, 2.5, {0: 0.5, 4: 0.5}, 200, passes=2, draft_seconds=99, other_seconds=3)
    drafter = curve(cost=lambda b, w, c: seconds(b, w, c) / 10)
    found = predict(cell, curve(), drafter)
    target = (seconds(8, 1, 200) + seconds(8, 5, 200)) / 2
    draft = 2 * seconds(8, 1, 200) / 10
    assert (found.target, found.draft, found.other) == (pytest.approx(target), pytest.approx(draft), 3)
    assert found.seconds == pytest.approx(target + draft + 3)
    assert found.tokens_per_second == pytest.approx(6 * 2.5 / (target + draft + 3))
    plain = 6 / (seconds(8, 1, 200) + 3)
    assert found.speed_up == pytest.approx(found.tokens_per_second / plain)


def test_without_the_drafters_curve_its_measured_time_counts() -> None:
    cell = CellStatistics(1, 1.0, 2.0, {4: 1.0}, 100, passes=4, draft_seconds=7)
    assert predict(cell, curve()).draft == 7


def test_a_measured_baseline_goes_before_the_assumed_one() -> None:
    cell = CellStatistics(2, 2.0, 2.0, {4: 1.0}, 100, other_seconds=5)
    baseline = CellStatistics(2, 1.0, 1.0, {0: 1.0}, 300, other_seconds=1)
    found = predict(cell, curve(), baseline=baseline)
    assert found.speed_up == pytest.approx(found.tokens_per_second * (seconds(2, 1, 300) + 1))


def test_plain_decoding_is_its_own_baseline() -> None:
    cell = CellStatistics(2, 2.0, 2.0, {4: 1.0}, 100, passes=3, other_seconds=5).plain()
    assert predict(cell, curve(), curve()).speed_up == 1
    assert predict(cell, curve()).tokens_per_second == pytest.approx(2 / (seconds(2, 1, 100) + 5))


def test_tokens_of_a_chain() -> None:
    chain = CellStatistics.chain(4, 3, 0.5, 100)
    assert chain.tokens_per_round == (1 - 0.5**4) / (1 - 0.5)
    assert (chain.widths, chain.passes, chain.occupied) == ({3: 1.0}, 3, 4)
    assert CellStatistics.chain(1, 3, 1.0, 100).tokens_per_round == 4
    assert CellStatistics.chain(1, 3, 0.0, 100).tokens_per_round == 1


def test_another_batch_size() -> None:
    cell = CellStatistics(2, 1.5, 2.0, {4: 1.0}, 100, passes=3, draft_seconds=1, other_seconds=4).at(8)
    assert (cell.batch_size, cell.occupied, cell.draft_seconds, cell.other_seconds) == (8, 8, 4, 16)
    assert (cell.tokens_per_round, cell.passes) == (2.0, 3)


def test_a_shorter_draft() -> None:
    full = CellStatistics.chain(1, 4, 0.5, 100)
    assert full.cut(2) == CellStatistics.chain(1, 2, 0.5, 100)
    assert full.cut(4) == full
    mixed = CellStatistics(
        1, 1, 1.9, {0: 0.25, 1: 0.25, 4: 0.5}, 100, draft_seconds=8, acceptance=(0.5, 0.25, 0.1, 0.1)
    )
    cut = mixed.cut(1)
    assert cut.widths == {0: 0.25, 1: 0.75}
    assert cut.tokens_per_round == pytest.approx(1.45)  # an end inside the draft stays an end
    assert cut.draft_seconds == 2
    with pytest.raises(UsageError, match="up to 4 tokens, not 5; run a cell with gamma 5"):
        full.cut(5)
    with pytest.raises(UsageError, match="are trees; only chains can be cut"):
        CellStatistics(1, 1, 2.0, {12: 1.0}, 100, acceptance=(0.6, 0.4)).cut(1)


@pytest.mark.parametrize(
    ("speed_ups", "expected"),
    [([2, 1.5, 1.0], None), ([2, 0.9, 0.8], 4), ([2, 0.9, 1.1], None), ([0.9, 0.8, 0.7], 1), ([2, 1.5, 0.9], 16)],
)
def test_where_a_pair_stops_paying(speed_ups: list[float], expected: int | None) -> None:
    assert stops_paying([1, 4, 16], speed_ups) == expected
    assert stops_paying([16, 4, 1], speed_ups[::-1]) == expected


# -- from records -----------------------------------------------------------------------------------------------


def rows(prompt: int, turn: int, emitted: Sequence[int], width: int = 2) -> list[RoundRecord]:
    return [RoundRecord(prompt, f"q{prompt}", "a", turn, i, e - 1, e, width, width) for i, e in enumerate(emitted)]


def chunk(emitted: int, **phases: float) -> Chunk:
    return Chunk(emitted, {"prefill": 0.0, "draft": 1.0, "target": 4.0, "verify": 2.0, "rest": 1.0} | phases)


def test_rounds_of_the_batch_by_hand() -> None:
    # Two slots. Chunk one: prompts 0 and 1, prompt 2 takes the slot of 1; then the second turn of prompt 0.
    records = [*rows(0, 0, [2, 2]), *rows(1, 0, [3]), *rows(2, 0, [1, 1, 1]), *rows(0, 1, [2]), *rows(3, 0, [5])]
    rounds = batch_rounds(records, [10, 20, 5, 30, 7], [chunk(12), chunk(5)], 2)
    assert rounds == [
        BatchRound(2, 2, 20, 5),
        BatchRound(2, 2, 12, 3),
        BatchRound(1, 2, 6, 1),
        BatchRound(1, 2, 7, 1),
        BatchRound(1, 2, 30, 2),
        BatchRound(1, 2, 7, 5),
    ]
    tail = Chunk(8, chunk(8).seconds, tail_emitted=4, tail_seconds=3.0)  # both parts are of the same chunk
    assert batch_rounds(records, [10, 20, 5, 30, 7], [tail, chunk(5)], 2) == rounds


def test_the_replayed_schedule_is_the_loops(tiny_model: Any, decoder: Any) -> None:
    model = tiny_model("llama")
    loop = decoder(model, PromptLookup, {"gamma": 3}, Greedy, batch_size=3, max_new_tokens=20, eos=(5, 11))
    prompts = [[3, 4, 3, 4, 3, 4, 7 + i][: 3 + i % 4] for i in range(8)]
    responses = sorted(loop.run(prompts), key=lambda response: response.index)
    records = [
        RoundRecord(r.index, str(r.index), "a", 0, i, x.tau, x.emitted, x.nodes, x.width)
        for r in responses
        for i, x in enumerate(r.rounds)
    ]
    emitted = sum(len(r.tokens) for r in responses)
    rounds = batch_rounds(records, [len(p) for p in prompts], [chunk(emitted)], 3)
    assert len(rounds) == loop.batch_rounds
    assert sum(r.occupied * (r.nodes + 1) for r in rounds) == loop.target_rows
    assert sum(r.occupied for r in rounds) == len(records)
    assert sum(r.emitted for r in rounds) == emitted
    assert len({r.occupied for r in rounds}) > 1  # the batch ran empty towards the end


def result(baseline: bool = False, error: bool = False, b: int = 2, passes: int = 8, sha: str = "abc") -> CellResult:
    drafter = Strategy(name="none" if baseline else "small-lm", config={} if baseline else {"model": "d", "gamma": 2})
    config = CellConfig(target="m", batch_size=b, drafter=drafter, verifier=Strategy(name="token"))
    if error:
        return CellResult(config, error="no")
    width = 0 if baseline else 2
    emitted = [1, 1, 1, 1] if baseline else [2, 2]
    records = [*rows(0, 0, emitted, width), *rows(1, 0, emitted, width)]
    chunks = [chunk(sum(r.emitted for r in records))]
    metrics: Metrics = measure(records, chunks, 0 if baseline else passes)
    models = {"m": {"sha256": sha, "source": ""}, **({} if baseline else {"d": {"sha256": "def", "source": ""}})}
    provenance = {"models": models, "dtype": "float32", "device": "cpu (toy)", "torch": "2.0", "threads": 2}
    responses = [{"prompt_tokens": 100}, {"prompt_tokens": 60}]
    return CellResult(
        config, metrics=metrics, records=records, chunks=chunks, responses=responses, provenance=provenance
    )


def test_statistics_of_a_cell() -> None:
    found = statistics(result())
    assert found == CellStatistics(
        batch_size=2,
        occupied=2.0,
        tokens_per_round=2.0,
        widths={2: 1.0},
        context=101.0,  # the longest row: 100, then 102
        passes=4.0,
        draft_seconds=0.5,
        other_seconds=1.5,
        acceptance=(1.0,),
    )
    assert statistics(result(error=True)) is None


def test_statistics_count_the_rounds_that_the_rate_counts() -> None:
    made = result()
    made.records = [*rows(0, 0, [2, 2]), *rows(1, 0, [1, 3, 3, 2])]  # two rounds of both rows, a tail of two of one
    made.chunks = [Chunk(8, chunk(8).seconds, tail_emitted=5, tail_seconds=7.0)]
    made.metrics = measure(made.records, made.chunks, passes=16)
    assert made.metrics.tokens_per_second == 8 / 8
    found = statistics(made)
    assert found is not None
    assert (found.occupied, found.tokens_per_round, found.context) == (2.0, 8 / 4, 101.0)
    assert (found.passes, found.draft_width) == (4.0, 1.0)
    assert (found.draft_seconds, found.other_seconds) == (0.5, 1.5)


def test_a_pass_of_several_tokens_a_row() -> None:
    made = result(passes=2)  # 2 nodes a round from one pass
    found = statistics(made)
    assert found is not None and (found.passes, found.draft_width) == (1.0, 2.0)
    assert predict(found, curve(), curve()).draft == pytest.approx(seconds(2, 2, 101))


def priced(b: int, speed_up: float, baseline: bool = False) -> CellResult:
    made = result(baseline, b=b)
    assert made.metrics is not None
    made.metrics.speed_up = Estimate(speed_up)
    return made


@pytest.mark.parametrize(
    ("speed_ups", "curves", "expected"),
    [
        ({1: 1.5, 2: 1.0}, [], 2),
        ({1: 0.9, 2: 0.8}, [], 0),
        ({2: 1.5, 8: 0.8}, [], 2),
        ({2: 1.5, 8: 0.8}, [curve(cost=lambda b, w, c: 22.0 + 4 * b * w)], 5),
        ({2: 1.5, 8: 0.8}, [curve(cost=lambda b, w, c: 100.0)], 7),
        ({2: 1.5, 8: 0.8}, [curve(cost=lambda b, w, c: w * 100.0)], 2),
        ({2: 1.5, 8: 0.8}, [curve(batch_sizes=(1,), cost=lambda b, w, c: 100.0)], 2),  # it cannot say
    ],
)
def test_the_last_batch_size_that_pays(speed_ups: dict[int, float], curves: list[CostCurve], expected: int) -> None:
    results = {b: priced(b, speed_up) for b, speed_up in speed_ups.items()}
    baselines = {b: priced(b, 1.0, baseline=True) for b in speed_ups}
    assert last_paying(results, baselines, curves) == expected


def test_predicted_beside_measured() -> None:
    curves = [curve(), curve(sha256="def", cost=lambda b, w, c: 1.0), curve(sha256="xyz")]
    found = predicted(result(), curves, result(baseline=True))
    assert found is not None
    assert (found.target, found.draft, found.other) == (pytest.approx(seconds(2, 3, 101)), 4.0, 1.5)
    assert found.tokens_per_second == pytest.approx(4 / (seconds(2, 3, 101) + 5.5))
    base = statistics(result(baseline=True))
    assert base is not None
    plain = 2 / (seconds(2, 1, base.context) + base.draft_seconds + base.other_seconds)
    assert found.speed_up == pytest.approx(found.tokens_per_second / plain)


def test_nothing_is_predicted_without_the_targets_curve() -> None:
    assert predicted(result(), []) is None
    assert predicted(result(sha="other"), [curve()]) is None
    assert predicted(result(), [curve(dtype="bfloat16")]) is None
    assert predicted(result(), [curve(device=HERE | {"threads": 1})]) is None
    unknown = result()
    del unknown.provenance["threads"]
    assert predicted(unknown, [curve()]) is None
    assert predicted(result(error=True), [curve()]) is None


def test_a_drafter_without_a_curve_keeps_its_measured_time() -> None:
    found = predicted(result(), [curve()])
    assert found is not None and found.draft == 0.5
    found = predicted(result(passes=0), [curve(), curve(sha256="def")])
    assert found is not None and found.draft == 0.5


def test_a_curve_that_is_too_small_predicts_nothing(caplog: Any) -> None:
    small = curve(batch_sizes=(1,))
    with pytest.raises(UsageError, match="one batch size, 1"):
        predicted(result(), [small])
    assert predictions([result(b=1), result(b=2)], [small]).keys() == {result(b=1).config.hash}
    assert "one batch size, 1, and cannot say what 2 costs" in caplog.text


# -- measuring --------------------------------------------------------------------------------------------------


def test_passes_are_those_of_the_loop(tiny_model: Any, monkeypatch: Any) -> None:
    from crossdraft.framework.decoding.lm import TransformersLM

    seen: list[tuple[int, int, list[int]]] = []
    grow = TransformersLM.grow

    def spy(self: TransformersLM, tokens: torch.Tensor, parents: Any = None) -> Any:
        seen.append((tokens.shape[0], tokens.shape[1], list(self.lengths)))
        return grow(self, tokens, parents)

    monkeypatch.setattr(TransformersLM, "grow", spy)
    advanced: list[int] = []
    points = measure_passes(
        tiny_model("llama"), batch_sizes=[1, 3], widths=[1, 4], contexts=[2, 20], repeats=3, advance=advanced.append
    )
    assert [p[:3] for p in points] == list(product([1, 3], [1, 4], [2, 20]))
    assert all(0 < p.low <= p.median <= p.high for p in points)
    assert len(seen) == sum(advanced) == 8 * 4
    assert {(b, w, tuple(lengths)) for b, w, lengths in seen} == {
        (b, w, tuple(max(c - row, 0) for row in range(b))) for b, w, c in product([1, 3], [1, 4], [2, 20])
    }
    assert len({call[:2] for call in seen[:4]}) > 1  # no point is measured in one go


def test_a_pass_beyond_the_context_is_refused(tiny_model: Any) -> None:
    with pytest.raises(UsageError, match="context of 90 and 9 new tokens exceed the model's 96 positions"):
        measure_passes(tiny_model("llama"), widths=[1, 9], contexts=[10, 90])


# -- the command ------------------------------------------------------------------------------------------------


@pytest.fixture
def config_file(tmp_path: Path) -> str:
    config = {"model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
              "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 128256}  # fmt: skip
    file = tmp_path / "llama-70b.json"
    file.write_text(json.dumps(config), encoding="utf-8")
    return str(file)


def test_roofline_from_the_command_line(config_file: str, capsys: Any) -> None:
    options = ["--on", "h100", "--devices", "8", "--gamma", "4", "--acceptance", "0.7", "--batch-size", "1,64,2048"]
    assert cli.main(["cost", "--target", config_file, *options]) == 0
    out = capsys.readouterr().out
    assert "llama-70b (69.50 G parameters in products) on 8 x h100, context 1024" in out
    assert "a = 0.7 stops paying at B = 2048" in out
    assert "weights and cache exceed the memory of a device, 80 GB, from B = 2048 on" in out
    assert "without --drafter, drafting counts as free" in out

    assert cli.main(["cost", "--target", config_file, *options, "--drafter", config_file, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    slow = found["speed_up"]["a = 0.7"]["1"]
    passes, step = found["target_seconds"]["1"], found["draft_step_seconds"]["1"]
    assert step == passes["1"]  # the drafter is the target
    assert slow == pytest.approx((1 - 0.7**5) / 0.3 * passes["1"] / (passes["5"] + 4 * step))
    assert found["stops_paying"] == {"a = 0.7": 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "cost needs --target"),
        (["--on", "h100"], "cost needs --target"),
        (["--target", "X", "--on", "h1000"], "there is no accelerator named 'h1000'; did you mean 'h100'"),
        (["--target", "X", "--on", "h100", "--context", "1,2"], "--context takes one value with --on"),
        (["--target", "X", "--on", "h100", "--efficiency", "0.8"], "--efficiency takes two shares"),
        (["--target", "X", "--gamma", "0"], "--gamma must be at least 1"),
        (["--target", "X", "--acceptance", "1.5"], "--acceptance takes probabilities"),
        (["--target", "X", "--repeats", "0"], "--repeats must be positive"),
        (["--target", "X", "--batch-size", "0,1"], "--batch-size takes positive numbers"),
        (["--target", "X", "--run", "R", "--acceptance", "0.5"], "give one of them"),
        (["--run", "nowhere"], "nowhere is no directory; give the directory of a finished run"),
    ],
)
def test_options_that_do_not_fit(options: list[str], message: str, config_file: str, capsys: Any) -> None:
    options = [config_file if option == "X" else option for option in options]
    assert cli.main(["cost", *options]) == 2
    assert message in capsys.readouterr().err


def test_from_measuring_to_a_run_and_back(
    models: dict[str, str], write_prompts: Any, recipe_file: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setenv("CROSSDRAFT_CACHE", str(tmp_path / "cache"))
    from crossdraft.framework.bench.recipe import load_recipe
    from crossdraft.framework.bench.run import run

    prompts = write_prompts(tmp_path / "prompts.jsonl")
    recipe = load_recipe(
        recipe_file(
            f"target: {models['target']}\nprompts: {{path: {prompts}}}\nmax_new_tokens: 6\nbatch_size: 2\n"
            f"sampling: {{temperature: 1.0}}\nverifiers: [token]\n"
            f"drafters: [{{name: small-lm, model: {models['narrow']}, gamma: 2}}]\n"
        )
    )
    outcome = run(recipe, tmp_path / "runs", say=None)
    capsys.readouterr()
    asked = ["cost", "--run", str(outcome.directory)]
    assert cli.main(asked) == 2
    assert f"no cost curve of {models['target']} was measured" in capsys.readouterr().err

    grid = ["--batch-size", "1,2", "--width", "2,3", "--context", "10,30", "--repeats", "1"]
    measure = ["cost", "--target", models["target"], "--drafter", models["narrow"], *grid, "--quiet"]
    assert cli.main(measure) == 0
    assert "a draft step against a pass over one token" in capsys.readouterr().out
    kept = {c.model: c for c in stored_curves()}
    assert kept[models["target"]].widths == [1, 2, 3] and kept[models["narrow"]].widths == [1, 2, 4]

    # A larger grid keeps the smaller one: what was measured as a target serves as a drafter too.
    assert cli.main(["cost", "--target", models["narrow"], *grid[:2], "--width", "5", *grid[4:], "--quiet"]) == 0
    capsys.readouterr()
    assert next(c for c in stored_curves() if c.model == models["narrow"]).widths == [1, 2, 4, 5]

    monkeypatch.setattr(cost, "measure_curve", lambda *args, **options: pytest.fail("measured twice"))
    assert cli.main([*measure, "--acceptance", "0.5", "--gamma", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["speed_up"]) == {"a = 0.5"} and len(found["curves"]) == 2

    assert cli.main([*asked, "--json", "--batch-size", "1,2"]) == 0
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert [cell["cell"] for cell in cells] == [r.config.hash for r in outcome.results]
    for cell, measured in zip(cells, outcome.results, strict=True):
        assert measured.metrics is not None
        assert cell["measured"] == measured.metrics.tokens_per_second
        again = predicted(measured, stored_curves(), outcome.results[0])
        assert again is not None and cell["predicted"] == again.tokens_per_second
        assert set(cell["by_batch_size"]) == {"1", "2"}
    assert set(predictions(outcome.results)) == {r.config.hash for r in outcome.results}
    assert predictions(outcome.results, []) == {}
    assert cells[0]["predicted_speed_up"] == 1  # the baseline over itself

    # A run keeps the curves it was predicted from; those measured after it are none of its business.
    page = ["report", str(outcome.directory)]
    assert cli.main(page) == 0 and "predicted" not in capsys.readouterr().out
    assert run(recipe, tmp_path / "runs", say=None).predicted
    monkeypatch.setenv("CROSSDRAFT_CACHE", str(tmp_path / "another machine"))
    assert cli.main(page) == 0 and "predicted: tok/s from the cost curve" in capsys.readouterr().out
    monkeypatch.setenv("CROSSDRAFT_CACHE", str(tmp_path / "cache"))

    config = str(Path(models["target"]) / "config.json")
    assert cli.main([*asked, "--target", config, "--on", "l4", "--batch-size", "1,8", "--json"]) == 0
    elsewhere = json.loads(capsys.readouterr().out)
    assert elsewhere["gamma"] == 2 and list(elsewhere["speed_up"]) == ["pair 1"]
