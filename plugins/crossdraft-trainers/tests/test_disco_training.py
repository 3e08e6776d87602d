"""Training of the stop classifier of the policy disco."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from crossdraft_trainers.contract import Batch
from crossdraft_trainers.trainees.disco import DiscoTraining, best_f1
from training_target import save_chat_model

from crossdraft import generate
from crossdraft.framework.cli import main as cli
from crossdraft.framework.models.load import load_model


@pytest.fixture(scope="module")
def pair(tmp_path_factory: Any) -> tuple[Path, Path]:
    """A chat model, and a noisy copy of it that drafts."""
    target, small = (tmp_path_factory.mktemp(name) for name in ("target", "small"))
    save_chat_model(target)
    save_chat_model(small)
    noisy: Any = load_model(str(small), dtype="float32", device="cpu").model
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in noisy.parameters():
            if weight.dim() > 1:
                weight += 0.3 * weight.std() * torch.randn_like(weight)
    noisy.save_pretrained(small)
    return target, small


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_examples_are_drafts_up_to_first_rejected_token(pair: tuple[Path, Path], temperature: float) -> None:
    """Acceptance at the first position follows from the two distributions; later tokens follow an accepted one."""
    target = load_model(str(pair[0]), dtype="float32", device="cpu")
    trainee: Any = DiscoTraining(model=str(pair[1]), gamma=3, top=4, temperature=temperature).trainee(target)
    torch.manual_seed(1)
    ids = torch.randint(4, 40, (4, 12)).repeat(100, 1)
    predicts = torch.ones_like(ids, dtype=torch.bool)
    predicts[:, :3], predicts[:, -1], predicts[1::2, 9:] = False, False, False
    with torch.inference_mode():
        hidden = target.model.get_decoder()(input_ids=ids).last_hidden_state
        p, q = ((m(input_ids=ids).logits).softmax(-1) for m in (target.model, trainee.drafting))
    x, accepted = trainee._examples(Batch(ids, torch.ones_like(ids), predicts, hidden[:, :, None].clone()))
    place = (x[:, -1] * 3).round().long()
    first, second = accepted[place == 0], accepted[place == 1]
    assert len(first) == int(predicts.sum()), "a draft from every place"
    # Outcomes are drawn once per position, so an accepted position's successor has the outcome of the next position.
    fates = torch.zeros_like(predicts)
    fates[predicts] = first
    behind = fates[:, :-1] & predicts[:, 1:]
    assert len(second) == int(behind.sum()) and int(second.sum()) == int((behind & fates[:, 1:]).sum())
    third = behind[:, :-1] & fates[:, 1:-1] & predicts[:, 2:]
    assert int((place == 2).sum()) == int(third.sum()) > 0
    if temperature:
        rate = torch.minimum(p, q).sum(-1)[predicts].mean()
    else:
        rate = (p.argmax(-1) == q.argmax(-1))[predicts].float().mean()
    assert float(first.float().mean()) == pytest.approx(float(rate), abs=0.04 if temperature else 1e-6)


def test_best_threshold_by_f1() -> None:
    """By hand: at 0.4 two of three are hits, and none is missed: 2 * 2 / (3 + 2)."""
    outputs, accepted = np.array([0.2, 0.4, 0.6, 0.8]), np.array([False, True, False, True])
    assert best_f1(outputs, accepted) == 0.4
    assert best_f1(outputs, np.array([False, False, False, True])) == 0.8


def test_command(pair: tuple[Path, Path], tmp_path: Path, capsys: Any) -> None:
    target, small = map(str, pair)
    command = [
        "train",
        "disco",
        "--target",
        target,
        "--model",
        small,
        "--out",
        str(tmp_path / "out"),
        "--dtype",
        "float32",
    ]
    command += [
        "--tokens",
        "120",
        "--questions",
        f"{target}/questions.jsonl",
        "--invented",
        "0",
        "--max-response",
        "12",
    ]
    command += ["--epochs", "2", "--gamma", "4", "--measure", f"{target}/questions.jsonl", "--measure-limit", "2"]
    assert cli.main([*command, "--measure-tokens", "6"]) == 0
    record = json.loads((tmp_path / "out" / "settings.json").read_text())
    assert record["kind"] == "disco" and len(record["weight1"]) == 32 and 0 < record["threshold"] < 1
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Accuracy of a drafted token" in card and "policy disco" in card
    policy = {"name": "disco", "checkpoint": str(tmp_path / "out")}
    arguments = {"temperature": 0, "max_new_tokens": 8}
    separate = generate(target, ["w9 w12"], drafter="none", **arguments)[0].tokens
    drafter = {"name": "draft-model", "model": small, "gamma": 4, "policy": policy}
    assert generate(target, ["w9 w12"], drafter=drafter, **arguments)[0].tokens == separate
    capsys.readouterr()
    for options, sentence in (
        (["--divergence", "tv"], "--divergence tv: must be left out"),
        (["--model", ""], "--model:"),
    ):
        assert cli.main([*command, *options]) == 2 and sentence in capsys.readouterr().err
