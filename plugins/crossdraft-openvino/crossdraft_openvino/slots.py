"""Slots of a transformers model whose passes OpenVINO computes, and the models that have them.

`OpenVINOPass` stands in for `ForwardPass`: a pass feeds the new tokens of every row as a sequence of its own, so ragged
rows need no padding, and a rejected draft is a shorter past. A tree is one sequence with a mask among its nodes; if it
is built in several passes, earlier nodes are fed again, as the mask covers only the nodes of a pass.

What OpenVINO cannot compute is left to PyTorch with one warning: a model before it has slots (`check`, a conversion or
a trial that fails), or slots at the first such pass, with their keys and values (`OpenVINOPass.leave`).
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import accumulate, chain
from operator import is_
from typing import Any

import numpy as np
import openvino
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from crossdraft import CrossdraftError, ModelError, ModelPreparation, ancestor_mask, counting
from crossdraft.framework.lm.architectures import TRIAL_LENGTH, refuse_unsupported, trial
from crossdraft.framework.lm.forward_pass import prepare
from crossdraft.framework.lm.layer_surgery import resolved
from crossdraft.framework.lm.transformers_lm import TransformersLM
from crossdraft.models import (
    AttentionMasks,
    ForwardPass,
    ModelDims,
    RaggedCache,
    RaggedLM,
    WritePlan,
    close,
    text_config,
    total_memory,
)

from .graph import BLOCK, FIRST_CACHE, PRECISIONS, ModelGraph, core, state

logger = logging.getLogger(__name__)

LONG_TEXT = 1024  # most tokens of that of a trial
#: Weights of the smallest model that is converted: a conversion takes seconds, and passes of smaller ones little time.
LEAST_WEIGHTS = 10**7
#: Largest share of the machine's memory for weights in float32: a conversion takes twice as much.
MEMORY_SHARE = 0.3
_TRY = "python plugins/crossdraft-openvino/tests/try_classes.py"


class BlockCache(RaggedCache):
    """Keys and values in adjacent blocks of memory that OpenVINO reads and writes, until `unpack`.

    Attributes:
        memory: ``[B, blocks, heads, BLOCK, dim]`` by input of a graph: keys and values of each layer.
        nodes: ``[B, N]``, the tokens of the speculative nodes.
    """

    def __init__(self, batch_size: int, max_length: int, compiled: Any, dtype: torch.dtype):
        super().__init__(batch_size, max_length)
        self.blocks, self.nodes = -(-max_length // BLOCK), None  # blocks of a row
        self.memory: dict[str, Tensor] = {}
        for port in compiled.inputs[FIRST_CACHE:]:
            heads, size = (port.get_partial_shape()[i].get_length() for i in (1, 3))
            shape = (batch_size, self.blocks, heads, BLOCK, size)
            self.memory[port.get_any_name()] = torch.zeros(shape, dtype=dtype)

    def unpack(self) -> None:
        """Become a plain `RaggedCache` of the same keys and values."""
        self.plan = WritePlan(counting(self.max_length, torch.device("cpu"))[None], self.max_length, 0)
        rows = [memory.transpose(1, 2).flatten(2, 3)[:, :, : self.max_length] for memory in self.memory.values()]
        for layer, (keys, values) in enumerate(zip(rows[::2], rows[1::2], strict=True)):
            self.update(keys, values, layer)
        self.memory, self.__class__ = {}, RaggedCache  # type: ignore[assignment]

    def move(self, source: Tensor, target: Tensor) -> None:
        rows = counting(len(source), source.device)[:, None]
        for memory in self.memory.values():
            memory[rows, target // BLOCK, :, target % BLOCK] = memory[rows, source // BLOCK, :, source % BLOCK]

    def commit(self, lengths: Sequence[int]) -> None:
        self.nodes = None

    def clear(self, row: int) -> None:
        for memory in self.memory.values():
            memory[row].zero_()

    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self.memory.values())


class OpenVINOPass(ForwardPass):
    """Passes of ``model`` over a `BlockCache`."""

    cache: Any
    left = ""  # the reason why PyTorch computes the passes from now on
    shift = 0  # added to all positions, in trials

    def __init__(self, model: Any, source: ModelGraph, batch_size: int, max_length: int):
        self._source, (compiled, _) = source, source.compiled()
        blocks = BlockCache(batch_size, max_length, compiled, model.dtype)
        masks = AttentionMasks(text_config(model), model.dtype, torch.device("cpu"), max_length)
        super().__init__(model, ModelDims.of(model), masks, blocks, preparations=())
        names = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
        self._registries = [vars(module)[name] for module in model.modules() for name in names]
        self._parts = self._read()
        self._states = [state(part, probe=True) for part in self._parts if isinstance(part, Tensor)]
        self._start()

    def _start(self, numbers: Iterable[int] = ()) -> None:
        compiled, self._outputs = self._source.compiled(numbers)
        self._request = compiled.create_infer_request()
        for name, memory in self.cache.memory.items():
            shape, data = openvino.Shape(memory.flatten(0, 1).shape), memory.view(torch.uint8).numpy()
            self._request.set_tensor(name, openvino.Tensor(data, shape, PRECISIONS[memory.dtype]))

    def _read(self) -> list[Any]:
        """Parts of the model."""
        return list(chain.from_iterable(map(dict.values, self._registries)))

    def _is_unchanged(self, probe: bool) -> bool:
        """True if the model has the parts that it had, and its tensors the numbers."""
        parts, tensors = self._read(), (part for part in self._parts if isinstance(part, Tensor))
        if len(parts) != len(self._parts) or not all(map(is_, parts, self._parts)):
            return False
        states = [state(tensor, probe) for tensor in tensors]
        return states == (self._states if probe else [known[:2] for known in self._states])

    def _computes(self, layers: Sequence[float], inputs: Mapping[str, Tensor], probe: bool = False) -> bool:
        """True if OpenVINO computes a pass with these hidden states and inputs."""
        if self.left:
            return False
        if not self._is_unchanged(probe):
            return self.leave("its weights or modules changed after OpenVINO compiled them")
        if inputs:
            return self.leave(f"a drafter gives it {', '.join(inputs)} beside tokens")
        try:
            if missing := set(self._numbers(layers)) - set(self._outputs):
                self._start(missing)
        except ModelError as error:
            return self.leave(str(error))
        return True

    def leave(self, reason: str) -> bool:
        """Let PyTorch compute all further passes, over the same keys and values; returns False."""
        if not self.left:
            _warn_once(type(self.model).__name__, reason)
            self.left, self.preparations = reason, prepare(self.model)
            self.cache.unpack()
            del self._request
        return False

    def score(self, kv_len: int, start: Any, layers: Any, tokens: Tensor, starts: Tensor, *_: Any, **more: Any) -> Any:
        parents, tree = more.pop("parents", None), more.pop("tree", None)
        if not self._computes(layers, more):
            return super().score(kv_len, start, layers, tokens, starts, parents, tree, **more)
        rows, width = tokens.shape
        nodes = self.cache.nodes = tokens if self.cache.nodes is None else torch.cat([self.cache.nodes, tokens], 1)
        if tree is None:
            return *self._infer(range(rows), starts.tolist(), list(tokens), layers), None
        past, tree = (starts - tree.shape[1]).tolist(), torch.cat([tree, parents], 1)
        allowed = ancestor_mask(tree, tree.shape[1])
        return *self._infer(range(rows), past, list(nodes[:, -tree.shape[1] :]), layers, width, allowed), tree

    def run(
        self, tokens: Tensor, plan: WritePlan, visibility: Any, inputs: Any, layers: Any, want_logits: bool = True
    ) -> tuple[Tensor | None, Tensor | None]:
        """Feed prompts, see `PromptPrefill`; computes one row of logits."""
        if not self._computes(layers, inputs, probe=True):
            return super().run(tokens, plan, visibility, inputs, layers, want_logits)
        counts = plan.counts or {plan.row: len(tokens[0])}
        texts = [row[:count] for row, count in zip(tokens, counts.values(), strict=True)]
        return None, self._infer(list(counts), [plan.start or 0] * len(counts), texts, layers, width=0)[1]

    def _infer(
        self, rows: Any, past: Any, tokens: list[Tensor], layers: Any = (), width: Any = None, allowed: Any = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Logits and hidden states of the last ``width`` of the ``tokens`` behind ``past`` ones of each of ``rows``.

        None = of all; 0 = all hidden states, no logits. ``allowed [R, N, N]``: what nodes of a tree attend to.
        """
        counts = [len(row) for row in tokens]
        ends, kept = list(accumulate(counts)), [width or count for count in counts]
        chosen = np.concatenate([np.arange(end - k, end) for end, k in zip(ends, kept, strict=True)])
        lengths = [before + count for before, count in zip(past, counts, strict=True)]
        blocks, each = [-(-length // BLOCK) for length in lengths], self.cache.blocks
        indices = [np.arange(row * each, row * each + count) for row, count in zip(rows, blocks, strict=True)]
        depths = [self.masks.slots[:n] for n in counts] if allowed is None else allowed.sum(-1) - 1
        positions = torch.cat([before + depth for before, depth in zip(past, depths, strict=True)]) + self.shift
        context = self.dims.context_length
        bias = np.zeros(0, np.uint8) if allowed is None else allowed.numpy().astype(np.uint8).reshape(-1)
        squares = [] if allowed is None else accumulate(count * count for count in counts)
        # OpenVINO's own memory would be overwritten by the next pass.
        logits = torch.empty(1 if width == 0 else len(chosen), self.dims.vocab_size)
        self._request.set_output_tensor(0, openvino.Tensor(logits.numpy(), shared_memory=True))
        self._request.infer(
            {
                0: torch.cat(tokens).numpy(),
                1: (positions if context is None else positions.clamp(max=context - 1)).numpy(),
                2: chosen[:1] if width == 0 else chosen,
                "past_lens": np.array(past, np.int32),
                "subsequence_begins": np.array([0, *ends], np.int32),
                "block_indices": np.concatenate(indices).astype(np.int32),
                "block_indices_begins": np.array([0, *accumulate(blocks)], np.int32),
                "max_context_len": np.array(max(lengths), np.int32),
                "qq_bias": bias,
                "qq_bias_begins": np.array([0, *squares], np.int32),
            },
            share_inputs=True,
            share_outputs=True,  # or every output is copied
        )
        scored = None if width == 0 else logits.unflatten(0, (len(rows), -1))
        if not layers:
            return scored, None
        hidden = torch.stack([self._output(number)[chosen] for number in self._numbers(layers)], 1)
        return scored, pad_sequence(list(hidden.to(self.model.dtype).split(kept)), batch_first=True)

    def _numbers(self, layers: Sequence[float]) -> list[int]:
        """Numbers of the outputs with the hidden states of ``layers``, see `ModelGraph`."""
        count = self.dims.num_layers
        return [count + 2 if i == count else 1 + range(count + 1)[i] for i in resolved(layers, count)]

    def _output(self, number: int) -> Tensor:
        return torch.from_numpy(self._request.get_output_tensor(self._outputs.index(number)).data)


class OpenVINOLM(TransformersLM):
    """B slots of a causal LM whose passes OpenVINO computes, as long as it can; ModelError if it never can."""

    forward_pass: OpenVINOPass

    def __init__(self, model: Any, batch_size: int, max_length: int):
        check(model, max_length)
        model.eval()
        graph = ModelGraph.of(model)
        graph.compiled()
        try_graph(model, graph, max_length, check(model, max_length, graph.window))
        RaggedLM.__init__(self, OpenVINOPass(model, graph, batch_size, max_length), batch_size, max_length)

    @property
    def passes_by(self) -> str:
        """Library that computes the passes, and why it is PyTorch."""
        return "OpenVINO" if not (reason := self.forward_pass.left) else f"PyTorch, not OpenVINO: {reason}"

    def fork(self, layers: Sequence[int], **options: Any) -> Any:
        self.forward_pass.leave("a drafter runs some of its layers")
        return super().fork(layers, **options)


def check(model: Any, max_length: int, window: int = sys.maxsize) -> int:
    """Raise ModelError if passes would be wrong, or cannot be computed; return the smallest window: trees ignore it."""
    tensors = [*model.parameters(), *model.buffers()]
    kinds = {(tensor.device.type, tensor.dtype) for tensor in model.parameters()}
    quantised = any(hasattr(tensor, "__tensor_flatten__") for tensor in tensors)
    size, memory = 4 * sum(tensor.numel() for tensor in tensors), total_memory(torch.device("cpu"))
    if memory is not None and size > MEMORY_SHARE * memory:
        raise ModelError(f"its weights in float32 would take {size / 1e9:.0f} of {memory / 1e9:.0f} GB of memory")
    if quantised or kinds not in [{("cpu", dtype)} for dtype in PRECISIONS]:
        raise ModelError("its weights are not all on the CPU in float32, or all in bfloat16")
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise ModelError("its weights were made in inference mode, so their changes would not be seen")
    if model.dtype == torch.bfloat16 and "BF16" not in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        raise ModelError("this processor has no products in bfloat16")
    refuse_unsupported(model, max_length)
    masks = AttentionMasks(text_config(model), model.dtype, torch.device("cpu"), 0)
    if max_length > (window := min(window, masks.window or window, masks.chunk or window)):
        raise ModelError(f"slots reach {max_length} tokens, more than its window of {window}")
    ropes = str([getattr(module, "rope_type", None) for module in model.modules()])
    if changing := [kind for kind in ("dynamic", "longrope") if kind in ropes]:
        raise ModelError(f"the frequencies of its {changing[0]} positions change with the length of a text")
    return window


@torch.inference_mode()
def try_graph(model: Any, graph: ModelGraph, max_length: int, window: int) -> None:
    """Raise ModelError if ``graph`` differs from ``model`` in `trial` or a long text at the last positions; once."""
    file = graph.path.with_suffix(".tried")
    if file.exists() and max_length <= int(file.read_text() or 0):
        return
    trial(RaggedLM(OpenVINOPass(model, graph, 2, TRIAL_LENGTH), 2, TRIAL_LENGTH))
    end = min(2 ** (max_length - 1).bit_length(), window, ModelDims.of(model).context_length or window)
    ids = (7 * torch.arange(min(end, LONG_TEXT)) + 3) % text_config(model).vocab_size
    one, positions = OpenVINOPass(model, graph, 1, len(ids)), torch.arange(end - len(ids), end)[None]
    one.shift = end - len(ids)
    one._infer([0], [0], [ids[:-1]], width=0)
    expected = model(input_ids=ids[None], position_ids=positions, use_cache=False, logits_to_keep=1).logits
    logits: Any = one._infer([0], [len(ids) - 1], [ids[-1:]])[0]
    if not close(logits, expected, model.dtype):
        raise ModelError(f"it failed a trial of a text of {len(ids)} tokens that ends at position {end}")
    file.write_text(str(max(end, max_length)))


@cache
def tried_classes() -> frozenset[str]:
    """Classes for which OpenVINO's passes equal transformers'; ``try_classes.py`` in the tests writes the list."""
    return frozenset(files("crossdraft_openvino").joinpath("tried.txt").read_text(encoding="utf-8").split())


class OpenVINOSlots(ModelPreparation):
    """`OpenVINOLM` for models of tried classes, not with ``CROSSDRAFT_OPENVINO=0``; with ``1`` however small."""

    name = "openvino"

    @classmethod
    def slots(cls, model: Any, batch_size: int, max_length: int) -> OpenVINOLM | str | None:
        setting, weights = os.environ.get("CROSSDRAFT_OPENVINO"), list(model.parameters())
        small = setting != "1" and sum(weight.numel() for weight in weights) < LEAST_WEIGHTS
        if setting == "0" or small or any(weight.device.type != "cpu" for weight in weights):
            return None
        kind = type(model)
        try:
            if kind.__name__ not in tried_classes() or not kind.__module__.startswith("transformers."):
                raise ModelError(f"its class has not been tried; in a clone: {_TRY} {model.config.model_type}")
            return OpenVINOLM(model, batch_size, max_length)
        except (CrossdraftError, OSError, RuntimeError) as error:  # of the model, the cache directory, or OpenVINO
            _warn_once(kind.__name__, str(error))
            return f"PyTorch, not OpenVINO: {error}"


@cache
def _warn_once(name: str, reason: str) -> None:
    logger.warning("crossdraft: PyTorch computes the passes of %s, not OpenVINO: %s", name, reason)
