"""Drafters on targets of several families, pair by pair: the text at temperature 0, and independence of the batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from head_checkpoints import write_heads

from crossdraft.framework.models.threads import one_thread
from crossdraft.testing import DrafterContract, TinyModel

HEADS = {"medusa", "eagle", "eagle3", "mtp", "dspark", "dflash", "p-eagle", "mlp-speculator", "pass"}
BLOCKS = {"layers": [1, 2, 3], "gamma": 3}
STATIC = {"tree": "static", "siblings": "without-replacement", "branching": [2, 1]}
DYNAMIC = {"tree": "dynamic", "depth": 3, "top_k": 2, "nodes": 5, "layers": [2, 3, 1]}
#: Every drafter that reads or runs the target, or its draft model, once, and every family with several of them.
PAIRS = [
    ("medusa", {"branching": [2, 2]}, "gpt2"),
    ("eagle", STATIC, "qwen3"),
    ("eagle3", DYNAMIC, "gpt-neox"),
    ("eagle3", {"gamma": 2, "layers": [2, 3, 1]}, "mistral-sliding"),
    ("mtp", {"gamma": 2}, "qwen2"),
    ("dspark", BLOCKS, "opt"),
    ("dflash", BLOCKS, "mistral-sliding"),
    ("p-eagle", BLOCKS, "gpt2"),
    ("mlp-speculator", {}, "gemma3"),
    ("pass", {}, "opt"),
    ("early-exit", {"exit_layer": 1, "gamma": 3}, "gemma3"),
    ("layer-skip", {"skip_attention": (1, 2), "skip_mlp": (2, 3), "gamma": 3}, "qwen3"),
    ("jacobi", {"gamma": 3}, "gemma3"),
    ("lookahead", {"window": 3, "ngram": 3, "guesses": 2}, "gpt-neox"),
    ("draft-model", {"model": "noisy", "gamma": 3}, "opt"),
    ("draft-model-tree", {"model": "noisy", "branching": [2, 2]}, "gpt2"),
    ("draft-model-dynamic-tree", {"model": "noisy", "depth": 3, "top_k": 2, "nodes": 5}, "mistral-sliding"),
]


class FamilyModel(TinyModel):
    """A tiny model of another family."""

    def __init__(self, target: Any):
        self._target = target

    def model(self, device: str = "cpu") -> Any:
        return self._target


@pytest.fixture(scope="module")
def target_of(tiny_model: Callable, tmp_path_factory: Any) -> Callable[[str], tuple[Any, Path]]:
    """``target_of(family)``: a target of four layers (Gemma: two), and a directory of random heads for it."""

    @cache
    def make(family: str) -> tuple[Any, Path]:
        layers = {"gpt2": {"n_layer": 4}, "gemma3": {}}.get(family, {"num_hidden_layers": 4})
        target = copy.deepcopy(tiny_model(family, vocab_size=13, **layers)).requires_grad_(False)
        heads = tmp_path_factory.mktemp(family)
        write_heads(heads, target, mask_token=12, target_ids=torch.tensor([0, 1, 2, 3, 4, 5, 7, 8, 11]))
        return target, heads

    return make


@pytest.mark.parametrize("drafter, options, family", PAIRS)
def test_text_is_the_targets_own_in_any_batch(
    drafter: str, options: dict[str, Any], family: str, target_of: Callable[[str], tuple[Any, Path]]
) -> None:
    target, heads = target_of(family)
    if drafter in HEADS:
        options = {**options, "model": str(heads / drafter)}
    case = type("Case", (DrafterContract,), {"drafter": drafter, "options": options, "setting": FamilyModel(target)})()
    with one_thread():
        case.test_greedy_decoding_is_targets_own()
        batched, single = case.decode(3, 1.0), case.decode(1, 1.0)
    for i, response in batched.items():
        assert response.tokens == single[i].tokens
        assert [step.tau for step in response.steps] == [step.tau for step in single[i].steps]
    taus = {step.tau for response in batched.values() for step in response.steps}
    assert len(taus) > 1, "drafts are accepted and rejected"
