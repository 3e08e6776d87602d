"""Attention that reads of each row no more than the row has: PyTorch's FlexAttention over a ragged cache.

An explicit mask is as long as the longest row, and every slot under it is read. FlexAttention is told which blocks of
128 slots of a row anybody sees, reads those alone, asks the mask only in blocks that are seen in part, reads keys that
heads share where they lie, and divides the keys of a row among a GPU's processors where queries are few (FlexDecoding,
which is flash-decoding). Chains and trees differ in their masks alone, so one kernel serves both.

J. Dong et al., "Flex Attention: A Programming Model for Generating Optimized Attention Kernels", 2024.

The explicit mask stays the reference: `block_mask` is made of the very same one, and tests hold both equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ..errors import ModelError, first_line
from ..models.placement import input_device, is_split, is_spread
from ..util.compilation import jit_compile

#: What transformers calls it: ``attn_implementation: flex_attention``.
FLEX = "flex_attention"
#: Where it is run. PyTorch's code for a CPU has to be compiled again for every length, which takes seconds each time.
DEVICES = ("cuda",)
#: Slots in a block, PyTorch's own number; and queries.
BLOCK = 128
#: What a model may ask of its attention beside this and is left to the explicit mask.
_OTHERS = ("s_aux", "position_bias", "cache")


def refusals(model: Any) -> Iterator[str]:
    """Why ``model``, which asks for FlexAttention, is not run with it here."""
    hint = "; leave attn_implementation out"
    if input_device(model).type not in DEVICES:
        yield (
            f"was loaded with {FLEX}, for which PyTorch compiles code on a CPU again for every length of a text, and "
            f"that takes longer than the text{hint}"
        )
    if is_spread(model) or is_split(model):
        yield f"was loaded with {FLEX}, whose masks lie on one device, but the model is laid out over several{hint}"


def block_mask(allowed: Tensor) -> BlockMask:
    """What `ragged_flex` takes for ``allowed [R, W, reach]`` bool: who sees which slot, the same for all heads."""
    width, reach = allowed.shape[1:]
    seen = functional.pad(allowed, (0, -reach % BLOCK, 0, -width % BLOCK if width > BLOCK else 0))
    seen = seen.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, min(width, BLOCK)))
    whole = seen.all(4).all(2)  # [R, blocks of queries, blocks of slots]
    some = seen.any(4).any(2) & ~whole

    def mask(row: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
        return allowed[row, query, slot]

    return BlockMask.from_kv_blocks(
        *_listed(some), *_listed(whole), BLOCK, mask, seq_lengths=(width, reach), compute_q_blocks=False
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many of ``blocks [R, Q, K]`` bool there are ``[R, 1, Q]``, and which, these first ``[R, 1, Q, K]``."""
    which = blocks.byte().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], which.int()[:, None]


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
    """In the place of transformers' ``flex_attention``, which copies keys where heads share them by threes, say.

    Args:
        query: ``[R, heads, W, dim]``.
        key, value: ``[R, shared heads, reach, dim]``.
        attention_mask: of `block_mask`.

    Returns:
        ``[R, W, heads, dim]``, and None for the attention weights.

    Raises:
        ModelError: a model that asks for more than a mask (attention sinks, say), or code that cannot be compiled.
    """
    if asked := [name for name in _OTHERS if options.get(name) is not None]:
        raise ModelError(
            f"{type(module).__name__} asks its attention for {', '.join(asked)}, which crossdraft does not do with "
            f"{FLEX}; load the model with another attn_implementation, or none"
        )
    inputs = [query, key, value, attention_mask]
    if softcap is not None:  # a tensor, because the kernel reads tensors whatever they hold
        inputs.append(torch.full((), softcap, device=query.device))
    rows, heads, width, dim = query.shape
    reach = key.shape[2]
    # Keys are divided among processors where code is compiled for a number of rows. A prompt that nothing stands before
    # need not be, and prompts share passes in any number.
    rows = rows if rows == 1 or width < reach else None
    shape = (rows, heads, key.shape[1], dim, width == 1, width > BLOCK, reach > BLOCK)
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
    """Code for this ``shape`` alone: PyTorch counts what it has compiled of a function, and stops.

    What else may differ in length is compiled in when it first comes, and found out when it comes otherwise: three or
    four times in all, then any length will do (`tests/lm/test_flex_attention.py` counts).
    """

    def run(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Any:
        return flex_attention(query, key, value, None, mask, scaling, grouped)

    def run_capped(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, cap: Tensor) -> Any:
        def score(score: Tensor, row: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
            return cap * torch.tanh(score / cap)

        return flex_attention(query, key, value, score, mask, scaling, grouped)

    return jit_compile(run_capped if capped else run, dynamic=None)
