"""Decoder layers of few kernels for passes on CUDA, by Liger's Triton kernels and joined projections.

In a CUDA graph, a small kernel of a layer costs about 2 microseconds on an H200, however little it computes. Here a
norm is one kernel, with the sum before it if there is one, so are the rotation of queries and keys, and the activation
with its product. Queries, keys and values are one product, and so are gate and up. The weights of joined projections
become views of one matrix, without a copy that stays.

``CROSSDRAFT_FUSED_LAYERS=1`` in the environment switches this on; it is an option because no GPU has run it yet. It
needs ``liger-kernel`` (in a clone: ``pip install -e 'plugins/crossdraft-layers[fused]'``). Layers that are not of the
structure of Llama's run as they are, and so do passes outside of `own_attention`.

Every operation of Liger is an operator of PyTorch here, ``crossdraft::..``, with a reference for CPUs in plain
PyTorch, which tests compare with the kernels.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from crossdraft import ModelPreparation, cache_argument, need
from crossdraft.framework.lm.attention.sdpa import in_own_attention

logger = logging.getLogger(__name__)

VARIABLE = "CROSSDRAFT_FUSED_LAYERS"
#: Layers of transformers that add what their attention returns, and then what their feed-forward network returns.
LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer")
#: Activations that Liger multiplies, by the name that configurations have for them.
_SILU = ("silu", "swish")


class FusedLayers(ModelPreparation):
    """Let the decoder layers of a model on CUDA run fused kernels; weights do not change."""

    name = "fused-layers"

    @classmethod
    def prepare(cls, model: nn.Module) -> None:
        if os.environ.get(VARIABLE, "0") != "1":
            return
        need(f"{VARIABLE}=1", "fused", "liger_kernel", of="plugins/crossdraft-layers")
        for layer in model.modules():
            if isinstance(layer, GradientCheckpointingLayer) and not hasattr(layer, "_runs_fused"):
                if reason := _unfit(layer):
                    _warn_once(type(layer).__name__, reason)
                else:
                    _join(layer)
                    layer.__class__ = _fused_class(type(layer))


@cache
def _warn_once(name: str, reason: str) -> None:
    logger.warning("crossdraft: %s runs without fused kernels (%s=1): %s", name, VARIABLE, reason)


def _unfit(layer: Any) -> str:
    """Reason why ``layer`` cannot run fused kernels; empty if it can."""
    kind = type(layer)
    if not kind.__module__.startswith("transformers.models.") or kind.__name__ not in LAYERS:
        return f"they are for {', '.join(LAYERS)}"
    if not _has_parts(layer):
        return "parts of it were replaced"
    if any(tensor.device.type != "cuda" for tensor in layer.parameters()):
        return "they are for models on CUDA"
    if any(
        type(linear) is not nn.Linear or hasattr(linear.weight, "__tensor_flatten__") for linear in _projections(layer)
    ):
        return "its projections are not plain linear layers"
    if layer.mlp.config.hidden_act not in _SILU:
        return f"its activation is {layer.mlp.config.hidden_act}, not {_SILU[0]}"
    if any(module._forward_hooks or module._forward_pre_hooks for module in [*layer.modules()][1:]):
        return "its modules have hooks, which would not run"
    return ""


def _has_parts(layer: Any) -> bool:
    parts = layer.self_attn, layer.mlp, layer.input_layernorm, layer.post_attention_layernorm
    return all(map(hasattr, parts, ("q_proj", "gate_proj", "variance_epsilon", "variance_epsilon")))


def _projections(layer: Any) -> list[Any]:
    attention, mlp = layer.self_attn, layer.mlp
    return [attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj]


def _join(layer: Any) -> None:
    """Let the projections with the same input be views of one matrix, and of one vector of biases."""
    linears = _projections(layer)
    for owner, group in ((layer.self_attn, linears[:3]), (layer.mlp, linears[3:])):
        owner._joined = _joined([linear.weight for linear in group]), _joined([linear.bias for linear in group])


@torch.no_grad()
def _joined(parameters: Sequence[nn.Parameter | None]) -> Tensor | None:
    """One tensor that holds ``parameters``, which become views of it; None without any."""
    present = [parameter for parameter in parameters if parameter is not None]
    if len(present) < len(parameters):
        return None
    whole = torch.cat([parameter.data for parameter in present])
    for parameter, part in zip(present, whole.split([len(parameter) for parameter in present]), strict=True):
        parameter.data = part
    return whole


def _is_joined(layer: Any) -> bool:
    """True unless a part, or a joined parameter, was replaced or moved since."""
    if not _has_parts(layer):
        return False
    pairs = (layer.self_attn._joined, layer.self_attn.q_proj), (layer.mlp._joined, layer.mlp.gate_proj)
    return all(joined.data_ptr() == linear.weight.data_ptr() for (joined, _), linear in pairs)


@cache
def _fused_class(plain: type[Any]) -> type[Any]:
    cache_name = cache_argument(plain.forward)

    @wraps(plain.forward)
    def forward(self: Any, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        kv_cache: Any = options.get(cache_name)
        rotation: Any = options.get("position_embeddings")
        fits = not args and kv_cache is not None and in_own_attention()
        if not fits or rotation is None or self.training or torch.is_grad_enabled() or not _is_joined(self):
            return plain.forward(self, hidden_states, *args, **options)
        return _layer(self, hidden_states, kv_cache, rotation, options.get("attention_mask"))

    new = type(plain.__name__, (plain,), {"forward": forward, "_runs_fused": plain})
    new.__module__, new.__qualname__ = plain.__module__, plain.__qualname__
    return new


def _layer(layer: Any, hidden: Tensor, kv_cache: Any, rotation: tuple[Tensor, Tensor], mask: Any) -> Tensor:
    """Output ``[R, W, H]`` of a layer of the structure of Llama's."""
    attention, mlp, norms = layer.self_attn, layer.mlp, (layer.input_layernorm, layer.post_attention_layernorm)
    ops = torch.ops.crossdraft
    rows, width, size = hidden.shape
    joined = functional.linear(ops.rms_norm(hidden, norms[0].weight, norms[0].variance_epsilon), *attention._joined)
    sizes = [linear.out_features // attention.head_dim for linear in _projections(layer)[:3]]
    heads = joined.view(rows, width, -1, attention.head_dim)
    ops.rotate(heads, *sizes[:2], *rotation)
    queries, keys, values = (part.transpose(1, 2) for part in heads.split(sizes, 2))
    keys, values = kv_cache.update(keys, values, attention.layer_idx)
    attend = ALL_ATTENTION_FUNCTIONS[attention.config._attn_implementation]
    context = attend(attention, queries, keys, values, mask, dropout=0.0, scaling=attention.scaling)[0]
    context = attention.o_proj(context.reshape(rows, width, -1))
    normed, hidden = ops.add_rms_norm(context, hidden, norms[1].weight, norms[1].variance_epsilon)
    both, bias = mlp._joined
    product = normed.view(1, -1, size).expand(2, -1, -1), both.view(2, -1, size).transpose(1, 2)
    gate, up = torch.bmm(*product) if bias is None else torch.baddbmm(bias.view(2, 1, -1), *product)
    return hidden + mlp.down_proj(ops.silu_and_multiply(gate, up)).view(hidden.shape)


# -- operators: a reference for CPUs, and Liger's kernels -----------------------------------------------------


def _reference_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _liger_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    from liger_kernel.ops.rms_norm import rms_norm_forward  # pyright: ignore[reportMissingImports]

    return rms_norm_forward(x, weight, eps, 0.0, "llama", True)[0]


def _reference_add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _reference_norm(total, weight, eps), total


def _liger_add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    from liger_kernel.ops.fused_add_rms_norm import fused_add_rms_norm_forward  # pyright: ignore[reportMissingImports]

    normed, total, *_ = fused_add_rms_norm_forward(x, residual, weight, eps, 0.0, "llama")
    return normed, total


def _reference_product(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def _liger_product(gate: Tensor, up: Tensor) -> Tensor:
    from liger_kernel.ops.swiglu import swiglu_forward  # pyright: ignore[reportMissingImports]

    return swiglu_forward(gate, up)[2]


def _reference_rotation(heads: Tensor, queries: int, keys: int, cos: Tensor, sin: Tensor) -> None:
    part = heads[:, :, : queries + keys]
    first, second = part.chunk(2, -1)
    part.copy_(part * cos[:, :, None] + torch.cat((-second, first), -1) * sin[:, :, None])


def _liger_rotation(heads: Tensor, queries: int, keys: int, cos: Tensor, sin: Tensor) -> None:
    """Launch Liger's kernel on parts of ``heads``: its own function would copy them to contiguous memory first."""
    from liger_kernel.ops.rope import _triton_rope  # pyright: ignore[reportMissingImports]

    rows, width, _, dim = heads.shape
    padded = [1 << (count - 1).bit_length() for count in (queries, keys, dim)]
    stride = heads.stride(1)
    _triton_rope[(rows * width,)](
        *(heads, stride, heads[:, :, queries:], stride, cos, cos.stride(-2), sin, sin.stride(-2)),
        *(width, rows, len(cos), queries, keys, dim, *padded, padded[2], dim),
        BLOCK_SIZE=max(padded[:2]),
        BACKWARD_PASS=False,
    )


#: By operator: its signature, the reference, and Liger's kernel. ``rotate`` turns the first ``queries + keys`` of
#: ``heads [R, W, all heads, dim]`` in place, by ``cos`` and ``sin [R or 1, W, dim]``.
OPERATORS: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    "rms_norm": ("(Tensor x, Tensor weight, float eps) -> Tensor", _reference_norm, _liger_norm),
    "add_rms_norm": (
        "(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
        _reference_add_norm,
        _liger_add_norm,
    ),
    "silu_and_multiply": ("(Tensor gate, Tensor up) -> Tensor", _reference_product, _liger_product),
    "rotate": (
        "(Tensor(a!) heads, int queries, int keys, Tensor cos, Tensor sin) -> ()",
        _reference_rotation,
        _liger_rotation,
    ),
}
_library = torch.library.Library("crossdraft", "FRAGMENT")
for _name, (_signature, _reference, _liger) in OPERATORS.items():
    _library.define(_name + _signature)
    _library.impl(_name, _reference, "CPU")
    _library.impl(_name, _liger, "CUDA")
