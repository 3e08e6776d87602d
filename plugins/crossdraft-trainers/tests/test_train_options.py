"""The command line of training: what it refuses before anything is loaded, where it can write, how it is stopped."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from crossdraft_trainers import files, text_files
from crossdraft_trainers.heartbeat import doing, heartbeat

from crossdraft.framework.cli import main as cli
from crossdraft.framework.errors import UsageError
from crossdraft.framework.util.limits import Limit


def train(kind: str, target: Any, out: Any, *options: str) -> int:
    return cli.main(["train", kind, "--target", str(target), "--out", str(out), "--dtype", "float32", *options])


def nothing_is_loaded(*_: Any, **__: Any) -> Any:
    raise AssertionError("a model is loaded before the options are checked")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--epochs", "0"], "--epochs 0: should be greater than or equal to 1"),
        (["--divergence", "l2"], "--divergence l2: should be 'forward-kl', 'reverse-kl', 'jsd', 'tv', 'lk', "),
        (["--beta", "0.1"], "--beta 0.1: must be left out without --divergence jsd"),
        (["--on-policy", "0.5", "--divergence", "nll"], "--on-policy 0.5: must be 0 with --divergence nll"),
        (["--on-policy", "1", "--misses-of", "x"], "--on-policy 1: must be 0 with --misses-of"),
        (["--invented", "0.2"], "--invented 0.2 requires --questions"),
        (["--measure", "none", "--measure-limit", "24"], "--measure-limit has no effect with --measure none"),
        (["--trust-remote-code", "other"], "--trust-remote-code 'other' is not a model of this command"),
        (["--tokens", "0"], "no texts to train on"),
        (
            ["--tokens", "0", "--texts", __file__, "--questions", "builtin"],
            "--questions has no effect with --tokens 0",
        ),
        (["--texts-limit", "3"], "--texts-limit requires --texts"),
        (["--texts", "nowhere.jsonl"], "--texts nowhere.jsonl is not a file"),
        (["--device", "nothing"], "unknown device 'nothing'"),
        (["--start-from", "./nowhere"], "model directory ./nowhere does not exist"),
    ],
)
def test_wrong_option_is_refused_before_anything_is_loaded(
    options: list[str], sentence: str, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("crossdraft.framework.models.load.load_model", nothing_is_loaded)
    assert train("draft-model", "no-such-target", tmp_path / "out", *options) == 2
    output = capsys.readouterr().err
    assert sentence in output and output.count("\n") == 1 and len(output) < 400, output


def test_file_in_place_of_out_is_refused_and_kept(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "out"
    file.write_text("mine")
    assert train("draft-model", "no-such-target", file) == 2
    assert f"--out {file} is not a directory; give an existing" in capsys.readouterr().err
    assert file.read_text() == "mine"


def test_other_files_are_kept(on_disk: Path, tmp_path: Path, capsys: Any) -> None:
    before = (on_disk / "model.safetensors").read_bytes()
    for force in ([], ["--force"]):
        assert train("draft-model", on_disk, on_disk, *force) == 2
        assert "would overwrite the files of" in capsys.readouterr().err
    assert (on_disk / "model.safetensors").read_bytes() == before
    (tmp_path / "README.md").write_text("a year's work")
    assert train("draft-model", on_disk, tmp_path) == 2
    err = capsys.readouterr().err
    assert "contains files not written by crossdraft train, such as README.md" in err and "--force" in err
    os.mkfifo(tmp_path / "texts.jsonl")
    assert train("draft-model", on_disk, tmp_path, "--force") == 2
    assert "texts.jsonl: it is a device, a pipe or a socket" in capsys.readouterr().err
    assert (tmp_path / "README.md").read_text() == "a year's work"


def test_two_trainings_do_not_write_into_one_directory(tmp_path: Path) -> None:
    refused = pytest.raises(UsageError, match="another crossdraft train is writing there")
    with files.claim_directory(tmp_path), refused, files.claim_directory(tmp_path):
        pass
    with files.claim_directory(tmp_path):
        pass


def test_line_of_texts_that_is_too_long_is_one_sentence(
    on_disk: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(text_files, "LINE_BYTES", Limit(1000, "a line is read into memory"))
    file = tmp_path / "long.jsonl"
    file.write_text(json.dumps({"prompt": "w4 " * 1000, "response": "w5"}) + "\n")
    assert train("draft-model", on_disk, tmp_path / "out", "--texts", str(file), "--tokens", "0") == 2
    assert ":1: the line is too long" in capsys.readouterr().err
    file.write_text(json.dumps({"prompt": "w4", "response": "w5"}) + "\n")
    assert train("draft-model", on_disk, tmp_path / "out", "--texts", str(file), "--tokens", "0") == 2
    assert "1 texts are too few" in capsys.readouterr().err


def test_prompt_that_cannot_fit_ends_at_once(on_disk: Path, tmp_path: Path, capsys: Any) -> None:
    assert train("medusa", on_disk, tmp_path, "--max-prompt", "2") == 2
    assert "--max-prompt 2: the empty chat template of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "moment"),
    [
        (signal.SIGTERM, "load"),
        (signal.SIGHUP, "write"),
        (signal.SIGINT, "step"),
        (signal.SIGTERM, "step"),
        (signal.SIGINT, "export"),
    ],
)
def test_signal_prints_resume_hint(
    kind: signal.Signals, moment: str, on_disk: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    place = {
        "load": "crossdraft.framework.models.load.load_model",
        "write": "crossdraft_trainers.texts.line_of",
        "step": "crossdraft_trainers.trainer.Trainer._train",
        "export": "crossdraft_trainers.trainer.Trainer.export",
    }[moment]
    module, _, name = place.rpartition(".")
    owner = cli_module(module)
    original, calls = getattr(owner, name), []

    def replacement(*args: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            os.kill(os.getpid(), kind)
        return original(*args, **more)

    monkeypatch.setattr(owner, name, replacement)
    before = signal.getsignal(kind)
    options = ["--tokens", "40", "--max-response", "5", "--write-batch", "8", "--measure", "none", "--epochs", "1"]
    options += ["--questions", str(on_disk / "questions.jsonl"), "--invented", "0"]
    assert train("medusa", on_disk, tmp_path, *options) == 130
    (line,) = [line for line in capsys.readouterr().err.replace("\r", "\n").splitlines() if "interrupted" in line]
    stored = [file for name in ("checkpoint.pt", "texts.jsonl") if (file := tmp_path / name).is_file()]
    stored = [file for file in stored if file.stat().st_size]
    assert bool(stored) == (moment != "load") or moment == "write"
    assert [file.name for file in stored[:1]] == ["checkpoint.pt"] or moment in ("load", "write")
    assert f"is in {stored[0]}" in line or f"are in {stored[0]}" in line if stored else "nothing was stored" in line
    assert signal.getsignal(kind) == before
    assert train("medusa", on_disk, tmp_path, *options) == 0
    assert (tmp_path / "README.md").exists()


def cli_module(name: str) -> Any:
    """A module, or a class in one."""
    if name in sys.modules:
        return sys.modules[name]
    module, _, attribute = name.rpartition(".")
    return getattr(sys.modules[module], attribute)


def test_signal_that_is_ignored_stays_ignored() -> None:
    from crossdraft.framework.runs.interrupts import handled

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with handled(signal.default_int_handler):
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_heartbeat_prints_current_work(capsys: Any) -> None:
    lines = list[str]()
    with heartbeat(0.01):
        for step in (1, 2):
            doing(lambda step=step: f"step {step}")
            while not any(line.endswith(f": step {step}") for line in lines):
                lines += capsys.readouterr().err.splitlines()
    assert all(line.startswith("crossdraft: ") for line in lines)
