"""Attention of a few queries over a long cache, where groups of heads share keys and values.

transformers' ``sdpa`` with a mask of our kind copies the cache that it attends over once for every head of a group
before it calls PyTorch (for one query it does not). Queries that share keys can as well be rows of one product: the
heads of a group become further queries, and keys and values are read where they lie. Same sums, same result.

Why not another one: FlashAttention takes no mask, which a tree and ragged rows need; FlexAttention does, but has to be
compiled, so it is run where it is asked for (``flex.py``); PyTorch's own ``enable_gqa`` has no fused CUDA kernel that
takes a mask. ``python benchmarks/attention.py`` shows what each costs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..util.shared_patch import SharedPatch
from .flex_attention import FLEX, BlockMask, ragged_flex


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


def _sdpa(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    """`grouped_sdpa` for the threads inside `own_attention`; a model that another thread runs keeps its own."""
    return (grouped_sdpa if getattr(_here, "passes", 0) else sdpa_attention_forward)(*arguments, **options)


def _flex(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """`ragged_flex` for the threads inside `own_attention`, where the mask is one of theirs."""
    ours = getattr(_here, "passes", 0) and isinstance(attention_mask, BlockMask)
    return (ragged_flex if ours else flex_attention_forward)(module, query, key, value, attention_mask, **options)


_REPLACED = {"sdpa": (sdpa_attention_forward, _sdpa), FLEX: (flex_attention_forward, _flex)}


def _replace() -> Callable[[], None]:
    # Where somebody put a function of their own, that is what the model is to run.
    ours = {name: own for name, (theirs, own) in _REPLACED.items() if ALL_ATTENTION_FUNCTIONS[name] is theirs}
    for name, own in ours.items():
        ALL_ATTENTION_FUNCTIONS[name] = own

    def take_back() -> None:
        for name, own in ours.items():
            if ALL_ATTENTION_FUNCTIONS[name] is own:
                # Taken away, not overwritten: an entry left here would hide what is registered for all models later.
                del ALL_ATTENTION_FUNCTIONS[name]

    return take_back


_replaced = SharedPatch(_replace)


@contextmanager
def own_attention() -> Iterator[None]:
    """Models that use ``sdpa`` use `grouped_sdpa` meanwhile, in this thread, and `ragged_flex` for ``flex_attention``.

    The names stay, because models ask for them.

    Threads may overlap in any order: when the last has left, the registry is what it was.
    """
    with _replaced:
        _here.passes = getattr(_here, "passes", 0) + 1
        try:
            yield
        finally:
            _here.passes -= 1
