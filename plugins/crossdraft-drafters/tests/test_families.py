"""Drafters on targets of several families, pair by pair: the text at temperature 0, and independence of the batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from family_targets import check_text_in_any_batch, family_target
from further_heads import write_further_heads

BLOCKS = {"layers": [1, 2, 3], "gamma": 3}
PAIRS = [
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
]


@pytest.mark.parametrize("drafter, options, family", PAIRS)
def test_text_is_the_targets_own_in_any_batch(
    drafter: str, options: dict[str, Any], family: str, tiny_model: Callable, tmp_path: Path
) -> None:
    target = family_target(tiny_model, family)
    write_further_heads(tmp_path, target, mask_token=12)
    if (tmp_path / drafter).exists():
        options = {**options, "model": str(tmp_path / drafter)}
    check_text_in_any_batch(drafter, options, target)
