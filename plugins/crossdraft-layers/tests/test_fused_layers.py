"""Fused layers of CUDA: Liger's kernels against their references, and which layers run them."""

import copy
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from crossdraft_layers import fused_layers
from crossdraft_layers.fused_layers import OPERATORS, FusedLayers

from crossdraft.framework.errors import UsageError
from crossdraft.framework.lm.layer_surgery import own_modules
from crossdraft.framework.lm.transformers_lm import TransformersLM

needs_liger = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("liger_kernel", "triton")), reason="needs liger-kernel"
)


@needs_liger
@pytest.mark.thorough
def test_kernels_return_what_their_references_do() -> None:
    """Each operator is one Triton kernel, and nothing else."""
    script = Path(__file__).with_name("interpreted_kernels.py")
    output = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True).stdout
    cases = [json.loads(line) for line in output.splitlines()]
    assert {name for name, *_ in cases} == set(OPERATORS) and len(cases) == 6 * len(OPERATORS)
    for name, dtype, error, kernels, others in cases:
        assert (kernels, others) == (1, []), name
        assert error < (1e-6 if dtype == "torch.float32" else 2e-3), (name, dtype, error)


@pytest.fixture
def requested(monkeypatch: Any) -> None:
    monkeypatch.setenv(fused_layers.VARIABLE, "1")
    monkeypatch.setattr(fused_layers, "need", lambda *_, **__: None)


def test_layers_stay_plain_by_default(tiny_model: Any, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.delenv(fused_layers.VARIABLE, raising=False)
    FusedLayers.prepare(tiny_model("llama"))
    assert not caplog.messages


def test_without_liger_the_option_is_refused(tiny_model: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv(fused_layers.VARIABLE, "1")
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(UsageError, match=r"pip install -e 'plugins/crossdraft-layers\[fused\]'"):
        FusedLayers.prepare(tiny_model("llama"))


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("llama", {}, "they are for models on CUDA"),
        ("gemma3", {}, "they are for LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer"),
    ],
)
def test_other_layers_stay_plain_with_one_warning(
    tiny_model: Any, family: str, changes: dict[str, Any], reason: str, requested: None, caplog: Any
) -> None:
    model = tiny_model(family, **changes)
    fused_layers._warn_once.cache_clear()
    layer = type(model.model.layers[0])
    FusedLayers.prepare(model)
    FusedLayers.prepare(model)
    assert type(model.model.layers[0]) is layer
    assert caplog.messages == [
        f"crossdraft: {layer.__name__} runs without fused kernels (CROSSDRAFT_FUSED_LAYERS=1): {reason}"
    ]


def test_joined_matrix_holds_the_weights_in_order() -> None:
    parts = [torch.nn.Parameter(torch.randn(rows, 4), requires_grad=False) for rows in (6, 2, 2)]
    before = [part.detach().clone() for part in parts]
    whole = fused_layers._joined(parts)
    assert whole is not None and whole.equal(torch.cat(before))
    assert all(part.equal(old) for part, old in zip(parts, before, strict=True))
    whole[7] = 1
    assert parts[1][1].tolist() == [1.0] * 4  # they are views of it
    assert fused_layers._joined([None, None]) is None


@needs_liger
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "qwen2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_on_cuda(tiny_model: Any, family: str, dtype: torch.dtype, monkeypatch: Any) -> None:
    def logits(requested: str) -> list[torch.Tensor]:
        monkeypatch.setenv(fused_layers.VARIABLE, requested)
        lm = TransformersLM(own_modules(copy.deepcopy(tiny_model(family)).to("cuda", dtype)), 2, 64)
        for row in range(2):
            lm.start(row, range(5, 9 + 2 * row))
        outputs = []
        for width in (1, 4, 1, 4):  # the second pass of a shape is a replay
            outputs.append(lm.forward(torch.arange(11, 11 + 2 * width, device="cuda").view(2, width))[0].float())
            lm.commit([1, 1])
        return outputs

    for fused, plain in zip(logits("1"), logits("0"), strict=True):
        assert (fused - plain).norm() <= (1e-3 if dtype == torch.float32 else 5e-2) * plain.norm()
