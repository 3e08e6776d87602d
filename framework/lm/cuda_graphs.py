"""CUDA graphs: device work that is captured once per shape and replayed with one launch.

A pass over a few tokens is hundreds of small kernels, which a host launches more slowly than a GPU runs them. A graph
launches them all at once, but shapes, addresses and every decision of Python are fixed at capture. Therefore only
functions of tensors are recorded, and a recording is replayed only for equal shapes.

``CROSSDRAFT_CUDA_GRAPHS=0`` in the environment switches graphs off, for debugging and comparison.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from ..models.placement import input_device
from ..util.shared_patch import SharedPatch

logger = logging.getLogger(__name__)

#: The warning of PyTorch about an operation that waits for the device.
_WAITED = "called a synchronizing CUDA operation"

Outputs = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class CaptureLimits:
    """The largest drafts after a warm-up: ``depth`` tokens deep, ``nodes`` tokens in all."""

    depth: int
    nodes: int


#: Which shapes are recorded, at their first call: "called" ones; `CaptureLimits` = also the others within the limits;
#: "none". Per thread, so that a benchmark does not affect others.
_policy: ContextVar[CaptureLimits | str] = ContextVar("policy", default="called")


@contextmanager
def recording(limits: CaptureLimits | None) -> Iterator[None]:
    """Within the context, record every shape at its first call, and those within ``limits`` with it; None: record none.

    Measure under ``None``, after a warm-up with limits: recording a shape takes longer than a pass.
    """
    token = _policy.set("none" if limits is None else limits)
    try:
        yield
    finally:
        _policy.reset(token)


def capture_limits() -> CaptureLimits | None:
    """The limits of the current warm-up; None outside of one."""
    policy = _policy.get()
    return policy if isinstance(policy, CaptureLimits) else None


def captures_called() -> bool:
    """True outside of warm-ups and measurements."""
    return _policy.get() == "called"


@dataclass
class _Recording:
    inputs: dict[str, Tensor]
    outputs: Outputs
    replay: Callable[[], None]


class _SharedBuffers:
    """Input and output memory of all recordings of a model: each is filled, replayed and read before the next one.

    Buffers never move. They grow by doubling, so in total they take less than four times the largest.
    """

    def __init__(self) -> None:
        self._buffers: dict[Hashable, list[Tensor]] = {}

    def buffer(self, name: Hashable, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor that shares memory only with tensors of the same ``name`` and dtype."""
        size, buffers = prod(shape), self._buffers.setdefault((name, dtype), [])
        buffer = next((tensor for tensor in buffers if tensor.numel() >= size), None)
        if buffer is None:
            buffer = torch.empty(max(size, 2 * len(buffers[-1]) if buffers else 0), dtype=dtype, device=device)
            buffers.append(buffer)
        return buffer[:size].view(shape)

    def nbytes(self, device: torch.device) -> int:
        return sum(tensor.nbytes for buffers in self._buffers.values() for tensor in buffers if tensor.device == device)


class CudaGraphRunner:
    """Calls functions of tensors; records a shape at its first call and replays it from then on (see `recording`).

    The first call runs without a graph, for lazy allocations (a cache, a library's workspace). If recording fails, a
    warning is logged once, the call is repeated, and from then on every call runs without graphs.

    Args:
        recorder: records work; ``None`` = every call runs without graphs.
        name: name of the model, for warnings.

    Attributes:
        records: True if shapes are recorded; then callers should use few distinct shapes.
        widths: kept for the caller: the widths recorded for each kind of pass.
    """

    def __init__(self, recorder: CudaRecorder | None, name: str):
        self._recorder = recorder
        self.records = recorder is not None
        self._name = name
        #: By function, constants and shapes of the tensors. They share the memory of inputs and outputs, so each costs
        #: little more than its list of kernels; callers bound their number.
        self._recordings: dict[Hashable, _Recording] = {}
        self._buffers = _SharedBuffers()
        self.widths: dict[Hashable, set[int]] = {}
        _instances.add(self)

    def __len__(self) -> int:
        """Number of recordings."""
        return len(self._recordings)

    def __call__(
        self, function: Callable[..., Outputs], tensors: Mapping[str, Tensor], *constants: Hashable
    ) -> Outputs:
        """Return ``function(*constants, **tensors)``, in tensors that no later call overwrites.

        ``function`` may depend only on its tensors, its constants, and memory at fixed addresses (weights, caches).
        Recordings are looked up by its name.
        """

        def run() -> Outputs:
            return function(*constants, **tensors)

        if self._recorder is None:
            return run()
        shapes = tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors.items())
        key = (function.__name__, constants, shapes)
        if (entry := self._recordings.get(key)) is not None:
            for name, buffer in entry.inputs.items():
                buffer.copy_(tensors[name])
            entry.replay()
            return tuple(None if output is None else output.clone() for output in entry.outputs)
        if _policy.get() == "none":
            _missed[self._name] += 1
            _warn_of_missed(self._name)
            return run()
        try:
            outputs = self._recorder.warm_up(run)
            self._recordings[key] = self._record(self._recorder, function, tensors, constants, outputs)
            return outputs
        except Exception as error:
            # The end of a failed capture raises an error of its own; the cause is its context.
            _warn_once(self._name, str(error.__context__ or error).partition("\n")[0])
            self._recorder, self.records, self._buffers = None, False, _SharedBuffers()
            self._recordings.clear()
            return run()

    def _record(
        self,
        recorder: CudaRecorder,
        function: Callable[..., Outputs],
        tensors: Mapping[str, Tensor],
        constants: tuple[Hashable, ...],
        results: Outputs,
    ) -> _Recording:
        buffer = self._buffers.buffer
        inputs = {
            name: buffer(name, tensor.shape, tensor.dtype, tensor.device).copy_(tensor)
            for name, tensor in tensors.items()
        }
        outputs = tuple(
            None if out is None else buffer(i, out.shape, out.dtype, out.device) for i, out in enumerate(results)
        )

        def run() -> None:
            for output, new in zip(outputs, function(*constants, **inputs), strict=True):
                if output is not None:
                    assert new is not None
                    output.copy_(new)

        return _Recording(inputs, outputs, recorder.record(run))


_instances: WeakSet[CudaGraphRunner] = WeakSet()
#: By name of the model: calls that ran without a graph because recording was switched off.
_missed: Counter[str] = Counter()


def recorded_nbytes(device: torch.device) -> int:
    """Bytes of inputs and outputs of all recordings in this process on ``device``.

    Collects garbage first: a model and its recordings refer to each other, so unused ones are freed only then.
    """
    gc.collect()
    return sum(graphs._buffers.nbytes(device) for graphs in _instances)


def missed_passes() -> int:
    """Passes of all models of this process that ran without a graph because recording was switched off."""
    return _missed.total()


def _report_waits() -> Callable[[], None]:
    """Report operations that wait for the device in `_waits`.

    PyTorch can also raise an error, but in every thread: a `generate` of another thread would fail.
    """
    mode, caught = torch.cuda.get_sync_debug_mode(), warnings.catch_warnings()
    caught.__enter__()
    warnings.filterwarnings("always", message=_WAITED)
    warnings.filterwarnings("ignore", message="Synchronization debug mode")  # that it is a prototype
    show = warnings.showwarning

    def report(message: Any, category: Any, filename: str, lineno: int, *more: Any, **options: Any) -> None:
        if str(message).startswith(_WAITED):
            _waits[threading.get_ident()] = f"{_WAITED} at {filename}:{lineno}"
        else:
            show(message, category, filename, lineno, *more, **options)

    warnings.showwarning = report
    torch.cuda.set_sync_debug_mode("warn")

    def undo() -> None:
        torch.cuda.set_sync_debug_mode(mode)
        caught.__exit__(None, None, None)

    return undo


_reported_waits = SharedPatch(_report_waits)
#: The last operation that waited for the device, by thread.
_waits: dict[int, str] = {}
#: PyTorch captures one graph at a time: a capture waits for the device, and the allocator belongs to all threads.
_capture = threading.Lock()


class CudaRecorder:
    """Records CUDA graphs, which share one memory pool for intermediate results."""

    def __init__(self, device: torch.device):
        self._device = device
        self._shared: Any = {"pool": torch.cuda.graph_pool_handle(), "stream": torch.cuda.Stream(device)}

    def warm_up(self, run: Callable[[], Outputs]) -> Outputs:
        # A synchronisation while recording would leave PyTorch's allocator and the recording stream in disorder. Code
        # that is compiled in the first run, or a library that it loads, may wait then and never again.
        thread, wait = threading.get_ident(), None
        for _ in range(2):
            with _reported_waits:
                _waits.pop(thread, None)
                outputs = run()
            if (wait := _waits.pop(thread, None)) is None:
                return outputs
        raise RuntimeError(wait)

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        with _capture, torch.cuda.device(self._device):
            graph, current, collects = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), gc.isenabled()
            gc.disable()  # a graph that is freed during the capture would end it
            try:
                # Other threads may allocate and wait during the capture.
                with torch.cuda.graph(graph, capture_error_mode="thread_local", **self._shared):
                    run()
            except Exception:
                # PyTorch leaves its own stream current, and its allocator keeps referring to this graph.
                torch.cuda.set_stream(current)
                _failed.append(graph)
                raise
            finally:
                if collects:
                    gc.enable()
        return graph.replay


#: Never freed, see `CudaRecorder.record`.
_failed: list[torch.cuda.CUDAGraph] = []


def runner_for(model: Any) -> CudaGraphRunner:
    """The caller of the passes of ``model``; records none on a CPU, over devices or processes, or if switched off."""
    name, devices = type(model).__name__, set(getattr(model, "hf_device_map", {}).values())
    if input_device(model).type != "cuda" or os.environ.get("CROSSDRAFT_CUDA_GRAPHS") == "0":
        return CudaGraphRunner(None, name)
    if len(devices) > 1:
        _warn_once(name, f"it is spread over {len(devices)} devices")
    elif any(hasattr(weight, "placements") for weight in model.parameters()):
        _warn_once(name, "it is split over several processes")
    else:
        return CudaGraphRunner(CudaRecorder(model.device), name)
    return CudaGraphRunner(None, name)


@cache
def _warn_once(name: str, reason: str) -> None:
    logger.warning("crossdraft: %s runs without CUDA graphs, which makes its passes slower: %s", name, reason)


@cache
def _warn_of_missed(name: str) -> None:
    logger.warning("crossdraft: %s runs a pass without a CUDA graph, more slowly: the warm-up did not record it", name)
