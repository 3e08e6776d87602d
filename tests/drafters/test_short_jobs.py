"""Jobs of few tokens, whose slots are short: every drafter runs, and the greedy text is plain decoding's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from head_checkpoints import write_heads
from tiny_models import save_model

import crossdraft

#: Prompts of one token and of a few.
PROMPTS = [[5], [7, 8, 7, 8, 9]]
DRAFTERS: list[dict[str, Any]] = [
    {"name": "prompt-lookup"},
    {"name": "token-recycling"},
    {"name": "draft-model", "model": "TARGET"},
    {"name": "draft-model-iid", "model": "TARGET"},
    {"name": "draft-model-tree", "model": "TARGET"},
    {"name": "draft-model-dynamic-tree", "model": "TARGET"},
    {"name": "online", "model": "TARGET"},
    {"name": "universal", "model": "TARGET"},
    {"name": "universal", "model": "TARGET", "gamma": 12},
    {"name": "early-exit", "exit_layer": 1},
    {"name": "layer-skip", "skip_attention": [1]},
    {"name": "jacobi"},
    {"name": "lookahead"},
    *({"name": name, "model": name} for name in ("medusa", "eagle", "mtp", "mlp-speculator", "pass")),
    {"name": "eagle3", "model": "eagle3", "layers": [2, 3, 1]},
    *({"name": name, "model": name, "layers": [1, 2, 3]} for name in ("dflash", "dspark", "p-eagle")),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: Any) -> Path:
    root = tmp_path_factory.mktemp("models")
    save_model(root / "target", context=512, layers=4)
    model: Any = crossdraft.load_model(str(root / "target"), dtype="float32", device="cpu").model
    write_heads(root, model, mask_token=12, target_ids=torch.arange(0, model.config.vocab_size, 2))
    return root


@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda drafter: drafter["name"])
def test_short_jobs(root: Path, drafter: dict[str, Any]) -> None:
    target = crossdraft.load_model(str(root / "target"), dtype="float32", device="cpu")
    if model := drafter.get("model"):
        drafter = {**drafter, "model": str(root / model.replace("TARGET", "target"))}
    for maximum in (1, 2, 3, 8, 16):
        options: dict[str, Any] = {"temperature": 0, "max_new_tokens": maximum, "batch_size": 2}
        drafted, plain = (crossdraft.generate(target, PROMPTS, drafter=d, **options) for d in (drafter, "none"))
        assert [r.tokens for r in drafted] == [r.tokens for r in plain]
