"""`crossdraft train` killed by the system at any time, and started again with the same command."""

import json
import os
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tqdm import tqdm

from crossdraft.framework.cli import main as cli


def start(argv: list[str], calls: Path, kill_at: int = 0) -> int:
    """The process that runs the command; a fork, which has imported everything.

    Args:
        calls: file for the number of Python functions that the main thread called.
        kill_at: number of the call before which the system kills the process; 0 = none.
    """
    process = os.fork()
    if process:
        return process
    try:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        tqdm.set_lock(threading.RLock())  # its own is shared with forks, and would stay locked after a kill
        number = 0

        def count(frame: Any, event: str, _: Any) -> None:
            nonlocal number
            number += event in ("call", "c_call")
            if number == kill_at > 0:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.setprofile(count)
        status = cli.main(argv)
        sys.setprofile(None)
        calls.write_text(str(number), encoding="utf-8")
        os._exit(status)
    finally:
        os._exit(70)


def ended(out: Path) -> tuple[bytes, list[Any], dict[str, torch.Tensor]]:
    """Texts, evaluations but for their time, and all tensors that are on disk."""
    facts = json.loads((out / "training.json").read_text())
    log = [{key: value for key, value in entry.items() if key != "minutes"} for entry in facts["log"]]
    tensors = {f"{file.name}: {k}": t for file in out.glob("*.safetensors") for k, t in load_file(file).items()}
    state = torch.load(out / "checkpoint.pt", weights_only=True)
    tensors |= state["student"]
    for number, moments in state["optimizer"]["state"].items():
        tensors |= {f"{number} {key}": value for key, value in moments.items()}
    return (out / "texts.jsonl").read_bytes(), [facts["steps"], facts["tokens"], log], tensors


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["draft-model", "medusa", "eagle3"])
def test_killed_and_started_again_it_ends_as_it_would_have(kind: str, on_disk: Path, tmp_path: Path) -> None:
    argv = ["train", kind, "--target", str(on_disk), "--dtype", "float32", "--tokens", "80", "--max-response", "5"]
    argv += ["--questions", str(on_disk / "questions.jsonl"), "--write-batch", "8", "--temperatures", "1,0"]
    argv += ["--epochs", "2", "--batch-tokens", "60", "--save-minutes", "0", "--measure", "none", "--held-out", "0.2"]
    calls = tmp_path / "calls"
    assert os.waitpid(start([*argv, "--out", str(tmp_path / "whole")], calls), 0)[1] == 0
    whole, every = ended(tmp_path / "whole"), int(calls.read_text(encoding="utf-8"))
    chance, kills = random.Random(0), 0
    for attempt in range(8):
        out = tmp_path / str(attempt)
        for _ in range(1 + attempt % 3):
            process = start([*argv, "--out", str(out)], calls, chance.randint(1, every))
            kills += os.waitpid(process, 0)[1] == signal.SIGKILL
        assert os.waitpid(start([*argv, "--out", str(out)], calls), 0)[1] == 0
        texts, log, tensors = ended(out)
        assert (texts, log) == whole[:2], attempt
        assert tensors.keys() == whole[2].keys()
        assert all(torch.equal(tensor, whole[2][name]) for name, tensor in tensors.items()), attempt
        left = {path.name for path in out.iterdir()} - {path.name for path in (tmp_path / "whole").iterdir()}
        assert not left, "half-written files"
    assert kills >= 8
