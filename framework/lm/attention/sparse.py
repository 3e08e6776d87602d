"""Sparse attention whose indexer ranks keys: exact while the indexer selects all of them.

Indexers keep keys of their own in a cache with one length for all rows, and equal scores make the selection depend on
the length of the pass. If a slot is not longer than the number of keys that an indexer selects, it selects every key,
and the attention mask decides. So its scores are not computed. Longer slots are refused, see `selected_keys`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ...contracts.models import ModelPreparation
from ...util.cache_argument import cache_argument, plain_signature


def _all_keys(module: Any, arguments: Mapping[str, Any], kv_len: int) -> Tensor:
    """DeepSeek sparse attention: indices of keys ``[R, W, kv_len]``."""
    hidden = arguments["hidden_states"]
    return torch.arange(kv_len, dtype=torch.int32, device=hidden.device).expand(*hidden.shape[:2], kv_len)


def _all_blocks(module: Any, arguments: Mapping[str, Any], kv_len: int) -> Tensor:
    """MiniMax M3: indices of blocks of keys ``[R, heads, W, blocks]``."""
    hidden = arguments["hidden_states"]
    blocks = -(-kv_len // module.block_size)
    indices = torch.arange(blocks, device=hidden.device)
    return indices.expand(hidden.shape[0], module.num_heads, hidden.shape[1], blocks)


#: By name of the indexer's class: selection of all keys, and the number of keys that it selects at most.
INDEXERS: Mapping[str, tuple[Callable[..., Tensor], Callable[[Any], int]]] = {
    **dict.fromkeys(
        ("AXK2Indexer", "DeepseekV32Indexer", "Dots3NoteTextIndexer", "GlmMoeDsaIndexer", "HYV4Indexer"),
        (_all_keys, lambda module: module.index_topk),
    ),
    "MiniMaxM3VLIndexer": (_all_blocks, lambda module: module.topk_blocks * module.block_size),
}


def indexers(model: nn.Module) -> list[nn.Module]:
    """The modules of ``model`` that select keys and are listed in `INDEXERS`."""
    return [module for module in model.modules() if type(module).__name__ in INDEXERS]


def selected_keys(model: nn.Module) -> int | None:
    """Number of keys up to which all indexers of ``model`` select every key; None without indexers."""
    return min((INDEXERS[type(module).__name__][1](module) for module in indexers(model)), default=None)


class _SelectsAll:
    """Added to the class of an indexer: passes over a `RaggedCache` attend to all visible keys."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        arguments = plain_signature(type(self)).bind(*args, **kwargs).arguments
        own = cache_argument(super().forward)  # type: ignore[misc]
        plan = getattr(arguments.get(own), "plan", None)
        if plan is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        return INDEXERS[type(self).__name__][0](self, arguments, plan.kv_len)


@cache
def _extended(cls: type) -> type:
    # The same name: `INDEXERS` has it.
    return type(cls.__name__, (_SelectsAll, cls), {"__module__": cls.__module__})


class SelectAll(ModelPreparation):
    """Let the indexers of a model select all keys in passes over a `RaggedCache`; elsewhere they run as before."""

    name = "sparse-attention"

    @classmethod
    def prepare(cls, model: nn.Module) -> None:
        for module in indexers(model):
            if not isinstance(module, _SelectsAll):
                module.__class__ = _extended(type(module))
