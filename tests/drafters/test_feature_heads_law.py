"""The joint distribution of two steps with heads over features is the target's, enumerated exactly."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from feature_heads import LAYERS, NAMES, make_head

from crossdraft.framework import plugins
from crossdraft.framework.contracts.draft import Draft

EXACT = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=8)


@pytest.fixture(scope="module")
def exact(tiny_model: Callable, tmp_path_factory: Any) -> Callable[[str], tuple[Any, dict[str, Any]]]:
    """``exact(name)``: a float64 target of three tokens, and the options of a random head for it."""
    target = tiny_model("llama", seed=3, vocab_size=3, num_hidden_layers=4, copy="exact", **EXACT).double()

    def instance(name: str) -> tuple[Any, dict[str, Any]]:
        torch.manual_seed(5)
        head = make_head(name, target, torch.tensor([0, 2]), {**EXACT, "num_hidden_layers": 1})
        with torch.no_grad():
            for weight in head.parameters():
                if weight.dim() > 1 and weight.requires_grad:
                    weight.copy_(torch.randn_like(weight) * 0.4)
        path = tmp_path_factory.mktemp(f"exact-{name}")
        head.save(path)
        return target, {"model": str(path)} | ({"layers": LAYERS} if name == "eagle3" else {})

    return instance


@pytest.mark.parametrize(
    "name, draft, verifier, depth",
    [
        pytest.param("eagle3", {"gamma": 2}, "token", 2, marks=pytest.mark.slow),
        *[pytest.param(name, {"gamma": 2}, "token", 2, marks=pytest.mark.slow) for name in NAMES if name != "eagle3"],
        ("eagle3", {"gamma": 2}, "block", 2),
        *[pytest.param(name, {"gamma": 1}, "block", 1, marks=pytest.mark.slow) for name in ("eagle", "mtp")],
        ("mtp", {"tree": "static", "branching": [2, 1]}, "sample-match", 2),
        ("eagle3", {"tree": "static", "branching": [2], "siblings": "without-replacement"}, "specinfer", 1),
        ("eagle3", {"tree": "dynamic", "depth": 2, "top_k": 2, "nodes": 4}, "traversal", 2),
    ],
)
def test_joint_distribution_of_two_steps_is_targets(
    enumerate_model: Callable, exact: Callable, name: str, draft: dict[str, Any], verifier: str, depth: int
) -> None:
    target, options = exact(name)
    certificate = enumerate_model(target, name, {**options, **draft}, verifier, prompt=[2, 0, 1], depth=depth)
    assert certificate.tv < 1e-6  # transformers norms in float32
    assert all(0.05 < tau < depth for tau in certificate.expected_tau)


def test_certificate_detects_unsampled_distribution(enumerate_model: Callable, exact: Callable) -> None:
    """The test above can fail: q of another temperature than the tokens were drawn at."""
    target, options = exact("eagle3")
    eagle3 = plugins.get("drafters", "eagle3")
    honest = eagle3.propose

    def dishonest(self: Any, sequences: Any, rng: Any) -> Draft:
        draft = honest(self, sequences, rng)
        if draft.q is not None:
            draft.q = draft.q**0.5 / (draft.q**0.5).sum(-1, keepdim=True)
        return draft

    eagle3.propose = dishonest
    try:
        certificate = enumerate_model(target, "eagle3", {**options, "gamma": 1}, "token", prompt=[2, 0], depth=1)
    finally:
        eagle3.propose = honest
    assert certificate.tv > 1e-3
