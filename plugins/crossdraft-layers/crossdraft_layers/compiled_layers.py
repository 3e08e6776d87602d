"""Decoder layers compiled ahead of time, for passes on a CPU in float32 or bfloat16.

A layer is a few products and some forty operations on a few kilobytes, each with a call from Python. In compiled code
the operations between two products are one loop, and the layer is one call.

The code depends on the structure of a layer, not on its weights, and the numbers of rows, tokens and slots are
variable: all layers of a model share it. It differs only between one row and several, and between one token and
several. PyTorch's AOTInductor compiles each variant at its first pass of a warm-up (`recording`), which takes 15 to 20
seconds and a C++ compiler, and stores it in the cache directory; from then on it is loaded at its first pass. A layer
runs uncompiled if it cannot be compiled, if others can write to the cache directory (`own_path`), if its output differs
at that first pass, and outside of `own_attention`.

``CROSSDRAFT_COMPILED_LAYERS=compile`` in the environment compiles at any pass, so in `generate` and servers, too; ``0``
switches this off, for debugging and comparison.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import operator
import os
import sys
import time
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property, wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from torch import Tensor, nn
from torch.export import Dim
from torch.func import functional_call
from torch.nn import functional
from transformers.modeling_layers import GradientCheckpointingLayer

from crossdraft.framework.contracts.models import ModelPreparation
from crossdraft.framework.lm.attention import sdpa
from crossdraft.framework.lm.attention.sdpa import in_own_attention, own_attention
from crossdraft.framework.lm.cuda_graphs import capture_limits
from crossdraft.framework.lm.kv_cache import RaggedCache, WritePlan
from crossdraft.framework.models.device import cpu_model
from crossdraft.framework.util.cache_argument import cache_argument
from crossdraft.framework.util.compilation import TensorFunction, export_function, load_package, package_program
from crossdraft.framework.util.output_files import cache_dir
from crossdraft.framework.util.stored_code import ForeignCodeError, own_directory

from . import small_batch_linear
from .small_batch_linear import PACKED_LINEAR_IN_C, SmallBatchLinear, packed, packed_linear, replaced_products

logger = logging.getLogger(__name__)

#: Weights of the smallest layer that is compiled.
LEAST_WEIGHTS = 2**18
#: Most kinds of calls of a layer; further ones run uncompiled.
MOST_FORMS = 8
#: Days after which code that was not loaded is removed.
MOST_DAYS = 90
#: Largest difference between compiled and uncompiled outputs, relative to the latter, in norms of tokens: numbers
#: differ by more where large ones cancel. Compiled code rounds to bfloat16 less often: only what leaves a loop.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
#: Options of Inductor: inputs of several products are computed once, and `packed_linear` is called without Python.
_INDUCTOR = {
    "realize_opcount_threshold": 1,
    "realize_reads_threshold": 1,
    "aot_inductor.custom_ops_to_c_shims": {torch.ops.crossdraft.packed_linear.default: PACKED_LINEAR_IN_C},
}
#: Environment variable by which users switch this off, or compile outside of warm-ups.
_SETTING = "CROSSDRAFT_COMPILED_LAYERS"
_NOT_STORED = f"no code is stored for it on this processor; set {_SETTING}=compile for one start, which compiles it"
#: Environment variable of the directory of the code.
_VARIABLE = "CROSSDRAFT_CACHE"
#: Module of the hooks by which models return hidden states, of layers, and attention weights, which no pass requests.
_RECORDERS = "transformers.utils.output_capturing"
#: Arguments for these hooks, which layers do not read.
_UNREAD = ("output_hidden_states",)
#: Attributes in which layers with the same code differ.
_IGNORED = {"layer_idx", "training", "siblings", "config"}
#: Rows, new tokens, slots attended over and slots of the cache in the pass that is traced, and in another one.
_TRACED, _OTHER = (3, 5, 37, 61), (6, 2, 130, 256)

#: What a call passes: by argument, the layout of a tensor, or a value.
Form = tuple[Hashable, ...]


class CompiledLayers(ModelPreparation):
    """Let the decoder layers of a model run compiled code; weights do not change."""

    name = "compiled-layers"

    @classmethod
    def prepare(cls, model: nn.Module) -> None:
        if os.environ.get(_SETTING) == "0":
            return
        for module in model.modules():
            if not isinstance(module, GradientCheckpointingLayer) or hasattr(module, "_runs_compiled"):
                continue
            weights = list(module.parameters())
            size = sum(tensor.numel() for tensor in weights)
            kinds = {(tensor.device.type, tensor.dtype) for tensor in weights}
            compilable = any(kinds == {("cpu", dtype)} for dtype in TOLERANCE)
            if compilable and size >= LEAST_WEIGHTS and cache_argument(module.forward):
                module.__class__ = _compiled_class(type(module))


@cache
def _compiled_class(plain: type[Any]) -> type[Any]:
    @wraps(plain.forward)
    def forward(self: nn.Module, *args: Any, **options: Any) -> Any:
        output = _compiled_output(self, args, options)
        return plain.forward(self, *args, **options) if output is None else output

    new = type(plain.__name__, (plain,), {"forward": forward, "_runs_compiled": plain})
    new.__module__, new.__qualname__ = plain.__module__, plain.__qualname__
    return new


@dataclass
class _Structure:
    """A layer as compiled code sees it.

    Attributes:
        registries: of every submodule, its submodules, parameters and buffers by name.
        state: see `_state`.
        tensors: every parameter and buffer by its full name.
        modules: every submodule.
        hooks: registries of the hooks of submodules, which compiled code would not run.
        index: the layer's number in the cache.
        identity: all that compiled code depends on; None if the layer cannot be compiled.
        functions: compiled code by form; None = uncompiled.
        checked: forms whose output was compared.
    """

    registries: list[dict[str, Any]]
    state: list[Hashable]
    tensors: dict[str, Tensor]
    modules: list[nn.Module]
    hooks: list[dict[int, Any]]
    index: int
    identity: Form | None
    functions: dict[Form, TensorFunction | None] = field(default_factory=dict)
    checked: set[Form] = field(default_factory=set)

    @classmethod
    def of(cls, layer: nn.Module) -> _Structure:
        modules = list(layer.modules())
        registries = [r for module in modules for r in (module._modules, module._parameters, module._buffers)]
        tensors = dict((*layer.named_parameters(remove_duplicate=False), *layer.named_buffers(remove_duplicate=False)))
        hooks: list[dict[int, Any]] = [
            registry for child in modules[1:] for registry in (child._forward_hooks, child._forward_pre_hooks)
        ]
        indices = {vars(module)["layer_idx"] for module in modules if "layer_idx" in vars(module)}
        index = indices.pop() if len(indices) == 1 else None
        tracked = index is not None and not any(tensor.is_inference() for tensor in tensors.values())
        identity = _identity(layer) if tracked else None
        return cls(registries, _state(registries), tensors, modules[1:], hooks, index or 0, identity)

    @property
    def is_current(self) -> bool:
        """True if no submodule, parameter or buffer was replaced or written to since the structure was read."""
        return _state(self.registries) == self.state

    @property
    def is_hooked(self) -> bool:
        """True if a submodule has a hook, other than `_RECORDERS`."""
        return any(self.hooks) and any(
            getattr(hook, "__module__", "") != _RECORDERS for registry in self.hooks for hook in registry.values()
        )

    @cached_property
    def weights(self) -> list[Tensor] | None:
        """Packed weights of `products`, then `unpacked`; None if a weight cannot be packed."""
        copies = [packed(*(linear.weight for linear in group)) for group in self.products]
        complete = [weight for weight in copies if weight is not None]
        return [*complete, *self.unpacked.values()] if len(complete) == len(copies) else None

    @cached_property
    def products(self) -> list[list[SmallBatchLinear]]:
        """The layers of each product over several tokens: layers with the same input, or a single one."""
        layers = {id(child.weight): child for child in self.modules if isinstance(child, SmallBatchLinear)}
        groups: dict[int, list[SmallBatchLinear]] = {}
        for layer in layers.values():
            group = [layers.get(id(weight)) for weight in layer.siblings.weights] if layer.siblings else [layer]
            present = [linear for linear in group if linear is not None]
            members = present if len(present) == len(group) else [layer]
            groups[id(members[0])] = members
        return list(groups.values())

    @cached_property
    def unpacked(self) -> dict[str, Tensor]:
        """Parameters and buffers by their full names, without the weights of `products`."""
        copied = {id(layer.weight) for group in self.products for layer in group}
        return {name: tensor for name, tensor in self.tensors.items() if id(tensor) not in copied}


def _state(registries: list[dict[str, Any]]) -> list[Hashable]:
    """The objects in ``registries``, with number of writes, address and dtype of tensors."""
    return [
        (id(entry), entry._version, entry.data_ptr(), entry.dtype)
        if type(entry) in (Tensor, nn.Parameter) and not entry.is_inference()
        else id(entry)
        for registry in registries
        for entry in registry.values()
    ]


def _identity(layer: nn.Module) -> Form | None:
    """All that compiled code depends on, except for a call; None if the layer cannot be compiled."""
    texts: dict[int, str] = {}  # of configurations, by id: submodules have the same one
    parts: list[Hashable] = [torch.__version__, transformers.__version__, torch.backends.cpu.get_cpu_capability()]
    parts += [cpu_model(), *map(_source, (__name__, small_batch_linear.__name__, sdpa.__name__))]
    for path, module in layer.named_modules():
        kind = getattr(module, "_runs_compiled", type(module))
        if "forward" in vars(module) or kind.__module__ not in sys.modules:
            return None
        parts += [path, kind.__qualname__, _source(kind.__module__)]
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                return None
            if name not in _IGNORED and (value is None or isinstance(value, bool | int | float | str | list | tuple)):
                parts.append((name, repr(value)))
        if (config := getattr(module, "config", None)) is not None:
            if id(config) not in texts:
                settings = {**config.to_dict(), "attention": config._attn_implementation, "_name_or_path": ""}
                texts[id(config)] = repr(sorted(settings.items()))
            parts.append(texts[id(config)])
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        if hasattr(tensor, "__tensor_flatten__") or tensor.device.type != "cpu":  # quantised, or split over processes
            return None
        parts.append((name, tensor.shape, tensor.dtype))
    return tuple(parts)


@cache
def _source(module: str) -> str:
    """Digest of the source file of a loaded module; its name if it has none."""
    file = getattr(sys.modules[module], "__file__", None)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else module


_structures: WeakKeyDictionary[nn.Module, _Structure] = WeakKeyDictionary()


def _compiled_output(layer: Any, args: Sequence[Any], options: dict[str, Any]) -> Tensor | None:
    """The output of ``layer``; None if it must run uncompiled."""
    if not in_own_attention() or torch.is_grad_enabled() or layer.training:
        return None
    structure = _structures.get(layer)
    if structure is None and not _has_code() and not _compiles():
        _warn_once(type(layer).__name__, _NOT_STORED)
        return None
    if structure is None or not structure.is_current:
        structure = _structures[layer] = _Structure.of(layer)
    if structure.identity is None or structure.is_hooked:
        return None
    cache_name = cache_argument(layer.forward)
    call = _Call.of(structure.index, cache_name, args, options)
    if call is None:
        return None
    function, known = structure.functions.get(call.form), call.form in structure.functions
    if function is None and (not _compiles() if known else len(structure.functions) == MOST_FORMS):
        return None
    weights = [*structure.tensors.values()] if call.single else structure.weights
    if weights is None:
        return None
    if function is None:
        function = structure.functions[call.form] = _function(layer, structure.identity, call)
        if function is None:
            return None
    output = function([*call.tensors, *weights])[0]
    if (plan := options[cache_name].plan).rows is not None:
        options[cache_name].layers[structure.index].update(*(slots[:, :, : plan.kv_len] for slots in call.tensors[-2:]))
    if call.form in structure.checked:
        return output
    # The code of another layer may differ in what its structure does not show. Both write the same slots.
    expected = layer._runs_compiled.forward(layer, *args, **options)
    structure.checked.add(call.form)
    difference, norm = (
        torch.linalg.vector_norm(t, dim=-1, dtype=torch.float32).sum() for t in (output - expected, expected)
    )
    if not difference <= TOLERANCE[expected.dtype] * norm:
        structure.identity = None
        _warn_once(type(layer).__name__, "compiled code returns other numbers")
    return expected


@dataclass
class _Arguments:
    """Arguments that the layers of a pass share: all but the hidden states and the cache.

    Attributes:
        plan: that of the pass.
        shape, dtype: of the hidden states, ``[R, W, dim]``.
        names, values: the arguments.
        form: see `_Call`; None if compiled code does not support the call.
        tensors: those among the arguments, contiguous, then the slots.
    """

    plan: WritePlan
    shape: torch.Size
    dtype: torch.dtype
    names: tuple[int | str, ...]
    values: list[Any]
    form: Form | None = None
    tensors: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, plan: WritePlan, hidden: Tensor, names: tuple[int | str, ...], values: list[Any]) -> _Arguments:
        arguments = cls(plan, hidden.shape, hidden.dtype, names, values)
        rows, width, dim = hidden.shape
        form: list[Hashable] = [rows == 1, width == 1, torch.get_num_threads(), hidden.dtype, dim]
        tensors: list[Tensor] = []
        for key, value in zip(names, values, strict=True):
            parts = _tensors(value)
            if parts is None:
                if value is not None and type(value) not in (bool, int, float, str):
                    return arguments
                form.append((key, value))
                continue
            for tensor in parts:
                mask, shape = _is_mask(tensor), tensor.shape
                if len(shape) < 2 or shape[0] not in (1, rows) or shape[2 if mask else 1] != width:
                    return arguments
                if tensor.device.type != "cpu" or (mask and (shape[1] != 1 or shape[3] != plan.kv_len)):
                    return arguments
                form.append((key, mask, tensor.dtype, shape[0] == 1, () if mask else shape[2:]))
            tensors += parts
        if sum(map(_is_mask, tensors)) == 1:
            arguments.form = tuple(form)
            arguments.tensors = [tensor.contiguous() for tensor in (*tensors, plan.slots.expand(rows, -1))]
        return arguments

    def is_of(self, plan: WritePlan, hidden: Tensor, names: tuple[int | str, ...], values: list[Any]) -> bool:
        return (
            self.plan is plan
            and (self.shape, self.dtype, self.names) == (hidden.shape, hidden.dtype, names)
            and all(map(operator.is_, self.values, values))
        )


#: Arguments of the last layer that ran with a cache.
_shared: WeakKeyDictionary[RaggedCache, _Arguments] = WeakKeyDictionary()


@dataclass
class _Call:
    """A call of a layer on R rows of W tokens each.

    Attributes:
        form: names of the arguments, values, and layouts of tensors.
        args, options: the arguments.
        tensors: tensors among the arguments, contiguous: one mask ``[R or 1, 1, W, kv_len]``, others of other ranks
            ``[R or 1, W, ..]``; then the slots ``[R, W]``, keys and values ``[R, heads, length, dim]`` of the cache.
    """

    form: Form
    args: Sequence[Any]
    options: dict[str, Any]
    tensors: list[Tensor]

    @classmethod
    def of(cls, index: int, cache_name: str, args: Sequence[Any], options: dict[str, Any]) -> _Call | None:
        """A call of layer ``index``; None if compiled code does not support it."""
        kv_cache, hidden = options.get(cache_name), args[0] if args else None
        if type(kv_cache) is not RaggedCache or not isinstance(hidden, Tensor) or hidden.dim() != 3:
            return None
        if hidden.dtype not in TOLERANCE or hidden.device.type != "cpu" or index >= len(kv_cache.layers):
            return None
        states: Any = kv_cache.layers[index]
        if not states.is_initialized:
            return None
        plan, buffers = kv_cache.plan, [states.keys, states.values]
        if plan.row is not None:
            buffers = [buffer[plan.row : plan.row + 1] for buffer in buffers]
        elif plan.rows is not None:  # such a pass reads no earlier slots; `_compiled_output` copies them
            buffers = [b.new_empty(len(hidden), b.shape[1], plan.kv_len + 1, b.shape[3]) for b in buffers]
        # Code is traced for a cache with more slots than are attended over.
        if plan.kv_len >= buffers[0].shape[2]:
            return None
        if any(tensor.dtype != hidden.dtype or not tensor.is_contiguous() for tensor in (hidden, *buffers)):
            return None
        if len(buffers[0]) != len(hidden):
            return None
        names = tuple(key for key in (*range(1, len(args)), *options) if key != cache_name and key not in _UNREAD)
        values = [args[key] if isinstance(key, int) else options[key] for key in names]
        shared = _shared.get(kv_cache)
        if shared is None or not shared.is_of(plan, hidden, names, values):
            shared = _shared[kv_cache] = _Arguments.of(plan, hidden, names, values)
        if shared.form is None:
            return None
        return cls(shared.form, args, options, [hidden, *shared.tensors, *buffers])

    @property
    def single(self) -> bool:
        """True for a pass over one token where weights as they are, in loops, are faster than in oneDNN's layout."""
        one_row, one_token, threads, dtype, *_ = self.form
        return one_row is one_token is True and (threads == 1 or dtype == torch.float32)

    def with_tensors(self, tensors: Sequence[Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments, with ``tensors`` in place of theirs."""
        rest = iter(tensors)

        def replaced(value: Any) -> Any:
            parts = _tensors(value)
            if parts is None:
                return value
            new = [next(rest) for _ in parts]
            return tuple(new) if isinstance(value, tuple) else new[0]

        return [replaced(value) for value in self.args], {
            k: replaced(value) for k, value in self.options.items() if k not in _UNREAD
        }

    def shapes(self, rows: int, width: int, kv_len: int, length: int) -> list[list[int]]:
        """Shapes of `tensors` in a call of the same form with other sizes."""
        rows, width = 1 if self.form[0] else rows, 1 if self.form[1] else width
        *others, keys, values = self.tensors
        shapes = []
        for tensor in others:
            first = 1 if len(tensor) == 1 else rows
            shapes.append([first, 1, width, kv_len] if _is_mask(tensor) else [first, width, *tensor.shape[2:]])
        return shapes + [[rows, states.shape[1], length, states.shape[3]] for states in (keys, values)]


def _is_mask(argument: Tensor) -> bool:
    return argument.dim() == 4


def _tensors(value: Any) -> list[Tensor] | None:
    """The tensors that an argument consists of; None if it is not a tensor, or a tuple of some."""
    if isinstance(value, Tensor):
        return [value]
    is_tuple = type(value) is tuple and value and all(isinstance(tensor, Tensor) for tensor in value)
    return list(value) if is_tuple else None


def _directory() -> Path:
    return cache_dir() / "layers"


@cache
def _has_code() -> bool:
    """True if any code is stored; cached until this process stores some. Without any, layers are not even read."""
    try:
        return any(_directory().iterdir())
    except OSError:  # it does not exist, or is not readable
        return False


def _compiles() -> bool:
    return capture_limits() is not None or os.environ.get(_SETTING) == "compile"


def _function(layer: nn.Module, identity: Form, call: _Call) -> TensorFunction | None:
    """Load the code for ``call``, or compile it where `_compiles`; None if that is not possible."""
    key = hashlib.sha256(repr((identity, call.form)).encode()).hexdigest()[:32]
    path = _directory() / f"{key}.pt2"
    if path in _failed:
        return None
    try:
        own = own_directory(path.parent, _VARIABLE) / path.name
        if not own.is_file():
            name = type(layer).__name__
            if not _compiles():
                _warn_once(name, _NOT_STORED)
                return None
            print(f"crossdraft: compiling {name} for this processor, once", file=sys.stderr, flush=True)
            _compile(layer, call, own)
        return _load(own)
    except ForeignCodeError as error:
        _failed.add(path)
        _warn_once(type(layer).__name__, str(error))
        return None
    except Exception as error:
        _failed.add(path)
        with suppress(OSError):
            path.unlink()  # damaged: the next process compiles anew
        _warn_once(type(layer).__name__, str(error).strip().partition("\n")[0])
        return None


#: Code that could not be compiled or loaded.
_failed: set[Path] = set()


@cache
def _load(path: Path) -> TensorFunction:
    function = load_package(path, _VARIABLE)
    with suppress(OSError):
        os.utime(path)  # see `_remove_unused`
    return function


def _remove_unused() -> None:
    """Remove code that was not loaded for `MOST_DAYS`: it is that of earlier versions, or of models no longer run."""
    for path in _directory().glob("*.pt2"):
        with suppress(OSError):
            if path.stat().st_mtime < time.time() - MOST_DAYS * 86400:
                path.unlink()


@cache
def _warn_once(name: str, reason: str) -> None:
    logger.warning("crossdraft: %s runs uncompiled, which makes its passes slower: %s", name, reason)


def _compile(layer: Any, call: _Call, path: Path) -> None:
    """Compile ``layer`` for calls of the form of ``call`` into the package ``path``."""
    cache_name = cache_argument(layer.forward)
    with torch.inference_mode(False), torch.no_grad(), own_attention():
        # A copy, as tracing replaces parameters, and other threads may run the layer. Its weights have no memory.
        tensors = [*layer.parameters(), *layer.buffers()]
        twin = copy.deepcopy(layer, {id(tensor): torch.empty_like(tensor, device="meta") for tensor in tensors})
        twin.__class__ = layer._runs_compiled
        for module in twin.modules():  # those of `_RECORDERS` would record what is traced
            module._forward_hooks.clear()
        structure = _Structure.of(twin)
        groups = [] if call.single else structure.products
        others = structure.tensors if call.single else structure.unpacked
        parts = {
            id(linear): (i, sum(before.out_features for before in group[:k]))
            for i, group in enumerate(groups)
            for k, linear in enumerate(group)
        }
        first, end = len(call.tensors), len(call.tensors) + len(groups)

        def run(*inputs: Tensor) -> tuple[Tensor, ...]:
            *arguments, slots, keys, values = inputs[:first]
            args, options = call.with_tensors(arguments)
            (mask,) = filter(_is_mask, arguments)
            options[cache_name] = _TracedCache(structure.index, slots, keys, values, mask.shape[3])
            outputs: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # inputs as well, so that their ids stay unique

            def product(linear: SmallBatchLinear, input: Tensor) -> Tensor:
                if call.single:
                    output = (input.float() * linear.weight.float()).sum(-1)[None].to(input.dtype)
                elif id(linear) not in parts:
                    return functional.linear(input, linear.weight, linear.bias)
                else:
                    group, offset = parts[id(linear)]
                    if (id(input), group) not in outputs:
                        outputs[id(input), group] = input, packed_linear(input, inputs[first + group])
                    output = outputs[id(input), group][1].narrow(-1, offset, linear.out_features)
                return output if linear.bias is None else output + linear.bias

            with replaced_products(product):
                output = functional_call(twin, dict(zip(others, inputs[end:], strict=True)), tuple(args), options)
            if not isinstance(output, Tensor):
                raise TypeError("it returns more than hidden states")
            return (output,)

        def example(*sizes: int) -> list[Tensor]:
            zeros = [
                torch.zeros(shape, dtype=t.dtype) for shape, t in zip(call.shapes(*sizes), call.tensors, strict=True)
            ]
            weights = [
                torch.zeros(sum(len(one.weight) for one in group), group[0].in_features, dtype=group[0].weight.dtype)
                for group in groups
            ]
            return [*zeros, *weights, *(torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in others.values())]

        traced, other = example(*_TRACED), example(*_OTHER)
        variable = [
            {i: Dim.AUTO for i, (a, b) in enumerate(zip(tensor.shape, two.shape, strict=True)) if a != b}
            for tensor, two in zip(traced, other, strict=True)
        ]
        program = export_function(run, traced, variable)
        program.module()(*other)  # checks the conditions on sizes that tracing assumed
        with TemporaryDirectory(dir=path.parent) as directory:
            package_program(program, Path(directory) / path.name, _INDUCTOR).replace(path)
        _remove_unused()
        _has_code.cache_clear()


class _TracedCache:
    """Cache of traced layer ``index``: ``keys`` and ``values [R, heads, length, dim]``, written at ``slots [R, W]``."""

    def __init__(self, index: int, slots: Tensor, keys: Tensor, values: Tensor, kv_len: int):
        self._index, self._slots, self._states, self._kv_len = index, slots, (keys, values), kv_len

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, ...]:
        if layer_idx != self._index:
            raise TypeError("it writes to the cache of another layer")
        rows = torch.arange(keys.shape[0])[:, None]
        for buffer, new in zip(self._states, (keys, values), strict=True):
            buffer[rows, :, self._slots] = new.transpose(1, 2)
        return tuple(buffer[:, :, : self._kv_len] for buffer in self._states)
