"""Layers on the simulated CUDA device: the text of the CPU for hybrids, in slots that are refilled; fused layers."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from crossdraft_layers import fused_layers
from crossdraft_layers.fused_layers import VARIABLE
from crossdraft_layers.some_layers import with_layers
from crossdraft_simulated_cuda import device
from on_both_devices import on_both_devices
from oracle_trees import PROMPTS
from tiny_architectures import tiny
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from crossdraft import LoadedModel, generate
from crossdraft.framework.lm.layer_surgery import own_modules
from crossdraft.framework.lm.transformers_lm import TransformersLM

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


#: Parents of the tokens of a pass: one token, a chain, a tree.
PASSES = {"token": [-1], "chain": [-1, 0, 1], "tree": [-1, 0, 0, 1]}


def pass_outputs(kind: str, layers: int, parents: list[int], **changes: Any) -> tuple[torch.Tensor, Counter[str]]:
    """Logits of a captured pass over rows of different lengths, and the operations that were captured."""
    config = CONFIG_MAPPING[kind](
        **{"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, **changes},
    )
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval().requires_grad_(False)
    lm = TransformersLM(own_modules(model.to("cuda")), 2, 128)
    for row in range(2):
        lm.start(row, range(5, 9 + 2 * row))
    width = len(parents)
    tree = torch.tensor([parents] * 2).cuda() if parents[1:3] == [0, 0] else None
    tokens = torch.arange(11, 11 + 2 * width).view(2, width).cuda()
    with device.counting() as counts:
        lm.forward(tokens, tree)
    lm.commit([0, 0], None if tree is None else torch.zeros(2, 1, dtype=torch.long).cuda())
    with device.counting() as replayed:
        logits = lm.forward(tokens, tree)[0]
    assert counts.captures == 1 and (replayed.captures, replayed.replays) == (0, 1)
    return logits.cpu(), counts.captured


@pytest.mark.parametrize(
    "kind, changes",
    [("llama", {}), ("mistral", {}), ("qwen2", {}), ("llama", {"mlp_bias": True}), ("llama", {"dtype": "bfloat16"})],
)
@pytest.mark.parametrize("shape", PASSES)
def test_fused_layers(kind: str, changes: dict[str, Any], shape: str, monkeypatch: Any) -> None:
    """Few operations reach the device in a captured pass, and logits are those of transformers' layers."""
    monkeypatch.setattr(fused_layers, "need", lambda *_, **__: None)  # the device runs references of the kernels

    def outputs(requested: str) -> tuple[torch.Tensor, int]:
        monkeypatch.setenv(VARIABLE, requested)
        (_, few), (logits, many) = (pass_outputs(kind, layers, PASSES[shape], **changes) for layers in (1, 3))
        assert (many - few).total() % 2 == 0
        return logits, (many - few).total() // 2

    logits, eager = outputs("0")
    fused_logits, fused = outputs("1")
    tolerance = 1e-5 if logits.dtype == torch.float32 else 2e-2
    assert torch.allclose(fused_logits, logits, rtol=tolerance, atol=tolerance)
    casts = 4 if changes.get("dtype") else 0  # norms of bfloat16 are computed in float32
    # Several tokens: queries are copied to the layout in which heads of a group share keys, and so is what is attended.
    assert (eager - casts, fused) == ((36, 12) if shape == "token" else (38, 14))


def test_layers_without_attention_stay_plain(monkeypatch: Any) -> None:
    """Skipped parts, as of drafters that skip layers, make a layer run as transformers' does."""
    monkeypatch.setattr(fused_layers, "need", lambda *_, **__: None)
    config = CONFIG_MAPPING["llama"](
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4
    )
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)

    def logits(requested: str) -> torch.Tensor:
        monkeypatch.setenv(VARIABLE, requested)
        own = own_modules(model.to("cuda"))
        TransformersLM(own, 1, 64)
        lm = TransformersLM(with_layers(own, [0, 2], no_attention=[2]), 1, 64)
        lm.start(0, [5, 6, 7])
        return lm.forward(torch.tensor([[11, 12]]).cuda())[0].cpu()

    expected = logits("0")
    with device.counting() as counts:
        assert torch.allclose(logits("1"), expected, rtol=1e-5, atol=1e-5)
    assert counts.captured["rotate"] == 1 and counts.captured["silu"] == 1
