"""EAGLE checkpoints: detection of layouts by their keys, and interpretation of configs.

Supported layouts, for EAGLE-1 and -2: the authors' own (``fc``, ``layers.0`` without an input norm) and that of
vllm-project/speculators up to 0.3 with HASS's norms (``fusion_fc``, ``transformer``). For EAGLE-3: the authors' own and
SpecForge's (``midlayer``) and that of speculators (``layers.0``, a nested config); NeMo's names begin with ``model.``.
Written checkpoints have the authors' layout.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...framework.contracts.models import Checkpoint
from .config_keys import SECTIONS, remark
from .rotary import Rotary, by_halves, interleaved, rope_parameters

#: Keys of a Llama-like config that define a decoder layer; other keys are ignored.
_LAYER_KEYS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps"),
    *("hidden_act", "max_position_embeddings", "sliding_window", "use_sliding_window", "max_window_layers"),
    "layer_types",
)
#: Tensors without effect: tables that old releases of transformers stored, and the scales of a quantised KV cache.
UNUSED_TENSOR = re.compile(r".*(?:rotary_emb\.inv_freq|\.[kqv]_scale|\.kv_scale)")
_BIAS = re.compile(r"layers\.\d+\.(?:self_attn|mlp)\.(\w+)\.bias")
#: Prefixes of other layouts: EAGLE-3's, HASS's, and DSpark's of Model-Optimizer.
_RENAMED = {
    "midlayer.": "layers.0.",
    "transformer.": "layers.0.",
    "fusion_fc.": "fc.",
    "markov_w": "markov_head.markov_w",
    "gate_proj.": "markov_head.gate_proj.",
    "joint_proj.": "markov_head.joint_proj.",
    "confidence_proj.": "confidence_head.proj.",
}


def renamed(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Tensors by the authors' names of EAGLE-1, which the modules here use for all heads with decoder layers.

    Raises:
        ModelError: they are quantised, or two names mean the same tensor.
    """
    checkpoint.refuse_quantized(checkpoint.tensors)
    out: dict[str, Tensor] = {}
    for name, tensor in checkpoint.tensors.items():
        if UNUSED_TENSOR.fullmatch(name):
            continue
        key = name.removeprefix("model.")  # of NeMo
        for old, new in _RENAMED.items():
            if key.startswith(old):
                key = new + key.removeprefix(old)
                break
        if key in out:
            raise checkpoint.refused(f"two of their tensors are {key} ({name} is one); leave one out")
        out[key] = tensor
    return out


def count_layers(checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> int:
    """Number of decoder layers, by key; at least 1, so that errors name the missing tensors."""
    matches = ((re.match(r"layers\.(\d+)\.", key), key) for key in tensors)
    return max((checkpoint.number(match[1], key) for match, key in matches if match), default=0) + 1


def biased(tensors: Mapping[str, Tensor]) -> frozenset[str]:
    """Names of the projections of attention and MLP with a bias (heads of Qwen2 targets: q, k and v)."""
    return frozenset(match[1] for key in tensors if (match := _BIAS.fullmatch(key)))


def layer_section(checkpoint: Checkpoint) -> dict[str, Any]:
    """The part of the config that describes decoder layers. Raises ModelError unless it is a mapping."""
    raw = checkpoint.config.get("transformer_layer_config") or checkpoint.config
    if not isinstance(raw, dict):
        raise checkpoint.refused(f"transformer_layer_config is {raw!r:.80} in config.json; it must be a mapping")
    return raw


def merged_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The checkpoint's config, merged with those of `SECTIONS`, which take precedence where they have a value.

    Raises:
        ModelError: a section is not a mapping.
    """
    merged = dict(checkpoint.config)
    for section in SECTIONS:
        nested = checkpoint.config.get(section) or {}
        if not isinstance(nested, dict):
            raise checkpoint.refused(f"{section} is {nested!r:.80} in config.json; it must be a mapping")
        merged |= {key: value for key, value in nested.items() if value is not None}
    return merged


def with_options(checkpoint: Checkpoint, **options: Any) -> Checkpoint:
    """A copy whose `merged_config` has other ``options``, written where the config has them."""
    sections = {name: checkpoint.config[name] for name in SECTIONS if isinstance(checkpoint.config.get(name), dict)}
    changed = {
        name: {**nested, **{key: value for key, value in options.items() if key in nested}}
        for name, nested in sections.items()
    }
    return checkpoint.with_config(**options, **changed)


def layer_config(checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> Any:
    """Make a transformers config of the heads' decoder layers: Llama's or, with query and key norms, Qwen3's.

    The channels of ``tensors`` are permuted if the config pairs other ones than transformers, see `by_halves`.

    Raises:
        ModelError: the config lacks a required size, or its sizes contradict each other or the tensors.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers.activations import ACT2FN

    raw = dict(layer_section(checkpoint))
    if raw.get("model_type") == "llama4_text" and raw.get("intermediate_size_mlp"):
        raw["intermediate_size"] = raw["intermediate_size_mlp"]  # the other size is that of experts
    raw["hidden_act"] = raw.get("hidden_act") or raw.get("hidden_activation")
    lacking = [key for key in ("hidden_size", "intermediate_size", "num_attention_heads") if not raw.get(key)]
    if lacking:
        raise checkpoint.refused(f"config.json lacks {', '.join(lacking)}")
    known = {key: raw[key] for key in _LAYER_KEYS if raw.get(key) is not None}
    norm = tensors.get("layers.0.self_attn.q_norm.weight")
    if norm is not None:
        known.setdefault("head_dim", norm.shape[-1] if norm.dim() else 0)
    if known.get("hidden_act", "silu") not in ACT2FN:
        raise checkpoint.refused(f"config.json has {known['hidden_act']!r:.80} for hidden_act, which is not known")
    rope = rope_parameters(checkpoint, raw, known.get("layer_types"))
    try:
        layers = count_layers(checkpoint, tensors)
        config = make_config(qk_norm=norm is not None, num_hidden_layers=layers, rope_parameters=rope, **known)
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
    try:
        Rotary(config)
        tensors |= by_halves(config, tensors, interleaved=interleaved(raw))
    except KeyError as error:
        raise checkpoint.refused(f"rope_parameters of type {rope['rope_type']!r} lack {error} in config.json") from None
    except (ValueError, TypeError, RuntimeError, ZeroDivisionError) as error:
        raise checkpoint.refused(
            f"the rotary embedding of config.json cannot be computed: {str(error)!r:.200} ({rope!r:.200})"
        ) from None
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
    reads_width = () if width is None else ("q_proj", "k_proj", "v_proj")
    for part in (layer.self_attn, layer.mlp):
        for name, old in list(part.named_children()):
            if not isinstance(old, nn.Linear):
                continue
            size = width if name in reads_width and width is not None else old.in_features
            if size != old.in_features or (name in biased) != (old.bias is not None):
                setattr(part, name, nn.Linear(size, old.out_features, bias=name in biased))
    return layer


class OutputHead(nn.Linear):
    """A linear layer without bias, whose output is multiplied by ``scale``."""

    scale = 1.0

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.scale


def shared(weight: Tensor, scale: float = 1.0) -> nn.Linear:
    """Make an output head on ``weight [rows, H]`` itself, not on a copy."""
    linear: Any = (nn.Linear if scale == 1 else OutputHead)(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight, linear.scale = nn.Parameter(weight, requires_grad=False), scale
    return linear


class Vocabulary(NamedTuple):
    """Tables of a head.

    Attributes:
        embedding: ``[V, H]``; ``own``: it is the checkpoint's.
        head: ``[Vd, H]``.
        ids: ``[Vd]`` int64, the target's id of each row of ``head``; None = identical ids.
        scale: factor of the logits.
    """

    embedding: Tensor
    own: bool
    head: Tensor
    ids: Tensor | None
    scale: float


def near(size: int, rows: int) -> bool:
    """True if a table of ``size`` rows may be that of a vocabulary of ``rows`` before it grew, or after it was cut."""
    return rows < 2 * size < 4 * rows


def with_rows(table: Tensor, rows: int, new: Tensor | None = None) -> Tensor:
    """Cut ``table [n, ..]`` to ``rows``, or append the rows ``new``, by default 0."""
    table = table[:rows]
    if len(table) == rows:
        return table
    return torch.cat([table, table.new_zeros(rows - len(table), *table.shape[1:]) if new is None else new])


def vocabulary(checkpoint: Checkpoint, tensors: dict[str, Tensor], target: Any, size: int) -> Vocabulary:
    """Remove embedding, head and vocabulary maps from ``tensors``; tables that are missing are those of ``target``.

    If ``tie_word_embeddings`` is set, a missing head is the checkpoint's own embedding. Tables with a few rows fewer
    than the target's are those of a vocabulary that grew afterwards: new tokens are embedded as the target does and
    never drafted. Rows that the target does not have are left out.

    Args:
        target: a causal LM of transformers.
        size: H, the width of the head.

    Raises:
        ModelError: a table has another shape, or the maps are invalid.
    """
    embedding, output = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    rows, ids = len(output), target_ids(checkpoint, tensors, len(output))
    own = tensors.pop("embed_tokens.weight", None)
    settings = {**layer_section(checkpoint), **checkpoint.config}
    head = tensors.pop("lm_head.weight", own if settings.get("tie_word_embeddings") else None)
    for name, table, count in (("embed_tokens", own, rows), ("lm_head", head, rows if ids is None else len(ids))):
        shape = [count, embedding.shape[1]] if table is None else list(table.shape)
        whose = "the target's" if table is None else "theirs"
        if name == "lm_head" and table is None and ids is not None:
            shape[0] = rows
        grown = shape[1:] == [size] and near(shape[0], rows) and (name == "embed_tokens" or ids is None)
        if shape != [count, size] and not grown:
            raise checkpoint.refused(f"{name}.weight must have shape {[count, size]}, but {whose} has {shape}")
        if shape[0] != count:
            remark(
                checkpoint,
                f"{name}.weight has {shape[0]} rows, the target's vocabulary {rows}; tokens that only one of them has "
                "are never drafted",
            )
    if own is not None:
        new = embedding[len(own) : rows].detach() if embedding.shape[1] == size else None
        own = with_rows(own.to(embedding.device, embedding.dtype), rows, new)
    if head is not None:
        head = head[:rows].to(output.device, output.dtype)
        if ids is None and len(head) < rows:
            ids = torch.arange(len(head))
    return Vocabulary(
        embedding if own is None else own,
        own is not None,
        output if head is None else head,
        ids,
        logit_scale(checkpoint, settings),
    )


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
    offsets = "d2t holds offsets, target id = drafted id + d2t[drafted id]"
    ids = checked_ids(checkpoint, torch.arange(len(d2t)) + d2t.long(), vocab_size, "d2t", offsets)
    if t2d is not None and not torch.equal(t2d.bool().nonzero()[:, 0], ids.sort().values):
        raise checkpoint.refused(f"t2d marks other ids than d2t leads to; {offsets}")
    return ids


def checked_ids(checkpoint: Checkpoint, ids: Tensor, end: int, table: str, hint: str) -> Tensor:
    """Return ``ids [n]``. Raises ModelError if they are not distinct or not below ``end``; ``hint`` describes them."""
    outside = ((ids < 0) | (ids >= end)).nonzero()
    if len(outside):
        i = int(outside[0])
        raise checkpoint.refused(f"{table}[{i}] leads to id {int(ids[i])}, but valid ids are 0 to {end - 1}; {hint}")
    if len(ids.unique()) < len(ids):
        raise checkpoint.refused(f"{table} leads to the same id of the target twice; {hint}")
    return ids


def logit_scale(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> float:
    """``logit_scale`` of a config, 1 without it. Raises ModelError unless it is a positive number."""
    scale = settings.get("logit_scale")
    scale = 1.0 if scale is None else scale
    if type(scale) not in (int, float) or not math.isfinite(scale) or scale <= 0:
        raise checkpoint.refused(f"logit_scale is {scale!r:.80} in config.json, which is not a positive number")
    return float(scale)


def save_head_files(directory: Path | str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
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
    partial = {key: rope.pop(key) for key in ("partial_rotary_factor",) if kind != "proportional" and key in rope}
    scaling = None if kind == "default" else {"rope_type": kind, **rope}
    return {
        "architectures": [architecture],
        "model_type": config.model_type,
        **{key: value for key, value in known.items() if value is not None},
        "num_hidden_layers": config.num_hidden_layers,
        "rope_theta": theta,
        "rope_scaling": scaling,
        **partial,
        "tie_word_embeddings": False,
        **more,
    }
