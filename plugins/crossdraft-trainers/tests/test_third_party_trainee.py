"""A trainee that imports only public names: training, resumption and drafting."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import trainee
from crossdraft_trainers.trainer import Trainer
from safetensors.torch import load_file

from crossdraft.framework import plugins
from crossdraft.framework.cli import main as cli


@pytest.fixture
def registered() -> Any:
    plugins.manager().register(trainee, "somebody's")
    yield
    plugins.manager().unregister(trainee)


def test_trainee_of_public_names_trains_and_resumes(
    registered: None, on_disk: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    questions = str(on_disk / "questions.jsonl")
    argv = ["train", "one-head", "--target", str(on_disk), "--dtype", "float32", "--tokens", "80", "--epochs", "3"]
    argv += ["--questions", questions, "--invented", "0", "--max-response", "6", "--write-batch", "8", "--held-out"]
    argv += ["0.2", "--batch-tokens", "60", "--measure", questions, "--measure-limit", "2", "--measure-tokens", "4"]
    assert cli.main([*argv, "--out", str(tmp_path / "whole")]) == 0, capsys.readouterr().err
    assert "It reads responses of up to" in (tmp_path / "whole" / "README.md").read_text()
    assert "| a  " in (tmp_path / "whole" / "README.md").read_text(), "drafted with it"

    original, steps = Trainer._train, []

    def train(*args: Any) -> Any:
        steps.append(1)
        if len(steps) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args)

    monkeypatch.setattr(Trainer, "_train", train)
    assert cli.main([*argv, "--out", str(tmp_path / "stopped")]) == 130
    assert cli.main([*argv, "--out", str(tmp_path / "stopped")]) == 0
    name = "medusa_lm_head.safetensors"
    whole, stopped = load_file(tmp_path / "whole" / name), load_file(tmp_path / "stopped" / name)
    assert whole.keys() == stopped.keys()
    assert all(tensor.equal(stopped[key]) for key, tensor in whole.items()), "dropout follows from the step"
    facts = [json.loads((tmp_path / out / "training.json").read_text()) for out in ("whole", "stopped")]
    assert facts[0]["recipe"]["dropout"] == 0.1
    assert [entry["positions"] for entry in facts[0]["log"]] == [entry["positions"] for entry in facts[1]["log"]]
    assert cli.main([*argv, "--out", str(tmp_path / "other"), "--dropout", "1"]) == 2
    assert "--dropout 1: should be less than 1" in capsys.readouterr().err
