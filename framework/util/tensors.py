"""Small operations on tensors that drafts, drafters and verifiers share. Ground floor: imports nothing of ours."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

#: Most numbers that a step over laws makes at the same time where it may go piece by piece: 64 MiB of float32.
AT_ONCE = 2**24
#: Laws of a step that are more numbers than this, 512 MiB of float32, are never there twice, and those of the target
#: are made for some rows at a time: `PIECE` numbers, 128 MiB.
LARGE, PIECE = 2**27, 2**25


def at_once(rows: int, numbers: int) -> list[slice]:
    """``rows`` of ``numbers`` each, in pieces of at most `AT_ONCE` numbers; in compiled code, and of nothing, one."""
    step = rows if torch.compiler.is_compiling() else AT_ONCE // max(numbers, 1)
    return [slice(first, first + max(step, 1)) for first in range(0, max(rows, 1), max(step, 1))]


class Gathered:
    """``torch.cat(parts, 1)`` of parts ``[B, w, V]`` that come one after the other, ``n`` columns in all or fewer.

    Where that is `LARGE`, each is copied as it comes, so that they never lie there twice.
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
        """``[B, columns, V]`` of at least one part."""
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


def columns(values: Tensor, places: Sequence[int]) -> Tensor:
    """``values[:, places]``, where possible without a copy."""
    step = places[1] - places[0] if len(places) > 1 else 1
    if step > 0 and list(places) == list(range(places[0], places[-1] + 1, step)):
        return values[:, places[0] : places[-1] + 1 : step]
    return torch.stack([values[:, place] for place in places], 1)


def counting(n: int, device: torch.device, step: int = 1) -> Tensor:
    """``[n]`` int64: 0, step, 2 step, .., to be read only: made once."""
    if torch.compiler.is_compiling():
        return torch.arange(0, n * step, step, device=device)
    return _counting(n, device, step)


@cache  # forever: what was recorded (`graphs`) reads it where it lies
def _counting(n: int, device: torch.device, step: int) -> Tensor:
    with torch.inference_mode(False):  # a training step may read it, too
        return torch.arange(0, n * step, step, device=device)


def descent(parents: Tensor, levels: int) -> Tensor:
    """``[B, n, n]`` bool of ``parents [B, n]`` (-1 = none): node j is node i or one of its ancestors.

    ``levels``: depth of the deepest node there can be.
    """
    n = parents.shape[1]
    reach = (parents[..., None] == counting(n, parents.device)).float()
    reach.diagonal(dim1=1, dim2=2).fill_(1)
    generations = 1
    while generations < min(levels, n) - 1:
        reach = reach @ reach  # in how many ways: at most 2 to the power of generations
        generations *= 2
        if generations >= 64:
            reach.clamp_(max=1)
    return reach > 0


def on_device(values: Any, device: torch.device) -> Tensor:
    """Nested lists of integers as an int64 tensor on ``device``, without waiting for the device.

    Copying from ordinary memory waits; pinned memory is handed out again only once its copy is made.
    """
    return torch.tensor(values, dtype=torch.long, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def eager_on_cpu(like: Tensor) -> bool:
    """Whether operations are done one by one by this processor: then its cache counts, and values may be looked at."""
    return like.device.type == "cpu" and not torch.compiler.is_compiling()
