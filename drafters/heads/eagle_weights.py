"""EAGLE checkpoints: which layout they are in, told by their keys, and what their configs mean.

Read layouts, for EAGLE-1 and -2: the authors' own (``fc``, ``layers.0`` without an input norm) and that of
vllm-project/speculators up to 0.3 with HASS's norms (``fusion_fc``, ``transformer``). For EAGLE-3: the authors' own and
SpecForge's (``midlayer``) and that of speculators (``layers.0``, a nested config). The authors' own is written.
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

#: Keys of a Llama-like config that shape a decoder layer; any other key of a checkpoint's config is left alone.
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
    """The tensors under the authors' names of EAGLE-1, which the modules here use for EAGLE-3 too."""
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
    """Whether `renamed` tensors are EAGLE-3's: its first layer norms the features, EAGLE-1's does not."""
    return "layers.0.hidden_norm.weight" in tensors


def count_layers(checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> int:
    """Decoder layers, counted by key; 1 at least, so that what is missing is named."""
    found = ((re.match(r"layers\.(\d+)\.", key), key) for key in tensors)
    return max((checkpoint.number(match[1], key) for match, key in found if match), default=0) + 1


def biased(tensors: Mapping[str, Tensor]) -> frozenset[str]:
    """Which attention projections have biases (heads of Qwen2 targets: q, k and v)."""
    return frozenset(found[1] for key in tensors if (found := _PROJECTION_BIAS.fullmatch(key)))


def layer_config(checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> Any:
    """A transformers config of the heads' decoder layers, Llama's or, with query and key norms, Qwen3's.

    Rotary embeddings are the heads' own: where their config names no ``rope_theta`` it is 10000, never the target's.

    Raises:
        ModelError: the config lacks a size that the weights alone do not tell, or its sizes contradict each other.
    """
    from huggingface_hub.errors import StrictDataclassError

    raw = checkpoint.config.get("transformer_layer_config") or checkpoint.config
    if not isinstance(raw, dict):
        raise checkpoint.refused(f"transformer_layer_config is {raw!r:.80} in config.json; it is a mapping")
    lacking = [key for key in ("hidden_size", "intermediate_size", "num_attention_heads") if not raw.get(key)]
    if lacking:
        raise checkpoint.refused(f"config.json lacks {', '.join(lacking)}")
    known = {key: raw[key] for key in _LAYER_KEYS if raw.get(key) is not None}
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise checkpoint.refused(f"rope_scaling is {rope!r:.80} in config.json; it is a mapping")
    rope = dict(rope)
    kind = rope.pop("type", "default")
    rope = {"rope_type": kind, "rope_theta": raw.get("rope_theta") or 10000.0, **rope}
    qk_norm = "layers.0.self_attn.q_norm.weight" in tensors
    try:
        layers = count_layers(checkpoint, tensors)
        config = make_config(qk_norm=qk_norm, num_hidden_layers=layers, rope_parameters=rope, **known)
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        raise checkpoint.refused(f"config.json is no config of decoder layers: {str(error)!r:.300}") from None
    # Modules are made before they are compared with the tensors: none of a size that no tensor has.
    sides = {side for tensor in tensors.values() for side in tensor.shape}
    sizes = {
        "intermediate_size": config.intermediate_size,
        "num_attention_heads times head_dim": config.num_attention_heads * config.head_dim,
    }
    for key, size in sizes.items():
        if sides and size not in sides:
            raise checkpoint.refused(f"config.json says {key} {size}, but no tensor has such a side")
    return config


def make_config(*, qk_norm: bool = False, **options: Any) -> Any:
    """A transformers config for heads, ``options`` named as in Llama's; ``qk_norm``: Qwen3's query and key norms."""
    from transformers import LlamaConfig, Qwen3Config

    config = (Qwen3Config if qk_norm else LlamaConfig)(**options, tie_word_embeddings=False)
    config._attn_implementation = "sdpa"
    return config


def decoder_layer(config: Any, index: int, *, biased: frozenset[str] = frozenset(), width: int | None = None) -> Any:
    """A decoder layer of ``config``; ``width``: what its q, k and v projections read, H by default."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

    layer: Any = (Qwen3DecoderLayer if config.model_type == "qwen3" else LlamaDecoderLayer)(config, index)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        old = getattr(layer.self_attn, name)
        reads = old.in_features if name == "o_proj" or width is None else width
        if reads != old.in_features or (name in biased) != (old.bias is not None):
            setattr(layer.self_attn, name, nn.Linear(reads, old.out_features, bias=name in biased))
    return layer


def mask_of(mask: Any, config: Any, index: int) -> Tensor | None:
    """The mask of one layer: heads with sliding layers get a dict by layer type."""
    return mask[config.layer_types[index]] if isinstance(mask, Mapping) else mask


def shared(weight: Tensor) -> nn.Linear:
    """A head without bias that uses ``weight [rows, H]`` itself, not a copy."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def table(checkpoint: Checkpoint, tensors: dict[str, Tensor], key: str, target: Tensor, shape: Sequence[int]) -> Tensor:
    """Take the table ``key`` out of ``tensors``, or the target's where they leave it out; in the target's dtype.

    Raises:
        ModelError: it has another shape than ``shape``.
    """
    own = tensors.pop(key, None)
    found = target if own is None else own.to(target.device, target.dtype)
    if list(found.shape) != list(shape):
        whose = "the target's" if own is None else "theirs"
        raise checkpoint.refused(f"{key} has to be {list(shape)} here, but {whose} is {list(found.shape)}")
    return found


def target_ids(checkpoint: Checkpoint, tensors: dict[str, Tensor], vocab_size: int) -> Tensor | None:
    """Take ``d2t`` and ``t2d`` out of ``tensors``: the target's id ``[Vd]`` of each drafted id, ``None`` = the same.

    ``d2t [Vd]`` holds offsets: the target's id is the drafted one plus its offset. ``t2d [V]`` marks the target's ids.

    Raises:
        ModelError: ids that are outside the target's vocabulary or not distinct, or tables that contradict each other.
    """
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if d2t is None:
        if t2d is not None and not bool(t2d.all()):
            raise checkpoint.refused("t2d marks a reduced vocabulary, but there is no d2t that maps it")
        return None
    if d2t.dim() != 1 or d2t.is_floating_point():
        raise checkpoint.refused(f"d2t has to be a list of integers, not {d2t.dtype} {list(d2t.shape)}")
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
    """Write ``config.json`` and ``model.safetensors``; existing files are replaced."""
    from safetensors.torch import save_file

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    save_file({k: t.detach().cpu().contiguous() for k, t in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")


def config_json(config: Any, architecture: str, **more: Any) -> dict[str, Any]:
    """The ``config.json`` of heads in the authors' layout."""
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
