"""The joint distribution of two steps with heads over a target's features is the target's, enumerated exactly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from further_heads import write_further_heads

SIZES = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
BLOCKS = {"layers": [1, 2, 3]}
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def exact(tiny_model: Callable, tmp_path_factory: Any) -> tuple[Any, Path]:
    """A float64 target of three tokens, and random heads for it."""
    target = tiny_model("llama", seed=3, vocab_size=3, num_hidden_layers=4, copy="exact", **SIZES).double()
    root = tmp_path_factory.mktemp("exact")
    write_further_heads(root, target.requires_grad_(False), mask_token=1)
    return target, root


@pytest.mark.parametrize(
    "name, options, verifier, depth",
    [
        ("dflash", {**BLOCKS, "gamma": 1}, "token", 1),
        ("dflash-2", {**BLOCKS, "gamma": 1}, "block", 1),
        ("dspark", {**BLOCKS, "gamma": 1}, "block", 1),
        ("p-eagle", {**BLOCKS, "gamma": 1}, "token", 1),
        ("mlp-speculator", {"gamma": 1}, "token", 1),
        ("mtp", {"tree": "static", "branching": [2, 1]}, "sample-match", 2),
        pytest.param("mtp", {"gamma": 2}, "block", 2, marks=SLOW),
        pytest.param("mlp-speculator", {"gamma": 2}, "token", 2, marks=SLOW),
        pytest.param("dflash", {**BLOCKS, "gamma": 2}, "block", 2, marks=SLOW),
        pytest.param("dflash-2", {**BLOCKS, "gamma": 2}, "block", 2, marks=SLOW),
        pytest.param("p-eagle", {**BLOCKS, "gamma": 2}, "block", 2, marks=SLOW),
        pytest.param("dspark", {**BLOCKS, "gamma": 2, "confidence": 0.5}, "token", 2, marks=SLOW),
        pytest.param("dspark", {**BLOCKS, "gamma": 2, "temperature": 0}, "token", 2, marks=SLOW),
        pytest.param(
            "dflash", {**BLOCKS, "gamma": 2, "policy": {"name": "confidence", "threshold": 0.4}}, "token", 2, marks=SLOW
        ),
    ],
)
def test_joint_distribution_of_two_steps_is_targets(
    enumerate_model: Callable, exact: tuple[Any, Path], name: str, options: dict[str, Any], verifier: str, depth: int
) -> None:
    target, heads = exact
    own = {**options, "model": str(heads / name)}
    certificate = enumerate_model(target, name.removesuffix("-2"), own, verifier, prompt=[2, 0, 1], depth=depth)
    assert certificate.tv < 1e-6  # transformers norms in float32
    assert all(0.02 < tau < depth for tau in certificate.expected_tau)
