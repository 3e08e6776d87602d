"""Key-value caches of ragged batches: the protocol, and the built-in contiguous cache.

transformers' own caches have one write offset for all rows; here every row has its own length, so each pass carries a
`WritePlan`. The built-in cache is one buffer ``[B, heads, max_length, dim]`` per layer for keys and one for values. A
pass writes each row at the row's own slots and attends over the first ``kv_len`` slots. The attention mask hides stale
slots, so they are not cleared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ..util.tensors import counting, eager_on_cpu


@dataclass
class WritePlan:
    """Slots that one forward pass writes and reads; shared by all layers.

    The pass has R rows: all B batch rows in order, or ``row``, or ``rows``.

    Attributes:
        slots: ``[R, W]`` int64, the slot of each new token; ``[1, W]`` if all rows write the same slots.
        kv_len: number of leading slots to attend over; greater than every slot written.
        start: the first slot, if every row writes W consecutive slots from the same one (a plain copy), else None.
        row: the only batch row of the pass; requires ``start``.
        rows: ``[R]`` int64, the batch rows of a pass that writes from slot 0 on and attends only over what it writes:
            ``start`` is 0 and ``kv_len`` is W.
        counts: by batch row of ``rows``, in their order, the number of its tokens that are not padding.
        parents: ``[R, N]`` int64, the parents of all speculative nodes, those of the pass last; ``None`` = chains.
    """

    slots: Tensor
    kv_len: int
    start: int | None = None
    row: int | None = None
    rows: Tensor | None = None
    counts: Mapping[int, int] | None = None
    parents: Tensor | None = None

    def to(self, device: torch.device) -> WritePlan:
        """The plan with its tensors on ``device``, copied once per pass: layers may lie on several devices."""
        if device == self.slots.device:
            return self
        if device not in self._copies:
            rows, parents = (None if tensor is None else tensor.to(device) for tensor in (self.rows, self.parents))
            self._copies[device] = replace(self, slots=self.slots.to(device), rows=rows, parents=parents)
        return self._copies[device]

    @cached_property
    def _copies(self) -> dict[torch.device, WritePlan]:
        return {}


class KVCache(Protocol):
    """Keys and values of B rows of different lengths, for all layers of a model.

    `begin_pass`, the updates of a pass, and `move` may be recorded into CUDA graphs: they launch operations on tensors
    at fixed addresses and depend on nothing else that changes between passes. `reserve`, `commit`, `clear` and `nbytes`
    run on the host, outside of recordings.

    A pass may attend over slots that were never reserved or written (short rows beside longer ones), and may write
    beyond the reserved slots (padding of graph buckets). The mask hides both; the values read must be finite.

    A cache whose tensors have no fixed addresses sets ``recordable = False``; its passes run without graphs. One that
    holds recurrent states sets ``forkable = False``: a fork with some of the layers would overwrite them.
    """

    def reserve(self, row: int, length: int) -> None:
        """Provide the first ``length`` slots of ``row``; called before every pass that writes to them."""
        ...

    def begin_pass(self, plan: WritePlan) -> Cache:
        """Return the cache that the model receives for one pass.

        Its ``update(keys, values, layer)`` takes ``[R, heads, W, dim]``, writes them as ``plan`` prescribes and returns
        the keys and values of the first ``plan.kv_len`` slots, those just written included.
        """
        ...

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy slots ``source [B, D]`` to slots ``target [B, D]`` in every row and layer; read all, then write.

        Commits a path of a tree: its nodes move behind the committed tokens.
        """
        ...

    def commit(self, lengths: Sequence[int]) -> None:
        """Keep the first ``lengths[b]`` slots of each row; those behind them may be dropped.

        Called after `move`, and after prompts were fed; of the slots behind a row's previous length, the kept ones are
        the first.
        """
        ...

    def clear(self, row: int) -> None:
        """Release ``row``; NaN in its keys and values must not reach the next sequence of the row."""
        ...

    def nbytes(self) -> int:
        """Memory held by keys and values, in bytes."""
        ...


class RaggedLayer(CacheLayerMixin):
    """Keys and values of one layer of a `RaggedCache`."""

    is_croppable = True
    is_sliding = False

    def __init__(self, cache: RaggedCache):
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        batch, length = self.cache.num_rows, self.cache.max_length
        self.dtype, self.device = key_states.dtype, key_states.device
        # Zeros, not empty memory: a masked slot still enters the product with weight 0, and 0 x NaN is NaN.
        self.keys = key_states.new_zeros(batch, key_states.shape[1], length, key_states.shape[3])
        self.values = value_states.new_zeros(batch, value_states.shape[1], length, value_states.shape[3])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write states ``[R, heads, W, dim]`` as the plan of the pass prescribes; return the slots to attend over."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        plan = self.cache.plan
        keys, values = self.keys, self.values
        if plan.row is not None:
            keys, values = keys[plan.row : plan.row + 1], values[plan.row : plan.row + 1]
        for buffer, states in ((keys, key_states), (values, value_states)):
            width = states.shape[2]
            if plan.rows is not None:
                buffer[plan.to(buffer.device).rows, :, :width] = states
            elif plan.start is not None:
                buffer[:, :, plan.start : plan.start + width] = states
            else:
                rows = counting(len(states), buffer.device)[:, None]
                # Two index tensors around a slice: the indexed view is [R, W, heads, dim].
                buffer[rows, :, plan.to(buffer.device).slots] = states.transpose(1, 2)
        if plan.rows is not None:  # the states equal the slots to attend over, which would have to be gathered
            return key_states, value_states
        return keys[:, :, : plan.kv_len], values[:, :, : plan.kv_len]

    def move(self, rows: Tensor, source: Tensor, target: Tensor) -> None:
        """Copy slots ``source [B, D]`` to ``target [B, D]`` of ``rows [B, 1]``; read all, then write."""
        if not self.is_initialized:
            return
        for buffer in (self.keys, self.values):
            assert buffer is not None
            buffer[rows, :, target] = buffer[rows, :, source]

    def get_seq_length(self) -> int:
        return 0  # rows have no common length: positions and masks are always passed explicitly

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.plan.kv_len, 0

    def get_max_length(self) -> int:
        return self.cache.max_length


_NO_PLAN = WritePlan(torch.empty(0, 0, dtype=torch.long), 0)


class RaggedCache(Cache):
    """The built-in `KVCache`; layers are created when the model first writes to them."""

    def __init__(self, batch_size: int, max_length: int):
        self.num_rows, self.max_length = batch_size, max_length
        self.plan = _NO_PLAN
        Cache.__init__(self, layer_class_to_replicate=lambda: RaggedLayer(self))  # type: ignore[arg-type]

    def reserve(self, row: int, length: int) -> None:
        """Every row has ``max_length`` slots from the start."""

    def begin_pass(self, plan: WritePlan) -> RaggedCache:
        self.plan = plan
        return self

    def move(self, source: Tensor, target: Tensor) -> None:
        if eager_on_cpu(source) and source.equal(target):
            return
        rows = counting(source.shape[0], source.device)[:, None]
        indices = {source.device: (rows, source, target)}
        for layer in cast(list[RaggedLayer], self.layers):
            if layer.keys is not None and layer.is_initialized:
                device = layer.keys.device
                if device not in indices:
                    indices[device] = rows.to(device), source.to(device), target.to(device)
                layer.move(*indices[device])

    def commit(self, lengths: Sequence[int]) -> None:
        """The mask hides all other slots; the plan is dropped, as replays overwrite its tensors."""
        self.plan = _NO_PLAN

    def clear(self, row: int) -> None:
        for layer in self.layers:
            for buffer in (layer.keys, layer.values):  # type: ignore[union-attr]
                if buffer is not None:
                    buffer[row].zero_()

    def nbytes(self) -> int:
        return sum(t.nbytes for layer in self.layers for t in (layer.keys, layer.values) if t is not None)  # type: ignore[union-attr]
