"""Training Medusa and EAGLE-3 heads: they learn, resume to the bit, and what is written drafts without loss."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from crossdraft_trainers.contract import Text
from crossdraft_trainers.features import Features
from crossdraft_trainers.losses import SampledHead, distil_many, most_frequent, overlap
from crossdraft_trainers.trainees.eagle3 import Eagle3Training
from crossdraft_trainers.trainees.medusa import MedusaTraining
from crossdraft_trainers.trainer import Trainer
from training_target import VOCAB, peaked_target, written_texts

from crossdraft.framework.contracts.models import LoadedModel
from crossdraft.framework.contracts.rng import CounterRng
from crossdraft.framework.errors import CrossdraftError, UsageError
from crossdraft.framework.models.checkpoint import load_checkpoint


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    """Six layers, so that an EAGLE-3 head reads hidden states 2 and 3."""
    return peaked_target(6)


@pytest.fixture(scope="module")
def texts(target: LoadedModel) -> tuple[list[Text], list[Text]]:
    return written_texts(target)


RECIPES: dict[str, Callable[..., Any]] = {
    "medusa": lambda **more: MedusaTraining(
        **{"heads": 3, "epochs": 8, "batch_tokens": 64, "learning_rate": 3e-3, "warm_up": 2, "sampled_vocab": 8, **more}
    ),
    "eagle3": lambda **more: Eagle3Training(
        **{"unroll": 3, "epochs": 8, "batch_tokens": 64, "learning_rate": 3e-3, "warm_up": 2, "draft_vocab": 30, **more}
    ),
}


@pytest.fixture(scope="module", params=list(RECIPES))
def trained(request: Any, target: LoadedModel, texts: Any, tmp_path_factory: Any) -> tuple[str, Trainer]:
    """A kind, and its trainer after a whole run."""
    trainer = Trainer(target, RECIPES[request.param](), tmp_path_factory.mktemp(request.param))
    trainer.run(*texts)
    trainer.export(texts[1])
    return request.param, trainer


def test_acceptance_rises_at_every_position(trained: Any) -> None:
    _, trainer = trained
    first, last = trainer.log[0]["positions"], trainer.log[-1]["positions"]
    assert len(first) == 3
    assert all(after > before + 0.003 for before, after in zip(first, last, strict=True)), (first, last)
    assert trainer.best == trainer.log[-1]["held_out_acceptance"] == last[0]


def test_interrupted_run_ends_with_same_weights(trained: Any, target: Any, texts: Any, tmp_path: Any) -> None:
    kind, whole = trained
    broken, steps = Trainer(target, RECIPES[kind](), tmp_path), []
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
    (tmp_path / "checkpoint.part").write_bytes(broken.checkpoint.read_bytes()[:1000])  # killed while it saved again
    repeat = Trainer(target, RECIPES[kind](), tmp_path)
    repeat.run(*texts)
    assert repeat.step == whole.step > 8
    assert repeat.log[-1]["positions"] == whole.log[-1]["positions"]
    for name, weight in repeat.trainee.trained.items():
        assert torch.equal(weight, whole.trainee.trained[name]), name


def test_finished_run_is_not_trained_again(trained: Any, target: Any, texts: Any) -> None:
    kind, whole = trained
    repeat = Trainer(target, RECIPES[kind](), whole.out)
    repeat._train = None  # type: ignore[assignment]
    repeat.run(*texts)
    assert (repeat.log, repeat.best) == (whole.log, whole.best)


def test_training_resumes_from_saved_drafter(trained: Any, target: Any, texts: Any, tmp_path: Any) -> None:
    kind, whole = trained
    other = (texts[0][::-1], texts[1])  # other texts: another vocabulary would be counted from them
    trainer = Trainer(target, RECIPES[kind](start_from=str(whole.out), learning_rate=1e-4, epochs=2), tmp_path)
    trainer.run(*other)
    # Written in bfloat16, so almost where the other run ended.
    first = trainer.log[0]["positions"]
    assert first == pytest.approx(whole.log[-1]["positions"], abs=0.02)
    assert first[0] > whole.log[0]["positions"][0] + 0.01
    for name, weight in trainer.trainee.trained.items():
        assert weight.dtype == torch.float32
        assert not torch.equal(weight, whole.trainee.trained[name]), name
    repeat = Trainer(target, trainer.recipe, tmp_path)
    repeat.run(*other)
    for name, weight in repeat.trainee.trained.items():
        assert torch.equal(weight, trainer.trainee.trained[name]), name


def test_start_that_does_not_fit_is_refused(trained: Any, target: Any, tmp_path: Any) -> None:
    kind, whole = trained
    wrong = {"medusa": {"heads": 2}, "eagle3": {"layers": (0, 2, 4)}}[kind]
    sentence = {"medusa": "3 heads of 1 blocks, not 2 of 1; add --heads 3", "eagle3": "--layers"}[kind]
    with pytest.raises(CrossdraftError, match=sentence):
        Trainer(target, RECIPES[kind](start_from=str(whole.out), **wrong), tmp_path)
    with pytest.raises(CrossdraftError, match=r"model directory .* does not exist"):
        Trainer(target, RECIPES[kind](start_from="./nowhere"), tmp_path)


@pytest.mark.parametrize("options", [{}, {"tree": True}])
def test_exported_model_keeps_greedy_output(
    trained: Any, options: dict[str, Any], target: Any, heads_decoder: Any
) -> None:
    kind, trainer = trained
    trees = {"medusa": {"nodes": 6}, "eagle3": {"tree": "dynamic", "depth": 2, "top_k": 2, "nodes": 5}}
    inputs = trees[kind] if options else {"gamma": 3}
    drafter = {**trainer.trainee.drafter, "model": str(trainer.out), **inputs}
    name = drafter.pop("name")
    prompts = [[5, 9, 3], [7], [2, 30, 11, 4]]
    rest = {"max_new_tokens": 12, "eos": (), "rng": CounterRng(0)}
    run = heads_decoder(target.model, name, drafter, "greedy", batch_size=3, **rest)
    responses = sorted(run.run(prompts), key=lambda r: r.index)
    for prompt, response in zip(prompts, responses, strict=True):
        ids = list(prompt)
        for _ in range(12):
            ids.append(int(target.model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert response.tokens == ids[len(prompt) :]
    assert sum(r.tau for response in responses for r in response.steps) > 0


def test_training_time_test_equals_drafting(target: Any, texts: Any, tmp_path: Any) -> None:
    """The same distributions after a root, step by step along the text."""
    trainer = Trainer(target, RECIPES["eagle3"](epochs=1, unroll=4), tmp_path)
    trainer.run(*texts)
    text = max(texts[1], key=lambda t: len(t.prompt))
    batch = Features(target, trainer.trainee.hidden_layers, 1).batch([text], [0])
    student: Any = trainer.trainee.student
    with torch.no_grad():
        states, keep, probs, tokens = trainer.trainee._unrolled(batch)  # type: ignore[attr-defined]
        passes = student.lm_head(states)[:, 0]
    row, first = 3, len(text.prompt) - 2  # of the response, and the pair that drafts its first token
    assert tokens[0].tolist() == text.response
    assert torch.equal(probs[0], batch.hidden[0, first + 1 : -1, -1]), "the target's law of the same tokens"
    ids = torch.tensor([text.ids])
    with torch.inference_mode():
        features = student.fuse(batch.hidden[:, :, :-1])[:, : first + row + 1]
        for s in range(4):
            # A chain fed from scratch: true features up to the row, its own after it.
            out = student(ids[:, 1 : first + row + 2 + s], features)
            assert keep[s, 0, row + s]
            torch.testing.assert_close(out.logits[0, -1], passes[s, row + s], atol=1e-4, rtol=1e-4)
            features = torch.cat([features, out.features[:, -1:]], 1)


def divergence(target: torch.Tensor, target_head: torch.Tensor, states: torch.Tensor, head: torch.Tensor) -> Any:
    """``[n]`` KL(p, q)."""
    log_p, log_q = (target @ target_head.T).log_softmax(-1), (states @ head.T).log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def test_loss_of_medusa_is_weighted_sum_over_heads(target: Any, texts: Any, tmp_path: Any) -> None:
    trainer = Trainer(target, RECIPES["medusa"](sampled_vocab=0, decay=0.5), tmp_path)
    trainee: Any = trainer.trainee
    trainee.prepare(texts[0])
    for weight in trainee.student.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    batch = trainer.features.batch(texts[0][:5], range(5))
    expected = torch.zeros(())
    for i, head in enumerate(trainee.student):
        results = []
        for row, text in enumerate(texts[0][:5]):
            # Token t + 2 + i of a response, drafted after the root t + 1, which is the prompt's last at the earliest.
            for t in range(max(len(text.prompt) - 2, 0), len(text.ids) - 2 - i):
                hidden = batch.hidden[row, :, 0]
                results.append(divergence(hidden[t + 1 + i], trainee.head, head(hidden[t]), trainee.head))
        expected = expected + 0.5**i * torch.stack(results).mean()
    torch.testing.assert_close(trainee.loss(batch, 0)[0], expected, atol=1e-5, rtol=1e-5)


def test_loss_of_eagle3_leaves_out_chains_head_cannot_draft(target: Any, texts: Any, tmp_path: Any) -> None:
    trainer = Trainer(target, RECIPES["eagle3"](draft_vocab=25, decay=0.5), tmp_path)
    trainee: Any = trainer.trainee
    trainee.prepare(texts[0])
    batch = trainer.features.batch(texts[0][:5], range(5))
    states, _, probs, _ = trainee._unrolled(batch)
    ids, head = trainee.student.target_ids, trainee.student.lm_head.weight
    known, expected, left_out = set(ids.tolist()), torch.zeros(()), 0
    for s in range(3):
        results = []
        for row, text in enumerate(texts[0][:5]):
            for last in range(s, len(text.response)):
                if last - s == 0 and len(text.prompt) == 1:
                    continue  # the root has no feature before it
                if known.issuperset(text.response[last - s : last + 1]):
                    results.append(divergence(probs[row, last], trainee.head[ids], states[s, row, last], head))
                else:
                    left_out += 1
        expected = expected + 0.5**s * torch.stack(results).mean()
    assert left_out > 20
    torch.testing.assert_close(trainee.loss(batch, 0)[0], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("kind", "many"), [("medusa", {"heads": 6}), ("eagle3", {"unroll": 6})])
def test_texts_may_be_shorter_than_draft(kind: str, many: Any, target: Any, tmp_path: Any) -> None:
    """The loss of a short text is the same beside a long one, where nothing runs over its end."""
    short, one = Text([3], [4, 5], "given"), Text([6, 7], [8], "given")
    long = Text([9] * 5, [2] * 9, "given")
    trainer = Trainer(target, RECIPES[kind](**many), tmp_path)
    trainer.trainee.prepare([short, one, long])
    with torch.no_grad():
        for text in (short, one):
            separate = trainer.trainee.acceptance(trainer.features.batch([text], [0 if text is short else 1]))
            padded: Any = trainer.features.batch([text, long], [0 if text is short else 1, 2])
            padded.predicts[1] = False
            for result, expected in zip(trainer.trainee.acceptance(padded), separate, strict=True):
                torch.testing.assert_close(result, expected)
    trainer = Trainer(target, RECIPES[kind](**many), tmp_path)
    trainer.run([short, one, short], [one])
    assert trainer.step > 0


def test_reduced_vocabulary_round_trip(target: Any, texts: Any, tmp_path: Any) -> None:
    trainer = Trainer(target, RECIPES["eagle3"](epochs=1, draft_vocab=11), tmp_path)
    trainer.run(*texts)
    trainer.export(texts[1])
    checkpoint = load_checkpoint(str(tmp_path))
    counts = torch.bincount(torch.tensor([token for text in texts[0] for token in text.response]), minlength=VOCAB)
    ids = torch.arange(11) + checkpoint.tensors["d2t"]
    assert ids.tolist() == sorted(sorted(range(VOCAB), key=lambda i: (-int(counts[i]), i))[:11])
    assert checkpoint.tensors["t2d"].nonzero()[:, 0].tolist() == ids.tolist()
    assert checkpoint.config["eagle_aux_hidden_state_layer_ids"] == list(trainer.recipe.layers)
    assert trainer.trainee.student.target_ids.tolist() == ids.tolist()  # type: ignore[union-attr]


def test_eagle3_head_starts_as_last_layer_of_target(target: Any, tmp_path: Any, texts: Any) -> None:
    trainer = Trainer(target, RECIPES["eagle3"](), tmp_path)
    trainer.trainee.prepare(texts[0])
    head: Any = trainer.trainee.student
    last, layer = target.model.model.layers[-1], head.layers[0]
    assert torch.equal(layer.self_attn.k_proj.weight[:, 32:], last.self_attn.k_proj.weight)
    assert torch.equal(layer.mlp.up_proj.weight, last.mlp.up_proj.weight)
    assert torch.equal(head.lm_head.weight, target.model.lm_head.weight[head.target_ids])
    assert torch.equal(head.fc.weight[:, -32:], torch.eye(32))


def test_eagle3_head_for_gemma_does_not_take_its_norms(tiny_model: Any, tmp_path: Any, texts: Any) -> None:
    model = tiny_model("gemma3", vocab_size=VOCAB)
    gemma = LoadedModel(model, None, "gemma", "made here", "0" * 64, (1,), 128)  # type: ignore[arg-type]
    trainer = Trainer(gemma, RECIPES["eagle3"](layers=(0, 1, 0)), tmp_path)
    trainer.trainee.prepare(texts[0])
    head: Any = trainer.trainee.student
    assert all(weight.eq(1).all() for name, weight in head.named_parameters() if "norm" in name)


@pytest.mark.parametrize("trained", ["medusa"], indirect=True)
def test_medusa_accuracies_by_rank(trained: Any, target: Any, texts: Any) -> None:
    _, trainer = trained
    heads, right, count = trainer.trainee.student, torch.zeros(3, 10), torch.zeros(3)
    for text in texts[1]:
        ids = torch.tensor([text.ids])
        with torch.no_grad():
            logits = heads(target.model.model(ids).last_hidden_state.bfloat16().float())[:, 0]
        for i in range(3):
            for t in range(max(len(text.prompt) - 2, 0), len(text.ids) - 2 - i):
                right[i] += logits[i, t].topk(10).indices == text.ids[t + 2 + i]
                count[i] += 1
    written = json.loads((trainer.out / "config.json").read_text())["medusa_accuracies"]
    torch.testing.assert_close(torch.tensor(written), right / count[:, None], atol=2e-5, rtol=0)


def test_gradient_for_several_students_is_that_of_autograd() -> None:
    torch.manual_seed(0)
    students, head = torch.randn(2, 7, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
    target, target_head = torch.randn(7, 5), torch.randn(20, 5)
    keep = torch.tensor([[True] * 7, [True, False, True, True, False, False, True]])
    rest = {"decay": 0.5, "target_head": target_head, "rows": 3}
    loss, same = distil_many(students, keep, target, head, torch.zeros(20), "forward-kl", **rest)
    ours = torch.autograd.grad(3 * loss, (students, head))
    log_p, log_q = (target @ target_head.T).log_softmax(-1), (students @ head.T).log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    expected = kl[0].mean() + 0.5 * kl[1, keep[1]].mean()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(ours, torch.autograd.grad(3 * expected, (students, head)), atol=1e-6, rtol=1e-4)
    minimum = torch.minimum(log_p.exp(), log_q.exp()).sum(-1)
    torch.testing.assert_close(same, torch.stack([minimum[0].mean(), minimum[1, keep[1]].mean()]).detach())


def test_overlap_counts_missing_vocabulary() -> None:
    states, head, target_head = torch.ones(1, 1), torch.zeros(2, 1), torch.zeros(4, 1)
    assert overlap(states[None], states, head, target_head, torch.tensor([0, 3])).tolist() == [[0.5]]
    assert overlap(states[None], states, target_head, target_head).tolist() == [[1]]


def test_sampled_rows_stand_for_all_tokens_and_follow_from_step() -> None:
    head = torch.arange(20.0)[:, None]
    sampled = SampledHead(head, [3, 5, 3], 6, seed=1)
    rows, bias = sampled.at(4)
    assert rows[:2, 0].tolist() == [3, 5] and len(set(rows[:, 0].tolist())) == 8
    assert bias.exp().tolist() == pytest.approx([1, 1, *[3] * 6]), "20 tokens in all"
    repeat, other = SampledHead(head, [5, 3], 6, seed=1).at(4)[0], sampled.at(5)[0]
    assert torch.equal(rows, repeat) and not torch.equal(rows, other)
    for expected in (0, 18):
        assert SampledHead(head, [3, 5], expected, seed=1).at(0)[0] is head


def test_most_frequent_tokens() -> None:
    assert most_frequent([5, 5, 3, 3, 1], 2, 8).tolist() == [3, 5]
    assert most_frequent([7], 3, 8).tolist() == [0, 1, 7]


@pytest.mark.parametrize(
    ("recipe", "sentence"),
    [
        (lambda: Eagle3Training(layers=(1, 2, 3)), "the first of them not 1"),
        (lambda: Eagle3Training(layers=(2, 3, 6)), "hidden states 0 to 5"),
    ],
)
def test_options_that_do_not_fit_are_refused(target: Any, recipe: Any, sentence: str, tmp_path: Any) -> None:
    with pytest.raises(UsageError, match=sentence):
        Trainer(target, recipe(), tmp_path)
