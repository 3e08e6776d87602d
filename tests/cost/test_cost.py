"""Timing of passes of tiny models, and ``crossdraft cost``."""

import json
import math
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from crossdraft.framework import plugins
from crossdraft.framework.cli import commands
from crossdraft.framework.cli import main as cli
from crossdraft.framework.cli.cost import pass_timing
from crossdraft.framework.cli.cost.pass_timing import measure_passes
from crossdraft.framework.cost import curve
from crossdraft.framework.cost.curve import Point, stored_curves
from crossdraft.framework.cost.finished_cells import (
    predicted,
    predictions,
)
from crossdraft.framework.errors import UsageError

# -- measuring --------------------------------------------------------------------------------------------------


def test_passes_are_those_of_loop(tiny_model: Any, monkeypatch: Any) -> None:
    from crossdraft.framework.lm.transformers_lm import TransformersLM

    events: list[tuple[int, int, list[int]]] = []
    grow = TransformersLM.forward

    def spy(self: TransformersLM, tokens: torch.Tensor, parents: Any = None) -> Any:
        events.append((tokens.shape[0], tokens.shape[1], list(self.lengths)))
        return grow(self, tokens, parents)

    monkeypatch.setattr(TransformersLM, "forward", spy)
    advanced: list[int] = []
    points = measure_passes(
        tiny_model("llama"), batch_sizes=[1, 3], widths=[1, 4], contexts=[2, 20], repeats=3, advance=advanced.append
    )
    assert [p[:3] for p in points] == list(product([1, 3], [1, 4], [2, 20]))
    assert all(0 < p.low <= p.median <= p.high for p in points)
    assert len(events) == sum(advanced) == 8 * 4
    assert {(b, w, tuple(lengths)) for b, w, lengths in events} == {
        (b, w, tuple(max(c - row, 0) for row in range(b))) for b, w, c in product([1, 3], [1, 4], [2, 20])
    }
    assert len({call[:2] for call in events[:4]}) > 1  # no point is measured in one go


def test_pass_beyond_context_is_refused(tiny_model: Any) -> None:
    with pytest.raises(UsageError, match="context of 90 and 9 new tokens exceed the model's 96 positions"):
        measure_passes(tiny_model("llama"), widths=[1, 9], contexts=[10, 90])


def test_disturbed_passes_are_measured_again(tiny_model: Any, monkeypatch: Any) -> None:
    """One row in 443 ms and three in 191 ms: another program ran. The shorter times of all attempts are kept."""
    loaded = SimpleNamespace(model=tiny_model("llama"), name="m", sha256="abc")
    attempts = iter([(443, 191), (180, 300), (443, 200)])

    def measure(model: Any, **options: Any) -> list[Point]:
        return [Point(1, w, 9, ms / 1e3, ms / 1e3, ms / 1e3) for w, ms in zip((1, 3), next(attempts), strict=True)]

    monkeypatch.setattr(pass_timing, "measure_passes", measure)
    assert [p.median for p in pass_timing.measure_curve(loaded).points] == [0.18, 0.191]
    attempts = iter([(443, 191)] * 3)
    with pytest.raises(UsageError, match=r"fewer tokens a row took up to 2.3 times as long .*; measure on a quiet"):
        pass_timing.measure_curve(loaded)


# -- the command ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "cost requires --target"),
        (["--target", "X", "--run", "R", "--acceptance", "0.5"], "--acceptance 0.5 has no effect with --run"),
        (["--run", "R", "--gamma", "2"], "--gamma 2 has no effect without --target"),
        (["--run", "R", "--context", "64"], "--context 64 has no effect without --target"),
        (["--run", "nowhere"], "nowhere is not a directory; give the directory of a finished run"),
    ],
)
def test_options_that_do_not_fit(options: list[str], message: str, config_file: str, capsys: Any) -> None:
    options = [config_file if option == "X" else option for option in options]
    assert cli.main(["cost", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("options", ["--on h100", "--devices 8 --on=h100"])
def test_other_machines_need_the_advisor(options: str, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(commands, "find_spec", lambda module: None)
    monkeypatch.setattr(plugins.manager(), "_collected", None)
    assert cli.main(["cost", "--target", "model", *options.split()]) == 2
    remedy = "in a clone of crossdraft: pip install plugins/crossdraft-advisor"
    assert f"the option 'cost --on' is part of crossdraft-advisor; {remedy}" in capsys.readouterr().err


def test_from_measuring_to_run_and_back(
    models: dict[str, str], write_prompts: Any, recipe_file: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setenv("CROSSDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(curve, "MOST_EXCESS", math.inf)  # passes of tiny models are as long as disturbances
    from crossdraft.framework.bench.matrix import load_recipe
    from crossdraft.framework.bench.run import run
    from crossdraft.framework.report.write import write_summary

    prompts = write_prompts(tmp_path / "prompts.jsonl")
    recipe = load_recipe(
        recipe_file(
            f"target: {models['target']}\nprompts: {{path: {prompts}}}\nmax_new_tokens: 6\nbatch_size: 2\n"
            f"sampling: {{temperature: 1.0}}\nverifiers: [token]\n"
            f"drafters: [{{name: draft-model, model: {models['narrow']}, gamma: 2}}]\n"
        )
    )
    outcome = write_summary(run(recipe, tmp_path / "runs", log=None))
    capsys.readouterr()
    arguments = ["cost", "--run", str(outcome.directory)]
    assert cli.main(arguments) == 2
    assert f"{models['target']} has no cost curve for the device" in capsys.readouterr().err

    grid = ["--batch-size", "1,2", "--width", "2,3", "--context", "10,30", "--repeats", "1"]
    measure = ["cost", "--target", models["target"], "--drafter", models["narrow"], *grid, "--quiet"]
    assert cli.main(measure) == 0
    assert "a draft step relative to a target pass over one token" in capsys.readouterr().out
    kept = {c.model: c for c in stored_curves()}
    assert kept[models["target"]].widths == [1, 2, 3] and kept[models["narrow"]].widths == [1, 2, 4]

    # A larger grid keeps the smaller one: what was measured as a target serves as a drafter too.
    assert cli.main(["cost", "--target", models["narrow"], *grid[:2], "--width", "5", *grid[4:], "--quiet"]) == 0
    capsys.readouterr()
    assert next(c for c in stored_curves() if c.model == models["narrow"]).widths == [1, 2, 4, 5]

    monkeypatch.setattr(pass_timing, "measure_curve", lambda *args, **options: pytest.fail("measured twice"))
    assert cli.main([*measure, "--acceptance", "0.5", "--gamma", "2", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert set(record["speed_up"]) == {"a = 0.5"} and len(record["curves"]) == 2

    assert cli.main([*arguments, "--json", "--batch-size", "1,2"]) == 0
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert [cell["cell"] for cell in cells] == [r.config.hash for r in outcome.results]
    for cell, measured in zip(cells, outcome.results, strict=True):
        assert measured.metrics is not None
        assert cell["measured"] == measured.metrics.tokens_per_second
        repeat = predicted(measured, stored_curves(), outcome.results[0])
        assert repeat is not None and cell["predicted"] == repeat.tokens_per_second
        assert set(cell["by_batch_size"]) == {"1", "2"}
    assert set(predictions(outcome.results)) == {r.config.hash for r in outcome.results}
    assert predictions(outcome.results, []) == {}
    assert cells[0]["predicted_speed_up"] == 1  # the baseline over itself

    # A run keeps the curves it was predicted from; those measured after it are none of its business.
    page = ["report", str(outcome.directory)]
    assert cli.main(page) == 0 and "predicted" not in capsys.readouterr().out
    assert write_summary(run(recipe, tmp_path / "runs", log=None)).predicted
    monkeypatch.setenv("CROSSDRAFT_CACHE", str(tmp_path / "another machine"))
    assert cli.main(page) == 0 and "predicted" in capsys.readouterr().out
    monkeypatch.setenv("CROSSDRAFT_CACHE", str(tmp_path / "cache"))

    if "advise" not in plugins.entries("commands"):
        return
    config = str(Path(models["target"]) / "config.json")
    assert cli.main([*arguments, "--target", config, "--on", "l4", "--batch-size", "1,8", "--json"]) == 0
    elsewhere = json.loads(capsys.readouterr().out)
    assert elsewhere["gamma"] == 2 and list(elsewhere["speed_up"]) == ["pair 1"]
