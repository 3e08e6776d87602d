"""Drafters on targets of several families, pair by pair: the text at temperature 0, and independence of the batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from family_targets import check_text_in_any_batch, family_target
from head_checkpoints import write_heads

HEADS = {"medusa", "eagle", "eagle3"}
STATIC = {"tree": "static", "siblings": "without-replacement", "branching": [2, 1]}
DYNAMIC = {"tree": "dynamic", "depth": 3, "top_k": 2, "nodes": 5, "layers": [2, 3, 1]}
#: Every drafter that reads or runs the target, or its draft model, once, and every family with several of them.
PAIRS = [
    ("medusa", {"branching": [2, 2]}, "gpt2"),
    ("eagle", STATIC, "qwen3"),
    ("eagle", {"gamma": 2}, "gemma3"),
    ("eagle3", DYNAMIC, "gpt-neox"),
    ("eagle3", {"gamma": 2, "layers": [2, 3, 1]}, "mistral-sliding"),
    ("draft-model", {"model": "noisy", "gamma": 3}, "opt"),
    ("draft-model-tree", {"model": "noisy", "branching": [2, 2]}, "gpt2"),
    ("draft-model-dynamic-tree", {"model": "noisy", "depth": 3, "top_k": 2, "nodes": 5}, "mistral-sliding"),
]


@pytest.mark.parametrize("drafter, options, family", PAIRS)
def test_text_is_the_targets_own_in_any_batch(
    drafter: str, options: dict[str, Any], family: str, tiny_model: Callable, tmp_path: Path
) -> None:
    target = family_target(tiny_model, family)
    if drafter in HEADS:
        write_heads(tmp_path, target, target_ids=torch.tensor([0, 1, 2, 3, 4, 5, 7, 8, 11]))
        options = {**options, "model": str(tmp_path / drafter)}
    check_text_in_any_batch(drafter, options, target)
