"""A ragged key-value cache: every row of the batch has its own length.

One buffer ``[B, heads, max_length, dim]`` per layer and per kind. A forward pass writes each row at the row's
own slots and attends over the first ``reach`` slots of the buffer; which of them a query may see is the mask's
business (``lm.py``), so stale slots need no clearing. transformers' own caches have one write offset for all
rows, which is why this exists.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ..util.tensors import counting


@dataclass
class Placement:
    """Where the next forward pass writes, shared by all layers.

    Attributes:
        slots: ``[R, W]`` int64, the slot each new token is written to.
        reach: number of leading slots the pass attends over; at least every slot written + 1.
        start: the first slot, if all rows write W consecutive slots from the same one (a plain copy), else None.
        row: the one batch row that takes part, which needs a ``start``; ``None`` for all B of them in order.
        several: ``[R]`` int64, the batch rows that take part where they are some and nothing stands before what is
            written: a ``start`` of 0, and a ``reach`` of W.
    """

    slots: Tensor
    reach: int
    start: int | None = None
    row: int | None = None
    several: Tensor | None = None

    @cached_property
    def rows(self) -> Tensor:
        """``[R, 1]`` int64, the batch row of each row of ``slots``."""
        return torch.arange(self.slots.shape[0], device=self.slots.device)[:, None]

    def on(self, device: torch.device) -> Placement:
        """The same where ``device`` reads it: layers of a model may lie on several."""
        if device == self.slots.device:
            return self
        if device not in self._elsewhere:
            several = None if self.several is None else self.several.to(device)
            self._elsewhere[device] = replace(self, slots=self.slots.to(device), several=several)
        return self._elsewhere[device]

    @cached_property
    def _elsewhere(self) -> dict[torch.device, Placement]:
        return {}


@dataclass
class Begun:
    """What of a prompt a slot holds before its sequence begins.

    Attributes:
        layers: of which the hidden states were asked for.
        hidden: what they said, ``[n, L, H]`` for each pass.
    """

    layers: tuple[float, ...]
    tokens: list[int] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)


class RaggedLayer(CacheLayerMixin):
    """Keys and values of one layer."""

    is_croppable = True
    is_sliding = False

    def __init__(self, cache: RaggedCache):
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        batch, length = self.cache.slots, self.cache.max_length
        self.dtype, self.device = key_states.dtype, key_states.device
        # Zeros, not empty memory: a masked slot still enters the product with weight 0, and 0 x NaN is NaN.
        self.keys = key_states.new_zeros(batch, key_states.shape[1], length, key_states.shape[3])
        self.values = value_states.new_zeros(batch, value_states.shape[1], length, value_states.shape[3])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write ``[R, heads, W, dim]`` states where the placement says; returns the slots to attend over."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        place = self.cache.placement
        return self._write(self.keys, key_states, place), self._write(self.values, value_states, place)

    @staticmethod
    def _write(buffer: Tensor, states: Tensor, place: Placement) -> Tensor:
        if place.several is not None:
            buffer[place.on(buffer.device).several, :, : states.shape[2]] = states
            return states  # all there is to attend over; the buffer's rows would have to be copied
        if place.row is not None:
            buffer = buffer[place.row : place.row + 1]
        if place.start is not None:
            buffer[:, :, place.start : place.start + states.shape[2]] = states
        else:
            place = place.on(buffer.device)
            # Two index tensors around a slice: the indexed view is [R, W, heads, dim].
            buffer[place.rows, :, place.slots] = states.transpose(1, 2)
        return buffer[:, :, : place.reach]

    def move(self, rows: Tensor, source: Tensor, target: Tensor) -> None:
        """Copy slots ``source [B, D]`` to slots ``target [B, D]`` in every row (all read before any is written)."""
        if not self.is_initialized:
            return
        for buffer in (self.keys, self.values):
            assert buffer is not None
            buffer[rows, :, target] = buffer[rows, :, source]

    def get_seq_length(self) -> int:
        return 0  # rows have no common length: positions and masks are always passed explicitly

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.placement.reach, 0

    def get_max_length(self) -> int:
        return self.cache.max_length


class RaggedCache(Cache):
    """The cache object handed to a transformers model; layers appear as the model asks for them."""

    def __init__(self, batch_size: int, max_length: int):
        self.slots, self.max_length = batch_size, max_length
        self.placement = Placement(torch.empty(0, 0, dtype=torch.long), 0)
        super().__init__(layer_class_to_replicate=lambda: RaggedLayer(self))  # type: ignore[arg-type]

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy slots ``source [B, D]`` to slots ``target [B, D]`` in every row of every layer."""
        rows = counting(source.shape[0], source.device)[:, None]
        there = {source.device: (rows, source, target)}
        for layer in cast(list[RaggedLayer], self.layers):
            if layer.keys is not None and layer.is_initialized:
                place = layer.keys.device
                if place not in there:
                    there[place] = rows.to(place), source.to(place), target.to(place)
                layer.move(*there[place])

    @torch.inference_mode()
    def clear(self, row: int) -> None:
        """Zeros in every slot of ``row``: a masked slot enters the product with weight 0, and 0 x NaN is NaN."""
        for layer in self.layers:
            for buffer in (layer.keys, layer.values):  # type: ignore[union-attr]
                if buffer is not None:
                    buffer[row].zero_()

    def nbytes(self) -> int:
        """Memory held by keys and values, in bytes."""
        return sum(t.nbytes for layer in self.layers for t in (layer.keys, layer.values) if t is not None)  # type: ignore[union-attr]
