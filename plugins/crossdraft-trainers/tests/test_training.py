"""Training: the hand-made gradient, the draft model's start, runs that resume, and the command line of every kind."""

import json
import os
import re
import signal
import sys
from types import SimpleNamespace

import pytest
import torch
from crossdraft_trainers.contract import Text
from crossdraft_trainers.features import Features
from crossdraft_trainers.losses import distil
from crossdraft_trainers.texts import split
from crossdraft_trainers.trainees.draft_model import DraftModelTraining, student_of
from crossdraft_trainers.trainer import Trainer
from torch.nn import functional
from training_target import tied_llama

from crossdraft.framework import plugins
from crossdraft.framework.cli import main as cli
from crossdraft.framework.contracts.hookspecs import hookimpl
from crossdraft.framework.contracts.models import LoadedModel
from crossdraft.framework.errors import UsageError
from crossdraft.framework.models.digests import weights_sha256
from crossdraft.framework.models.load import load_model


@pytest.fixture
def target():
    return LoadedModel(tied_llama(), None, "tiny", "made here", "0" * 64, (1,), 128)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("divergence", "beta"),
    [(name, 0.5) for name in ("forward-kl", "reverse-kl", "tv", "lk", "lk-hybrid", "jsd", "nll")]
    + [("jsd", 0.1), ("jsd", 0.9)],
)
def test_gradient_is_that_of_autograd(divergence, beta):
    torch.manual_seed(1)
    student, teacher = torch.randn(7, 8, requires_grad=True), torch.randn(7, 8)
    head, bias = torch.randn(20, 8), torch.rand(20)
    tokens = torch.tensor([3, 19, 0, 3, 7, 11, 2])
    loss, overlap = distil(student, teacher, head, bias, divergence, rows=3, beta=beta, tokens=tokens)
    (ours,) = torch.autograd.grad(loss, student)
    log_p = functional.log_softmax(teacher @ head.T + bias, -1)
    log_q = functional.log_softmax(student @ head.T + bias, -1)
    p, q = log_p.exp(), log_q.exp()
    m = beta * p + (1 - beta) * q
    min_pq = torch.minimum(p, q).sum(-1)
    kl_share = (-3 * min_pq.detach()).exp()
    jsd = beta * (p * (p / m).log()).sum(-1) + (1 - beta) * (q * (q / m).log()).sum(-1)
    expected = {
        "forward-kl": (p * (log_p - log_q)).sum(-1).mean(),
        "reverse-kl": (q * (log_q - log_p)).sum(-1).mean(),
        "tv": (1 - min_pq).mean(),
        "lk": -min_pq.log().mean(),
        "lk-hybrid": (kl_share * (p * (log_p - log_q)).sum(-1) + (1 - kl_share) * (1 - min_pq)).mean(),
        "jsd": jsd.mean(),
        "nll": functional.cross_entropy(student @ head.T + bias, tokens),
    }[divergence]
    (theirs,) = torch.autograd.grad(expected, student)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(overlap, min_pq.mean().detach())


def test_lk_losses_stay_finite_without_overlap():
    head, bias = torch.eye(2), torch.zeros(2)
    student, teacher = torch.tensor([[200.0, 0.0]], requires_grad=True), torch.tensor([[0.0, 200.0]])
    for divergence in ("lk", "lk-hybrid"):
        loss, _ = distil(student, teacher, head, bias, divergence)
        (gradient,) = torch.autograd.grad(loss, student)
        assert loss.isfinite() and gradient.isfinite().all()


def test_student_of_all_layers_is_target(target):
    student = student_of(target.model, (0, 1, 2)).eval()
    ids = torch.arange(10)[None]
    torch.testing.assert_close(student(ids).logits, target.model(ids).logits)
    assert student.get_input_embeddings().weight is target.model.get_input_embeddings().weight


@pytest.mark.parametrize("layers", [(), (3,), (0, -1)])
def test_layers_target_does_not_have_are_refused(target, layers):
    with pytest.raises(UsageError, match="layers of the target, 0 to 2"):
        student_of(target.model, layers)


def texts():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(2, 50, (24, 12), generator=generator).tolist()
    return split([Text(row[:4], row[4:], "given") for row in rows], 0.2)


def test_training_raises_acceptance_and_resumes(target, tmp_path):
    train, held_out = texts()
    recipe = DraftModelTraining(
        layers=(0, 2), epochs=6, batch_tokens=48, learning_rate=3e-3, warm_up=2, sampled_vocab=0
    )
    whole = Trainer(target, recipe, tmp_path / "whole")
    whole.out.mkdir()
    whole.run(train, held_out)
    assert whole.log[-1]["held_out_acceptance"] > whole.log[0]["held_out_acceptance"]

    broken = Trainer(target, recipe, tmp_path / "broken")
    broken.out.mkdir()
    steps, original = [], broken._train

    def dies_after_ten(*args):
        if len(steps) == 10:
            broken._save()
            raise KeyboardInterrupt
        steps.append(1)
        return original(*args)

    broken._train = dies_after_ten
    with pytest.raises(KeyboardInterrupt):
        broken.run(train, held_out)
    repeat = Trainer(target, recipe, tmp_path / "broken")
    repeat.run(train, held_out)
    assert repeat.step == whole.step
    assert repeat.best == pytest.approx(whole.best, abs=2e-3)


def test_checkpoint_of_other_options_is_refused(target, tmp_path):
    train, held_out = texts()
    Trainer(target, DraftModelTraining(layers=(0,), epochs=1), tmp_path).run(train, held_out)
    with pytest.raises(UsageError, match="other options"):
        Trainer(target, DraftModelTraining(layers=(1,), epochs=1), tmp_path).run(train, held_out)


def test_damaged_checkpoint_is_named(target, tmp_path):
    train, held_out = texts()
    (tmp_path / "checkpoint.pt").write_bytes(b"PK\x03\x04 half a file")
    with pytest.raises(UsageError, match=r"checkpoint\.pt is damaged"):
        Trainer(target, DraftModelTraining(layers=(0,), epochs=1), tmp_path).run(train, held_out)


def test_checkpoint_of_other_texts_is_refused(target, tmp_path):
    train, held_out = texts()
    Trainer(target, DraftModelTraining(layers=(0,), epochs=1), tmp_path).run(train, held_out)
    with pytest.raises(UsageError, match=r"other options or texts \(texts\)"):
        Trainer(target, DraftModelTraining(layers=(0,), epochs=1), tmp_path).run(train[1:], held_out)


def test_signal_ends_run_after_step_with_checkpoint(target, tmp_path):
    train, held_out = texts()
    trainer = Trainer(target, DraftModelTraining(layers=(0,), epochs=2, batch_tokens=48), tmp_path)
    original = trainer._train

    def train_interrupted(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        return original(*args)

    trainer._train = train_interrupted
    with pytest.raises(KeyboardInterrupt):
        trainer.run(train, held_out)
    assert trainer.step == torch.load(trainer.checkpoint, weights_only=True)["step"] == 1


def test_features_do_not_depend_on_batch_or_on_room(target):
    train, _ = texts()
    kept, none = Features(target, (1, -1), 1.0), Features(target, (1, -1), 0.0)
    batched = kept.batch([train[0], train[1]], [0, 1])
    longer = Text([3] * 20, [4, 5], "given")
    other = none.batch([longer, train[1]], [7, 1])
    n = len(train[1].ids)
    assert torch.equal(batched.hidden[1, :n], other.hidden[1, :n])
    assert torch.equal(kept.batch([train[1]], [1]).hidden[0], other.hidden[1, :n])
    inner = target.model(torch.tensor([train[1].ids]), output_hidden_states=True).hidden_states
    expected = torch.stack([inner[1], inner[-1]], 2)[0].bfloat16().float()
    torch.testing.assert_close(other.hidden[1, :n], expected)
    assert not none._kept


def test_head_that_is_more_than_matrix_is_refused(tmp_path):
    model = tied_llama()
    model.lm_head.register_forward_hook(lambda module, args, logits: 30 * logits)
    scaled = LoadedModel(model, None, "tiny", "made here", "0" * 64, (1,), 128)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="more than a matrix"):
        Trainer(scaled, DraftModelTraining(layers=(0,)), tmp_path)


@pytest.mark.parametrize(
    "kind", ["draft-model", *[pytest.param(heads, marks=pytest.mark.slow) for heads in ("medusa", "eagle3")]]
)
def test_command_line_writes_texts_trains_and_writes_card(kind, on_disk, tmp_path, capsys, monkeypatch):
    questions = str(on_disk / "questions.jsonl")
    argv = [
        "train",
        kind,
        "--target",
        str(on_disk),
        "--out",
        str(tmp_path),
        "--questions",
        questions,
        "--tokens",
        "300",
    ]
    argv += ["--write-batch", "8", "--max-response", "12", "--minutes", "0.005", "--batch-tokens", "64", "--held-out"]
    argv += ["0.1", "--measure", questions, "--measure-limit", "4", "--measure-tokens", "6", "--dtype", "float32"]
    monkeypatch.setattr(sys, "argv", ["crossdraft", *argv])
    assert cli.main(argv) == 0, capsys.readouterr().err
    assert f"{kind} written to {tmp_path}" in capsys.readouterr().out
    card = (tmp_path / "README.md").read_text()
    facts = json.loads((tmp_path / "training.json").read_text())
    assert facts["kind"] == kind and facts["steps"] > 0 and facts["log"][0]["step"] == 0
    assert load_model(str(on_disk), dtype="float32").sha256 in card
    assert re.search(r"\| a +\| +[1-9]\.\d\d \| +2 \|\n\| b +\| +[1-9]\.\d\d \| +2 \|", card)
    assert str(tmp_path.parent) not in card, "a path of this machine"
    assert f"Made with: `crossdraft train {kind} --target {on_disk.name} --out {tmp_path.name}" in card
    assert "answers were sampled from the target at temperature 1" in " ".join(card.split())

    argv[argv.index("--out") + 1] = str(tmp_path / "twice")
    del argv[argv.index("--measure") : argv.index("--dtype")]
    argv += ["--start-from", str(tmp_path), "--measure", "none"]
    assert cli.main(argv) == 0, capsys.readouterr().err
    repeat = json.loads((tmp_path / "twice" / "training.json").read_text())
    ended, start = facts["log"][-1]["positions"], repeat["log"][0]["positions"]
    assert start == pytest.approx(ended, abs=0.02), "it does not start where the other ended"
    card = " ".join((tmp_path / "twice" / "README.md").read_text().split())
    assert f"Initial weights: `{tmp_path.name}`, sha256 `{weights_sha256(tmp_path)}`" in card


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--layers", "0,9", "--tokens", "5"], "must name layers of the target, 0 to 2"),
        (["--tokens", "0"], "no texts to train on"),
        (["--measure", "nowhere.jsonl"], "prompt file nowhere.jsonl does not exist"),
        (["--start-from", "./nowhere"], "model directory ./nowhere does not exist"),
        (["--start-from", "TARGET"], "has an embedding of its own"),
        (["--questions", "nothing"], "there is no prompt source named 'nothing'"),
    ],
)
def test_wrong_options_give_sentence(options, sentence, on_disk, tmp_path, capsys):
    options = [str(on_disk) if option == "TARGET" else option for option in options]
    argv = ["train", "draft-model", "--target", str(on_disk), "--out", str(tmp_path), "--dtype", "float32", *options]
    assert cli.main(argv) == 2
    assert sentence in capsys.readouterr().err


def test_kind_that_is_broken_leaves_others(capsys):
    plugin = SimpleNamespace(crossdraft_register_trainers=hookimpl(lambda register: register("bad", "nowhere:Recipe")))
    plugins.manager().register(plugin, "extra")
    try:
        assert cli.main(["train", "bad"]) == 2
        assert "the trainer 'bad' of extra (in this process) is unusable" in capsys.readouterr().err
        with pytest.raises(SystemExit):
            cli.main(["train", "medusa", "--help"])
        assert "--sampled-vocab" in capsys.readouterr().out
    finally:
        plugins.manager().unregister(plugin)
