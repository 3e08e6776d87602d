"""The stopping classifier of DISCO: features, training data, and draft lengths."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from crossdraft.drafters.autoregressive.disco import Classifier, DiscoLength, features
from crossdraft.drafters.draft_model.draft_model import DraftModelChain
from crossdraft.framework import plugins
from crossdraft.framework.certificate.certify import TOLERANCE, certify
from crossdraft.framework.certificate.table_lm import Toy
from crossdraft.framework.contracts.draft import Draft
from crossdraft.framework.errors import UsageError

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
    assert certificate.tv <= TOLERANCE and certificate.coverage.drafted


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
