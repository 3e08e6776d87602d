"""Targets whose layers lie on several devices: what can be seen of that with a CPU and a disk."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import save_model

from crossdraft import UsageError, generate, load_model
from crossdraft.framework.errors import ModelError
from crossdraft.framework.lm.kv_cache import RaggedCache, WritePlan
from crossdraft.framework.models.placement import input_device

#: Half of the weights stay on the disk, and are read in every pass.
HALF = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "disk"}
HALF |= {"model.rotary_emb": "cpu", "lm_head": "disk"}
PROMPTS = ["w5 w6 w7 w5 w6", "w9"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: Any) -> str:
    return save_model(tmp_path_factory.mktemp("models") / "target")


@pytest.mark.parametrize("device", [HALF, "spread"], ids=["disk", "spread"])
def test_spread_target_matches_whole_one(target: str, device: Any) -> None:
    whole, spread = (load_model(target, device=place, dtype="float32") for place in ("cpu", device))
    for drafter in ("prompt-lookup", {"name": "draft-model", "model": target, "gamma": 2}):
        outputs = [generate(item, PROMPTS, drafter=drafter, max_new_tokens=12, seed=3) for item in (whole, spread)]
        assert [r.tokens for r in outputs[0]] == [r.tokens for r in outputs[1]]
    assert whole.sha256 == spread.sha256
    if device is HALF:
        assert {str(weight.device) for weight in spread.model.parameters()} == {"cpu", "meta"}
        assert input_device(spread.model) == torch.device("cpu")


@pytest.mark.usefixtures("third_party")
def test_layers_of_spread_target_are_not_run_separately(target: str) -> None:
    """Its hooks would run all of them without a word."""
    spread = load_model(target, device=HALF, dtype="float32")
    with pytest.raises(ModelError, match="its layers cannot be run alone"):
        generate(spread, PROMPTS, drafter={"name": "first-layers", "layers": [0]}, max_new_tokens=4)


def test_indices_follow_keys_and_values_to_their_device() -> None:
    """PyTorch takes an index on the device of what is indexed; a device without values is one that is elsewhere."""
    cache = RaggedCache(2, 8)
    states = {place: torch.zeros(2, 1, 2, 4, device=place) for place in ("cpu", "meta")}
    plan = WritePlan(torch.tensor([[1, 2], [3, 4]]), 5)
    for layer, place in enumerate(("cpu", "meta")):
        keys, _ = cache.begin_pass(plan).update(states[place], states[place], layer)
        assert keys.device.type == place
    copied = plan.to(torch.device("meta"))
    assert copied.slots.device.type == "meta"
    assert plan.to(torch.device("meta")) is copied  # once a pass, not once a layer
    assert plan.to(torch.device("cpu")) is plan
    moved: list[str] = []
    for layer in cache.layers:
        layer.move = lambda *indices: moved.extend(item.device.type for item in indices)  # type: ignore[union-attr]
    cache.move(torch.tensor([[1], [3]]), torch.tensor([[0], [2]]))
    assert moved == ["cpu"] * 3 + ["meta"] * 3


def test_invalid_placements_raise(target: str, tmp_path: Path, monkeypatch: Any) -> None:
    with pytest.raises(UsageError, match="quantised on load, which requires one device"):
        load_model(f"{target}@int8", device="spread")
    for device, sentence in (({}, "the device map is empty"), ({"": "disc"}, "'disc'"), ({"": None}, "None in the")):
        with pytest.raises(UsageError, match=sentence):
            load_model(target, device=device)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ModelError, match=r"pip install -e '.\[spread\]'"):
        load_model(target, device="spread")


def test_under_torchrun_target_on_one_device_is_refused(target: str, monkeypatch: Any) -> None:
    """The other processes would be idle."""
    for key, value in {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(UsageError, match="torchrun started 2 processes, but device auto uses only one"):
        load_model(target)
