"""Jobs of few tokens, whose slots are short: every drafter runs, and the greedy text is plain decoding's."""

from pathlib import Path
from typing import Any

import pytest
from further_heads import write_further_heads
from short_jobs import check_short_jobs
from tiny_models import save_model

import crossdraft

DRAFTERS: list[dict[str, Any]] = [
    {"name": "token-recycling"},
    {"name": "online", "model": "target"},
    {"name": "universal", "model": "target"},
    {"name": "universal", "model": "target", "gamma": 12},
    {"name": "early-exit", "exit_layer": 1},
    {"name": "layer-skip", "skip_attention": [1]},
    {"name": "jacobi"},
    {"name": "lookahead"},
    *({"name": name, "model": name} for name in ("mtp", "mlp-speculator", "pass")),
    *({"name": name, "model": name, "layers": [1, 2, 3]} for name in ("dflash", "dspark", "p-eagle")),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: Any) -> Path:
    root = tmp_path_factory.mktemp("models")
    save_model(root / "target", context=512, layers=4)
    model: Any = crossdraft.load_model(str(root / "target"), dtype="float32", device="cpu").model
    write_further_heads(root, model, mask_token=12)
    return root


@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda drafter: drafter["name"])
def test_short_jobs(root: Path, drafter: dict[str, Any]) -> None:
    check_short_jobs(root, drafter)
