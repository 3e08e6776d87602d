"""Models of transformers as graphs of OpenVINO, over flat tokens of several sequences with paged keys and values.

A model is traced with an attention function of its own, an opaque operation. Conversion turns that into a marker (a
concatenation with a name, then a slice), and the graph is stored under a digest of the weights and of all that it
depends on: a later start reads it, and its weights stay in the mapped file. Only then every marker is replaced by
OpenVINO's paged attention, which cannot be stored.
"""

from __future__ import annotations

import copy
import hashlib
import os
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any

import numpy as np
import openvino  # pyright: ignore[reportMissingImports]
import torch
import transformers
from openvino import opset15 as ops  # pyright: ignore[reportMissingImports]
from openvino.frontend.pytorch import ConversionExtension  # pyright: ignore[reportMissingImports]
from openvino.op import _PagedAttentionExtension  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface

from crossdraft.framework.errors import ModelError
from crossdraft.framework.lm.architectures import text_config
from crossdraft.framework.lm.layer_surgery import recorded
from crossdraft.framework.util.output_files import cache_dir
from crossdraft.framework.util.stored_code import own_directory

#: Tokens of a block of keys and values.
BLOCK = 32
#: Days after which graphs that were not read are removed.
MOST_DAYS = 90
#: Types of numbers of models, of their products and of their keys and values.
PRECISIONS = {torch.float32: openvino.Type.f32, torch.bfloat16: openvino.Type.bf16}
_NAME, _MARK = "crossdraft_openvino", "crossdraft-paged"
#: Own attention, and products of experts that can be traced.
_FUNCTIONS = {"_attn_implementation": _NAME, "_experts_implementation": "batched_mm"}
#: Inputs of a graph beside tokens, keys and values; of 32 bits, but for the mask of a tree.
_INPUTS = ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins")
_INPUTS += ("max_context_len", "qq_bias", "qq_bias_begins")
#: Arguments of attention functions, beside flags, that change nothing where slots are no longer than a window.
_WITHOUT_EFFECT = {"sliding_window", "dropout", "position_ids", "cache_position", "logits_to_keep"}
_lock = Lock()  # conversion changes the settings of a model for a moment


@dataclass
class Graph:
    """The graph of one model, compiled for one number of threads.

    Attributes:
        layouts: of the keys and values of every layer, number of heads and their size.
        window: the smallest sliding window of a layer, which the graph ignores.
        outputs: index of the compiled output by number: 0 is the logits, 1 + i the hidden states i as transformers
            numbers them, and the last one the output of the last layer before its norm.
    """

    compiled: Any
    threads: int
    layouts: list[tuple[int, int]]
    window: int
    outputs: dict[int, int]


@dataclass
class ModelGraph:
    """The graph of a model with given weights; compiled again for hidden states not requested before.

    Attributes:
        path: of the stored graph.
        tried: True after its `trial`.
    """

    path: Path
    dtype: torch.dtype
    _numbers: set[int] = field(default_factory=lambda: {0})
    tried: bool = False
    _last: Graph | None = None

    @classmethod
    def of(cls, model: Any) -> ModelGraph:
        """That of ``model``, whose weights may be those of another one.

        Raises:
            ModelError: the model cannot be converted.
        """
        with _lock:
            key, graphs = digest(model), _graphs.setdefault(next(model.parameters()), {})
            if key not in graphs:
                graphs[key] = cls(_stored(model, key), model.dtype)
            return graphs[key]

    def compiled(self, numbers: Iterable[int]) -> Graph:
        """A graph with at least the outputs ``numbers``, for PyTorch's number of threads."""
        with _lock:
            threads = torch.get_num_threads()
            if self._last is None or self._last.threads != threads or not self._numbers.issuperset(numbers):
                self._numbers.update(numbers)
                self._last = None
                self._last = _compile(self.path, self.dtype, sorted(self._numbers), threads)
            return self._last


#: Graphs by the first parameter of their model, and by `digest`.
_graphs: Any = WeakIdKeyDictionary()
#: Digests of tensors, with their version.
_digests: Any = WeakIdKeyDictionary()


# -- conversion ----------------------------------------------------------------------------------------------------


@torch.library.custom_op("crossdraft::paged_attention", mutates_args=())
def _paged(query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float, shared: int, window: int) -> Tensor:
    return query.clone()


@_paged.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float, shared: int, window: int) -> Tensor:
    return torch.empty_like(query)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float | None = None, **options: Any
) -> tuple[Tensor, None]:
    known = {name for name, option in options.items() if option is None or isinstance(option, bool)} | _WITHOUT_EFFECT
    unknown = sorted(options.keys() - known)
    if unknown or mask is not None or options.get("is_causal") is False:
        raise ModelError(f"its attention takes {', '.join(unknown) or 'a mask'}")
    if not query.shape[3] == key.shape[3] == value.shape[3]:
        raise ModelError("its keys and values have different sizes")
    flat = [states[0].transpose(0, 1).flatten(1) for states in (query, key, value)]
    scale = query.shape[3] ** -0.5 if scaling is None else float(scaling)
    out = _paged(*flat, module.layer_idx, scale, key.shape[1], options.get("sliding_window") or 0)
    return out.unflatten(1, (query.shape[1], -1))[None], None


AttentionInterface.register(_NAME, _attention)


class _Flat(nn.Module):
    """``model`` over tokens without a batch: logits of ``chosen`` tokens, then all hidden states."""

    def __init__(self, model: Any):
        super().__init__()
        self.model, self.count = model, text_config(model).num_hidden_layers

    def forward(self, input_ids: Tensor, position_ids: Tensor, chosen: Tensor) -> tuple[Tensor, ...]:
        with recorded(self.model, [self.count], self.count) as recorder:
            out = self.model(
                input_ids=input_ids[None],
                position_ids=position_ids[None],
                use_cache=False,
                output_hidden_states=True,
                logits_to_keep=chosen,
            )
            states = [*out.hidden_states, *recorder.select([self.count], out.hidden_states)]
        return (out.logits[0], *(state[0] for state in states))


@contextmanager
def _own_functions(model: Any) -> Iterator[None]:
    """Within the context, ``model`` calls `_FUNCTIONS`."""
    config = text_config(model)
    before = {name: value for name in _FUNCTIONS if (value := getattr(config, name, None)) is not None}
    for name in before:
        setattr(config, name, _FUNCTIONS[name])
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


def _marked(context: Any) -> Any:
    states = [context.get_input(i) for i in range(3)]
    numbers = [context.get_values_from_const_input(i) for i in range(3, 7)]
    joined = ops.concat(states, 1)
    joined.set_friendly_name(":".join([_MARK, *map(str, numbers)]))
    one, zero = (ops.constant([i], np.int64) for i in (1, 0))
    width = ops.gather(ops.shape_of(states[0]), one, ops.constant(0, np.int64))
    return ops.slice(joined, zero, width, one, one).outputs()


def convert(model: Any) -> Any:
    """The graph of ``model`` with markers, its products in float32.

    Raises:
        ModelError: the model cannot be traced or converted, with the reason.
    """
    # Products of a graph traced in bfloat16 are several times slower than float32 ones computed in bfloat16.
    traced = model if model.dtype == torch.float32 else copy.deepcopy(model).float()
    example = torch.arange(7) % text_config(model).vocab_size, torch.arange(7), torch.tensor([0, 3])
    try:
        with _own_functions(traced), torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of constant branches, and of tracing itself
            script = torch.jit.trace(_Flat(traced), example, check_trace=False)
        extension = ConversionExtension("crossdraft::paged_attention", _marked)
        graph = openvino.convert_model(script, example_input=example, extension=[extension])
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}") from error
    if len(_markers(graph)) != text_config(model).num_hidden_layers:
        raise ModelError("its layers do not each call transformers' attention function once")
    return graph


def _markers(graph: Any) -> list[Any]:
    """Markers by layer."""
    nodes = [node for node in graph.get_ordered_ops() if node.get_friendly_name().startswith(_MARK)]
    return sorted(nodes, key=lambda node: int(node.get_friendly_name().split(":")[1]))


# -- the stored graph ----------------------------------------------------------------------------------------------


def digest(model: Any) -> str:
    """SHA-256 of all that the graph of ``model`` depends on."""
    total = hashlib.sha256(Path(__file__).read_bytes())
    parts = [openvino.__version__, torch.__version__, transformers.__version__, repr(model), repr(model.config)]
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
        parts += [name, str(tensor.shape), _tensor_digest(tensor)]
    total.update("\n".join(parts).encode())
    return total.hexdigest()


def _tensor_digest(tensor: Tensor) -> str:
    version = versions([tensor]), tensor.data_ptr()
    known = _digests.get(tensor)
    if known is None or known[0] != version:
        data: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        known = _digests[tensor] = version, hashlib.sha256(data).hexdigest()
    return known[1]


def versions(tensors: Iterable[Tensor]) -> int:
    """A number that grows when one of ``tensors`` is written to."""
    return sum(0 if tensor.is_inference() else tensor._version for tensor in tensors)


def _stored(model: Any, key: str) -> Path:
    """The file of the graph of ``model``; converts the model on first use."""
    folder = own_directory(cache_dir() / "openvino", "CROSSDRAFT_CACHE")
    path = folder / f"{key}.xml"
    if path.exists() and path.with_suffix(".bin").exists():
        for file in (path, path.with_suffix(".bin")):
            os.utime(file)
        return path
    for old in folder.glob("*.*"):
        with suppress(OSError):
            if old.stat().st_mtime < time.time() - MOST_DAYS * 86400:
                old.unlink()
    graph = convert(model)
    with TemporaryDirectory(dir=folder) as staged:
        openvino.save_model(graph, Path(staged) / path.name, compress_to_fp16=False)
        for suffix in (".bin", ".xml"):  # the graph last: it needs the weights
            (Path(staged) / path.name).with_suffix(suffix).replace(path.with_suffix(suffix))
    return path


# -- paged attention -----------------------------------------------------------------------------------------------


def has_bfloat16() -> bool:
    """True if OpenVINO computes products in bfloat16 on this processor."""
    return "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def _compile(path: Path, dtype: torch.dtype, numbers: list[int], threads: int) -> Graph:
    core, precision = openvino.Core(), PRECISIONS[dtype]
    graph = core.read_model(path)
    i32, u8 = openvino.Type.i32, openvino.Type.u8
    inputs = {
        name: _parameter(name, u8 if name == "qq_bias" else i32, [] if name == "max_context_len" else [-1])
        for name in _INPUTS
    }
    parameters, layouts, windows = [*graph.get_parameters(), *inputs.values()], [], []
    for i, marker in enumerate(_markers(graph)):
        query, key, value = (marker.input_value(j) for j in range(3))
        _, _, scale, shared, window = marker.get_friendly_name().split(":")
        width = key.get_partial_shape()[1].get_length()
        heads, size = layout = int(shared), width // int(shared)
        layouts.append(layout)
        windows.append(int(window) or sys.maxsize)
        caches = [_parameter(f"{name}.{i}", precision, [-1, heads, BLOCK, size]) for name in ("keys", "values")]
        parameters += caches
        states = [query, key, value, *(cache.output(0) for cache in caches)]
        attention = _paged_attention(states, inputs, float(scale), layout)
        (cut,) = {target.get_node() for target in marker.output(0).get_target_inputs()}
        for target in list(cut.output(0).get_target_inputs()):
            target.replace_source_output(attention.output(0))
    outputs = [graph.output(number) for number in numbers]
    results = [ops.result(output.get_node().input_value(0)) for output in outputs]
    options = {
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,  # the default has 8 bits
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
    }
    try:
        compiled = core.compile_model(openvino.Model(results, parameters), "CPU", options)
    except RuntimeError as error:
        raise ModelError(f"OpenVINO does not compile it: {str(error).strip().rpartition(chr(10))[2]}") from error
    return Graph(compiled, threads, layouts, min(windows), {number: i for i, number in enumerate(numbers)})


def _parameter(name: str, kind: Any, shape: list[int]) -> Any:
    parameter = ops.parameter(shape, kind)
    parameter.output(0).set_names({name})
    return parameter


def _paged_attention(states: list[Any], inputs: dict[str, Any], scale: float, layout: tuple[int, int]) -> Any:
    """The operation with its 28 inputs; those of features that are not used are empty or 0."""

    def constant(*numbers: Any, kind: Any = np.int32) -> list[Any]:
        return [ops.constant(kind(number)).output(0) for number in numbers]

    def empty(*kinds: Any) -> list[Any]:
        return [ops.constant(np.zeros(0, kind)).output(0) for kind in kinds]

    common = [inputs[name].output(0) for name in _INPUTS]
    i, f = np.int32, np.float32
    paged = _PagedAttentionExtension(
        [
            *states,
            *common[:4],
            *constant(scale, kind=f),
            *constant(0),  # sliding window
            *empty(f),  # alibi slopes
            common[4],
            *empty(i, i, i, f, f),
            *constant(0, 0),
            ops.constant(np.zeros((0, 0, 0, 0), f)).output(0),  # sinks
            *constant(0),
            *empty(i, i, i, i),
            *common[5:],
        ]
    )
    for kind in "kv":
        paged.get_rt_info()[f"num_{kind}_heads"] = layout[0]
        paged.get_rt_info()[f"{kind}_head_size"] = layout[1]
    return paged
