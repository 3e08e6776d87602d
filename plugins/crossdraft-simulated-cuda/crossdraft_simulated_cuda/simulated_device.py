"""A simulated CUDA device: tensors that claim ``cuda:0`` and are computed on the CPU, under the rules of a GPU.

    pytest -n0 -p crossdraft_simulated_cuda tests

The plug-in replaces `torch.cuda` in its process, so use a process of its own. Tests then move models and tensors to
``"cuda"`` as usual, and read `device`: what it counts (`Device.counting`) and forbids (`Device.no_waits`).

Simulated:

- Operands on different devices raise an error, except for numbers and 0-dimensional host tensors in pointwise
  operations.
- Operations that wait for the device (``.item()``, ``nonzero``, a mask as an index, a copy that is not asynchronous,
  a tensor made from host data) are counted by line in `Counts.waits`. They raise an error in `Device.no_waits`, in
  captures and under ``torch.cuda.set_sync_debug_mode("error")``.
- The host memory of an asynchronous copy holds garbage until its stream, or an event after the copy, is waited for.
- A tensor that is written on one stream and read on another, which does not wait for it, raises an error.
- ``torch.cuda.graph`` computes nothing. A replay repeats the captured operations on the captured addresses, shapes and
  decisions of Python, and raises an error if memory of an input was freed. Memory allocated in a capture holds garbage
  until the first replay; `Device.kept` lists tensors of captures that are still referenced, which replays overwrite.
- Copies between host and device raise an error in a capture.
- ``torch.empty`` holds garbage: NaN, or integers that are not valid indices. It is counted by line in
  `Counts.uninitialised`.
- Operations that CUDA lacks for a dtype raise an error; the table is PyTorch's own, see `NO_KERNEL`.
- float64 tensors as wide as a vocabulary (`Device.vocabulary`) are counted by line in `Counts.float64`.

Garbage and frozen decisions raise no error: results differ from the CPU's.

Not simulated: time, memory limits, more than one device, rounding of GPU kernels, kernels that are not PyTorch's
(Triton, `torch.compile`), and pinned memory that is overwritten before its copy has run.
"""

from __future__ import annotations

import gc
import importlib
import sys
import threading
import time
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

CUDA = torch.device("cuda", 0)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_PRODUCTS = """mm bmm addmm baddbmm addbmm addmv mv dot vdot matmul linear einsum inner tensordot bilinear
    linalg_multi_dot max_pool2d max_pool3d max_pool2d_with_indices max_pool3d_with_indices native_dropout_backward"""
_CONVOLUTIONS = """convolution conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d avg_pool1d
    avg_pool2d avg_pool3d"""
#: Version of PyTorch whose op database (``torch.testing._internal``) the table below was taken from, and dtypes that an
#: ATen operation supports on a CPU, but not on CUDA.
NO_KERNEL_VERSION = "2.13.0"
NO_KERNEL: Mapping[str, frozenset[torch.dtype]] = {
    **dict.fromkeys(_names(_PRODUCTS), _INTEGERS | {torch.bool}),
    **dict.fromkeys(_names(_CONVOLUTIONS), frozenset({torch.int64})),
    **dict.fromkeys(_names("angle histc igamma igammac"), frozenset({torch.float16, torch.bfloat16})),
    **dict.fromkeys(_names("histogram histogramdd"), frozenset({torch.float32, torch.float64})),
    **dict.fromkeys(_names("scatter_reduce scatter_reduce_"), frozenset({torch.bool})),
    "upsample_bilinear2d": frozenset({torch.uint8}),
}
#: Operations whose result, or its shape, is read by the host.
_WAITING = _names("""item _local_scalar_dense is_nonzero equal allclose nonzero argwhere masked_select bincount _unique
    _unique2 unique_consecutive unique_dim""")
#: Functions whose CPU version reads values, and whose CUDA version does not.
_CHECKED_ON_CPU = frozenset({"one_hot"})
#: Functions that copy host data to the device.
_FROM_HOST = _names("tensor as_tensor asarray new_tensor")
#: Attributes of a tensor that the simulated one holds itself, and methods that do no device work.
_OWN = _names("device is_cuda is_cpu")
_METADATA = _names("""size stride dim ndimension numel nelement element_size is_contiguous storage_offset data_ptr
    untyped_storage is_floating_point is_complex is_inference is_signed __len__""")
#: Context within which calls are those of the host, unchecked.
host_only = torch._C.DisableTorchFunction
_TORCH = str(Path(torch.__file__).parent)


@dataclass
class Counts:
    """Counts of device work, the counters by ``operation at file:line in function``.

    Attributes:
        waits: operations that waited for the device.
        copies: asynchronous copies, ``pinned`` or ``pageable``.
        float64: numbers in float64 tensors at least as wide as `Device.vocabulary`.
        uninitialised: tensors of ``torch.empty``, which hold garbage.
        captured: operations recorded in captures, by name; views and allocations are not among them.
        launches: operations outside of replays; a replay is one.
    """

    waits: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)
    float64: Counter[str] = field(default_factory=Counter)
    uninitialised: Counter[str] = field(default_factory=Counter)
    captured: Counter[str] = field(default_factory=Counter)
    launches: int = 0
    captures: int = 0
    replays: int = 0


class Device:
    """The state of the simulated device.

    Attributes:
        counts: since the last `counting`.
        vocabulary: last dimension from which a float64 tensor is counted.
    """

    def __init__(self) -> None:
        self.counts, self.vocabulary = Counts(), 10_000
        self.sync_mode = 0
        self.default_stream = Stream()
        self.capturing: tuple[int, CUDAGraph] | None = None
        #: Tensors of finished captures: reference, line, shape.
        self.captured: list[tuple[weakref.ref[DeviceTensor], str, tuple[int, ...]]] = []
        #: Stream and position of the last write to a storage; kept once a second stream is used.
        self.written: dict[int, tuple[Stream, int]] | None = None
        #: Files and folders to name in messages instead of the innermost line, if it was called from there.
        self.places: tuple[str, ...] = ()
        self._forbidden: set[int] = set()

    @contextmanager
    def counting(self) -> Iterator[Counts]:
        """Count from zero within the context."""
        before, self.counts = self.counts, Counts()
        try:
            yield self.counts
        finally:
            self.counts = before

    @contextmanager
    def no_waits(self) -> Iterator[None]:
        """Raise an error if this thread waits for the device within the context."""
        thread = threading.get_ident()
        self._forbidden.add(thread)
        try:
            yield
        finally:
            self._forbidden.discard(thread)

    def kept(self) -> Counter[str]:
        """Tensors made in captures that are still referenced, by line, shape and holder: replays overwrite them."""
        if self.captures_alive():
            gc.collect()
        return Counter(
            f"of shape {shape}, made {line}, held by {_holder(kept)}"
            for tensor, line, shape in self.captured
            if (kept := tensor()) is not None
        )

    def captures_alive(self) -> bool:
        """True if tensors made in captures are still referenced, perhaps by garbage."""
        return any(tensor() is not None for tensor, *_ in self.captured)

    def forget(self) -> None:
        """Forget all captures, for the next test."""
        self.captured.clear()

    @property
    def graph(self) -> CUDAGraph | None:
        """The graph that this thread captures."""
        return self.capturing[1] if self.capturing and self.capturing[0] == threading.get_ident() else None

    def wait(self, operation: str, of: Stream | None = None, position: int | None = None) -> None:
        """Count that the host waits for a stream (the current one), up to a position in it (its end)."""
        line = f"{operation} {_line()}"
        self.counts.waits[line] += 1
        if self.graph is not None:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({line})")
        if threading.get_ident() in self._forbidden or self.sync_mode == 2:
            raise RuntimeError(f"called a synchronizing CUDA operation: {line}")
        if self.sync_mode == 1:
            file, number, _ = _frame(self.places)
            warnings.warn_explicit("called a synchronizing CUDA operation", UserWarning, file, number)
        (of or current_stream()).complete(position)


class DeviceTensor(Tensor):
    """A tensor that claims to be on ``cuda:0``; ``raw`` holds its values on the CPU."""

    raw: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore

    @staticmethod
    def __new__(cls, raw: Tensor) -> DeviceTensor:
        layout = {"strides": raw.stride(), "storage_offset": raw.storage_offset(), "dtype": raw.dtype}
        return Tensor._make_wrapper_subclass(cls, raw.shape, device=CUDA, **layout)  # type: ignore[attr-defined]

    def __init__(self, raw: Tensor):
        self.raw = raw
        if (graph := device.graph) is not None:
            graph.made.append((weakref.ref(self), _line(), tuple(raw.shape)))

    __hash__ = object.__hash__

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        device.wait("repr")
        return f"{self.raw!r} on {CUDA}"

    def tolist(self) -> Any:
        device.wait("tolist")
        return self.raw.tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"can't convert cuda:0 device type tensor to numpy; copy it to the host first ({_line()})")

    __array__ = numpy

    def __iter__(self) -> Iterator[Any]:
        return iter(self.unbind(0))

    def get_device(self) -> int:
        return 0

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceTensor:
        copy = memo[id(self)] = DeviceTensor(self.raw.detach().clone().requires_grad_(self.raw.requires_grad))
        if getattr(self, "_is_param", False):
            copy._is_param = True  # type: ignore[attr-defined]
        return copy

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls that do not pass `_Calls`, such as those from C++."""
        kwargs = dict(kwargs or {})
        to_host = kwargs.get("device") is not None and torch.device(kwargs.pop("device")).type == "cpu"
        if to_host:
            device.wait("copy to the host")
        result = _compute(func, args, kwargs)
        return _tree(result, _raw) if to_host else result


# -- operations ---------------------------------------------------------------------------------------------


class _Operations(TorchDispatchMode):
    """Counts and checks the ATen operations of a call, and records them in a capture."""

    def __init__(self, function: str):
        super().__init__()
        self._silent = function in _CHECKED_ON_CPU

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        if func.is_view and _shares_memory(result := func(*args, **kwargs), args[0]):
            return result  # computed once more below if it is not a view of these operands
        device.counts.launches += 1
        if not self._silent and (name in _WAITING or _reads_shape(name, func, args, kwargs)):
            device.wait(name)
        if (dtypes := NO_KERNEL.get(name)) is not None:
            for operand in _tensors(args):
                if operand.dtype in dtypes:
                    raise RuntimeError(f'"{name}_cuda" not implemented for {operand.dtype} ({_line()})')
        stream = current_stream()
        stream.submitted += 1
        if device.written is not None and device.graph is None:
            _check_streams(stream, name, args, kwargs)
        graph = device.graph
        if graph is not None:
            graph.save(func, args, kwargs)
        func = _histogram_of_integers if name == "histc" and not args[0].is_floating_point() else func
        result = func(*args, **kwargs)
        if "empty" in name:
            device.counts.uninitialised[f"{name} {_line(())}"] += 1
            _tree(result, _spoil)
        for tensor in _tensors(result):
            if tensor.dtype == torch.float64 and tensor.dim() and tensor.shape[-1] >= device.vocabulary:
                device.counts.float64[f"{name} {_line()}"] += tensor.numel()
            if device.written is not None:
                device.written[_storage(tensor)] = stream, stream.submitted
        if graph is not None:
            graph.record(name, func, args, kwargs, result)
        return result


def _histogram_of_integers(values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``torch.histc``, which has integers on CUDA only."""
    return torch.ops.aten.histc(values.float(), *args, **kwargs).to(values.dtype)


def _shares_memory(result: Any, operand: Any) -> bool:
    """True for views, and for operations such as ``contiguous`` that return their operand if nothing is to be done."""
    return all(_storage(tensor) == _storage(operand) for tensor in _tensors(result))


def _reads_shape(name: str, func: Any, args: Any, kwargs: Any) -> bool:
    """True if the shape of the result depends on values: a mask as an index, repetitions without their sum."""
    if name == "one_hot":
        return len(args) < 2 or args[1] < 0
    if name == "where":
        return func._overloadname == "default"
    if name == "repeat_interleave":
        return "self_int" not in func._overloadname and kwargs.get("output_size") is None
    if name not in ("index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_"):
        return False
    masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
    fills = "put" in name and args[2].numel() == 1 and len(args[1]) == 1  # masked_fill
    return bool(masks) and not fills


def _compute(func: Callable, args: Any, kwargs: Any, name: str = "") -> Any:
    """Call ``func`` with the values of simulated tensors; results that are new become simulated tensors."""
    before, raws = _tensors(args, kwargs), (_tree(args, _raw), _tree(kwargs, _raw))
    with host_only(), _Operations(name):
        result = func(*raws[0], **raws[1])
    known = {id(_raw(tensor)): tensor for tensor in before}
    return _tree(result, lambda tensor: known.get(id(tensor)) if id(tensor) in known else DeviceTensor(tensor))


def _raw(tensor: Tensor) -> Tensor:
    return tensor.raw if isinstance(tensor, DeviceTensor) else tensor


def _tree(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """``value`` with every tensor in its tuples, lists, dicts and slices changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, torch.Size) or not isinstance(value, (tuple, list, dict, slice)):
        return value
    if isinstance(value, dict):
        return {key: _tree(item, change) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(_tree(item, change) for item in (value.start, value.stop, value.step)))
    items = [_tree(item, change) for item in value]
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _tensors(*values: Any) -> list[Tensor]:
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, tuple | list):
            tensors += _tensors(*value)
        elif isinstance(value, dict):
            tensors += _tensors(*value.values())
        elif isinstance(value, slice):
            tensors += _tensors(value.start, value.stop, value.step)
    return tensors


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _spoil(tensor: Tensor) -> Tensor:
    """Fill a tensor with garbage."""
    with host_only(), torch.no_grad():
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
        elif tensor.dtype in (torch.int64, torch.int32):
            tensor.fill_(torch.iinfo(tensor.dtype).max // 2)
    return tensor


def _frame(places: tuple[str, ...]) -> tuple[str, int, str]:
    """File, line and function of the innermost frame of ``places``, or of one that is not PyTorch's."""
    frame, innermost = sys._getframe(1), None
    while frame is not None and (innermost is None or places):
        code = frame.f_code
        if places and code.co_filename.startswith(places):
            return code.co_filename, frame.f_lineno, code.co_name
        if innermost is None and code.co_filename != __file__ and not code.co_filename.startswith((_TORCH, "<")):
            innermost = code.co_filename, frame.f_lineno, code.co_name
        frame = frame.f_back
    return innermost or ("", 0, "")


def _holder(value: Any, levels: int = 3) -> str:
    """Attribute or variable that refers to a value, directly or in containers."""
    for referrer in gc.get_referrers(value):
        names, owner = getattr(referrer, "__dict__", {}), referrer
        if isinstance(referrer, dict):
            owners = (owner for owner in gc.get_referrers(referrer) if getattr(owner, "__dict__", None) is referrer)
            names, owner = referrer, next(owners, None)
        name = next((name for name, item in names.items() if item is value), None)
        if name is not None and owner is not None:
            named = owner if hasattr(owner, "__name__") else type(owner)
            return f"{getattr(named, '__module__', '')}.{named.__name__}.{name}".lstrip(".")
        if levels and isinstance(referrer, dict | list | tuple):
            return _holder(referrer, levels - 1)
    return "an unknown object"


def _line(places: tuple[str, ...] | None = None) -> str:
    file, number, function = _frame(device.places if places is None else places)
    return f"at {file.rpartition('site-packages/')[2]}:{number} in {function}"


# -- calls --------------------------------------------------------------------------------------------------


class _Calls(TorchFunctionMode):
    """Checks the devices of every call from Python, and computes those of the simulated device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if (special := _SPECIAL.get(func)) is not None:
            return special(*args, **kwargs)
        if name in ("__get__", "__set__"):
            return _attribute(func, name, args)
        tensors = _tensors(args, kwargs)
        simulated = any(isinstance(tensor, DeviceTensor) for tensor in tensors)
        place, pinned = kwargs.get("device"), kwargs.pop("pin_memory", False)
        on_device = simulated if place is None else _is_cuda(place)
        if pinned and type(args[0]).__module__ == "numpy":
            raise RuntimeError(f"Can't pin tensor constructed from numpy ({_line()})")
        if not simulated and not on_device:
            return _pin(func(*args, **kwargs)) if pinned else func(*args, **kwargs)
        if name in _METADATA:
            with host_only():
                return func(_raw(args[0]), *args[1:], **kwargs)
        if place is not None:
            kwargs["device"] = "cpu"
        if name in _FROM_HOST and (on_device != simulated or name == "new_tensor"):
            _copy("to the device" if on_device else "to the host", waits=True)
        elif simulated:
            _check_devices(name, tensors)
        result = _compute(func, args, kwargs, name)
        return result if on_device else _tree(result, _raw)


def _check_devices(name: str, tensors: list[Tensor]) -> None:
    for tensor in tensors:
        if not isinstance(tensor, DeviceTensor) and (tensor.dim() or not _accepts_host_number(name)):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and "
                f"{tensor.device}! (when calling {name} {_line()})"
            )


def _accepts_host_number(name: str) -> bool:
    """True for pointwise operations, by PyTorch's own tags."""
    if name.startswith("__"):
        return "matmul" not in name
    packet = getattr(torch.ops.aten, name, None)
    overloads = [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]
    pointwise = (torch.Tag.pointwise in overload.tags for overload in overloads)
    return any(pointwise) or name.rstrip("_") in ("fill", "index_put", "masked_fill", "full", "set_data")


def _attribute(func: Any, name: str, args: Any) -> Any:
    tensor, attribute = args[0], getattr(func.__self__, "__name__", "")
    if not isinstance(tensor, DeviceTensor) or attribute in _OWN:
        with host_only():
            return func(*args)
    with host_only():
        if name == "__set__":
            return func(tensor.raw, *(_tree(value, _raw) for value in args[1:]))
        return _tree(func(tensor.raw), DeviceTensor)


def _copy(direction: str, *, waits: bool, pinned: bool = False) -> None:
    """Count a copy between host and device."""
    if device.graph is not None:
        raise RuntimeError(f"Cannot copy between CPU and CUDA tensors during CUDA graph capture ({_line()})")
    if waits:
        device.wait(f"copy {direction}")
    else:
        device.counts.copies[f"{'pinned' if pinned else 'pageable'} copy {direction} {_line()}"] += 1


def _to(tensor: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
    with host_only():
        place, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)  # type: ignore[attr-defined]
        own = isinstance(tensor, DeviceTensor)
        to_device = own if place is None else _is_cuda(place)
        if not (own or to_device) or tensor.is_meta or (place is not None and place.type == "meta"):
            return _raw(tensor).to(*args, copy=copy, **kwargs)
    if moves := own != to_device:
        direction, pinned = ("to the device", _is_pinned(tensor)) if to_device else ("to the host", True)
        _copy(direction, waits=not non_blocking, pinned=pinned)
    options: dict[str, Any] = {"dtype": dtype or tensor.dtype, "copy": copy or moves}
    if memory_format is not None:
        options["memory_format"] = memory_format
    if to_device:
        return _compute(Tensor.to, (tensor,), options)
    with host_only():
        value = _raw(tensor).to(**options)
    return _arriving(torch.empty_like(value), value) if non_blocking else value


def _copy_into(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """``target.copy_(source)``."""
    own, from_device = isinstance(target, DeviceTensor), isinstance(source, DeviceTensor)
    pinned = _is_pinned(source if own else target)
    later = non_blocking and (own or pinned)
    if own != from_device:
        _copy("to the device" if own else "to the host", waits=not later, pinned=pinned)
    if own:
        return _compute(Tensor.copy_, (target, source), {})
    with host_only():
        if later and from_device:
            return _arriving(target, _raw(source).to(target.dtype, copy=True).expand_as(target))
        return target.copy_(_raw(source))


def _arriving(target: Tensor, value: Tensor) -> Tensor:
    """``target``, on the host, which holds garbage until the current stream is waited for."""
    stream = current_stream()
    stream.submitted += 1
    stream.arriving.append((stream.submitted, target, value))
    return _pin(_spoil(target))


def _index(func: Callable) -> Callable:
    def call(tensor: Tensor, index: Any, *value: Any) -> Any:
        own = isinstance(tensor, DeviceTensor)
        parts = index if isinstance(index, tuple) else (index,)
        if not own and not any(isinstance(part, DeviceTensor) for part in _tensors(parts, value)):
            with host_only():
                return func(tensor, index, *value)
        indices = [part for part in parts if isinstance(part, Tensor | list)]
        elsewhere = [part for part in indices if isinstance(part, DeviceTensor) != own]
        if any(isinstance(part, list) or part.dim() or part.dtype == torch.bool for part in elsewhere):
            if not own:
                raise RuntimeError(f"indices should be on cpu or the device of the indexed tensor ({_line()})")
            _copy("of indices to the device", waits=True)
        if any(isinstance(v, DeviceTensor) != own and (v.dim() or not own) for v in _tensors(value)):
            if own and indices:
                raise RuntimeError(f"expected self and values to be on the same device ({_line()})")
            _copy("to the device" if own else "to the host", waits=True)
        result = _compute(func, (tensor, index, *value), {})
        return result if own else _tree(result, _raw)

    return call


def _is_cuda(place: Any) -> bool:
    return isinstance(place, int) or torch.device(place).type == "cuda"


def _pin(tensor: Tensor) -> Tensor:
    tensor._is_pinned = True  # type: ignore[attr-defined]
    return tensor


def _is_pinned(tensor: Tensor) -> bool:
    return getattr(tensor, "_is_pinned", False)


_SPECIAL: dict[Any, Callable] = {
    Tensor.to: _to,
    Tensor.cpu: lambda tensor, **kwargs: _to(tensor, "cpu", **kwargs),
    Tensor.cuda: lambda tensor, place=CUDA, non_blocking=False, **_: _to(tensor, place, non_blocking=non_blocking),
    Tensor.copy_: _copy_into,
    Tensor.__getitem__: _index(Tensor.__getitem__),
    Tensor.__setitem__: _index(Tensor.__setitem__),
    torch._has_compatible_shallow_copy_type: lambda old, new: type(old) is type(new) is not DeviceTensor,  # pyright: ignore
    Tensor.pin_memory: lambda tensor, *_: _pin(tensor.clone()),
    Tensor.is_pinned: lambda tensor, *_: _is_pinned(tensor),
}


_save, _load = torch.save, torch.load


def _save_values(value: Any, *args: Any, **kwargs: Any) -> None:
    with host_only():
        _save(_tree(value, _raw), *args, **kwargs)


def _load_values(file: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """``torch.load``; tensors are loaded to the host unless ``map_location`` is the device."""
    on_device = isinstance(map_location, str | int | torch.device) and _is_cuda(map_location)
    with host_only():
        value = _load(file, "cpu" if on_device else map_location, **kwargs)  # pyright: ignore
    return _tree(value, DeviceTensor) if on_device else value


_apply_function = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]


def _apply(function: Any, *args: Any) -> Any:
    """``torch.autograd.Function.apply`` on the values of simulated tensors, which have the gradients."""
    own = [isinstance(arg, DeviceTensor) for arg in args]

    class Simulated(function):
        @staticmethod
        def forward(ctx: Any, *raws: Any) -> Any:
            inputs = (DeviceTensor(raw) if simulated else raw for raw, simulated in zip(raws, own, strict=True))
            return _tree(function.forward(ctx, *inputs), _raw)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            with _disable_current_modes():
                return _tree(function.backward(ctx, *_tree(gradients, DeviceTensor)), _raw)

    result = _apply_function(Simulated if any(own) else function, *map(_raw, args))
    return _tree(result, DeviceTensor) if any(own) else result


# -- streams, events and graphs -----------------------------------------------------------------------------


class Stream:
    """Work in order: ``submitted`` operations, ``finished`` of which the host knows to be done."""

    def __init__(self, *_: Any, **__: Any):
        self.device, self.submitted, self.finished = CUDA, 0, 0
        #: Position of other streams up to which this one waits.
        self.seen: dict[Stream, int] = {}
        #: Copies to the host: position, host memory, value.
        self.arriving: deque[tuple[int, Tensor, Tensor]] = deque()

    def complete(self, position: int | None = None) -> None:
        self.finished = max(self.finished, self.submitted if position is None else position)
        with host_only(), torch.inference_mode():
            while self.arriving and self.arriving[0][0] <= self.finished:
                _, target, value = self.arriving.popleft()
                target.copy_(value)

    def synchronize(self) -> None:
        device.wait("stream.synchronize", self)

    def query(self) -> bool:
        return self.finished == self.submitted

    def wait_stream(self, other: Stream) -> None:
        self.seen |= other.seen | {other: other.submitted}

    def wait_event(self, event: Event) -> None:
        if event.stream is not None:
            self.seen |= event.seen | {event.stream: event.position}

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event


class Event:
    """A position in a stream, reached when the host has waited for it, or for later work."""

    def __init__(self, *_: Any, **__: Any):
        self.stream: Stream | None = None
        self.position, self.seen, self.time = 0, {}, 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or current_stream()
        self.position, self.seen, self.time = self.stream.submitted, dict(self.stream.seen), time.perf_counter()

    def query(self) -> bool:
        return self.stream is None or self.stream.finished >= self.position

    def synchronize(self) -> None:
        if not self.query():
            device.wait("event.synchronize", self.stream, self.position)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.time - self.time)


def _check_streams(stream: Stream, name: str, *operands: Any) -> None:
    for tensor in _tensors(*operands):
        writer, position = (device.written or {}).get(_storage(tensor), (stream, 0))
        if writer is not stream and stream.seen.get(writer, 0) < position > writer.finished:
            raise RuntimeError(f"{name} reads a tensor of another stream without waiting for it ({_line()})")


class CUDAGraph:
    """Captured operations on the memory of their tensors."""

    def __init__(self, *_: Any, **__: Any):
        self._operations: list[tuple[Any, Any, Any, Any]] = []
        self._undo: list[tuple[Tensor, Tensor]] = []
        #: Tensors of memory that the capture did not allocate: of the caller, and of the graph.
        self._aliases: dict[int, tuple[Tensor, Tensor]] = {}
        #: Memory of these: the graph's own references to it, one of the tensors, and the line that reads it first.
        self._inputs: dict[int, tuple[int, Tensor, str]] = {}
        self._allocated: set[int] = set()
        self.made: list[tuple[weakref.ref[DeviceTensor], str, tuple[int, ...]]] = []

    def save(self, func: Any, args: Any, kwargs: Any) -> None:
        """Save the tensors that an operation writes, to be restored after the capture."""
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[i] if i < len(args) else kwargs.get(argument.name)
                self._undo += [(tensor, tensor.clone()) for tensor in _tensors(value)]

    def record(self, name: str, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        inputs = _tree((args, kwargs), self._input)
        self._allocated |= {_storage(tensor) for tensor in _tensors(result)} - set(self._inputs)
        if "empty" not in name:
            device.counts.captured[name] += 1
            self._operations.append((func, *inputs, _tree(result, self._input)))

    def _input(self, tensor: Tensor) -> Tensor:
        """The graph's own reference to memory of the caller, so that `replay` can see if the caller freed it."""
        if (memory := _storage(tensor)) in self._allocated:
            return tensor
        if id(tensor) not in self._aliases:
            self._aliases[id(tensor)] = tensor, (alias := tensor.detach())
            count, first, line = self._inputs.get(memory, (0, alias, ""))
            self._inputs[memory] = count + 1, first, line or _line()
        return self._aliases[id(tensor)][1]

    def capture_end(self) -> None:
        """Undo the capture, and spoil the memory that it allocated."""
        with host_only(), torch.inference_mode():
            for tensor, before in reversed(self._undo):
                tensor.copy_(before)
            self._undo.clear()
            for *_, result in self._operations:
                for tensor in _tensors(result):
                    if _storage(tensor) in self._allocated:
                        _spoil(tensor)
        self._aliases.clear()
        device.captured += self.made
        self.made = []

    def replay(self) -> None:
        device.counts.launches += 1
        device.counts.replays += 1
        stream = current_stream()
        stream.submitted += 1
        with host_only(), torch.inference_mode():
            for count, tensor, line in self._inputs.values():
                # One more reference is the storage's own in Python.
                if tensor.numel() and torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) <= count + 1:
                    shape = tuple(tensor.shape)
                    raise RuntimeError(f"a replay uses memory that was freed after its capture: {shape}, used {line}")
            for func, args, kwargs, result in self._operations:
                for old, new in zip(_tensors(result), _tensors(func(*args, **kwargs)), strict=True):
                    if old.numel() and old.data_ptr() != new.data_ptr():
                        old.copy_(new)
                    if device.written is not None:
                        device.written[_storage(old)] = stream, stream.submitted


@contextmanager
def _capture(graph: CUDAGraph, *_: Any, **__: Any) -> Iterator[None]:
    """``torch.cuda.graph``."""
    if device.capturing is not None:
        raise RuntimeError(f"CUDA graphs are captured one at a time ({_line()})")
    current_stream().complete()  # torch.cuda.graph synchronises
    device.counts.captures += 1
    device.capturing = threading.get_ident(), graph
    try:
        yield
    finally:
        device.capturing = None
        graph.capture_end()


_thread = threading.local()


def current_stream(_: Any = None) -> Stream:
    return getattr(_thread, "stream", device.default_stream)


def _set_stream(stream: Stream) -> None:
    if stream is not device.default_stream and device.written is None:
        device.written = {}
    _thread.stream = stream


@contextmanager
def _stream(stream: Stream | None) -> Iterator[None]:
    before = current_stream()
    _set_stream(stream or before)
    try:
        yield
    finally:
        _set_stream(before)


# -- installation -------------------------------------------------------------------------------------------

device = Device()
_GIB = 1 << 30
_PROPERTIES = SimpleNamespace(
    name="simulated", major=9, minor=0, total_memory=80 * _GIB, multi_processor_count=132, L2_cache_size=50 << 20
)


def _set_sync_debug_mode(mode: int | str) -> None:
    device.sync_mode = {"default": 0, "warn": 1, "error": 2}.get(mode, mode)  # type: ignore[arg-type, assignment]


def _constant(value: Any) -> Callable:
    return lambda *_, **__: value


_CUDA_MODULE: dict[str, Any] = {
    **dict.fromkeys(_names("is_available is_initialized is_bf16_supported"), _constant(True)),
    **dict.fromkeys(_names("init _lazy_init set_device empty_cache reset_peak_memory_stats"), _constant(None)),
    **dict.fromkeys(_names("manual_seed manual_seed_all set_rng_state"), _constant(None)),
    **dict.fromkeys(
        _names("memory_allocated max_memory_allocated memory_reserved max_memory_reserved"), _constant(_GIB)
    ),
    "device_count": _constant(1),
    "current_device": _constant(0),
    "device": lambda *_: nullcontext(),
    "synchronize": lambda *_: device.wait("torch.cuda.synchronize"),
    "Event": Event,
    "Stream": Stream,
    "stream": _stream,
    "set_stream": _set_stream,
    "current_stream": current_stream,
    "default_stream": lambda *_: device.default_stream,
    "CUDAGraph": CUDAGraph,
    "graph": _capture,
    "graph_pool_handle": _constant((0, 1)),
    "is_current_stream_capturing": lambda: device.graph is not None,
    "get_sync_debug_mode": lambda: device.sync_mode,
    "set_sync_debug_mode": _set_sync_debug_mode,
    "get_device_properties": _constant(_PROPERTIES),
    "get_device_capability": _constant((9, 0)),
    "get_device_name": _constant(_PROPERTIES.name),
    "mem_get_info": _constant((70 * _GIB, 80 * _GIB)),
    "get_rng_state": lambda *_: torch.get_rng_state(),
}


def install() -> None:
    """Replace `torch.cuda` in this process and all its threads; cannot be undone."""
    importlib.import_module("torch._dynamo")  # its import lists the functions of torch.cuda, and refuses equal ones
    for name, value in _CUDA_MODULE.items():
        setattr(torch.cuda, name, value)
    torch.save, torch.load = _save_values, _load_values
    torch.autograd.Function.apply = classmethod(_apply)  # type: ignore[assignment]
    # Modules swap their tensors for simulated ones in place, so that shared weights stay shared.
    torch.__future__.set_swap_module_params_on_conversion(True)
    run = threading.Thread.run

    def run_with_device(thread: threading.Thread) -> None:
        with _Calls():
            run(thread)

    threading.Thread.run = run_with_device  # type: ignore[method-assign]
    _Calls().__enter__()


def installed() -> bool:
    return torch.cuda.Event is Event  # type: ignore[comparison-overlap]


def pytest_configure() -> None:
    install()
