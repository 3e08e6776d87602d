"""Several drafters replayed together: shared target passes, none if not needed; policies from one replay."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crossdraft_advisor.replay.teacher_forcing import lazy_models as module

from crossdraft import load_model
from crossdraft.framework.cli import main as cli
from crossdraft.framework.lm.transformers_lm import TransformersLM


@pytest.fixture
def outputs(models: dict[str, str], tmp_path: Path) -> Callable[..., Path]:
    """``said(logprobs=True)``: responses of ten tokens, recorded at temperature 1."""

    def write(*, logprobs: bool) -> Path:
        random, path = np.random.default_rng(0), tmp_path / "responses.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for i in range(4):
                row: dict[str, Any] = {"prompt": [5, 6, 7 + i], "tokens": random.integers(5, 12, 10).tolist()}
                row |= {"logprobs": [-1.0] * 10} if logprobs else {}
                file.write(json.dumps(row | {"temperature": 1.0}) + "\n")
        return path

    return write


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """Passes over nodes by the directory of the model, and models that were loaded."""
    result: Counter = Counter()
    grow, load = TransformersLM.forward, load_model

    def counted(self: Any, *args: Any, **inputs: Any) -> Any:
        result[Path(self.model.config._name_or_path).name] += 1
        return grow(self, *args, **inputs)

    def loaded(name: str, **options: Any) -> Any:
        result[f"load {Path(name).name}"] += 1
        return load(name, **options)

    monkeypatch.setattr(TransformersLM, "forward", counted)
    monkeypatch.setattr(module, "load_model", loaded)
    return result


def replayed(capsys: Any, *arguments: Any) -> dict[str, Any]:
    assert cli.main(["replay", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def small(models: dict[str, str], name: str = "narrow", **options: Any) -> list[str]:
    return ["--drafter", json.dumps({"name": "draft-model", "model": models[name], **options})]


COMMON = ["--dtype", "float32", "--device", "cpu", "--gamma", "1-4"]


def test_target_is_not_loaded_with_recorded_log_p(
    models: dict[str, str], outputs: Callable, passes: Counter, capsys: Any
) -> None:
    path = outputs(logprobs=True)
    options = [*COMMON, "--target", models["target"], *small(models), *small(models, "wide", label="wide")]
    spared = replayed(capsys, path, *options)
    assert "target" not in passes and "load target" not in passes
    assert passes["narrow"] == passes["wide"] == 1  # a pass over all texts, for both rules and all lengths
    assert len(spared["rows"]) == 2 * 2 * 4
    # The same with the target, which computes the log P that was not recorded.
    passes.clear()
    scored = replayed(capsys, outputs(logprobs=False), *options)
    assert passes["target"] == 1 and passes["load target"] == 1
    assert scored["rows"][0]["block_efficiency"] != spared["rows"][0]["block_efficiency"]


def test_one_pass_of_target_serves_all(models: dict[str, str], outputs: Callable, passes: Counter, capsys: Any) -> None:
    """Each drafter's numbers are those that it has alone."""
    path = outputs(logprobs=False)
    iid = ["--drafter", json.dumps({"name": "draft-model-iid", "model": models["wide"], "K": 2})]
    options = [*COMMON, "--target", models["target"]]
    both = replayed(capsys, path, *options, *small(models), *iid)
    assert passes["target"] == 1
    separate = [replayed(capsys, path, *options, *item)["rows"] for item in (small(models), iid)]
    for row, other in zip(both["rows"], [*separate[0], *separate[1]], strict=True):
        assert (row["drafter"], row["verifier"]) == (other["drafter"], other["verifier"])
        assert row["block_efficiency_all_steps"] == pytest.approx(other["block_efficiency_all_steps"])


def test_policies_from_one_replay(models: dict[str, str], outputs: Callable, passes: Counter, capsys: Any) -> None:
    path = outputs(logprobs=True)
    options = [*COMMON, "--target", models["target"], "--verifier", "token"]
    policies = ["static", "oracle", "heuristic:2", "confidence:0.05,0.5"]
    result = replayed(
        capsys, path, *options, *small(models), *(word for policy in policies for word in ("--policy", policy))
    )
    group = {row["drafter"]: row for row in result["rows"] if row["gamma"] == 4}
    static, oracle = group["draft-model"], group["draft-model, oracle"]
    assert oracle["block_efficiency_all_steps"] == pytest.approx(static["block_efficiency_all_steps"])
    assert oracle["drafted_per_step"] <= oracle["block_efficiency_all_steps"] - 1 + 1e-9
    # A text that was cut ends no step with its own last token, so all but the accepted are target's.
    assert oracle["drafted_per_step"] < min(row["drafted_per_step"] for row in group.values() if row is not oracle)
    careful, bold = group["draft-model, confidence 0.5"], group["draft-model, confidence 0.05"]
    assert careful["drafted_per_token"] < bold["drafted_per_token"] <= static["drafted_per_token"] + 1e-9
    assert careful["block_efficiency_all_steps"] <= static["block_efficiency_all_steps"] + 1e-9
    assert "target" not in passes
    # Each is the drafter's own policy.
    own = small(models, policy={"name": "confidence", "threshold": 0.5}, gamma=4)
    (expected_own,) = replayed(capsys, path, *options, *own)["rows"]
    for key in ("block_efficiency_all_steps", "drafted_per_step"):
        assert expected_own[key] == pytest.approx(careful[key], rel=1e-3)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--policy", "confident"], "is not static, oracle, heuristic"),
        (["--policy", "confidence:2"], "a threshold must be between 0 and 1"),
        (["--policy", "confidence:x"], "'x' is not a number"),
        (["--policy", "heuristic:0"], "START must be an integer from 1"),
        (["--policy", "confidence:0.5"], "drafter 'prompt-lookup' has no token probabilities"),
    ],
)
def test_incomplete_policies_raise(outputs: Callable, capsys: Any, options: list[str], sentence: str) -> None:
    path = outputs(logprobs=True)
    assert cli.main(["replay", str(path), "--drafter", "prompt-lookup", *options]) == 2
    assert sentence in capsys.readouterr().err
