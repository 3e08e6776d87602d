"""Random tensors of a module of multi-token prediction, by Qwen's names."""

from typing import Any

import torch
from torch import Tensor

H = 32


def decoder_layer(target: Any) -> dict[str, Tensor]:
    """Random tensors under the names of a decoder layer of the target's kind."""
    state = target.model.layers[0].state_dict()
    return {key: torch.randn(tensor.shape) * 0.4 for key, tensor in state.items()}


def qwen(target: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    layer = {f"mtp.layers.0.{key}": tensor for key, tensor in decoder_layer(target).items()}
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    return {**layer, "mtp.fc.weight": torch.randn(H, 2 * H) * 0.4} | {f"mtp.{n}.weight": torch.randn(H) for n in norms}


def renamed(tensors: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    """The tensors with other beginnings of their names."""
    out = {}
    for key, tensor in tensors.items():
        old = next(old for old in names if key.startswith(old))
        out[names[old] + key.removeprefix(old)] = tensor
    return out
