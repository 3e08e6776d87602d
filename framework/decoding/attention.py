"""Attention of a few queries over a long cache, where groups of heads share keys and values.

transformers' ``sdpa`` with a mask of our kind copies the cache that it attends over once for every head of a group
before it calls PyTorch (for one query it does not). Queries that share keys can as well be rows of one product: the
heads of a group become further queries, and keys and values are read where they lie. Same sums, same result.

Why not another one: FlashAttention takes no mask, which a tree and ragged rows need; FlexAttention does, but has to be
compiled; PyTorch's own ``enable_gqa`` has no fused CUDA kernel that takes a mask. ``python benchmarks/attention.py``
shows what each costs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..models.meanwhile import Meanwhile


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
    """In the place of `sdpa_attention_forward`, which takes over where heads share nothing or more than this is asked.

    Args:
        query: ``[R, heads, W, dim]``.
        key, value: ``[R, shared heads, reach, dim]``.
        attention_mask: additive ``[R, 1, W, reach]``.

    Returns:
        ``[R, W, heads, dim]``, and None for the attention weights.
    """
    r, heads, width, _ = query.shape
    shared = key.shape[1]
    asked = any(options.get(name) is not None for name in ("position_bias", "softcap", "cache"))
    if heads == shared or asked or attention_mask is None or attention_mask.shape[1] != 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **options)
    rows = query.reshape(r, shared, -1, query.shape[3])  # heads of a group follow each other
    if width > 1:  # one row stands for all of them
        attention_mask = attention_mask.repeat(1, 1, heads // shared, 1)
    out = functional.scaled_dot_product_attention(
        rows, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
    )
    return out.unflatten(2, (-1, width)).permute(0, 3, 1, 2, 4).flatten(2, 3).contiguous(), None


#: How many passes this thread is inside of.
_here = threading.local()


def _attention(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    """`grouped_sdpa` for the threads inside `grouped_attention`; a model that another thread runs keeps its own."""
    return (grouped_sdpa if getattr(_here, "passes", 0) else sdpa_attention_forward)(*arguments, **options)


def _replace_sdpa() -> Callable[[], None]:
    if ALL_ATTENTION_FUNCTIONS["sdpa"] is not sdpa_attention_forward:
        return lambda: None  # somebody put a function of their own there: that is what the model is to run
    ALL_ATTENTION_FUNCTIONS["sdpa"] = _attention

    def take_back() -> None:
        if ALL_ATTENTION_FUNCTIONS["sdpa"] is _attention:
            # Taken away, not overwritten: an entry left here would hide what is registered for all models later.
            del ALL_ATTENTION_FUNCTIONS["sdpa"]

    return take_back


_replaced = Meanwhile(_replace_sdpa)


@contextmanager
def grouped_attention() -> Iterator[None]:
    """Models that use ``sdpa`` use `grouped_sdpa` meanwhile, in this thread; the name stays, because models ask for it.

    Threads may overlap in any order: when the last has left, the registry is what it was.
    """
    with _replaced:
        _here.passes = getattr(_here, "passes", 0) + 1
        try:
            yield
        finally:
            _here.passes -= 1
