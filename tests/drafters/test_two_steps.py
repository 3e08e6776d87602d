"""The joint distribution of two steps with heads over a target's features is the target's, enumerated exactly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from head_checkpoints import write_heads

from crossdraft.framework import plugins
from crossdraft.framework.contracts.draft import Draft

SIZES = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
EAGLE3 = {"layers": [2, 3, 1]}
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def exact(tiny_model: Callable, tmp_path_factory: Any) -> tuple[Any, Path]:
    """A float64 target of three tokens, and random heads for it."""
    target = tiny_model("llama", seed=3, vocab_size=3, num_hidden_layers=4, copy="exact", **SIZES).double()
    root = tmp_path_factory.mktemp("exact")
    write_heads(root, target.requires_grad_(False), target_ids=torch.tensor([0, 2]))
    return target, root


@pytest.mark.parametrize(
    "name, options, verifier, depth",
    [
        ("eagle3", {**EAGLE3, "gamma": 2}, "block", 2),
        ("eagle3", {**EAGLE3, "tree": "static", "branching": [2], "siblings": "without-replacement"}, "specinfer", 1),
        ("eagle3", {**EAGLE3, "tree": "dynamic", "depth": 2, "top_k": 2, "nodes": 4}, "traversal", 2),
        pytest.param("eagle", {"gamma": 2}, "token", 2, marks=SLOW),
    ],
)
def test_joint_distribution_of_two_steps_is_targets(
    enumerate_model: Callable, exact: tuple[Any, Path], name: str, options: dict[str, Any], verifier: str, depth: int
) -> None:
    target, heads = exact
    own = {**options, "model": str(heads / name)}
    certificate = enumerate_model(target, name, own, verifier, prompt=[2, 0, 1], depth=depth)
    assert certificate.tv < 1e-6  # transformers norms in float32
    assert all(0.02 < tau < depth for tau in certificate.expected_tau)


def test_enumeration_detects_other_distribution(
    enumerate_model: Callable, exact: tuple[Any, Path], monkeypatch: Any
) -> None:
    """The test above can fail: q of another temperature than the tokens were drawn at."""
    target, heads = exact
    drafter = plugins.get("drafters", "eagle3")
    honest = drafter.propose

    def dishonest(self: Any, sequences: Any, rng: Any) -> Draft:
        draft = honest(self, sequences, rng)
        if draft.q is not None:
            draft.q = draft.q**0.5 / (draft.q**0.5).sum(-1, keepdim=True)
        return draft

    monkeypatch.setattr(drafter, "propose", dishonest)
    own = {**EAGLE3, "model": str(heads / "eagle3"), "gamma": 1}
    assert enumerate_model(target, "eagle3", own, "token", prompt=[2, 0], depth=1).tv > 1e-3
