"""Bucket sizes for CUDA-graph capture: few enough to be reused, enough to cover every shape.

A pass is padded to the next bucket, at most a quarter more slots; a graph for every exact length would rarely be
replayed.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from .cuda_graphs import Outputs, capture_limits, captures_called
from .forward_pass import ForwardPass

#: Graphs attend over a multiple of this many slots (see `stepped`), or over all of them. PyTorch's kernels copy masks
#: whose rows are not a multiple of 8 or 16 numbers.
BUCKET = 256
#: Passes over more tokens than this keep a GPU busy for longer than their launches take.
MOST_GRAPHED = 4096
#: Widths of a kind of pass outside of warm-ups that are not rounded.
MOST_WIDTHS = 4


def stepped(n: int, smallest: int) -> int:
    """The smallest of 1, 2, .. 8, 10, 12, 14, 16, 20, 24, .. times ``smallest`` that is not below ``n``."""
    step = smallest << max((-(-n // smallest)).bit_length() - 3, 0)
    return -(-n // step) * step


def kv_lens(smallest: int, largest: int) -> list[int]:
    """All values of `stepped` for 1 to ``largest``, longest first; the longest is ``largest`` itself."""
    length, shorter = stepped(1, smallest), []
    while length < largest:
        shorter.append(length)
        length = stepped(length + 1, smallest)
    return [largest, *reversed(shorter)]


def widths(width: int, widest: int) -> list[int]:
    """``width``, ``widest`` and the powers of two below the larger of them, widest first."""
    widest = max(width, widest)
    return sorted({width, widest, *(1 << i for i in range((widest - 1).bit_length()))}, reverse=True)


def wider(width: int, more: int) -> list[int]:
    """``width``, ``width + more`` and those that lie a power of two above ``width`` in between, widest first."""
    return [width + n for n in widths(1, more) if more] + [width]


def at_width(tensors: Mapping[str, Tensor], width: int) -> dict[str, Tensor]:
    """``tensors [B, W, ..]``, by name, cut or padded to ``width``: with 0, parents and paths with -1."""
    resized = {}
    for name, tensor in tensors.items():
        missing, value = width - tensor.shape[1], -1 if name in ("parents", "path") else 0
        padding = (*(0, 0) * (tensor.dim() - 2), 0, missing)
        resized[name] = functional.pad(tensor, padding, value=value) if missing > 0 else tensor[:, :width]
    return resized


class BucketedPasses:
    """Runs the passes of a model at bucket sizes, recorded into CUDA graphs.

    During a warm-up (`recording` with `CaptureLimits`), the first pass of each kind is recorded at every width and
    every number of slots; later passes are padded to the next recorded width. What lies beyond a row's own nodes is
    masked.

    Outside of a warm-up, a pass is padded to a width that came before, see `_width`.
    """

    def __init__(self, forward_pass: ForwardPass, batch_size: int):
        self.graphs = forward_pass.graphs
        self._pass, self._batch_size, self._max_length = forward_pass, batch_size, len(forward_pass.masks.slots)

    def compact(self, path: Tensor, committed: Tensor, longest: int) -> None:
        """`ForwardPass.compact`; the longest row has ``longest`` tokens."""
        tensors = {"path": path, "committed": committed}
        self._record_compact(tensors, longest)
        tensors |= at_width({"path": path}, self._width("compact", path.shape[1], longest))
        self.graphs(self._pass.compact, tensors)

    def score(self, tensors: dict[str, Tensor], nodes: int, longest: int, layers: tuple[float, ...]) -> Outputs:
        """`ForwardPass.score` of ``tensors`` behind ``nodes`` earlier nodes; the longest row has ``longest`` tokens."""
        per_node = {name: value for name, value in tensors.items() if name in ("tokens", "parents") or value.dim() > 2}
        # Inputs that index positions, such as the position at which a head wants logits.
        indices = {
            name: value for name, value in tensors.items() if name not in per_node and name not in ("starts", "tree")
        }
        kind = (
            nodes if "tree" in tensors else None,
            layers,
            *((name, value.shape[2:], value.dtype) for name, value in per_node.items()),
            *((name, value.shape, value.dtype) for name, value in indices.items()),
        )
        width, filled = tensors["tokens"].shape[1], longest + nodes
        self._record_scores(kind, tensors, nodes, per_node, indices, layers)
        if "tree" in tensors:  # whose path is moved when a draft is accepted, in the warm-up or later
            self._record_compact({"path": tensors["starts"][:, None], "committed": tensors["starts"]}, longest)
        padded = self._width(kind, width, filled)
        kv_len = min(stepped(filled + padded, BUCKET), self._max_length)
        outputs = self.graphs(self._pass.score, tensors | at_width(per_node, padded), kv_len, None, layers)
        if padded == width:
            return outputs
        logits, hidden, tree = outputs
        if not indices:  # with indices, outputs are those of the indexed positions
            logits, hidden = (None if value is None else value[:, :width] for value in (logits, hidden))
        return logits, hidden, None if tree is None else tree[:, : nodes + width]

    def _width(self, kind: Hashable, width: int, filled: int) -> int:
        """The smallest recorded width of a kind of pass that holds ``width`` and fits the slots; or ``width``.

        Outside of warm-ups and measurements, that has at most twice as many tokens, or a new width is recorded:
        ``width`` itself for the first `MOST_WIDTHS` of a kind, and then the next power of two.
        """
        room, called = self._max_length - filled, captures_called()
        recorded, largest = self._widths(kind), min(room, 2 * width) if called else room
        if fitting := [n for n in recorded if width <= n <= largest]:
            return min(fitting)
        if called:
            if len(recorded) >= MOST_WIDTHS and (power := 1 << (width - 1).bit_length()) <= room:
                width = power
            recorded.add(width)
        return width

    def _widths(self, kind: Hashable) -> set[int]:
        """Widths of a kind of pass: those of warm-ups, or those that came outside."""
        return self.graphs.widths.setdefault((kind, captures_called()), set())

    def _record_scores(
        self,
        kind: Hashable,
        tensors: Mapping[str, Tensor],
        nodes: int,
        per_node: Mapping[str, Tensor],
        indices: Mapping[str, Tensor],
        layers: tuple[float, ...],
    ) -> None:
        """During a warm-up, record this kind of pass at every width and every number of slots.

        The outputs are discarded; every slot written is written again before it is read, or belongs to a sequence of
        the warm-up.
        """
        limits, width = capture_limits(), per_node["tokens"].shape[1]
        if limits is None:
            return
        if "tree" not in tensors:
            candidates = wider(width, limits.depth) if indices else widths(width, limits.depth + 1)
        else:  # later levels of a tree are not padded
            candidates = [width] if nodes or indices else widths(width, limits.nodes + 1)
        recorded = self._widths(kind)
        for n in candidates:
            if n in recorded or n * self._batch_size > MOST_GRAPHED:
                continue
            for kv_len in kv_lens(BUCKET, self._max_length):
                if kv_len < nodes + n:
                    continue
                inputs = {name: torch.zeros_like(value) for name, value in indices.items()}
                inputs |= at_width(per_node, n) | {"starts": tensors["starts"].clamp(max=kv_len - n)}
                if self.graphs.records:
                    self.graphs(self._pass.score, {**tensors, **inputs}, kv_len, None, layers)
                    recorded.add(n)

    def _record_compact(self, tensors: Mapping[str, Tensor], longest: int) -> None:
        limits, path = capture_limits(), tensors["path"]
        if limits is None:
            return
        recorded = self._widths("compact")
        for n in widths(path.shape[1], limits.depth + 1):
            if n not in recorded and longest + n <= self._max_length:
                self.graphs(self._pass.compact, {**tensors, "path": path.new_full((len(path), n), -1)})
                recorded.add(n)
