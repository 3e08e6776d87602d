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
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from operator import is_
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any
from weakref import ref

import numpy as np
import openvino
import torch
import transformers
from openvino import opset15 as ops
from openvino.frontend.pytorch import ConversionExtension
from openvino.op import _PagedAttentionExtension  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface

from crossdraft import ModelError, cache_dir, own_directory
from crossdraft.framework.models.device import cpu_model
from crossdraft.models import recorded, text_config

#: Tokens of a block of keys and values.
BLOCK = 32
#: Days after which graphs that were not read are removed.
MOST_DAYS = 90
#: Types of numbers of models, of their products and of their keys and values.
PRECISIONS = {torch.float32: openvino.Type.f32, torch.bfloat16: openvino.Type.bf16}
_MARK = "crossdraft-paged"
#: Own attention, and products of experts that can be traced.
_FUNCTIONS = {"_attn_implementation": "crossdraft_openvino", "_experts_implementation": "batched_mm"}
#: Inputs of a graph beside tokens, keys and values; of 32 bits, but for the mask of a tree.
_INPUTS = ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins")
_INPUTS += ("max_context_len", "qq_bias", "qq_bias_begins")
#: Index of the first input with keys; behind tokens, positions and the chosen ones.
FIRST_CACHE = 3 + len(_INPUTS)
#: Arguments of attention functions, beside flags, that change nothing where slots are no longer than a window.
_WITHOUT_EFFECT = {"sliding_window", "dropout", "position_ids", "cache_position", "logits_to_keep"}
_lock = Lock()  # conversion takes memory


@dataclass
class ModelGraph:
    """The graph of a model, compiled for PyTorch's number of threads.

    Attributes:
        path: of the stored graph.
        key, tensors, states: of the model when it was converted; see `state`.
        outputs: number of each output of ``compiled``: 0 is the logits, 1 + i the hidden states i as transformers
            numbers them, and the last one the output of the last layer before its norm.
        window: the smallest sliding window of a layer, which the graph ignores.
    """

    path: Path
    dtype: torch.dtype
    key: tuple[str, str]
    tensors: list[ref[Tensor]]
    states: list[tuple[float, ...]]
    outputs: Sequence[int] = (0,)
    window: int = sys.maxsize
    _compiled: Any = None
    _threads: int = 0

    @classmethod
    def of(cls, model: Any) -> ModelGraph:
        """That of ``model``; ModelError if it cannot be converted, or changed since: each change would be stored."""
        key, tensors = (repr(model), repr(model.config)), [*model.parameters(), *model.buffers()]
        states = [state(tensor, probe=True) for tensor in tensors]
        with _lock:
            graphs = _graphs.setdefault(tensors[len(list(model.parameters())) // 2], [])
            graph = next((g for g in graphs if g.key == key and all(map(is_, [r() for r in g.tensors], tensors))), None)
            if graph is None:
                graph = cls(_stored(model), model.dtype, key, list(map(ref, tensors)), states)
                graphs.append(graph)
        if graph.states != states:
            raise ModelError("its weights changed after OpenVINO converted it")
        return graph

    def compiled(self, numbers: Iterable[int] = ()) -> tuple[Any, Sequence[int]]:
        """A compiled graph with at least the outputs ``numbers``, and the numbers of all its outputs."""
        with _lock:
            threads, needed = torch.get_num_threads(), tuple(sorted({*self.outputs, *numbers}))
            if self._compiled is None or (self._threads, self.outputs) != (threads, needed):
                self._compiled = None  # frees its packed weights
                self._compiled, self.window = _compile(self.path, self.dtype, needed, threads)
                self._threads, self.outputs = threads, needed
            return self._compiled, self.outputs


#: Graphs by a parameter of a layer: models with one embedding do not share it.
_graphs: Any = WeakIdKeyDictionary()


@torch.library.custom_op("crossdraft::paged_attention", mutates_args=())
def _paged(query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float, shared: int, window: int) -> Tensor:
    return query.clone()


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


AttentionInterface.register("crossdraft_openvino", _attention)


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
            states = recorder.select([*range(self.count), -1, self.count], out.hidden_states)
        return (out.logits[0], *(state[0] for state in states))


def _marked(context: Any) -> Any:
    states = [context.get_input(i) for i in range(3)]
    numbers = [context.get_values_from_const_input(i) for i in range(3, 7)]
    joined = ops.concat(states, 1)
    joined.set_friendly_name(":".join([_MARK, *map(str, numbers)]))
    one, zero = (ops.constant([i], np.int64) for i in (1, 0))
    width = ops.gather(ops.shape_of(states[0]), one, ops.constant(0, np.int64))
    return ops.slice(joined, zero, width, one, one).outputs()


def convert(model: Any) -> Any:
    """The graph of ``model`` with markers, its products in float32; ModelError if it cannot be traced or converted."""
    # A copy with settings of its own and the same weights; products of a graph traced in bfloat16 are several times
    # slower than float32 ones computed in bfloat16.
    same = [*model.parameters(), *model.buffers()] if model.dtype == torch.float32 else []
    traced = copy.deepcopy(model, {id(tensor): tensor for tensor in same})
    traced, config = traced if same else traced.float(), text_config(traced)
    for name in _FUNCTIONS:
        if getattr(config, name, None) is not None:
            setattr(config, name, _FUNCTIONS[name])
    example = torch.arange(7) % config.vocab_size, torch.arange(7), torch.tensor([0, 3])
    try:
        with torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of constant branches, and of tracing itself
            script = torch.jit.trace(_Flat(traced), example, check_trace=False)
        extension = ConversionExtension("crossdraft::paged_attention", _marked)
        graph = openvino.convert_model(script, example_input=example, extension=[extension])
    except Exception as error:
        line = str(error).strip().partition("\n")[0][:200]
        raise ModelError(line if isinstance(error, ModelError) else f"{type(error).__name__}: {line}") from error
    if len(_markers(graph)) != config.num_hidden_layers:
        raise ModelError("its layers do not each call transformers' attention function once")
    return graph


def _markers(graph: Any) -> list[Any]:
    """Markers by layer."""
    nodes = [node for node in graph.get_ordered_ops() if node.get_friendly_name().startswith(_MARK)]
    return sorted(nodes, key=lambda node: int(node.get_friendly_name().split(":")[1]))


def digest(model: Any) -> str:
    """SHA-256 of all that the graph of ``model``, and its trial, depend on."""
    total = hashlib.sha256(Path(__file__).read_bytes())
    versions = openvino.__version__, torch.__version__, transformers.__version__, cpu_model()
    total.update(repr((versions, model, model.config)).encode())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        total.update(f"{name} {tensor.shape} {tensor.dtype}".encode())
        total.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    return total.hexdigest()


def state(tensor: Tensor, probe: bool = False) -> tuple[float, ...]:
    """Version and address of ``tensor``; with ``probe`` a sample, too, as writes to its ``data`` have no version."""
    sample = tensor.detach().reshape(-1)[:: max(tensor.numel() // 64, 1)] if probe else tensor
    known = -1 if tensor.is_inference() else tensor._version, tensor.data_ptr()
    return (*known, sample.double().nan_to_num().sum().item()) if probe else known


def _stored(model: Any) -> Path:
    """The file of the graph of ``model``; converts the model on first use."""
    key = digest(model)
    folder = own_directory(cache_dir() / "openvino", "CROSSDRAFT_CACHE")
    path = folder / f"{key}.xml"
    if path.exists() and path.with_suffix(".bin").exists():
        for file in folder.glob(f"{key}.*"):
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


@cache
def core() -> Any:
    """OpenVINO's core, the only one: each sets the stack of signal handlers, which may be freed when others end."""
    return openvino.Core()


def _compile(path: Path, dtype: torch.dtype, numbers: Sequence[int], threads: int) -> tuple[Any, int]:
    """The graph with the outputs ``numbers``, and its smallest window."""
    precision, graph = PRECISIONS[dtype], core().read_model(path)
    inputs = {}
    for name in _INPUTS:
        kind = openvino.Type.u8 if name == "qq_bias" else openvino.Type.i32
        inputs[name] = _parameter(name, kind, [] if name == "max_context_len" else [-1])
    parameters, windows = [*graph.get_parameters(), *inputs.values()], [sys.maxsize]
    for i, marker in enumerate(_markers(graph)):
        query, key, value = (marker.input_value(j) for j in range(3))
        _, _, scale, shared, window = marker.get_friendly_name().split(":")
        width = key.get_partial_shape()[1].get_length()
        heads, size = layout = int(shared), width // int(shared)
        windows += [int(window)] if int(window) else []
        caches = [_parameter(f"{name}.{i}", precision, [-1, heads, BLOCK, size]) for name in ("keys", "values")]
        parameters += caches
        states = [query, key, value, *(cache.output(0) for cache in caches)]
        attention = _paged_attention(states, inputs, float(scale), layout)
        (cut,) = {target.get_node() for target in marker.output(0).get_target_inputs()}
        for target in list(cut.output(0).get_target_inputs()):
            target.replace_source_output(attention.output(0))
    results = [ops.result(graph.output(number).get_node().input_value(0)) for number in numbers]
    options = {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}  # the defaults round
    options |= {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1}
    try:
        whole = openvino.Model(results, parameters)  # pyright: ignore[reportGeneralTypeIssues]
        return core().compile_model(whole, "CPU", options), min(windows)
    except RuntimeError as error:
        raise ModelError(f"OpenVINO does not compile it: {str(error).strip().rpartition(chr(10))[2]}") from error


def _parameter(name: str, kind: Any, shape: list[int]) -> Any:
    parameter = ops.parameter(shape, kind)
    parameter.output(0).set_names({name})
    return parameter


def _paged_attention(states: list[Any], inputs: dict[str, Any], scale: float, layout: tuple[int, int]) -> Any:
    """The operation with its 28 inputs; those of features that are not used are empty or 0."""
    sources = [inputs[name].output(0) for name in _INPUTS]
    values = np.int32(0), np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros((0, 0, 0, 0), np.float32)
    no, ints, reals, sinks = (ops.constant(value).output(0) for value in values)
    window, slopes = no, reals
    rest = [ints, ints, ints, reals, reals, no, no, sinks, no, ints, ints, ints, ints]
    first = [*states, *sources[:4], ops.constant(np.float32(scale)).output(0), window, slopes, sources[4]]
    paged = _PagedAttentionExtension([*first, *rest, *sources[5:]])
    for kind in "kv":
        paged.get_rt_info()[f"num_{kind}_heads"] = layout[0]
        paged.get_rt_info()[f"{kind}_head_size"] = layout[1]
    return paged
