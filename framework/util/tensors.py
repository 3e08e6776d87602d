"""Tensor operations shared by drafts, drafters and verifiers; imports nothing of crossdraft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

#: Maximum numbers of a temporary of probabilities that can be computed in chunks: 64 MiB of float32.
AT_ONCE = 2**24
#: Probabilities of a step with more numbers than this (512 MiB of float32) are never copied, and those of the target
#: are computed in chunks of rows of `PIECE` numbers (128 MiB).
LARGE, PIECE = 2**27, 2**25


def at_once(rows: int, numbers: int) -> list[slice]:
    """Slices of ``rows`` with ``numbers`` each, at most `AT_ONCE` numbers per slice; a single one in compiled code."""
    step = rows if torch.compiler.is_compiling() else AT_ONCE // max(numbers, 1)
    return [slice(first, first + max(step, 1)) for first in range(0, max(rows, 1), max(step, 1))]


class Gathered:
    """Incremental ``torch.cat(parts, 1)`` of parts ``[B, w, V]`` with at most ``n`` columns in all.

    A result above `LARGE` is preallocated and each part copied into it, so that no part is kept twice.
    """

    def __init__(self, n: int):
        self._n, self._columns = n, 0
        self._parts: list[Tensor] = []
        self._whole: Tensor | None = None

    def add(self, *parts: Tensor) -> None:
        for part in parts:
            b, w, v = part.shape
            if b * self._n * v <= LARGE:
                self._parts.append(part)
                continue
            if self._whole is None:
                self._whole = part.new_empty(b, self._n, v)
            self._whole[:, self._columns : self._columns + w] = part
            self._columns += w

    def tensor(self) -> Tensor:
        """The concatenation ``[B, columns, V]``; needs at least one part."""
        return torch.cat(self._parts, 1) if self._whole is None else self._whole[:, : self._columns]


def take_rows(rows: Tensor, index: Tensor) -> Tensor:
    """``[B, V]`` (``[B, L, V]``): a copy of the rows ``index [B]`` (``[B, L]``) of ``rows [B, M, V]``."""
    b, m, v = rows.shape
    if b == 1:
        return rows[0].index_select(0, index.flatten()).view(*index.shape, v)
    if rows.is_contiguous():  # on a CPU several times faster than indexing
        order = counting(b, index.device, m).view(-1, *(1,) * (index.dim() - 1))
        return rows.view(b * m, v).index_select(0, (order + index).flatten()).view(*index.shape, v)
    return rows[counting(b, index.device).view(-1, *(1,) * (index.dim() - 1)), index]


def columns(values: Tensor, index: Sequence[int]) -> Tensor:
    """``values[:, index]``, as a view if possible."""
    step = index[1] - index[0] if len(index) > 1 else 1
    if step > 0 and list(index) == list(range(index[0], index[-1] + 1, step)):
        return values[:, index[0] : index[-1] + 1 : step]
    return torch.stack([values[:, i] for i in index], 1)


def counting(n: int, device: torch.device, step: int = 1) -> Tensor:
    """``torch.arange(0, n * step, step)``, cached; must not be written to."""
    if torch.compiler.is_compiling():
        return torch.arange(0, n * step, step, device=device)
    return _counting(n, device, step)


@cache  # unbounded: CUDA graphs read the tensors at their addresses
def _counting(n: int, device: torch.device, step: int) -> Tensor:
    with torch.inference_mode(False):  # a training step may use it
        return torch.arange(0, n * step, step, device=device)


def parent_lists(parents: Tensor | None, rows: int, first: int, width: int) -> list[list[int]]:
    """Parents of ``width`` nodes behind ``first`` others, by row; of a chain if ``parents [rows, width]`` is None."""
    return [list(range(first - 1, first - 1 + width))] * rows if parents is None else parents.tolist()


def ancestor_mask(parents: Tensor, levels: int) -> Tensor:
    """``[B, n, n]`` bool for ``parents [B, n]`` (-1 = root): node j is node i or one of its ancestors.

    ``levels``: upper bound on the depth of a node.
    """
    n = parents.shape[1]
    paths = (parents[..., None] == counting(n, parents.device)).float()
    paths.diagonal(dim1=1, dim2=2).fill_(1)
    generations = 1
    while generations < min(levels, n) - 1:
        paths = paths @ paths  # number of paths: at most 2 to the power of generations
        generations *= 2
        if generations >= 64:
            paths.clamp_(max=1)
    return paths > 0


def on_device(values: Any, device: torch.device, dtype: torch.dtype | None = torch.long) -> Tensor:
    """Copy nested lists or an array to ``device``, without synchronisation; dtype None: that of the values.

    Copies from pageable memory synchronise; pinned memory is reused only after its copy is finished.
    """
    tensor = torch.tensor(values, dtype=dtype)  # its option pin_memory refuses arrays
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def unpacked(bits: np.ndarray, count: int, device: torch.device) -> Tensor:
    """``[.., count]`` bool on ``device``: ``bits [.., ceil(count / 8)]`` of ``np.packbits(.., bitorder="little")``."""
    if device.type == "cpu":
        return torch.from_numpy(np.unpackbits(bits, axis=-1, count=count, bitorder="little").view(bool))
    shifts = counting(8, device).to(torch.uint8)
    return (on_device(bits, device, None)[..., None] >> shifts & 1).flatten(-2)[..., :count].bool()


def start_host_copy(tensor: Tensor) -> Callable[[], Any]:
    """Start to copy a tensor to the host; the result returns its lists, and waits for the copy, not for later work."""
    if tensor.device.type != "cuda":
        lists = tensor.tolist()
        return lambda: lists
    copy, end = tensor.to("cpu", non_blocking=True), torch.cuda.Event()
    end.record(torch.cuda.current_stream(tensor.device))

    def read() -> Any:
        end.synchronize()
        return copy.tolist()

    return read


def eager_on_cpu(like: Tensor) -> bool:
    """True if operations run eagerly on a CPU, so that the host may read values without waiting."""
    return like.device.type == "cpu" and not torch.compiler.is_compiling()
