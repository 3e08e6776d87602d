"""CUDA graphs: device work that is recorded once for a shape and replayed with one launch.

A pass over a few tokens is hundreds of small kernels, which a host launches more slowly than a GPU runs them. A graph
launches them all at once, but what it holds is fixed: the shapes, the addresses, and everything that Python decided
while it was recorded. So only functions of tensors are recorded, and a recording is used for equal shapes alone.

``CROSSDRAFT_CUDA_GRAPHS=0`` in the environment switches graphs off, for debugging and comparison.
"""

from __future__ import annotations

import gc
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from ..models.placement import input_device
from ..util.shared_patch import SharedPatch

logger = logging.getLogger(__name__)

#: Most recordings of one model; the least recently used one makes way. What they read and return lies in memory that
#: they share, so each costs little more than its list of kernels.
MOST_GRAPHS = 256

Outputs = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Ahead:
    """What may come after the warm-up: drafts ``depth`` tokens deep, of ``nodes`` tokens in all."""

    depth: int
    nodes: int


#: When a shape is recorded: "again" = when it comes for the second time; `Ahead` = at once, and with it what may
#: come; "never". Of the thread that asks, so that a benchmark changes nothing for others.
_when: ContextVar[Ahead | str] = ContextVar("when", default="again")


@contextmanager
def recording(ahead: Ahead | None) -> Iterator[None]:
    """Meanwhile shapes are recorded when they come first, and those that may follow with them; ``None``: none are.

    What is measured is measured under ``None``, after a warm-up under `Ahead`: recording takes longer than a pass.
    """
    token = _when.set("never" if ahead is None else ahead)
    try:
        yield
    finally:
        _when.reset(token)


def ahead() -> Ahead | None:
    """What is to be recorded beside the shapes that come."""
    when = _when.get()
    return when if isinstance(when, Ahead) else None


class Recorder(Protocol):
    """How device work is recorded."""

    def rehearse(self, run: Callable[[], Outputs]) -> Outputs:
        """``run()``; raises what makes it impossible to record."""
        ...

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record ``run()`` without doing its work; returns what does it, on the same tensors."""
        ...


@dataclass
class _Recording:
    inputs: dict[str, Tensor]
    outputs: Outputs
    replay: Callable[[], None]


class _Room:
    """Memory that all recordings of a model share: each is filled, replayed and read before another one is.

    What was handed out stays where it is. It grows by doubling, so all of it is less than four times the largest.
    """

    def __init__(self) -> None:
        self._pieces: dict[Hashable, list[Tensor]] = {}

    def take(self, place: Hashable, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor with room of its own beside those of every other ``place``."""
        numbers, pieces = prod(shape), self._pieces.setdefault((place, dtype), [])
        fits = next((piece for piece in pieces if piece.numel() >= numbers), None)
        if fits is None:
            fits = torch.empty(max(numbers, 2 * len(pieces[-1]) if pieces else 0), dtype=dtype, device=device)
            pieces.append(fits)
        return fits[:numbers].view(shape)

    def nbytes(self, device: torch.device) -> int:
        return sum(piece.nbytes for pieces in self._pieces.values() for piece in pieces if piece.device == device)


class Graphs:
    """Calls functions of tensors; a shape that comes again is recorded, and replayed from then on (see `recording`).

    The first call of a shape is a rehearsal: it makes what is made lazily (a cache, a library's workspace), and many
    shapes of a ragged batch come only once. Where a call cannot be recorded, there is one warning, that call is made
    again, and from then on every call runs as usual.

    Args:
        recorder: how work is recorded; ``None`` = it is not, every call runs as usual.
        name: of the model, for warnings.

    Attributes:
        missed: calls that ran as usual because nothing was to be recorded by then.
        widths: for its user: of each kind of pass, the widths that were recorded ahead.
    """

    def __init__(self, recorder: Recorder | None, name: str):
        self._recorder = recorder
        self._name = name
        #: By function, constants and shapes of the tensors; of one that was only seen, what it returns.
        self._known: OrderedDict[Hashable, _Recording | list[Any]] = OrderedDict()
        self._room = _Room()
        self.missed = 0
        self.widths: dict[Hashable, set[int]] = {}
        _living.add(self)

    @property
    def records(self) -> bool:
        """Are shapes recorded? Then few shapes that come again are better than many."""
        return self._recorder is not None

    def __len__(self) -> int:
        """Recordings held."""
        return sum(isinstance(found, _Recording) for found in self._known.values())

    def nbytes(self, device: torch.device) -> int:
        """Bytes that recordings read from and return into on ``device``, held as long as they are."""
        return self._room.nbytes(device)

    def __call__(
        self, function: Callable[..., Outputs], tensors: Mapping[str, Tensor], *constants: Hashable
    ) -> Outputs:
        """``function(*constants, **tensors)``. Its outputs are the caller's own: no later call writes into them.

        ``function`` must read nothing that changes between calls but its tensors, its constants, and what lies at fixed
        addresses (weights, caches); its name stands for it.
        """

        def run() -> Outputs:
            return function(*constants, **tensors)

        if self._recorder is None:
            return run()
        shapes = tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors.items())
        key = (function.__name__, constants, shapes)
        found, when = self._known.get(key), _when.get()
        if when == "never" and not isinstance(found, _Recording):
            self.missed += 1
            _warn_of_missed(self._name)
            return run()
        try:
            if found is None:
                outputs = self._recorder.rehearse(run)
                found = [out if out is None else (out.shape, out.dtype, out.device) for out in outputs]
                if isinstance(when, Ahead):
                    found = self._record(self._recorder, function, tensors, constants, found)
                self._known[key] = found
                while len(self._known) > MOST_GRAPHS:
                    self._known.popitem(last=False)
                return outputs
            if not isinstance(found, _Recording):
                found = self._known[key] = self._record(self._recorder, function, tensors, constants, found)
        except Exception as error:
            # A failed recording is reported by what ends it, too; the cause came before.
            _warn_once(self._name, str(error.__context__ or error).partition("\n")[0])
            self._recorder, self._room = None, _Room()
            self._known.clear()
            return run()
        self._known.move_to_end(key)
        for name, buffer in found.inputs.items():
            buffer.copy_(tensors[name])
        found.replay()
        return tuple(None if output is None else output.clone() for output in found.outputs)

    def _record(
        self,
        recorder: Recorder,
        function: Callable[..., Outputs],
        tensors: Mapping[str, Tensor],
        constants: tuple[Hashable, ...],
        returned: list[Any],
    ) -> _Recording:
        take = self._room.take
        inputs = {name: take(name, one.shape, one.dtype, one.device).copy_(one) for name, one in tensors.items()}
        outputs = tuple(None if like is None else take(i, *like) for i, like in enumerate(returned))

        def run() -> None:
            for output, new in zip(outputs, function(*constants, **inputs), strict=True):
                if output is not None:
                    assert new is not None
                    output.copy_(new)

        return _Recording(inputs, outputs, recorder.record(run))


_living: WeakSet[Graphs] = WeakSet()


def held(device: torch.device) -> int:
    """Bytes that the recordings of all models in this process read from and return into on ``device``.

    A model and what replays its passes refer to each other: one that nobody uses any more is collected first, where
    somebody wants to know where the memory is.
    """
    gc.collect()
    return sum(graphs.nbytes(device) for graphs in _living)


def _forbid_synchronisation() -> Callable[[], None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    return lambda: torch.cuda.set_sync_debug_mode(before)


_no_synchronisation = SharedPatch(_forbid_synchronisation)


class CudaRecorder:
    """Records CUDA graphs, which share one pool of memory for all that they do not return."""

    def __init__(self, device: torch.device):
        self._device = device
        self._shared: dict[str, Any] | None = None  # pool and stream of all recordings

    def rehearse(self, run: Callable[[], Outputs]) -> Outputs:
        # A synchronisation while recording would leave PyTorch's allocator and the recording stream in disorder.
        with _no_synchronisation:
            return run()

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        with torch.cuda.device(self._device):
            if self._shared is None:
                self._shared = {"pool": torch.cuda.graph_pool_handle(), "stream": torch.cuda.Stream()}
            graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
            try:
                # Other threads may allocate meanwhile.
                with torch.cuda.graph(graph, capture_error_mode="thread_local", **self._shared):
                    run()
            except Exception:
                # PyTorch leaves its own stream the current one, and its allocator goes on to ask this graph.
                torch.cuda.set_stream(current)
                _failed.append(graph)
                raise
        return graph.replay


#: Never freed, see `CudaRecorder.record`.
_failed: list[torch.cuda.CUDAGraph] = []


def runner_for(model: Any) -> Graphs:
    """What runs the passes of ``model``; not recorded on a CPU, over devices or processes, or if graphs are off."""
    name, places = type(model).__name__, set(getattr(model, "hf_device_map", {}).values())
    if input_device(model).type != "cuda" or os.environ.get("CROSSDRAFT_CUDA_GRAPHS") == "0":
        return Graphs(None, name)
    if len(places) > 1:
        _warn_once(name, f"it is spread over {len(places)} devices")
        return Graphs(None, name)
    if any(hasattr(weight, "placements") for weight in model.parameters()):
        _warn_once(name, "it is split over several processes")
        return Graphs(None, name)
    return Graphs(CudaRecorder(model.device), name)


@cache
def _warn_once(name: str, reason: str) -> None:
    logger.warning("crossdraft: %s runs without CUDA graphs, which makes its passes slower: %s", name, reason)


@cache
def _warn_of_missed(name: str) -> None:
    logger.warning(
        "crossdraft: %s makes a pass that the warm-up did not record, and runs it without a CUDA graph, more slowly",
        name,
    )
