"""The stopping classifier of DISCO: features, training data, and draft lengths."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_target import save_chat_model

from crossdraft import generate
from crossdraft.drafters.autoregressive.disco import Classifier, DiscoLength, features
from crossdraft.drafters.autoregressive.disco_training import DiscoTraining, best_f1
from crossdraft.drafters.draft_model.draft_model import DraftModelChain
from crossdraft.framework import plugins
from crossdraft.framework.certificate.certify import TOLERANCE, certify
from crossdraft.framework.certificate.table_lm import Toy
from crossdraft.framework.cli import main as cli
from crossdraft.framework.contracts.draft import Draft
from crossdraft.framework.contracts.training import Batch
from crossdraft.framework.errors import UsageError
from crossdraft.framework.models.load import load_model

#: Reads the probability of the token alone: yes from 0.45 on.
CUT = {
    "kind": "disco", "top": 2, "gamma": 4, "threshold": 0.5, "weight1": [[0.0, 0.0, 0.0, 1.0, 0.0]], "bias1": [0.0],
    "weight2": [1.0], "bias2": -0.45,
}  # fmt: skip


def saved(path: Path, **changes: Any) -> str:
    (path / "settings.json").write_text(json.dumps({**CUT, **changes}))
    return str(path)


def test_tensors_read_from_checkpoint() -> None:
    """By hand: the two largest, the entropy as a share of log 4, the token's own, its place."""
    q = torch.tensor([[0.5, 0.25, 0.125, 0.125], [0.0, 1.0, 0.0, 0.0]])
    result = features(q, torch.tensor([2, 1]), torch.tensor([0.0, 0.25]), 2)
    entropy = 0.5 * math.log(2) + 0.25 * math.log(4) + 0.25 * math.log(8)
    expected = [[0.5, 0.25, entropy / math.log(4), 0.125, 0.0], [1.0, 0.0, 0.0, 1.0, 0.25]]
    torch.testing.assert_close(result, torch.tensor(expected))
    assert features(q, torch.tensor([0, 0]), torch.zeros(2), 6).shape == (2, 9), "there may be fewer tokens than that"


def build(checkpoint: str, **options: Any) -> Callable:
    policy = {"name": "disco", "checkpoint": checkpoint, **options}
    return lambda context, gamma: DraftModelChain(
        DraftModelChain.Config(model="toy", gamma=gamma, policy=policy), context
    )


@pytest.mark.parametrize("toy", ["T0", "G2"])
@pytest.mark.parametrize("rule", ["token", "block"])
def test_lossless_by_enumeration(toys: dict[str, Toy], tmp_path: Path, toy: str, rule: str) -> None:
    certificate = certify(toys[toy], build(saved(tmp_path)), plugins.get("verifiers", rule), steps=2, gamma=2)
    assert certificate.tv <= TOLERANCE and certificate.drafted


def test_classifier_that_reads_tokens_probability_is_threshold(toys: dict[str, Toy], tmp_path: Path) -> None:
    """The same drafts as ``confidence`` with that threshold, so the same E[tau]."""
    checkpoint = saved(tmp_path)
    for name in ("T0", "G1", "G2"):
        both = [
            certify(toys[name], instance, plugins.get("verifiers", "token"), steps=1, gamma=3).expected_tau
            for instance in (
                build(checkpoint),
                lambda context, gamma: DraftModelChain(
                    DraftModelChain.Config(model="toy", gamma=gamma, policy={"name": "confidence", "threshold": 0.45}),
                    context,
                ),
            )
        ]
        assert both[0] == pytest.approx(both[1], abs=1e-12)


class Peeks(DiscoLength):
    """Deliberately wrong: drops the inspected token."""

    keeps_last = False


def test_dropping_token_that_was_looked_at_is_caught(toys: dict[str, Toy], tmp_path: Path, monkeypatch: Any) -> None:
    from crossdraft.drafters.autoregressive import disco

    monkeypatch.setattr(disco, "DiscoLength", Peeks)
    certificate = certify(toys["G2"], build(saved(tmp_path)), plugins.get("verifiers", "token"), steps=1, gamma=2)
    assert certificate.tv > 1e-3


def test_place_in_draft_counts(tmp_path: Path, tiny_model: Callable, decoder: Callable) -> None:
    """A classifier that reads the place alone: yes at the first two of four. Every draft has three tokens."""
    checkpoint = saved(tmp_path, weight1=[[0, 0, 0, 0, 1.0]], weight2=[-1.0], bias2=0.3)
    events: list[Draft] = []
    loop = decoder(
        tiny_model("llama"),
        DraftModelChain,
        {"model": "noisy", "gamma": 6, "policy": {"name": "disco", "checkpoint": checkpoint}},
        plugins.get("verifiers", "token"),
        batch_size=2,
        drafting=tiny_model("llama", noise=0.05),
        temperature=1.0,
        max_new_tokens=20,
        on_step=lambda event: events.append(event.draft),
    )
    list(loop.run([[5], [7, 8, 9]]))
    assert {draft.width for draft in events[:3]} == {3}


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"kind": "layer-skip"}, "is not a checkpoint of disco"),
        ({"top": 3}, "its layers are not 1 x 6 and 1 x 1"),
        ({"bias1": []}, "is damaged"),
        ({"weight1": [[0.0, 1.0], [0.0]]}, "is damaged"),
        ({"bias2": "x"}, "does not hold a classifier of two layers"),
        ({"weight2": [float("nan")]}, "does not hold a classifier of two layers"),
    ],
)
def test_damaged_checkpoint_is_refused(tmp_path: Path, changes: Any, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        Classifier.of("mine", {**CUT, **changes})


# -- training ------------------------------------------------------------------------------------------------


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
