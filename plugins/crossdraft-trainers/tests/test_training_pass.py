"""Training look-ahead embeddings: they learn, nothing else changes, and training matches drafting."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
import torch
from crossdraft_trainers.contract import Text
from crossdraft_trainers.trainees.look_ahead import PassTraining
from crossdraft_trainers.trainer import Trainer
from training_target import VOCAB, peaked_target, written_texts

from crossdraft.framework.contracts.models import LoadedModel
from crossdraft.framework.contracts.rng import CounterRng
from crossdraft.framework.errors import UsageError
from crossdraft.framework.lm.transformers_lm import TransformersLM
from crossdraft.framework.models.checkpoint import load_checkpoint


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return peaked_target(2)


@pytest.fixture(scope="module")
def texts(target: LoadedModel) -> tuple[list[Text], list[Text]]:
    return written_texts(target)


def recipe(**more: Any) -> PassTraining:
    small = {"look_ahead": 2, "cuts": 6, "epochs": 8, "batch_tokens": 64, "learning_rate": 0.05, "warm_up": 2}
    return PassTraining(**{**small, "sampled_vocab": 8, **more})


def digest(model: Any) -> str:
    result = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        result.update(name.encode() + tensor.numpy().tobytes())
    return result.hexdigest()


@pytest.fixture(scope="module")
def trained(target: LoadedModel, texts: Any, tmp_path_factory: Any) -> tuple[Trainer, list[float], bool]:
    """A trainer after a whole run, its losses, and whether the target's weights are what they were."""
    before, losses = digest(target.model), []
    trainer = Trainer(target, recipe(), tmp_path_factory.mktemp("pass"))
    step = trainer._train

    def watched(*args: Any) -> tuple[float, float]:
        result = step(*args)
        losses.append(result[0])
        return result

    trainer._train = watched  # type: ignore[method-assign]
    trainer.run(*texts)
    trainer.export(texts[1])
    return trainer, losses, digest(target.model) == before


def test_loss_falls_and_acceptance_rises_at_every_embedding(trained: Any) -> None:
    trainer, losses, _ = trained
    epoch = len(losses) // 8
    assert sum(losses[-epoch:]) < 0.97 * sum(losses[:epoch]), losses
    first, last = trainer.log[0]["positions"], trainer.log[-1]["positions"]
    assert len(first) == 2
    assert all(after > before + 0.003 for before, after in zip(first, last, strict=True)), (first, last)


def test_only_embeddings_are_trained(trained: Any, target: Any) -> None:
    trainer, _, unchanged = trained
    assert unchanged, "the target's weights have changed"
    assert {name: tuple(w.shape) for name, w in trainer.trainee.trained.items()} == {"embeddings": (2, 32)}
    assert all(weight.grad is None for weight in target.model.parameters())
    mean = target.model.get_input_embeddings().weight.mean(0)
    assert all(not torch.equal(row, mean) for row in trainer.trainee.student.embeddings)


@pytest.mark.parametrize("cuts", [3, 1000])
def test_training_positions_match_drafting(trained: Any, target: Any, texts: Any, cuts: int) -> None:
    """At every position of every text, in a batch: the target's output in a pass of the drafter."""
    trainer = trained[0]
    other = Trainer(target, recipe(cuts=cuts), trainer.out / f"cuts{cuts}")
    trainee: Any = other.trainee
    trainee.student.load_state_dict(trainer.trainee.student.state_dict())
    batch = trainer.features.batch(texts[0][:4], range(4))
    with torch.no_grad():
        state = torch.get_rng_state()
        result, present = trainee._cuts(batch)
        torch.set_rng_state(state)
        states, keep, probs = trainee._aligned(batch)
    places = result.shape[1]
    visited: list[set[int]] = [set() for _ in range(4)]
    for n, (cut, real) in enumerate(zip(result.flatten().tolist(), present.flatten().tolist(), strict=True)):
        text = texts[0][n // places]
        last = len(text.ids) - 2  # after it there is one token of the response: no embedding drafts it
        assert real == (len(text.prompt) - 1 <= cut < last) or not real
        assert keep[:, n].tolist() == [real and cut + 1 + j <= last for j in range(2)]
        if not real:
            continue
        visited[n // places].add(cut)
        lm = TransformersLM(target.model, 1, 64)
        fork = lm.fork(range(2), embeddings=trainee.student.embeddings.detach())
        lm.start(0, text.ids[: cut + 1])
        fork.start(0, text.ids[: cut + 1])
        output = fork.forward(torch.tensor([[text.ids[cut], VOCAB, VOCAB + 1]]))[0][0, 1:]
        for j in range(2):
            if keep[j, n]:
                torch.testing.assert_close(states[j, n] @ trainee.head.T, output[j], atol=1e-4, rtol=1e-4)
                assert torch.equal(probs[j, n], batch.hidden[n // places, cut + 1 + j, 0])
    for text, found_here in zip(texts[0][:4], visited, strict=True):
        all_items = set(range(len(text.prompt) - 1, len(text.ids) - 2))
        assert found_here == all_items if cuts == 1000 else len(found_here) == 3 and found_here <= all_items


def test_interrupted_run_ends_with_same_embeddings(trained: Any, target: Any, texts: Any, tmp_path: Any) -> None:
    whole = trained[0]
    broken, steps = Trainer(target, recipe(), tmp_path), []
    original = broken._train

    def dies(*args: Any) -> Any:
        if len(steps) == 7:
            raise RuntimeError("the machine went down")
        if len(steps) == 4:
            broken._save()
        steps.append(1)
        return original(*args)

    broken._train = dies  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="went down"):
        broken.run(*texts)
    repeat = Trainer(target, recipe(), tmp_path)
    repeat.run(*texts)
    assert repeat.step == whole.step > 8
    assert repeat.log[-1]["positions"] == whole.log[-1]["positions"]
    assert torch.equal(repeat.trainee.trained["embeddings"], whole.trainee.trained["embeddings"])


@pytest.mark.parametrize("batch_size", [1, 3])
def test_exported_model_keeps_greedy_output(trained: Any, target: Any, heads_decoder: Any, batch_size: int) -> None:
    trainer = trained[0]
    config = json.loads((trainer.out / "config.json").read_text())
    assert config["target_sha256"] == "ab" * 32 and (config["look_ahead"], config["hidden_size"]) == (2, 32)
    assert torch.equal(load_checkpoint(str(trainer.out)).tensors["embeddings"], trainer.trainee.student.embeddings)
    drafter = trainer.trainee.drafting_with(trainer.out)
    prompts = [[5, 9, 3], [7], [2, 30, 11, 4]]
    rest = {"max_new_tokens": 12, "eos": (), "rng": CounterRng(0), "batch_size": batch_size}
    run = heads_decoder(target.model, drafter.pop("name"), drafter, "greedy", **rest)
    responses = sorted(run.run(prompts), key=lambda r: r.index)
    for prompt, response in zip(prompts, responses, strict=True):
        ids = list(prompt)
        for _ in range(12):
            ids.append(int(target.model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert response.tokens == ids[len(prompt) :]
    assert max(r.tau for response in responses for r in response.steps) > 1, "no look-ahead token was ever right"


def test_training_resumes_from_saved_embeddings(trained: Any, target: Any, texts: Any, tmp_path: Any) -> None:
    out = str(trained[0].out)
    trainer = Trainer(target, recipe(start_from=out, epochs=1), tmp_path)
    trainer.run(*texts)
    assert trainer.log[0]["positions"] == trained[0].log[-1]["positions"]
    with pytest.raises(UsageError, match="has 2 look-ahead embeddings, not 3; add --look-ahead 2"):
        Trainer(target, recipe(start_from=out, look_ahead=3), tmp_path)


def test_texts_may_be_shorter_than_draft(target: Any, tmp_path: Any) -> None:
    """Short texts are not overrun, and texts without positions to learn from have no effect."""
    short, one, long = Text([3], [4, 5], "given"), Text([6, 7], [8], "given"), Text([9] * 5, [2] * 9, "given")
    trainer = Trainer(target, recipe(look_ahead=5), tmp_path)
    trainer.trainee.prepare([short, one, long])
    with torch.no_grad():
        separate = trainer.trainee.acceptance(trainer.features.batch([short], [0]))
        padded: Any = trainer.features.batch([short, one, long], [0, 1, 2])
        padded.predicts[2] = False
        batched = trainer.trainee.acceptance(padded)
    assert [len(result) for result in separate] == [1, 0, 0, 0, 0]
    for result, expected in zip(batched, separate, strict=True):
        torch.testing.assert_close(result, expected)
    trainer = Trainer(target, recipe(), tmp_path)
    trainer.run([short, one, short], [short, one])
    assert trainer.step > 0


def test_window_that_text_reaches_beyond_is_refused(tiny_model: Any, tmp_path: Any) -> None:
    model = tiny_model("gemma3", vocab_size=VOCAB)
    gemma = LoadedModel(model, None, "gemma", "made here", "0" * 64, (1,), 128)  # type: ignore[arg-type]
    window = model.config.sliding_window
    fits, beyond = (Text([3, 4], [5 + i % 9 for i in range(window - 2 + more)], "given") for more in (0, 1))
    trainer = Trainer(gemma, recipe(epochs=1), tmp_path)
    trainer.run([fits, fits], [fits])
    with pytest.raises(
        UsageError, match=f"{window + 1} tokens, but layers of gemma have an attention window of {window}"
    ):
        Trainer(gemma, recipe(epochs=1), tmp_path / "other").run([fits, beyond], [fits])
