"""EAGLE checkpoints: detection of layouts by their keys, and interpretation of configs.

Supported layouts, for EAGLE-1 and -2: the authors' own (``fc``, ``layers.0`` without an input norm) and that of
vllm-project/speculators up to 0.3 with HASS's norms (``fusion_fc``, ``transformer``). For EAGLE-3: the authors' own and
SpecForge's (``midlayer``) and that of speculators (``layers.0``, a nested config). Written checkpoints have the
authors' layout.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...framework.contracts.models import Checkpoint

#: Keys of a Llama-like config that define a decoder layer; other keys are ignored.
_LAYER_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "hidden_act",
    "max_position_embeddings",
    "sliding_window",
    "use_sliding_window",
    "layer_types",
)
_PROJECTION_BIAS = re.compile(r"layers\.\d+\.self_attn\.(\w+)\.bias")


def renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename tensors to the authors' names of EAGLE-1, which the modules here use for EAGLE-3, too."""
    rules = (("midlayer.", "layers.0."), ("transformer.", "layers.0."), ("fusion_fc.", "fc."))
    out = {}
    for key, tensor in tensors.items():
        if key.endswith("rotary_emb.inv_freq"):  # computed from the config; old releases of transformers stored it
            continue
        for old, new in rules:
            if key.startswith(old):
                key = new + key.removeprefix(old)
        out[key] = tensor
    return out


def is_eagle3(tensors: Mapping[str, Tensor]) -> bool:
    """True if `renamed` tensors are EAGLE-3's: its first layer norms the features, EAGLE-1's does not."""
    return "layers.0.hidden_norm.weight" in tensors


def count_layers(checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> int:
    """Number of decoder layers, by key; at least 1, so that errors name the missing tensors."""
    matches = ((re.match(r"layers\.(\d+)\.", key), key) for key in tensors)
    return max((checkpoint.number(match[1], key) for match, key in matches if match), default=0) + 1


def biased(tensors: Mapping[str, Tensor]) -> frozenset[str]:
    """Names of the attention projections with a bias (heads of Qwen2 targets: q, k and v)."""
    return frozenset(match[1] for key in tensors if (match := _PROJECTION_BIAS.fullmatch(key)))


def layer_config(checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> Any:
    """Make a transformers config of the heads' decoder layers: Llama's or, with query and key norms, Qwen3's.

    ``rope_theta`` defaults to 10000, not to the target's.

    Raises:
        ModelError: the config lacks a required size, or its sizes contradict each other or the tensors.
    """
    from huggingface_hub.errors import StrictDataclassError

    raw = checkpoint.config.get("transformer_layer_config") or checkpoint.config
    if not isinstance(raw, dict):
        raise checkpoint.refused(f"transformer_layer_config is {raw!r:.80} in config.json; it must be a mapping")
    lacking = [key for key in ("hidden_size", "intermediate_size", "num_attention_heads") if not raw.get(key)]
    if lacking:
        raise checkpoint.refused(f"config.json lacks {', '.join(lacking)}")
    known = {key: raw[key] for key in _LAYER_KEYS if raw.get(key) is not None}
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise checkpoint.refused(f"rope_scaling is {rope!r:.80} in config.json; it must be a mapping")
    rope = dict(rope)
    kind = rope.pop("type", "default")
    rope = {"rope_type": kind, "rope_theta": raw.get("rope_theta") or 10000.0, **rope}
    qk_norm = "layers.0.self_attn.q_norm.weight" in tensors
    try:
        layers = count_layers(checkpoint, tensors)
        config = make_config(qk_norm=qk_norm, num_hidden_layers=layers, rope_parameters=rope, **known)
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        raise checkpoint.refused(f"config.json is not a config of decoder layers: {str(error)!r:.300}") from None
    # Modules are created before the tensors are compared: reject sizes that no tensor has first.
    sides = {side for tensor in tensors.values() for side in tensor.shape}
    sizes = {
        "intermediate_size": config.intermediate_size,
        "num_attention_heads times head_dim": config.num_attention_heads * config.head_dim,
    }
    for key, size in sizes.items():
        if sides and size not in sides:
            raise checkpoint.refused(f"config.json has {key} {size}, but no tensor has this size")
    return config


def make_config(*, qk_norm: bool = False, **options: Any) -> Any:
    """Make a transformers config for heads from Llama's ``options``; ``qk_norm``: with Qwen3's query and key norms."""
    from transformers import LlamaConfig, Qwen3Config

    config = (Qwen3Config if qk_norm else LlamaConfig)(**options, tie_word_embeddings=False)
    config._attn_implementation = "sdpa"
    return config


def decoder_layer(config: Any, index: int, *, biased: frozenset[str] = frozenset(), width: int | None = None) -> Any:
    """Make a decoder layer of ``config``; ``width``: input size of its q, k and v projections, default H."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

    layer: Any = (Qwen3DecoderLayer if config.model_type == "qwen3" else LlamaDecoderLayer)(config, index)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        old = getattr(layer.self_attn, name)
        size = old.in_features if name == "o_proj" or width is None else width
        if size != old.in_features or (name in biased) != (old.bias is not None):
            setattr(layer.self_attn, name, nn.Linear(size, old.out_features, bias=name in biased))
    return layer


def mask_of(mask: Any, config: Any, index: int) -> Tensor | None:
    """Mask of one layer; ``mask`` is a dict by layer type if the head has sliding layers."""
    return mask[config.layer_types[index]] if isinstance(mask, Mapping) else mask


def shared(weight: Tensor) -> nn.Linear:
    """Make a linear layer without bias on ``weight [rows, H]`` itself, not on a copy."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def table(checkpoint: Checkpoint, tensors: dict[str, Tensor], key: str, target: Tensor, shape: Sequence[int]) -> Tensor:
    """Remove and return the table ``key`` of ``tensors``, in the target's dtype; default: the target's table.

    Raises:
        ModelError: its shape is not ``shape``.
    """
    own = tensors.pop(key, None)
    weight = target if own is None else own.to(target.device, target.dtype)
    if list(weight.shape) != list(shape):
        whose = "the target's" if own is None else "theirs"
        raise checkpoint.refused(f"{key} must have shape {list(shape)}, but {whose} has {list(weight.shape)}")
    return weight


def target_ids(checkpoint: Checkpoint, tensors: dict[str, Tensor], vocab_size: int) -> Tensor | None:
    """Remove ``d2t`` and ``t2d`` from ``tensors``; return the target's id ``[Vd]`` of each drafted id, None = equal.

    ``d2t [Vd]`` holds offsets: target id = drafted id + offset. ``t2d [V]`` marks the target's ids.

    Raises:
        ModelError: ids are outside the target's vocabulary or not distinct, or the tables contradict each other.
    """
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if d2t is None:
        if t2d is not None and not bool(t2d.all()):
            raise checkpoint.refused("t2d marks a reduced vocabulary, but d2t, which maps it, is missing")
        return None
    if d2t.dim() != 1 or d2t.is_floating_point():
        raise checkpoint.refused(f"d2t is {d2t.dtype} {list(d2t.shape)}; it must be a list of integers")
    ids = torch.arange(len(d2t)) + d2t.long()
    offsets = "d2t holds offsets, target id = drafted id + d2t[drafted id]"
    outside = ((ids < 0) | (ids >= vocab_size)).nonzero()
    if len(outside):
        i = int(outside[0])
        raise checkpoint.refused(f"d2t[{i}] = {int(d2t[i])} leads to id {int(ids[i])} of {vocab_size}; {offsets}")
    if len(ids.unique()) != len(ids):
        raise checkpoint.refused(f"d2t leads to the same target id twice; {offsets}")
    if t2d is not None and not torch.equal(t2d.bool().nonzero()[:, 0], ids.sort().values):
        raise checkpoint.refused(f"t2d marks other ids than d2t leads to; {offsets}")
    return ids


def write(directory: Path | str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write ``config.json`` and ``model.safetensors``, replacing existing files."""
    from safetensors.torch import save_file

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    save_file({k: t.detach().cpu().contiguous() for k, t in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")


def config_json(config: Any, architecture: str, **more: Any) -> dict[str, Any]:
    """Make the ``config.json`` of heads in the authors' layout."""
    known = {key: getattr(config, key, None) for key in _LAYER_KEYS}
    rope = dict(config.rope_parameters)
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    scaling = None if kind == "default" else {"rope_type": kind, **rope}
    return {
        "architectures": [architecture],
        "model_type": config.model_type,
        **{key: value for key, value in known.items() if value is not None},
        "num_hidden_layers": config.num_hidden_layers,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": False,
        **more,
    }
