"""The command line of training: what it refuses before anything is loaded, where it can write, how it is stopped."""

import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdraft.drafters.autoregressive.disco_training import DiscoTraining
from crossdraft.drafters.draft_model.training import DraftModelTraining
from crossdraft.drafters.heads.eagle3_training import Eagle3Training
from crossdraft.drafters.heads.medusa.training import MedusaTraining
from crossdraft.drafters.self_speculation.layer_skip_training import LayerSkipSearch
from crossdraft.drafters.self_speculation.pass_training import PassTraining
from crossdraft.framework.cli import main as cli
from crossdraft.framework.cli.train import CardOptions, RunOptions, StepOptions, TextOptions
from crossdraft.framework.contracts.training_options import Options, integers, numbers, option
from crossdraft.framework.errors import CrossdraftError, UsageError
from crossdraft.framework.training import files, text_files

EVERY = [
    DraftModelTraining,
    MedusaTraining,
    Eagle3Training,
    DiscoTraining,
    LayerSkipSearch,
    PassTraining,
    TextOptions,
    RunOptions,
    StepOptions,
    CardOptions,
]


def train(kind: str, target: Any, out: Any, *options: str) -> int:
    return cli.main(["train", kind, "--target", str(target), "--out", str(out), "--dtype", "float32", *options])


def nothing_is_loaded(*_: Any, **__: Any) -> Any:
    raise AssertionError("a model is loaded before the options are checked")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--epochs", "-1"], "--epochs -1: must be a whole number, at least 1 and at most 1000"),
        (["--epochs", "0"], "--epochs 0: must be"),
        (["--epochs", "2.5"], "--epochs 2.5: must be a whole number"),
        (["--epochs", "9" * 5000], "--epochs 999"),
        (["--batch-tokens", "0"], "--batch-tokens 0: must be a whole number, at least 1"),
        (["--learning-rate", "nan"], "--learning-rate nan: must be a number, above 0 and at most 10"),
        (["--learning-rate", "0"], "--learning-rate 0: must be"),
        (["--minutes", "inf"], "--minutes inf: must be a number, at least 0"),
        (["--warm-up", "-3"], "--warm-up -3: must be"),
        (["--weight-decay", "nan"], "--weight-decay nan: must be"),
        (["--save-minutes", "-1"], "--save-minutes -1: must be"),
        (["--seed", "-1"], "--seed -1: must be a whole number, at least 0 and at most 4294967295"),
        (["--divergence", "l2"], "--divergence l2: must be one of forward-kl, reverse-kl, jsd, tv, lk, lk-hybrid, nll"),
        (["--beta", "0.1"], "--beta 0.1: must be left out without --divergence jsd"),
        (["--divergence", "jsd", "--beta", "1"], "--beta 1: must be a number, above 0 and below 1"),
        (["--on-policy", "0.5", "--divergence", "nll"], "--on-policy 0.5: must be 0 with --divergence nll"),
        (["--on-policy", "1", "--misses-of", "x"], "--on-policy 1: must be 0 with --misses-of"),
        (
            ["--layers", "0,x"],
            "--layers 0,x: must be whole numbers with commas between them (at most 256), each at least 0 and",
        ),
        (["--layers", "0,99999999"], "--layers 0,99999999: must be"),
        (["--layers", ",".join("0" * 999)], "--layers 0,0,0,"),
        (["--sampled-vocab", "-1"], "--sampled-vocab -1: must be"),
        (["--held-out", "2"], "--held-out 2: must be a number, above 0 and below 1"),
        (["--held-out", "0"], "--held-out 0: must be"),
        (
            ["--temperatures", "-1"],
            "--temperatures -1: must be numbers with commas between them (at most 256), each at least 0",
        ),
        (["--temperatures", "1,nan"], "--temperatures 1,nan: must be"),
        (["--temperatures", ""], "--temperatures '': must be"),
        (["--invented", "1.5"], "--invented 1.5: must be a number, at least 0 and at most 1"),
        (["--invented", "0.2"], "--invented 0.2 requires --questions"),
        (["--invented", "0.5"], "--invented 0.5 requires --questions"),
        (["--measure", "none", "--measure-limit", "24"], "--measure-limit 24 has no effect with --measure none"),
        (["--trust-remote-code", "other"], "--trust-remote-code 'other' is not a model of this command"),
        (["--tokens", "-5"], "--tokens -5: must be"),
        (["--tokens", "0"], "no texts to train on"),
        (
            ["--tokens", "0", "--texts", __file__, "--questions", "builtin"],
            "--questions has no effect with --tokens 0",
        ),
        (["--texts-limit", "3"], "--texts-limit 3 requires --texts"),
        (["--texts-limit", "-3"], "--texts-limit -3: must be"),
        (["--texts", "nowhere.jsonl"], "--texts nowhere.jsonl is not a file"),
        (["--texts", "a\0b"], "is not a file"),
        (["--texts", "~nosuchuser/x"], "--texts '~nosuchuser/x' is not a valid path"),
        (["--max-prompt", "0"], "--max-prompt 0: must be"),
        (["--max-response", "0"], "--max-response 0: must be a whole number, at least 1"),
        (["--write-batch", "0"], "--write-batch 0: must be"),
        (["--write-batch", "100000"], "--write-batch 100000: must be"),
        (["--cache-gib", "nan"], "--cache-gib nan: must be"),
        (["--dtype", "int8"], "--dtype int8: must be one of auto, float32, bfloat16, float16"),
        (["--device", "nothing"], "unknown device 'nothing'"),
        (["--precision", "fp8"], "--precision fp8: must be one of no, bf16"),
        (["--measure-limit", "0"], "--measure-limit 0: must be"),
        (["--measure-tokens", "-1"], "--measure-tokens -1: must be"),
        (["--start-from", "./nowhere"], "model directory ./nowhere does not exist"),
        (["--out", ""], "--out '' is not a valid path"),
        (["--out", "~nosuchuser/x"], "--out '~nosuchuser/x' is not a valid path"),
        (["--out", "x" * 300], "is not writable (File name too long)"),
        (["--out", "a\0b"], "is not writable"),
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
    assert f"--out {file}: is a file; give a directory" in capsys.readouterr().err
    assert file.read_text() == "mine"


def test_directory_that_cannot_be_written_to_is_refused(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files.tempfile, "TemporaryFile", refused)
    assert train("draft-model", "no-such-target", tmp_path) == 2
    assert "is not writable (Permission denied)" in capsys.readouterr().err


def test_two_trainings_do_not_write_into_one_directory(tmp_path: Path) -> None:
    refused = pytest.raises(UsageError, match="another crossdraft train is writing there")
    with files.claim_directory(tmp_path), refused, files.claim_directory(tmp_path):
        pass
    with files.claim_directory(tmp_path):
        pass


def test_line_of_texts_that_is_too_long_is_one_sentence(
    on_disk: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(text_files, "MOST_LINE", 1000)
    file = tmp_path / "long.jsonl"
    file.write_text(json.dumps({"prompt": "w4 " * 1000, "response": "w5"}) + "\n")
    assert train("draft-model", on_disk, tmp_path / "out", "--texts", str(file), "--tokens", "0") == 2
    assert "line 1: exceeds 1,000 bytes" in capsys.readouterr().err
    file.write_text(json.dumps({"prompt": "w4", "response": "w5"}) + "\n")
    assert train("draft-model", on_disk, tmp_path / "out", "--texts", str(file), "--tokens", "0") == 2
    assert "1 texts are too few" in capsys.readouterr().err


def test_prompt_that_cannot_fit_ends_at_once(on_disk: Path, tmp_path: Path, capsys: Any) -> None:
    assert train("medusa", on_disk, tmp_path, "--max-prompt", "2") == 2
    assert "--max-prompt 2: the empty chat template of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        (signal.SIGTERM, "load"),
        (signal.SIGHUP, "write"),
        (signal.SIGINT, "step"),
        (signal.SIGTERM, "step"),
        (signal.SIGINT, "export"),
    ],
)
def test_signal_prints_resume_hint(
    kind: signal.Signals, where: str, on_disk: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    place = {
        "load": "crossdraft.framework.models.load.load_model",
        "write": "crossdraft.framework.training.texts.line_of",
        "step": "crossdraft.framework.training.trainer.Trainer._train",
        "export": "crossdraft.framework.training.trainer.Trainer.export",
    }[where]
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
    (line,) = [line for line in capsys.readouterr().err.replace("\r", "\n").splitlines() if "crossdraft:" in line]
    assert line.endswith(
        f"crossdraft: interrupted; the checkpoint is in {tmp_path}; run the same command again to resume"
    )
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
    from crossdraft.framework.runs.interrupts import interrupting

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with interrupting():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


# What an option allows.


@pytest.mark.parametrize("options", EVERY)
def test_defaults_are_allowed_and_read_back(options: type[Options]) -> None:
    instance = options()
    for name, default, settings_ in options.options():
        assert getattr(instance, name) == default
        written = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
        if written:
            assert settings_["type"](written) == default


@pytest.mark.parametrize("options", EVERY)
@settings(max_examples=20, deadline=None)
@given(value=st.one_of(st.none(), st.booleans(), st.text(), st.floats(), st.integers(), st.just(10**5000), st.lists(
    st.one_of(st.integers(), st.floats(), st.text(max_size=3)), max_size=3)), data=st.data())  # fmt: skip
def test_any_value_is_taken_as_it_is_or_refused_in_sentence(options: type[Options], value: Any, data: Any) -> None:
    name, _, settings_ = data.draw(st.sampled_from(list(options.options())))
    flag = f"--{name.replace('_', '-')} "
    try:
        assert getattr(options(**{name: value}), name) is value
    except UsageError as error:
        assert str(error).startswith(flag) and len(str(error)) < 400
    if isinstance(value, str):
        try:
            settings_["type"](value)
        except CrossdraftError as error:
            assert str(error).startswith(flag) and len(str(error)) < 400


@dataclass(frozen=True, kw_only=True)
class Bounded(Options):
    whole: int = option(3, "", at_least=1, below=5)
    real: float = option(0.5, "", above=0, at_most=1)
    wholes: tuple[int, ...] = option((), "", type=integers, at_least=2)
    reals: tuple[float, ...] = option((1.0,), "", type=numbers, below=2)
    word: str = option("a", "", choices=("a", "b"))
    own: str = option("x", "", type=str.upper)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ({"whole": 1}, {"whole": 0}),
        ({"whole": 4}, {"whole": 5}),
        ({"whole": 2}, {"whole": 2.0}),
        ({"real": 1}, {"real": 1.0000001}),
        ({"real": 1e-300}, {"real": 0.0}),
        ({"real": 0.5}, {"real": float("nan")}),
        ({"wholes": (2, 3)}, {"wholes": (2, 1)}),
        ({"wholes": ()}, {"wholes": 2}),
        ({"reals": (1, 1.5)}, {"reals": (1, 2.0)}),
        ({"word": "b"}, {"word": "c"}),
        ({"real": 1}, {"real": True}),
    ],
)
def test_documented_bounds_are_enforced(right: dict[str, Any], wrong: dict[str, Any]) -> None:
    (name, value) = next(iter(right.items()))
    assert getattr(Bounded(**right), name) == value
    with pytest.raises(UsageError, match=f"^--{name} "):
        Bounded(**wrong)
    readers = {name: settings_["type"] for name, _, settings_ in Bounded.options()}
    assert (readers["own"]("q"), readers["reals"]("1,0"), readers["wholes"]("2,7")) == ("Q", (1.0, 0.0), (2, 7))
