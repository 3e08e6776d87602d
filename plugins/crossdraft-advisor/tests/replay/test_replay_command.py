"""``crossdraft replay``: as the run whose responses it replays, in every form of output, and what it refuses."""

from __future__ import annotations

import csv
import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet
from replay_fixtures import RECIPE

from crossdraft.framework.cli import main as cli
from crossdraft.framework.runs.record_schema import read_numbers


@pytest.fixture(scope="module")
def run(models: Any, write_prompts: Any, tmp_path_factory: Any) -> Path:
    """The directory of a finished run at a temperature at which prompt lookup is right now and then."""
    root = tmp_path_factory.mktemp("run")
    prompts = write_prompts(root / "prompts.jsonl", n=6)
    (root / "recipe.yaml").write_text(
        RECIPE.format(target=models["target"], prompts=prompts, gamma=3), encoding="utf-8"
    )
    assert cli.main(["run", str(root / "recipe.yaml"), "--out", str(root / "runs"), "--quiet"]) == 0
    return next((root / "runs").iterdir())


def replayed(capsys: Any, *arguments: Any) -> dict[str, Any]:
    assert cli.main(["replay", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def cells(run: Path) -> dict[tuple[str, str], Path]:
    results = {}
    for file in run.glob("cells/*/config.json"):
        config = json.loads(file.read_text(encoding="utf-8"))["config"]
        results[config["drafter"]["name"], config["verifier"]["name"]] = file.parent
    return results


def test_as_run_itself_counted(run: Path, capsys: Any) -> None:
    """The drafts are certain, so given its responses a run could have gone in one way only."""
    cell = cells(run)["prompt-lookup", "block"]
    for rule in ("token", "block"):
        result = replayed(capsys, cell, "--drafter", "{name: prompt-lookup, gamma: 3}", "--verifier", rule)
        (row,) = result["rows"]
        numbers = json.loads((cell / "metrics.json").read_text(encoding="utf-8"))["metrics"]
        metrics = read_numbers(cell / "metrics.json").metrics
        assert metrics.steps_cut and metrics.mean_tau > 0
        assert metrics.block_efficiency is not None
        assert row["steps"] == pytest.approx(metrics.steps) and row["tokens"] == metrics.tokens
        assert row["block_efficiency"] == pytest.approx(numbers["block_efficiency"])
        assert row["block_efficiency_all_steps"] == pytest.approx(metrics.block_efficiency_all_steps)
        assert row["acceptance_marginal"] == pytest.approx(metrics.acceptance)
        assert row["drafted_per_step"] == pytest.approx(metrics.nodes_per_step)
        for name, group in metrics.by_category.items():
            assert row["by_category"][name]["block_efficiency"]["value"] == pytest.approx(group.block_efficiency.value)


def test_directory_of_run_stands_for_its_plain_decoding(run: Path, capsys: Any) -> None:
    result = replayed(capsys, run, "--drafter", "prompt-lookup", "--gamma", "1,3")
    separate = replayed(capsys, _baseline(run), "--drafter", "prompt-lookup", "--gamma", "1,3")
    assert result == separate and result["sampling"]["temperature"] == 0.3 and result["prompts"] == 6
    assert cli.main(["replay", str(run), "--drafter", "prompt-lookup", "--temperature", "1"]) == 2
    assert "plain-decoding cell with that sampling; available: temperature 0.3" in capsys.readouterr().err


def _baseline(run: Path) -> Path:
    return next(path for (drafter, _), path in cells(run).items() if drafter == "none")


def rows_of(path: Path, n: int = 30) -> Path:
    random = np.random.default_rng(0)
    with path.open("w", encoding="utf-8") as file:
        for i in range(n):
            row = {"id": i % 10, "category": "ab"[i % 2], "prompt": [1, 2, 3, 1, 2, 3], "finish_reason": "eos"}
            file.write(json.dumps(row | {"tokens": random.integers(1, 4, 5 + i).tolist()}) + "\n")
    return path


def test_all_formats_agree(tmp_path: Path, capsys: Any) -> None:
    path, out = rows_of(tmp_path / "responses.jsonl"), tmp_path / "positions.parquet"
    options = [path, "--drafter", "prompt-lookup", "--drafter", "{name: prompt-lookup, label: one, max_ngram: 1}"]
    options += ["--verifier", "token", "--verifier", "specinfer", "--gamma", "2-3"]
    result = replayed(capsys, *options, "--out", out)
    assert [(r["drafter"], r["verifier"], r["gamma"]) for r in result["rows"]] == [
        (drafter, rule, gamma)
        for drafter in ("prompt-lookup", "one")
        for rule in ("token", "specinfer")
        for gamma in (2, 3)
    ]
    assert cli.main(["replay", *map(str, options), "--csv"]) == 0
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    whole = [line for line in lines if not line["category"]]
    assert len(lines) == 3 * len(whole) == 3 * len(result["rows"])
    for line, row in zip(whole, result["rows"], strict=True):
        assert float(line["block_efficiency"]) == row["block_efficiency"]["value"]
        assert float(line["marginal_2"]) == row["acceptance_marginal"][1]
        assert float(line["conditional_2"]) == pytest.approx(float(line["marginal_2"]) / float(line["marginal_1"]))
    assert cli.main(["replay", *map(str, options)]) == 0
    text = capsys.readouterr().out
    best = result["rows"][1]["block_efficiency"]
    assert f"{best['value']:.2f} [{best['low']:.2f}, {best['high']:.2f}]" in text
    assert "marginal" in text and "conditional" in text

    one, other = (result["rows"][i]["block_efficiency"]["value"] for i in (1, 5))
    apart = result["rows"][5]["differences"]
    assert apart["drafter"]["from"] == "prompt-lookup"
    assert apart["drafter"]["block_efficiency"]["value"] == pytest.approx(other - one)
    assert apart["gamma"]["from"] == "2" and "verifier" not in apart
    assert result["rows"][3]["differences"]["verifier"]["block_efficiency"]["value"] == 0  # a point mass

    table = parquet.read_table(out).to_pydict()
    own = [i for i, rule in enumerate(table["rule"]) if rule == "token" and table["drafter"][i] == "prompt-lookup"]
    assert len(own) == result["tokens"] and len(table["rule"]) == 4 * result["tokens"]
    assert all(len(table["survival"][i]) == 3 for i in own)
    output = [json.loads(line)["tokens"] for line in path.read_text(encoding="utf-8").splitlines()]
    assert [table["token"][i] for i in own] == [token for tokens in output for token in tokens]


def test_many_prompts_are_grouped(tmp_path: Path, monkeypatch: Any) -> None:
    from crossdraft_advisor.replay import aggregate

    monkeypatch.setattr(aggregate, "MAX_GROUPS", 4)
    monkeypatch.setattr(aggregate, "MAX_CATEGORIES", 2)
    pieces = aggregate.PromptGroups()
    numbers = [pieces.number("a", str(i)) for i in range(50)] + [pieces.number("b", "x"), pieces.number("c", "x")]
    assert sorted(set(numbers)) == [0, 1, 2, 3, 4, 5]
    assert numbers[:50] == [pieces.number("a", str(i)) for i in range(50)]
    assert pieces.category == ["a", "a", "a", "a", "b", aggregate.OTHERS]


@pytest.mark.parametrize(
    ("options", "output"),
    [
        (["--drafter", "prompt-lookup", "--verifier", "traversal"], "'traversal' cannot be replayed"),
        (
            ["--drafter", "prompt-lookup", "--verifier", "tokn"],
            "no verifier named 'tokn'; did you mean 'token'",
        ),
        (["--drafter", "prompt-lookup", "--verifier", "greedy"], "needs temperature 0"),
        (["--drafter", "none"], "'none' does not draft"),
        (["--drafter", "{name: draft-model-tree, model: x}"], "drafts trees ('without_replacement')"),
        (["--drafter", "{name: draft-model, model: x}"], "requires --target MODEL"),
        (["--drafter", "prompt-lookup", "--gamma", "0"], "--gamma: 0 is not a range of positive numbers"),
        (["--drafter", "prompt-lookup", "--gamma", "1-99"], "--gamma: 99 is too large; the maximum is 64"),
        (["--drafter", "prompt-lookup", "--gamma", "x"], "--gamma 'x' is not a list of numbers and ranges"),
        (["--drafter", "{name: prompt-lookup, gamma: 0}"], "gamma must be from 1 to 64"),
        (["--drafter", "{name: prompt-lookup, gama: 1}"], "key 'gama'"),
        (["--drafter", "prompt-lookup", "--drafter", "prompt-lookup"], "is given twice"),
        (["--drafter", "prompt-lookup", "--top-p", "0.5"], "require --temperature"),
        (["--drafter", "prompt-lookup", "--k", "1-3"], "--k 1-3: no drafter drafts several sequences"),
        (["--drafter", "prompt-lookup", "--drop", "0.1"], "--drop requires several --target"),
        (
            ["--drafter", "prompt-lookup", "--out", "/nowhere/x.parquet"],
            "x.parquet: the directory /nowhere does not exist",
        ),
    ],
)
def test_unsupported_drafters_raise(tmp_path: Path, capsys: Any, options: list[str], output: str) -> None:
    path = rows_of(tmp_path / "responses.jsonl", 2)
    sampled = [] if "--top-p" in options else ["--temperature", "1"]
    assert cli.main(["replay", str(path), *options, *sampled]) == 2
    assert output in capsys.readouterr().err


def test_responses_sampled_in_different_ways_are_refused(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "responses.jsonl"
    rows = [{"prompt": [1], "tokens": [1], "temperature": t} for t in (1, 0.5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert cli.main(["replay", str(path), "--drafter", "prompt-lookup"]) == 2
    assert "responses.jsonl:2: sampling parameters differ" in capsys.readouterr().err
    path.write_text("\n", encoding="utf-8")
    assert cli.main(["replay", str(path), "--drafter", "prompt-lookup"]) == 2
    assert "no responses to replay" in capsys.readouterr().err


def test_interrupted_replay_leaves_no_file(tmp_path: Path) -> None:
    source, out = tmp_path / "f.jsonl", tmp_path / "out" / "x.parquet"
    out.parent.mkdir()
    row = {"prompt": [1, 2, 3, 1, 2, 3], "tokens": [1, 2, 3, 4] * 100, "temperature": 0}
    source.write_text((json.dumps(row) + "\n") * 10_000, encoding="utf-8")  # takes many seconds
    command = [sys.executable, "-m", "crossdraft", "replay", str(source), "--temperature", "0"]
    command += ["--drafter", "prompt-lookup", "--gamma", "1-2", "--out", str(out)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        while process.poll() is None and not list(out.parent.glob(".x.parquet.*.part")):
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130 and "interrupted" in err
    assert not list(out.parent.iterdir())
