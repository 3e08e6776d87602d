"""Distillation: the hand-made gradient, the student's start, and training that resumes."""

import pytest
import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from crossdraft.framework.errors import UsageError
from crossdraft.framework.models import LoadedModel
from crossdraft.framework.training.small_lm import Recipe, Trainer, distil, student_of
from crossdraft.framework.training.texts import Text, split


def tied_llama(layers=3, vocab=50):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def target():
    return LoadedModel(tied_llama(), None, "tiny", "made here", "0" * 64, (1,), 128)  # type: ignore[arg-type]


@pytest.mark.parametrize("divergence", ["forward-kl", "reverse-kl", "tv"])
def test_the_gradient_is_that_of_autograd(divergence):
    torch.manual_seed(1)
    student, teacher = torch.randn(7, 8, requires_grad=True), torch.randn(7, 8)
    head, bias = torch.randn(20, 8), torch.rand(20)
    loss, overlap = distil(student, teacher, head, bias, divergence, rows=3)
    (ours,) = torch.autograd.grad(loss, student)
    log_p = functional.log_softmax(teacher @ head.T + bias, -1)
    log_q = functional.log_softmax(student @ head.T + bias, -1)
    p, q = log_p.exp(), log_q.exp()
    expected = {
        "forward-kl": (p * (log_p - log_q)).sum(-1).mean(),
        "reverse-kl": (q * (log_q - log_p)).sum(-1).mean(),
        "tv": (1 - torch.minimum(p, q).sum(-1)).mean(),
    }[divergence]
    (theirs,) = torch.autograd.grad(expected, student)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(overlap, torch.minimum(p, q).sum(-1).mean().detach())


def test_a_student_of_all_layers_is_the_target(target):
    student = student_of(target.model, (0, 1, 2)).eval()
    ids = torch.arange(10)[None]
    torch.testing.assert_close(student(ids).logits, target.model(ids).logits)
    assert student.get_input_embeddings().weight is target.model.get_input_embeddings().weight


@pytest.mark.parametrize("layers", [(), (3,), (0, -1)])
def test_layers_the_target_does_not_have_are_refused(target, layers):
    with pytest.raises(UsageError, match="layers 0 to 2"):
        student_of(target.model, layers)


def texts():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(2, 50, (24, 12), generator=generator).tolist()
    return split([Text(row[:4], row[4:], "given") for row in rows], 0.2)


def test_training_raises_acceptance_and_resumes_where_it_stopped(target, tmp_path):
    train, held_out = texts()
    recipe = Recipe(layers=(0, 2), epochs=6, batch_tokens=48, learning_rate=3e-3, warm_up=2, sampled_vocab=0)
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
    again = Trainer(target, recipe, tmp_path / "broken")
    again.run(train, held_out)
    assert again.step == whole.step
    assert again.best == pytest.approx(whole.best, abs=2e-3)


def test_a_checkpoint_of_other_options_is_refused(target, tmp_path):
    train, held_out = texts()
    Trainer(target, Recipe(layers=(0,), epochs=1), tmp_path).run(train, held_out)
    with pytest.raises(UsageError, match="other options"):
        Trainer(target, Recipe(layers=(1,), epochs=1), tmp_path).run(train, held_out)
