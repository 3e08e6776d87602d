"""Recorded log-probabilities that the target cannot have had are named, with the target's own if it was run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from crossdraft_advisor.replay.replay import RecordedLogP
from crossdraft_advisor.replay.response import Response
from crossdraft_advisor.replay.teacher_forcing.scoring import DraftScores
from transformers import AutoModelForCausalLM

from crossdraft.framework.cli import main as cli
from crossdraft.framework.contracts.sampling import Sampling

PROMPT = [5, 6, 7]


def write(path: Path, model: Any, change: Any, temperature: float = 1.0) -> Path:
    """Four responses of sixteen tokens that ``model`` drew, with log P changed by ``change``."""
    torch.manual_seed(0)
    tokens = torch.tensor([PROMPT] * 4)
    with torch.no_grad():
        for _ in range(16):
            tokens = torch.cat([tokens, model(tokens).logits[:, -1].softmax(-1).multinomial(1)], 1)
        log_p = model(tokens).logits.log_softmax(-1)[:, 2:-1].gather(2, tokens[:, 3:, None])[..., 0]
    rows = [
        {"prompt": PROMPT, "tokens": outputs[3:].tolist(), "logprobs": change(p).tolist(), "temperature": temperature}
        for outputs, p in zip(tokens, log_p, strict=True)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def warnings(capsys: Any, *arguments: Any) -> tuple[list[str], str]:
    assert cli.main(["replay", *map(str, arguments), "--dtype", "float32", "--device", "cpu", "--json"]) == 0
    out, err = capsys.readouterr()
    return json.loads(out)["warnings"], err


@pytest.fixture
def target(models: dict[str, str]) -> Any:
    return AutoModelForCausalLM.from_pretrained(models["target"])


def test_target_that_is_run_is_compared_with_record(
    models: dict[str, str], target: Any, tmp_path: Path, capsys: Any
) -> None:
    drafter = json.dumps({"name": "draft-model-iid", "model": models["wide"], "K": 2})
    options = ["--target", models["target"], "--drafter", drafter, "--gamma", "1-2"]
    result, err = warnings(capsys, write(tmp_path / "right.jsonl", target, lambda p: p), *options)
    assert result == [] and "warning" not in err
    result, err = warnings(capsys, write(tmp_path / "wrong.jsonl", target, lambda p: p - 1.7), *options)
    assert "differ from the target's" in result[0] and "(mean absolute difference 1.70)" in result[0]
    assert f"crossdraft: warning: {result[0]}" in err


def test_without_target_floor_decides(models: dict[str, str], target: Any, tmp_path: Path, capsys: Any) -> None:
    for options in (
        ["--drafter", "prompt-lookup"],
        ["--target", models["target"], "--drafter", json.dumps({"name": "draft-model", "model": models["wide"]})],
    ):
        options = [*options, "--gamma", "1-2"]
        assert warnings(capsys, write(tmp_path / "a.jsonl", target, lambda p: p), *options)[0] == []
        result, _ = warnings(capsys, write(tmp_path / "b.jsonl", target, lambda p: 0 * p - 11.1), *options)
        assert "implausible: -11.10 per token is below -6" in result[0]
    cold = write(tmp_path / "c.jsonl", target, lambda p: 0 * p - 11.1, temperature=0.0)
    assert warnings(capsys, cold, "--drafter", "prompt-lookup", "--gamma", "1-2")[0] == []


@pytest.mark.parametrize(
    ("recorded", "own", "temperature", "expected"),
    [
        (-2.27, None, 1.0, None),  # SmolLM2-135M-Instruct on its own samples
        (-11.1, None, 1.0, "implausible"),  # drafted positions of an engine with an undefined temperature
        (-4.2, None, 1.0, None),  # the same over all positions: not impossible by itself,
        (-4.2, -2.5, 1.0, "differ from the target's"),  # but not what the target has
        (-2.5, -2.48, 1.0, None),  # bfloat16 against float32
        (-7.0, None, 1.5, None),  # a high temperature makes flat distributions
        (-12.5, None, 1.5, "implausible"),
        (-100.0, -np.inf, 1.0, "implausible"),
    ],
)
def test_real_numbers(recorded: float, own: float | None, temperature: float, expected: str | None) -> None:
    result, n = RecordedLogP(), 40
    response = Response("a", "all", [1], [2] * n, np.full(n, recorded), sampling=Sampling(temperature=temperature))
    known = None if own is None else np.full(n, own)
    result.add(response, DraftScores(np.zeros((n, 1)), np.ones(n, dtype=np.int64), np.zeros(n), own_log_p=known))
    assert (result.warning is None) == (expected is None)
    assert expected is None or expected in str(result.warning)


def test_few_tokens_are_inconclusive() -> None:
    result = RecordedLogP()
    response = Response("a", "all", [1], [2] * 3, np.full(3, -11.1), sampling=Sampling())
    result.add(response, DraftScores(np.zeros((3, 1)), np.ones(3, dtype=np.int64), np.zeros(3)))
    assert result.warning is None
