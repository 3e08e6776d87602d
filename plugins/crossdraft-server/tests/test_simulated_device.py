"""The endpoint on the simulated CUDA device: the answers of the CPU, for requests that share steps."""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from on_both_devices import on_both_devices
from server_thread import serving
from text_models import SCHEMA, save_text_model

pytestmark = pytest.mark.simulated

pytest.importorskip("llguidance", reason="constraints need the extra constrain")
BODIES: list[dict[str, Any]] = [
    {"prompt": "a cat", "temperature": 0},
    {"prompt": "a cat, a dog, a cat, a", "temperature": 0},
    {"prompt": "yes", "temperature": 0},
    {"prompt": "a dog?", "temperature": 0, "structured_outputs": {"json": SCHEMA}, "max_tokens": 40},
    {"prompt": "a cat?", "temperature": 0.8, "top_p": 0.9, "seed": 3},
    {"prompt": "no", "temperature": 1.0, "seed": 4},
]


@pytest.mark.parametrize("drafter", [pytest.param("prompt-lookup", marks=pytest.mark.slow), "draft-model"])
def test_answers_are_those_of_cpu(drafter: str, tmp_path_factory: Any, monkeypatch: Any) -> None:
    root = tmp_path_factory.mktemp("models")
    name, small = save_text_model(root / "target"), save_text_model(root / "small", 1)
    options = ["--drafter", f"{{name: draft-model, model: {small}, gamma: 3}}" if drafter == "draft-model" else drafter]

    def answers(place: str) -> list[Any]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: place == "cuda")
        with serving("--target", name, "--slots", "2", *options) as server, ThreadPoolExecutor(4) as pool:
            assert server.pool.target.model.device.type == place

            def post(body: dict[str, Any]) -> Any:
                data = json.dumps({"model": name, "max_tokens": 10, **body}).encode()
                request = urllib.request.Request(
                    f"{server.url}/v1/completions", data, {"Content-Type": "application/json"}
                )
                with urllib.request.urlopen(request, timeout=120) as answer:
                    return json.load(answer)["choices"][0]

            return list(pool.map(post, BODIES))

    on_both_devices(answers)
