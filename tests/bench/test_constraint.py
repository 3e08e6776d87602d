"""The key ``constraint`` of a recipe."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from companions import has_command
from text_models import SCHEMA, is_valid, save_text_model
from tiny_runs import cells

from crossdraft import UsageError, load_recipe
from crossdraft.framework.cli.main import main

pytest.importorskip("llguidance", reason="constraints need the extra constrain")


@pytest.fixture
def recipe(tmp_path: Path, write_prompts: Callable[..., str], recipe_file: Callable[[str], str]) -> str:
    names = [save_text_model(tmp_path / f"model-{seed}", seed) for seed in range(2)]
    return recipe_file(f"""\
target: {names[0]}
prompts: {write_prompts(tmp_path / "prompts.jsonl", 2)}
dtype: float32
device: cpu
max_new_tokens: 60
batch_size: 2
constraint: {{json_schema: {json.dumps(SCHEMA)}}}
drafters:
  - grammar
  - prompt-lookup
  - {{name: draft-model, model: {names[1]}, gamma: 3}}
  - {{name: draft-model-tree, model: {names[1]}, branching: [2, 2]}}
verifiers: [token, traversal]
""")


def test_outputs_match_schema(recipe: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", recipe, "--validate", "always"]) == 0
    directories = cells(tmp_path)
    assert len(directories) > 5
    for directory in directories:
        lines = (directory / "responses.jsonl").read_text(encoding="utf-8").splitlines()
        assert len(lines) == 3 and all(is_valid(json.loads(line)["text"]) for line in lines)
    (summary,) = tmp_path.glob("runs/*/summary.csv")
    assert '""json_schema""' in summary.read_text(encoding="utf-8")
    capsys.readouterr()
    (run,) = tmp_path.glob("runs/*")
    if has_command("replay"):
        assert main(["replay", str(run), "--drafter", "prompt-lookup"]) == 2
        assert "was decoded under a constraint, which replay does not apply" in capsys.readouterr().err


def test_prompts_have_constraints_of_their_own(recipe: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [
        {"prompt": "a number", "constraint": {"regex": "[0-9]{3}"}},
        {"prompt": "an animal", "constraint": {"choice": ["cat", "dog"], "mask_drafts": False}},
        {"turns": ["more", "animals"], "constraint": {"choice": ["cat", "dog"]}},
        {"prompt": "the recipe's"},
    ]
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    drafters = f"[grammar, {{name: draft-model, model: {tmp_path / 'model-1'}, gamma: 3}}]"
    settings = [f"prompts={file}", "constraint={regex: '[a-c]{2}'}", "verifiers=[token]", f"drafters={drafters}"]
    assert main(["run", recipe, *(word for setting in settings for word in ("--set", setting))]) == 0
    directories = cells(tmp_path)
    assert len(directories) == 3
    for directory in directories:
        lines = (directory / "responses.jsonl").read_text(encoding="utf-8").splitlines()
        texts = {(row["question_id"], row["turn"]): row["text"] for row in map(json.loads, lines)}
        assert re.fullmatch("[0-9]{3}", texts[1, 0]) and re.fullmatch("[a-c]{2}", texts[4, 0])
        assert {texts[2, 0], texts[3, 0], texts[3, 1]} <= {"cat", "dog"}
    capsys.readouterr()
    options = ["--set", f"prompts={file}", "--set", "constraint=null", "--set", "drafters=[prompt-lookup]"]
    options += ["--set", "verifiers=[token]"]
    if has_command("replay"):  # and its engines
        assert main(["run", recipe, *options, "--set", "engine={name: openai, url: 'http://127.0.0.1:9/v1'}"]) == 2
        assert "prompt 1 has a constraint, which the engine openai does not apply" in capsys.readouterr().err
    assert main(["run", recipe, *options, "--out", "free"]) == 0
    (run,) = tmp_path.glob("free/*")
    if has_command("replay"):
        assert main(["replay", str(run), "--drafter", "prompt-lookup"]) == 2
        assert "the response to '1' was decoded under a constraint" in capsys.readouterr().err
    rows[1]["constraint"] = {"regex": "("}
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert main(["run", recipe, *options]) == 2
    assert "prompt 2: the constraint's regex cannot be compiled" in capsys.readouterr().err


def test_failed_constraints_end_their_own_response(recipe: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"an animal {i}", "constraint": {"choice": ["cat", "dog"]}} for i in range(3)]
    rows[1]["constraint"] = {"grammar": "start: /[ab]/ T\nT: /b/ & /c/"}  # T has no text
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    settings = [f"prompts={file}", "constraint=null", "verifiers=[token]", "drafters=[grammar]"]
    assert main(["run", recipe, *(word for setting in settings for word in ("--set", setting))]) == 0
    assert "1 of 3 responses ended with an error: prompt 2 at position" in capsys.readouterr().out
    for directory in cells(tmp_path):
        lines = (directory / "responses.jsonl").read_text(encoding="utf-8").splitlines()
        responses = {row["question_id"]: row for row in map(json.loads, lines)}
        assert {responses[1]["text"], responses[3]["text"]} <= {"cat", "dog"}
        assert responses[2]["finish_reason"] == "error" and "a dead end" in responses[2]["error"]


def test_matrix_compares_constraints(recipe: str) -> None:
    values = [{"regex": "a"}, {"regex": "a", "mask_drafts": False}, None]
    expanded = load_recipe(recipe, {"matrix.constraint": values})
    assert len(expanded.matrix["constraint"]) == 3
    load_recipe(
        recipe, {"matrix.constraint": values, "exclude": [{"constraint": {"regex": "a"}, "drafter": "grammar"}]}
    )


@pytest.mark.parametrize(
    "overrides, sentence",
    [
        (["constraint.regex=a"], "needs exactly one of json_schema, regex, grammar, choice"),
        (["constraint={regx: a}"], "regex"),
        (["engine=vllm"], "engine vllm: constraint is given, which only crossdraft's own loop supports"),
    ],
)
def test_invalid_constraints_are_refused(recipe: str, overrides: list[str], sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_recipe(recipe, overrides)
    assert sentence in str(caught.value)
