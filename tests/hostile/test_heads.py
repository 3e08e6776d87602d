"""Checkpoints of heads with hostile names, shapes and configs: claimed sizes are not allocated."""

# ruff: noqa: E501 (an input and its words on one line can be read)

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_contexts import GivenContext
from feature_heads import make_head
from medusa_heads import Weights
from safetensors.torch import load_file, save_file
from torch import Tensor

from crossdraft.drafters.heads.eagle import Eagle
from crossdraft.drafters.heads.medusa.weights import read_heads
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.errors import ModelError
from crossdraft.framework.lm.transformers_lm import TransformersLM
from crossdraft.framework.models.checkpoint import load_checkpoint

SMALL = torch.zeros(32, 32)
#: Tensors beside whole Medusa heads (three heads of one block), changes of the config, words of the sentence.
MEDUSA: dict[str, tuple[dict[str, Tensor], dict[str, Any], list[str]]] = {
    "a head of 10^9": ({"999999999.0.linear.weight": SMALL}, {}, ["the index in '999999999.0.linear.weight' is not below 10,"]),
    "a block of 10^8": ({"0.99999999.linear.weight": SMALL}, {}, ["'0.99999999.linear.weight' is not below"]),
    "a head of 5,000 digits": ({"9" * 5000 + ".0.linear.weight": SMALL}, {}, ["is not below", "…"]),
    "a head in other digits": ({"\u0663.0.linear.weight": SMALL}, {}, ["is not below"]),
    "a head that skips": ({"7.0.linear.weight": SMALL, "7.0.linear.bias": SMALL[0], "7.1.weight": torch.zeros(97, 32)}, {}, ["missing 3.0.linear"]),
    "vLLM's names, a block of 10^9": ({"blocks.0.layers.999999999.weight": SMALL}, {}, ["'blocks.0.layers.999999999.weight' is not below"]),
    "vLLM's names, a head of 10^9": ({"blocks.999999999.layers.0.weight": SMALL}, {}, ["is not below"]),
    "another number of heads": ({}, {"medusa_num_heads": 10**9}, ["their config has 1000000000 heads"]),
    "another number of blocks": ({}, {"medusa_num_layers": 10**9}, ["their config has 1000000000 blocks"]),
    "a scale that is a text": ({}, {"logit_scale": "loud"}, ["logit_scale is 'loud' in config.json, which is not a positive number"]),
    "a scale that is NaN": ({}, {"logit_scale": float("nan")}, ["logit_scale is nan"]),
    "a size that is a text": ({}, {"hidden_size": "32"}, ["config.json: hidden_size is '32'"]),
    "a config of 10^9 layers": ({}, {"num_hidden_layers": 10**9}, ["the maximum is 1024"]),
    "NaN": ({"0.0.linear.bias": torch.full((32,), torch.nan)}, {}, ["0.0.linear.bias holds numbers that are not finite"]),
}  # fmt: skip


@pytest.fixture
def target(tiny_model: Any) -> Any:
    return tiny_model("llama")


def written(directory: Path, tensors: dict[str, Tensor], config: Any) -> Path:
    directory.mkdir(exist_ok=True)
    save_file({key: tensor.clone().contiguous() for key, tensor in tensors.items()}, directory / "model.safetensors")
    text = config if isinstance(config, str) else json.dumps(config)
    (directory / "config.json").write_text(text, encoding="utf-8")
    return directory


@pytest.mark.parametrize("subject", MEDUSA)
def test_medusa(subject: str, target: Any, tmp_path: Path) -> None:
    more, config, words = MEDUSA[subject]
    directory = written(tmp_path / "heads", Weights().v01() | more, config)
    with pytest.raises(ModelError) as caught:
        read_heads(load_checkpoint(str(directory)), target)
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


#: Tensors beside whole EAGLE heads, changes of the config, words of the sentence.
EAGLE: dict[str, tuple[dict[str, Tensor], dict[str, Any], list[str]]] = {
    "a layer of 10^8": ({"layers.99999999.mlp.up_proj.weight": SMALL}, {}, ["'layers.99999999.mlp.up_proj.weight' is not below"]),
    "a layer of 5,000 digits": ({"layers." + "9" * 5000 + ".x": SMALL}, {}, ["is not below", "…"]),
    "a layer in other digits": ({"layers.\u0663.x": SMALL}, {}, ["is not below"]),
    "a layer that skips": ({"layers.3.x": SMALL}, {}, ["missing"]),
    "a width of 10^7": ({}, {"intermediate_size": 10**7}, ["has intermediate_size 10000000, but no tensor has this size"]),
    "heads of 10^6": ({}, {"head_dim": 10**6}, ["num_attention_heads times head_dim 4000000, but no tensor"]),
    "no division": ({}, {"num_attention_heads": 5, "head_dim": None}, ["config.json"]),
    "no heads": ({}, {"num_attention_heads": 0}, ["num_attention_heads is 0"]),
    "a negative width": ({}, {"hidden_size": -32}, ["hidden_size is -32"]),
    "a width that is a text": ({}, {"intermediate_size": "48"}, ["intermediate_size is '48'"]),
    "a scaling that is a text": ({}, {"rope_parameters": None, "rope_scaling": "x"}, ["rope_scaling is 'x' in config.json"]),
    "a nested config that is a list": ({}, {"transformer_layer_config": [1]}, ["transformer_layer_config is [1]"]),
    "an activation that is none": ({}, {"hidden_act": 3}, ["has 3 for hidden_act, which is not known"]),
}  # fmt: skip


@pytest.mark.parametrize("subject", EAGLE)
def test_eagle(subject: str, target: Any, tmp_path: Path) -> None:
    more, changes, words = EAGLE[subject]
    make_head("eagle", target).save(tmp_path / "heads")
    config = json.loads((tmp_path / "heads" / "config.json").read_text(encoding="utf-8"))
    tensors = load_file(tmp_path / "heads" / "model.safetensors")
    directory = written(tmp_path / "heads", tensors | more, config | changes)
    lm = TransformersLM(target, 1, 32)
    context = GivenContext(lm, Sampling(), 32, target_model=target, load_heads=load_checkpoint)
    with pytest.raises(ModelError) as caught:
        Eagle(Eagle.Config(model=str(directory)), context)
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


FILES: dict[str, tuple[str, bytes, list[str]]] = {
    "a header of 10 GB": ("model.safetensors", (10**10).to_bytes(8, "little") + b"{", ["header too large"]),
    "nothing": ("model.safetensors", b"", ["is damaged or not a safetensors file"]),
    "cut": ("model.safetensors", b"\x10\0\0\0\0\0\0\0{", ["is damaged or not a safetensors file"]),
    "a pickle of a call": ("heads.bin", b"cos\nsystem\n(S'touch hacked'\ntR.", ["is a pickle of more than tensors"]),
    "a pickle that is cut": ("heads.bin", b"\x80\x02}", ["heads.bin"]),
    "no pickle": ("heads.pt", b"PK\x03\x04 not a zip", ["is damaged or not a PyTorch file"]),
    "a pickle of a list": ("heads.bin", pickle.dumps([1, 2], 2), ["heads.bin"]),
    "an empty pickle": ("heads.pt", b"", ["heads.pt"]),
}


@pytest.mark.parametrize("subject", FILES)
def test_files(subject: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    name, content, words = FILES[subject]
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError) as caught:
        load_checkpoint(str(tmp_path))
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize(
    "text, words",
    [
        ("{", "config.json:1: not JSON"),
        ("[]", "must hold a JSON object"),
        ("", "config.json:1: not JSON"),
        ('{"a": ' + "[" * 100_000, "nested too deeply"),
        ('{"num_hidden_layers": 1000000000}', "the maximum is 1024"),
    ],
)
def test_config_of_heads(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words):
        load_checkpoint(str(written(tmp_path / "heads", {"x": SMALL}, text)))
