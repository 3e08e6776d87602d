"""PyTorch's FlexAttention over a ragged cache: it reads only the slots that a row has.

An explicit mask is as long as the longest row, and every slot under it is read. FlexAttention receives the blocks of
128 slots that are visible to some query, reads only those, evaluates the mask only in partly visible blocks, reads
shared keys in place, and splits the keys of a row among a GPU's processors if there are few queries (FlexDecoding,
i.e. flash-decoding). Chains and trees differ only in their masks, so one kernel serves both.

J. Dong et al., "Flex Attention: A Programming Model for Generating Optimized Attention Kernels", 2024.

The explicit mask remains the reference: `block_mask` is built from it, and tests compare both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from crossdraft import ModelError, ModelPreparation, first_line
from crossdraft.framework.lm.attention.sdpa import in_own_attention
from crossdraft.framework.util.compilation import jit_compile

#: Its name in transformers: ``attn_implementation: flex_attention``.
FLEX = "flex_attention"
#: Slots, and queries, of a block: PyTorch's default.
BLOCK = 128
#: Options of attention that need the explicit mask.
_UNSUPPORTED = ("s_aux", "position_bias", "cache")


def block_mask(allowed: Tensor) -> BlockMask:
    """The mask of `ragged_flex` for ``allowed [R, W, kv_len]`` bool, the same for all heads."""
    width, kv_len = allowed.shape[1:]
    seen = functional.pad(allowed, (0, -kv_len % BLOCK, 0, -width % BLOCK if width > BLOCK else 0))
    seen = seen.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, min(width, BLOCK)))
    full = seen.all(4).all(2)  # [R, blocks of queries, blocks of slots]
    partial = seen.any(4).any(2) & ~full

    def mask(row: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
        return allowed[row, query, slot]

    return BlockMask.from_kv_blocks(
        *_listed(partial), *_listed(full), BLOCK, mask, seq_lengths=(width, kv_len), compute_q_blocks=False
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The number ``[R, 1, Q]`` of true ``blocks [R, Q, K]``, and their indices, first in ``[R, 1, Q, K]``."""
    indices = blocks.byte().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], indices.int()[:, None]


def ragged_flex(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: BlockMask,
    scaling: float | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Replace transformers' ``flex_attention``, which copies keys if groups of heads are not a power of two.

    Args:
        query: ``[R, heads, W, dim]``.
        key, value: ``[R, shared heads, kv_len, dim]``.
        attention_mask: of `block_mask`.

    Returns:
        ``[R, W, heads, dim]``, and None for the attention weights.

    Raises:
        ModelError: the model needs more than a mask (attention sinks, for example), or compilation failed.
    """
    if unsupported := [name for name in _UNSUPPORTED if options.get(name) is not None]:
        raise ModelError(
            f"{type(module).__name__} uses {', '.join(unsupported)} in its attention, which crossdraft does not "
            f"support with {FLEX}; load the model with another attn_implementation, or none"
        )
    inputs = [query, key, value, attention_mask]
    if softcap is not None:  # a tensor: the kernel is not compiled for its value
        inputs.append(torch.full((), softcap, device=query.device))
    rows, heads, width, dim = query.shape
    kv_len = key.shape[2]
    # Splitting keys among processors requires code compiled for the number of rows. Prefill from slot 0 does not need
    # it, and any number of prompts may share a pass.
    rows = rows if rows == 1 or width < kv_len else None
    shape = (rows, heads, key.shape[1], dim, width == 1, width > BLOCK, kv_len > BLOCK)
    try:
        out = _compiled(shape, scaling, heads != key.shape[1], softcap is not None)(inputs)
    except RuntimeError as error:
        from torch._dynamo.exc import TorchDynamoException

        if not isinstance(error, TorchDynamoException):
            raise
        raise ModelError(
            f"PyTorch could not compile {FLEX} ({first_line(error)}); load the model with another attn_implementation, "
            "or none"
        ) from error
    return out.transpose(1, 2).contiguous(), None


@cache
def _compiled(shape: tuple[Any, ...], scaling: float | None, grouped: bool, capped: bool) -> Callable[[list[Any]], Any]:
    """A separate function per ``shape``: PyTorch limits how often it compiles one function.

    Other lengths are compiled as constants at first and become dynamic when they change: three or four compilations in
    all, after which any length runs (`tests/lm/test_flex_attention.py` counts).
    """

    def run(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Any:
        return flex_attention(query, key, value, None, mask, scaling, grouped)

    def run_capped(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, cap: Tensor) -> Any:
        def score(score: Tensor, row: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
            return cap * torch.tanh(score / cap)

        return flex_attention(query, key, value, score, mask, scaling, grouped)

    return jit_compile(run_capped if capped else run)


def _flex(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """`ragged_flex` in passes of crossdraft, for masks of `block_mask`; transformers' function in all others."""
    own = in_own_attention() and isinstance(attention_mask, BlockMask)
    return (ragged_flex if own else flex_attention_forward)(module, query, key, value, attention_mask, **options)


class FlexAttention(ModelPreparation):
    """`ragged_flex` in place of transformers' function, which models look up by name, unless the user replaced it."""

    name = "flex-attention"
    mask = staticmethod(block_mask)

    @classmethod
    def prepare(cls, model: torch.nn.Module) -> None:
        if ALL_ATTENTION_FUNCTIONS[FLEX] is flex_attention_forward:
            ALL_ATTENTION_FUNCTIONS.register(FLEX, _flex)
