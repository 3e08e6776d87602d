"""DistillSpec's choices: sequences or words, whose texts, and what other students miss."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from crossdraft_trainers import trainer as trainer_module
from crossdraft_trainers.contract import Text, public
from crossdraft_trainers.losses import SampledHead
from crossdraft_trainers.texts import split
from crossdraft_trainers.trainees.draft_model import DraftModelTraining, student_of
from crossdraft_trainers.trainees.on_policy_texts import own_answers
from crossdraft_trainers.trainer import Trainer
from training_target import tied_llama

from crossdraft.framework.contracts.models import LoadedModel
from crossdraft.framework.errors import UsageError

COMMON: dict[str, Any] = {"layers": (0, 2), "batch_tokens": 60, "learning_rate": 3e-3, "warm_up": 1}


@pytest.fixture
def target() -> LoadedModel:
    return LoadedModel(tied_llama(), None, "tiny", "made here", "0" * 64, (1,), 128)  # type: ignore[arg-type]


def texts() -> tuple[list[Text], list[Text]]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(2, 50, (20, 14), generator=generator).tolist()
    return split([Text(row[: 3 + i % 3], row[3 + i % 3 :], "given") for i, row in enumerate(rows)], 0.2)


def drawn(student: Any, prompts: list[list[int]], maximum: list[int], eos: int) -> list[list[int]]:
    """The same as `own_answers`, a whole pass for every token and row, and random numbers in the same order."""
    output: list[list[int]] = [[] for _ in prompts]
    for _ in range(max(maximum)):
        if all(eos in answer for answer in output):
            break
        distributions = [
            student(torch.tensor([p + a])).logits[0, -1].softmax(-1) for p, a in zip(prompts, output, strict=True)
        ]
        for answer, token in zip(output, torch.multinomial(torch.stack(distributions), 1)[:, 0].tolist(), strict=True):
            answer.append(0 if eos in answer else token)  # what pads a row that ended
    cut = [answer[: answer.index(eos) + 1] if eos in answer else answer for answer in output]
    return [answer[:longest] for answer, longest in zip(cut, maximum, strict=True)]


@torch.no_grad()
def test_responses_follow_full_student_distribution(target: LoadedModel) -> None:
    student = student_of(target.model, (0, 2))
    prompts, maximum = [[4, 9, 3], [7], [5, 5, 5, 8]], [9, 12, 4]
    eos = 11
    for seed in range(3):
        torch.manual_seed(seed)
        result = own_answers(student.train(), prompts, maximum, [eos])
        assert student.training, "it is as it was"
        torch.manual_seed(seed)
        assert result == drawn(student.eval(), prompts, maximum, eos)
    assert all(1 <= len(answer) <= longest for answer, longest in zip(result, maximum, strict=True))


def test_on_policy_texts_are_students_of_that_step(
    target: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = DraftModelTraining(**COMMON, epochs=1, on_policy=1.0, divergence="jsd", beta=0.2)
    trainer = Trainer(target, recipe, tmp_path)
    students, steps = [], []
    rewritten, batch = trainer.trainee.rewritten, trainer.features.batch

    def rewrite(inputs: Any, step: int) -> Any:
        students.append(copy.deepcopy(trainer.trainee.student).eval())
        result = rewritten(inputs, step)
        steps.append((step, list(inputs), list(result)))
        return result

    scored: list[Any] = []

    def features(inputs: Any, numbers: Any) -> Any:
        result = batch(inputs, numbers)
        scored.append((list(inputs), list(numbers), result))
        return result

    monkeypatch.setattr(trainer.trainee, "rewritten", rewrite)
    monkeypatch.setattr(trainer.features, "batch", features)
    trainer.run(*texts())
    assert len(steps) == trainer.step > 2
    for (step, inputs, result), student in zip(steps, students, strict=True):
        with trainer_module._seeded(recipe.seed, step, torch.device("cpu")), torch.no_grad():
            torch.rand(len(inputs))  # which of them
            repeat = drawn(student, [t.prompt for t in inputs], [len(t.response) for t in inputs], 1)
        assert [text.response for text in result] == repeat
        assert [text.prompt for text in result] == [text.prompt for text in inputs]
    first, last = (dict(student.named_parameters()) for student in (students[0], students[-1]))
    assert not all(torch.equal(first[name], last[name]) for name in first), "they differ from step to step"
    # The target scored what the student wrote, and nothing of it is kept for another text.
    learned_items = [item for item in scored if item[1][0] is None]
    assert len(learned_items) == trainer.step and all(number is None for item in learned_items for number in item[1])
    (text, *_), _, result = learned_items[0]
    whole = target.model(torch.tensor([text.ids]), output_hidden_states=True).hidden_states[-1][0]
    torch.testing.assert_close(result.hidden[0, : len(text.ids), 0], whole.bfloat16().float())


def test_share_of_texts_is_students(target: LoadedModel, tmp_path: Path) -> None:
    trainee = Trainer(target, DraftModelTraining(**COMMON, on_policy=0.25), tmp_path).trainee
    inputs = texts()[0]
    torch.manual_seed(0)
    kept = [old is new for _ in range(12) for old, new in zip(inputs, trainee.rewritten(inputs, 0), strict=True)]
    assert 0.65 < sum(kept) / len(kept) < 0.85
    assert {text.source for text in trainee.rewritten(inputs, 0)} == {"given", "student"}
    assert "25% of the answers written by the student" in trainee.describe()[2]


def test_on_policy_runs_resume_to_bit(target: LoadedModel, tmp_path: Path) -> None:
    recipe = DraftModelTraining(**COMMON, epochs=2, on_policy=0.5)
    whole, broken = Trainer(target, recipe, tmp_path / "whole"), Trainer(target, recipe, tmp_path / "broken")
    whole.run(*texts())
    original = broken._train

    def dies_in_the_third(*args: Any) -> Any:
        if broken.step == 3:
            broken._save()
            raise KeyboardInterrupt
        return original(*args)

    broken._train = dies_in_the_third  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        broken.run(*texts())
    repeat = Trainer(target, recipe, tmp_path / "broken")
    repeat.run(*texts())
    assert repeat.log == [
        entry | {"minutes": other["minutes"]} for entry, other in zip(whole.log, repeat.log, strict=True)
    ]
    ended, resumed = whole._state(), repeat._state()
    assert all(torch.equal(ended[name], resumed[name]) for name in ended)


@pytest.mark.parametrize("sampled_vocab", [0, 8])
def test_sequence_level_is_likelihood_of_texts(target: LoadedModel, tmp_path: Path, sampled_vocab: int) -> None:
    trainer = Trainer(target, DraftModelTraining(**COMMON, divergence="nll", sampled_vocab=sampled_vocab), tmp_path)
    train, _ = texts()
    train = [Text(text.prompt, [2 + token % 20 for token in text.response], "given") for text in train]
    trainer.trainee.prepare(train)
    student, logs = trainer.trainee.student.eval(), []
    head, bias = trainer.trainee._rows.at(4)
    for text in train[:3]:
        states = student.get_decoder()(torch.tensor([text.ids])).last_hidden_state[0]
        place = trainer.trainee._rows.row_indices(torch.tensor(text.response))
        assert torch.equal(head[place], trainer.trainee.head[text.response])
        output = (states[len(text.prompt) - 1 : -1] @ head.T + bias).log_softmax(-1)
        logs += output[torch.arange(len(place)), place].tolist()
    loss, _ = trainer.trainee.loss(trainer.features.batch(train[:3], [0, 1, 2]), 4)
    assert float(loss.detach()) == pytest.approx(-sum(logs) / len(logs), rel=1e-5)


def test_places_of_sampled_head() -> None:
    head = torch.arange(24.0).view(12, 2)
    some, whole = SampledHead(head, [7, 2, 9, 2], 3, seed=1), SampledHead(head, [7, 2, 9, 2], 0, seed=1)
    tokens = torch.tensor([9, 2, 7])
    for rows in (some, whole):
        assert torch.equal(rows.at(5)[0][rows.row_indices(tokens)], head[tokens])


# -- what other students miss ---------------------------------------------------------------------------------


@pytest.fixture
def first(chat_target: LoadedModel, tmp_path: Path) -> str:
    """A student that was trained for a while."""
    trainer = Trainer(chat_target, DraftModelTraining(**COMMON, epochs=6), tmp_path / "first")
    trainer.out.mkdir()
    trainer.run(*few())
    trainer.export(few()[1])
    return str(trainer.out)


def few() -> tuple[list[Text], list[Text]]:
    train, held_out = texts()
    all_items = [
        Text([t % 38 + 2 for t in x.prompt], [t % 7 + 2 for t in x.response], "given") for x in train + held_out
    ]
    return all_items[: len(train)], all_items[len(train) :]


def test_next_student_learns_missed_tokens(chat_target: LoadedModel, first: str, tmp_path: Path) -> None:
    recipe = DraftModelTraining(**COMMON, misses_of=first, sampled_vocab=0, divergence="nll")
    trainer = Trainer(chat_target, recipe, tmp_path / "second")
    train, _ = few()
    trainer.trainee.prepare(train)
    batch = trainer.features.batch(train[:4], range(4))
    learned_items = trainer.trainee._learned_positions(batch)
    other, kept = trainer.trainee._others[first].model, 0
    for row, text in enumerate(train[:4]):
        output = other(torch.tensor([text.ids])).logits[0].argmax(-1).tolist()
        for at in range(batch.ids.shape[1]):
            answers = len(text.prompt) - 1 <= at < len(text.ids) - 1
            target_value = answers and output[at] != text.ids[at + 1]
            assert bool(learned_items[row, at]) == target_value
            kept += target_value
    assert 0 < kept < int(batch.predicts.sum()), "the first student says some of them, and misses some"
    assert len(trainer.trainee.acceptance(batch)[0]) == kept
    loss, _ = trainer.trainee.loss(batch, 0)
    logits = trainer.trainee.student(batch.ids, attention_mask=batch.mask).logits
    expected = torch.nn.functional.cross_entropy(logits[learned_items], batch.ids.roll(-1, 1)[learned_items])
    torch.testing.assert_close(loss, expected)
    assert "those that first misses" in trainer.trainee.describe()[2]
    assert "tokens that none of first ranks first" in trainer.trainee.measured_by
    assert trainer._identity(*few())[f"misses of {first}"] == trainer.trainee._others[first].sha256


def test_no_missed_tokens_give_zero_loss(chat_target: LoadedModel, first: str, tmp_path: Path) -> None:
    trainer = Trainer(chat_target, DraftModelTraining(**COMMON, misses_of=first), tmp_path / "second")
    output = trainer.trainee._others[first].model
    text = [3, 4]
    for _ in range(5):
        text.append(int(output(torch.tensor([text])).logits[0, -1].argmax()))
    train = [Text(text[:2], text[2:], "given")]
    trainer.trainee.prepare(train)
    loss, same = trainer.trainee.loss(trainer.features.batch(train, [0]), 0)
    assert float(loss.detach()) == float(same) == 0
    loss.backward()


def test_invalid_missed_options_raise(target: LoadedModel, on_disk: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has an embedding of its own"):
        Trainer(target, DraftModelTraining(**COMMON, misses_of=str(on_disk)), tmp_path)


def test_cards_cut_each_of_several_paths() -> None:
    assert public("/home/me/first,second,org/name,/a/third") == "first,second,org/name,third"
