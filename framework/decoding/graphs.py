"""CUDA graphs: device work that is recorded once for a shape and replayed with one launch.

A pass over a few tokens is hundreds of small kernels, which a host launches more slowly than a GPU runs them. A graph
launches them all at once, but what it holds is fixed: the shapes, the addresses, and everything that Python decided
while it was recorded. So only functions of tensors are recorded, and a recording is used for equal shapes alone.

``CROSSDRAFT_CUDA_GRAPHS=0`` in the environment switches graphs off, for debugging and comparison.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from ..models.meanwhile import Meanwhile

logger = logging.getLogger(__name__)

#: Most recordings of one model. Each keeps its inputs and outputs, and the least recently used one makes way.
MOST_GRAPHS = 64

Outputs = tuple[Tensor | None, ...]


class Recorder(Protocol):
    """How device work is recorded."""

    def rehearse(self, run: Callable[[], Outputs]) -> Outputs:
        """``run()``; raises what makes it impossible to record."""
        ...

    def record(self, run: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], None]]:
        """Record ``run()`` without doing its work.

        Returns its outputs, and what does the work: it reads the tensors that ``run`` read and fills the outputs.
        """
        ...


@dataclass
class _Recording:
    inputs: dict[str, Tensor]
    outputs: Outputs
    replay: Callable[[], None]


class Graphs:
    """Calls functions of tensors; when a shape comes for the second time it is recorded, and replayed from then on.

    The first call of a shape is a rehearsal: it makes what is made lazily (a cache, a library's workspace), and many
    shapes of a ragged batch come only once. Where a call cannot be recorded, there is one warning, that call is made
    again, and from then on every call runs as usual.

    Args:
        recorder: how work is recorded; ``None`` = it is not, every call runs as usual.
        name: of the model, for the warning.
    """

    def __init__(self, recorder: Recorder | None, name: str):
        self._recorder = recorder
        self._name = name
        #: By function, constants and shapes of the tensors; None = seen once.
        self._known: OrderedDict[Hashable, _Recording | None] = OrderedDict()

    @property
    def records(self) -> bool:
        """Are shapes recorded? Then few shapes that come again are better than many."""
        return self._recorder is not None

    def __len__(self) -> int:
        """Recordings held."""
        return sum(recording is not None for recording in self._known.values())

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
        try:
            if key not in self._known:
                outputs = self._recorder.rehearse(run)
                self._known[key] = None
                while len(self._known) > MOST_GRAPHS:
                    self._known.popitem(last=False)
                return outputs
            self._known.move_to_end(key)
            recording = self._known[key]
            if recording is None:
                inputs = {name: tensor.clone() for name, tensor in tensors.items()}
                recording = _Recording(inputs, *self._recorder.record(lambda: function(*constants, **inputs)))
                self._known[key] = recording
        except Exception as error:
            # A failed recording is reported by what ends it, too; the cause came before.
            _warn_once(self._name, str(error.__context__ or error).partition("\n")[0])
            self._recorder = None
            self._known.clear()
            return run()
        for name, buffer in recording.inputs.items():
            buffer.copy_(tensors[name])
        recording.replay()
        return tuple(None if output is None else output.clone() for output in recording.outputs)


def _forbid_synchronisation() -> Callable[[], None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    return lambda: torch.cuda.set_sync_debug_mode(before)


_no_synchronisation = Meanwhile(_forbid_synchronisation)


class CudaRecorder:
    """Records CUDA graphs, which share one pool of memory for all that they do not return."""

    def __init__(self, device: torch.device):
        self._device = device
        self._shared: dict[str, Any] | None = None  # pool and stream of all recordings

    def rehearse(self, run: Callable[[], Outputs]) -> Outputs:
        # A synchronisation while recording would leave PyTorch's allocator and the recording stream in disorder.
        with _no_synchronisation:
            return run()

    def record(self, run: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], None]]:
        with torch.cuda.device(self._device):
            if self._shared is None:
                self._shared = {"pool": torch.cuda.graph_pool_handle(), "stream": torch.cuda.Stream()}
            graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
            try:
                # Other threads may allocate meanwhile.
                with torch.cuda.graph(graph, capture_error_mode="thread_local", **self._shared):
                    outputs = run()
            except Exception:
                # PyTorch leaves its own stream the current one, and its allocator goes on to ask this graph.
                torch.cuda.set_stream(current)
                _failed.append(graph)
                raise
        return outputs, graph.replay


#: Never freed, see `CudaRecorder.record`.
_failed: list[torch.cuda.CUDAGraph] = []


def runner_for(model: Any) -> Graphs:
    """What runs the passes of ``model``; not recorded on a CPU, over several devices, or where graphs are off."""
    name, places = type(model).__name__, set(getattr(model, "hf_device_map", {}).values())
    if model.device.type != "cuda" or os.environ.get("CROSSDRAFT_CUDA_GRAPHS") == "0":
        return Graphs(None, name)
    if len(places) > 1:
        _warn_once(name, f"it is spread over {len(places)} devices")
        return Graphs(None, name)
    return Graphs(CudaRecorder(model.device), name)


@cache
def _warn_once(name: str, reason: str) -> None:
    logger.warning("crossdraft: %s runs without CUDA graphs, which makes its passes slower: %s", name, reason)
