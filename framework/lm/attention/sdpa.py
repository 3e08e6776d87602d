"""Attention of a few queries over a long cache, where groups of heads share keys and values.

With an explicit mask, transformers' ``sdpa`` repeats keys and values for every head of a group before it calls PyTorch
(except for a single query). Here the heads of a group become further queries instead, so keys and values are read in
place. The sums, and the result, are the same.

Others: FlashAttention takes no mask, and PyTorch's ``enable_gqa`` has no fused CUDA kernel with one. FlexAttention
must be compiled, so it runs only on request (crossdraft-layers).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...contracts.models import ModelPreparation


def grouped_sdpa(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Replace `sdpa_attention_forward`; call it where heads share no keys, or other options are requested.

    Args:
        query: ``[R, heads, W, dim]``.
        key, value: ``[R, shared heads, kv_len, dim]``.
        attention_mask: additive ``[R, 1, W, kv_len]``.

    Returns:
        ``[R, W, heads, dim]``, and None for the attention weights.
    """
    r, heads, width, _ = query.shape
    shared = key.shape[1]
    special = any(options.get(name) is not None for name in ("position_bias", "softcap", "cache"))
    if heads == shared or special or attention_mask is None or attention_mask.shape[1] != 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **options)
    rows = query.reshape(r, shared, -1, query.shape[3])  # heads of a group are adjacent
    if width > 1:  # a single row broadcasts; repeated once for all layers of a pass
        known = getattr(_thread, "repeated", None) or (None, 0, None)
        if known[0] is not attention_mask or known[1] != heads // shared:
            known = _thread.repeated = attention_mask, heads // shared, attention_mask.repeat(1, 1, heads // shared, 1)
        attention_mask = known[2]
    out = functional.scaled_dot_product_attention(rows, key, value, attention_mask, dropout, scale=scaling)
    return out.unflatten(2, (-1, width)).permute(0, 3, 1, 2, 4).flatten(2, 3).contiguous(), None


#: ``passes``: number of passes that run in this thread; ``repeated``: see `grouped_sdpa`.
_thread = threading.local()


def in_own_attention() -> bool:
    """True in threads inside `own_attention`."""
    return getattr(_thread, "passes", 0) > 0


def _sdpa(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    """`grouped_sdpa` in threads inside `own_attention`; transformers' function in all others."""
    own = getattr(_thread, "passes", 0)  # not in_own_attention: once a layer
    return (grouped_sdpa if own else sdpa_attention_forward)(*arguments, **options)


@contextmanager
def own_attention(cache: Any = None, visibility: Any = None) -> Iterator[None]:
    """Within the context, in this thread, models run `grouped_sdpa` for ``sdpa``."""
    _thread.passes = getattr(_thread, "passes", 0) + 1
    try:
        yield
    finally:
        _thread.passes -= 1
        _thread.repeated = None


class GroupedAttention(ModelPreparation):
    """Passes inside `own_attention`.

    The function is registered in place of transformers', because models look it up by name, and stays: elsewhere it
    calls transformers' own. A function that the user registered, before or after, replaces ours.
    """

    name = "grouped-attention"
    around_pass = staticmethod(own_attention)  # type: ignore[assignment]

    @classmethod
    def prepare(cls, model: torch.nn.Module) -> GroupedAttention:
        if ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward:
            ALL_ATTENTION_FUNCTIONS.register("sdpa", _sdpa)
        return cls()
