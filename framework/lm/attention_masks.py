"""Attention masks of ragged batches of chains and trees: causal, sliding-window and chunked.

A query attends to the committed tokens of its row and, among the speculative nodes, to itself and its ancestors; its
position is its depth. Masks are additive floats, which every attention implementation of transformers reads alike, or
block masks for FlexAttention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .. import plugins
from ..util.tensors import ancestor_mask
from .architectures import FLEX, FLEX_ATTENTION, sliding_window

#: Recurrent layers, by their type.
_NO_MASKS = {"conv": None, "linear_attention": None}


@dataclass(frozen=True)
class Visibility:
    """The slots that each query of a pass may attend to, before windows and chunks.

    Attributes:
        allowed: ``[R, W, kv_len]`` bool.
        positions: ``[R, W]`` int64, the position of each query; ``[1, W]`` if it is the same in all rows.
        key_positions: ``[R, kv_len]`` int64, the position of each slot; ``None`` = its index.
    """

    allowed: Tensor
    positions: Tensor
    key_positions: Tensor | None = None

    def expand(self, rows: int) -> Visibility:
        """The same for ``rows`` rows."""
        return Visibility(self.allowed.expand(rows, -1, -1), self.positions, self.key_positions)


class AttentionMasks:
    """Builds the masks of one model: its window, its chunks, its dtype and its attention implementation.

    Attributes:
        slots: ``[max_length]`` int64, the indices of the slots of a row.
        window, chunk: size of its sliding windows, and of its chunks, in tokens; None without any.
    """

    def __init__(self, config: Any, dtype: torch.dtype, device: torch.device, max_length: int):
        self.slots = torch.arange(max_length, device=device)
        # Added to the attention score of a visible and of a hidden slot.
        self._visible, self._hidden = torch.tensor([0.0, torch.finfo(dtype).min], dtype=dtype, device=device).unbind()
        self._layer_types = set(getattr(config, "layer_types", None) or ())
        self.window = sliding_window(config)
        # MiniMax: the window applies to the layers that it calls full attention.
        self._one_mask = not self._layer_types or getattr(config, "model_type", None) == "minimax"
        if not self._one_mask and not self._layer_types & {"sliding_attention", "hybrid_sliding"}:
            self.window = None
        if getattr(config, "use_sliding_window", True) is False:
            self.window = None
        self.chunk: int | None = None
        if "chunked_attention" in self._layer_types:
            self.chunk = config.attention_chunk_size
        flex = getattr(config, "_attn_implementation", None) == FLEX
        self._block_mask = plugins.get("preparations", FLEX_ATTENTION).mask if flex else None

    def causal(self, slots: Tensor, kv_len: int) -> Visibility:
        """Chains: the query in slot ``slots [R, W]`` attends to every slot up to its own."""
        return Visibility(self.slots[:kv_len] <= slots[..., None], slots)

    def tree(self, starts: Tensor, parents: Tensor, width: int, kv_len: int) -> Visibility:
        """Trees: the last ``width`` nodes attend to all committed slots, to their ancestors and to themselves.

        Args:
            starts: ``[B]`` int64, the slot of the first of these nodes.
            parents: ``[B, N]`` int64, the parent of every speculative node; -1 = the last committed token.
        """
        total = parents.shape[1]
        first, slot = total - width, self.slots[:kv_len]
        ancestors = ancestor_mask(parents, total)
        # Column 0 stands for the committed slots, the last one for everything behind the nodes.
        seen = functional.pad(functional.pad(ancestors[:, first:], (1, 0), value=True), (0, 1), value=False)
        root = starts[:, None] - (first + 1)  # the last committed slot
        node = (slot - root).clamp_(0, total + 1)
        allowed = seen.gather(2, node[:, None].expand(-1, width, -1))
        depth = ancestors.sum(-1)
        positions, key_positions = root + depth[:, first:], None
        if self.window is not None or self.chunk is not None or "hybrid" in self._layer_types:
            speculative = (node > 0) & (node <= total)
            key_positions = root + depth.gather(1, (node - 1).clamp_(0, total - 1))
            key_positions = torch.where(speculative, key_positions, slot)
        return Visibility(allowed, positions, key_positions)

    def build(self, visibility: Visibility) -> Any:
        """The ``attention_mask`` argument of the model.

        Additive ``[R, 1, W, kv_len]``, or a block mask for FlexAttention; a dict by layer type if the model mixes full
        attention with other types.
        """
        allowed = visibility.allowed
        full = self._mask(allowed)
        if self.window is None and self.chunk is None:
            return full
        masks = {"full_attention": full, "hybrid": full, "indexed_attention": full, **_NO_MASKS}
        keys = visibility.key_positions
        if keys is None:
            keys = self.slots[None, : allowed.shape[-1]]
        queries, keys = visibility.positions[..., None], keys[:, None]
        if self.window is not None:
            sliding = self._mask(allowed & (queries - keys < self.window))
            masks |= {"sliding_attention": sliding, "hybrid_sliding": sliding}
        if self.chunk is not None:
            masks["chunked_attention"] = self._mask(allowed & (queries // self.chunk == keys // self.chunk))
        return masks["sliding_attention"] if self._one_mask else masks

    def _mask(self, allowed: Tensor) -> Any:
        if self._block_mask is not None:
            return self._block_mask(allowed)
        return torch.where(allowed, self._visible, self._hidden)[:, None]
