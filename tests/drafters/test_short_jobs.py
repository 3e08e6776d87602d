"""Jobs of few tokens, whose slots are short: every drafter runs, and the greedy text is plain decoding's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from head_checkpoints import write_heads
from short_jobs import check_short_jobs
from tiny_models import save_model

import crossdraft

DRAFTERS: list[dict[str, Any]] = [
    {"name": "prompt-lookup"},
    {"name": "draft-model", "model": "target"},
    {"name": "draft-model-iid", "model": "target"},
    {"name": "draft-model-tree", "model": "target"},
    {"name": "draft-model-dynamic-tree", "model": "target"},
    {"name": "medusa", "model": "medusa"},
    {"name": "eagle", "model": "eagle"},
    {"name": "eagle3", "model": "eagle3", "layers": [2, 3, 1]},
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: Any) -> Path:
    root = tmp_path_factory.mktemp("models")
    save_model(root / "target", context=512, layers=4)
    model: Any = crossdraft.load_model(str(root / "target"), dtype="float32", device="cpu").model
    write_heads(root, model, target_ids=torch.arange(0, model.config.vocab_size, 2))
    return root


@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda drafter: drafter["name"])
def test_short_jobs(root: Path, drafter: dict[str, Any]) -> None:
    check_short_jobs(root, drafter)
