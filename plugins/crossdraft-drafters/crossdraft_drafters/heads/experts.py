"""Published tensors of mixture-of-experts layers: one per expert, in block-scaled float8."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from crossdraft import Checkpoint

_EXPERT = re.compile(r"(.+\.experts)\.(\d{1,6})\.(gate_proj|up_proj|down_proj)\.weight")
_SCALE = "_scale_inv"


def dequantized(checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Multiply float8 weights by their block scales; other tensors are unchanged.

    DeepSeek's layout: ``*.weight`` and ``*.weight_scale_inv``, blocks of ``weight_block_size`` (128 x 128).

    Raises:
        ModelError: a weight lacks its scales, scales lack their weight, or the number of blocks differs.
    """
    out = {key: tensor for key, tensor in tensors.items() if not key.endswith(_SCALE)}
    settings = checkpoint.config.get("quantization_config")
    block = (settings if isinstance(settings, dict) else {}).get("weight_block_size") or [128, 128]
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise checkpoint.refused(f"weight_block_size is {block!r:.80} in config.json; it must be two whole numbers")
    for key, tensor in out.items():
        if tensor.dtype.itemsize > 1 or not tensor.is_floating_point():
            continue
        scale = tensors.get(key + _SCALE)
        if scale is None:
            raise checkpoint.refused(f"{key} is {tensor.dtype}, but {key}{_SCALE} is missing")
        blocks = [-(-side // size) for side, size in zip(tensor.shape, block, strict=False)]
        if tensor.dim() != 2 or list(scale.shape) != blocks:
            raise checkpoint.refused(f"{key}{_SCALE} is {list(scale.shape)}, but {key} has {blocks} blocks of {block}")
        scales = scale.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        out[key] = tensor.float() * scales[: tensor.shape[0], : tensor.shape[1]]
    for key in tensors:
        weight = tensors.get(key.removesuffix(_SCALE))
        if key.endswith(_SCALE) and (weight is None or weight.dtype.itemsize > 1):
            raise checkpoint.refused(f"{key} has no float8 weight {key.removesuffix(_SCALE)}")
    return out


def stacked(checkpoint: Checkpoint, tensors: Mapping[str, Tensor], module: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Stack experts as transformers does: ``gate_up_proj [E, 2I, H]`` and ``down_proj [E, H, I]``.

    Args:
        module: the state dict of the module; experts that it does not stack are unchanged.

    Raises:
        ModelError: an expert is missing or unexpected, or has another shape.
    """
    out, groups = {}, {}
    for key, tensor in tensors.items():
        match = _EXPERT.fullmatch(key)
        if match is None or f"{match[1]}.gate_up_proj" not in module:
            out[key] = tensor
        else:
            groups.setdefault(match[1], {})[int(match[2]), match[3]] = tensor
    for prefix, parts in groups.items():
        gate_up, down = module[f"{prefix}.gate_up_proj"], module[f"{prefix}.down_proj"]
        half = [gate_up.shape[1] // 2, gate_up.shape[2]]
        shapes = {"gate_proj": half, "up_proj": half, "down_proj": list(down.shape[1:])}
        names = [(i, kind) for i in range(len(gate_up)) for kind in shapes]
        if wrong := sorted(set(names) ^ parts.keys()):
            fault = "missing" if wrong[0] in names else f"of {len(gate_up)} experts, unexpected"
            raise checkpoint.refused(f"{fault} {prefix}.{wrong[0][0]}.{wrong[0][1]}.weight, and {len(wrong) - 1} more")
        for (i, kind), tensor in parts.items():
            if list(tensor.shape) != shapes[kind]:
                raise checkpoint.refused(
                    f"{prefix}.{i}.{kind}.weight is {list(tensor.shape)}, not {shapes[kind]}, the shape of the target's"
                )
        experts = range(len(gate_up))
        out[f"{prefix}.gate_up_proj"] = torch.stack(
            [torch.cat([parts[i, "gate_proj"], parts[i, "up_proj"]]) for i in experts]
        )
        out[f"{prefix}.down_proj"] = torch.stack([parts[i, "down_proj"] for i in experts])
    return out
