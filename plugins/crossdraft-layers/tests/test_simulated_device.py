"""Hybrids on the simulated CUDA device: the text of the CPU, for chains and trees in slots that are refilled."""

from __future__ import annotations

import copy

import pytest
from on_both_devices import on_both_devices
from oracle_trees import PROMPTS
from tiny_architectures import tiny
from transformers import CONFIG_MAPPING

from crossdraft import LoadedModel, generate

pytestmark = pytest.mark.simulated


@pytest.mark.parametrize(
    "kind, tree",
    [
        ("qwen3_next", False),
        ("bamba", True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("jamba", True), ("lfm2", False), ("falcon_h1", True))
        ),
    ],
)
def test_hybrids(kind: str, tree: bool) -> None:
    model = tiny(CONFIG_MAPPING[kind])

    def run(place: str) -> list[list[int]]:
        target = LoadedModel(copy.deepcopy(model).to(place), None, kind, "", "0" * 64, (), 96)  # type: ignore[arg-type]
        chosen = {"name": "token-recycling", "nodes": 6} if tree else {"name": "prompt-lookup"}
        return [r.tokens for r in generate(target, PROMPTS * 2, drafter=chosen, max_new_tokens=10, batch_size=2)]

    on_both_devices(run)
