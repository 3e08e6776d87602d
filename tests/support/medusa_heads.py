"""Random Medusa heads as plain numbers, written in every layout they are published in, and what they compute."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from crossdraft.framework.contracts.draft import Draft

NEW = 12
#: The shortest prompt has no committed token before its root; prompts of different lengths end in different steps.
PROMPTS = ([5], [7, 8, 9, 7, 8, 9, 7, 8], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 11, 12, 13])
H, V, HEADS = 32, 97, 3
#: Ids that heads with a reduced vocabulary know, in no order.
KNOWN = [90, 3, 41, 7, 8, 12, 60, 11, 0, 96, 55, 23]
TREE = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]


class Weights:
    """Random heads as plain numbers: ``w[i][j] [H, H]``, ``b[i][j] [H]`` and ``p[i] [V, H]``, and what they compute."""

    def __init__(self, layers: int = 1, rows: int = V, bias: bool = True, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator) * 0.3

        self.w = [[random(H, H) for _ in range(layers)] for _ in range(HEADS)]
        self.b = [[random(H) if bias else torch.zeros(H) for _ in range(layers)] for _ in range(HEADS)]
        self.p = [random(rows, H) for _ in range(HEADS)]
        self.bias, self.ids = bias, list(range(rows))

    def logits(self, hidden: Tensor) -> Tensor:
        """``[H]`` -> ``[heads, V]``, -inf where a head does not know a token."""
        out = torch.full((HEADS, V), -torch.inf)
        for i in range(HEADS):
            x = hidden
            for w, b in zip(self.w[i], self.b[i], strict=True):
                x = x + functional.silu(w @ x + b)
            out[i, self.ids] = (self.p[i] @ x)[: len(self.ids)]
        return out

    def v01(self, projections: bool = True, prefix: str = "") -> dict[str, Tensor]:
        tensors = {}
        for i in range(HEADS):
            for j, (w, b) in enumerate(zip(self.w[i], self.b[i], strict=True)):
                tensors |= {f"{prefix}{i}.{j}.linear.weight": w, f"{prefix}{i}.{j}.linear.bias": b}
            if projections:
                tensors[f"{prefix}{i}.{len(self.w[i])}.weight"] = self.p[i]
        return tensors

    def vllm(self, prefix: str = "", one_projection: bool = False) -> dict[str, Tensor]:
        tensors = {}
        for i in range(HEADS):
            for j, (w, b) in enumerate(zip(self.w[i], self.b[i], strict=True)):
                tensors[f"{prefix}blocks.{i}.layers.{j}.weight"] = w
                if self.bias:
                    tensors[f"{prefix}blocks.{i}.layers.{j}.bias"] = b
            if i == 0 or not one_projection:
                tensors[f"{prefix}lm_heads.{i}.weight"] = self.p[i]
        return tensors


MEDUSA = {"medusa_num_heads": HEADS, "medusa_num_layers": 1}
VLLM = {"model_type": "medusa", "hidden_size": H, "vocab_size": V, "num_heads": HEADS, "num_hidden_layers": 1}


def layout(name: str, target: Any) -> tuple[Weights, dict[str, Tensor], dict[str, Any]]:
    """Weights, and the tensors and the config of a file that holds them."""
    if name == "v0.1":
        return (w := Weights()), w.v01(), MEDUSA
    if name == "v0.1, two blocks":
        return (w := Weights(layers=2)), w.v01(), {**MEDUSA, "medusa_num_layers": 2}
    if name == "v0.1, fewer ids than the target":
        return (w := Weights(rows=90)), w.v01(), MEDUSA
    if name == "version 2":
        w = Weights()
        w.p = [target.lm_head.weight.detach()] * HEADS
        return w, w.v01(projections=False), MEDUSA
    if name == "Medusa-2":
        whole = {key: tensor.clone() for key, tensor in target.state_dict().items()}
        config = {**target.config.to_dict(), "num_heads": 32, **MEDUSA}  # two of them are head counts
        return (w := Weights()), {**whole, **w.v01(prefix="medusa_head.")}, config
    if name == "vLLM":
        return (w := Weights(bias=False)), w.vllm(), VLLM
    if name == "vLLM, two blocks with biases, behind a prefix":
        config = {**VLLM, "num_hidden_layers": 2, "medusa_fc_bias": True}
        return (w := Weights(layers=2)), w.vllm("medusa_heads."), config
    if name == "vLLM, one projection":
        w = Weights()
        w.p = w.p[:1] * HEADS
        return w, w.vllm(one_projection=True), {**VLLM, "original_lm_head": True}
    if name == "vLLM, scaled":
        w = Weights()
        tensors = {key: tensor.clone() for key, tensor in w.vllm().items()}
        w.p = [p * 0.5 for p in w.p]
        return w, tensors, {**VLLM, "logit_scale": 0.5}
    if name == "vLLM, token map":
        w = Weights(rows=len(KNOWN))
        w.ids = KNOWN
        return w, {**w.vllm(), "token_map": torch.tensor(KNOWN)}, {**VLLM, "truncated_vocab_size": len(KNOWN)}
    if name == "vLLM, token map beside whole projections":
        w = Weights()
        tensors = {**w.vllm(), "token_map": torch.tensor(KNOWN)}
        w.p, w.ids = [p[KNOWN] for p in w.p], KNOWN
        return w, tensors, {**VLLM, "truncated_vocab_size": len(KNOWN)}
    assert name == "vLLM, token map that is not used"
    w = Weights()
    return w, {**w.vllm(), "token_map": torch.tensor(KNOWN)}, {**VLLM, "truncated_vocab_size": V}


LAYOUTS = [
    "v0.1",
    "v0.1, two blocks",
    "v0.1, fewer ids than the target",
    "version 2",
    "Medusa-2",
    "vLLM",
    "vLLM, two blocks with biases, behind a prefix",
    "vLLM, one projection",
    "vLLM, scaled",
    "vLLM, token map",
    "vLLM, token map beside whole projections",
    "vLLM, token map that is not used",
]


def write(directory: Path, tensors: dict[str, Any], config: dict[str, Any], pickled: bool = False) -> str:
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if pickled:
        torch.save(tensors, directory / "medusa_lm_head.pt")
    else:
        save_file({key: t.contiguous().clone() for key, t in tensors.items()}, directory / "model.safetensors")
    return str(directory)


def hidden_of(model: Any, tokens: Sequence[int]) -> Tensor:
    """``[len(tokens), H]``: what goes into the model's head."""
    with torch.inference_mode():
        return model(torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states[-1][0]


def propose(loop: Any) -> Draft:
    """The draft of the next step, which is not made."""
    sequences = loop.sequences
    return loop.drafter.propose(
        sequences, loop.rng.for_step(sequences.stream, [0] * sequences.batch_size, torch.device("cpu"))
    )
