"""Slots of a transformers model whose passes OpenVINO computes, and the models that have them.

`OpenVINOPass` stands in for `ForwardPass`: a pass feeds the new tokens of every row as a sequence of its own, so ragged
rows need no padding, and a rejected draft is a shorter past. A tree is one sequence with a mask among its nodes; if it
is built in several passes, earlier nodes are fed again, as the mask covers only the nodes of a pass.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import accumulate
from typing import Any

import numpy as np
import openvino  # pyright: ignore[reportMissingImports]
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from crossdraft.framework.contracts.models import ModelPreparation
from crossdraft.framework.errors import CrossdraftError, ModelError
from crossdraft.framework.lm.architectures import TRIAL_LENGTH, refuse_unsupported, sliding_window, text_config, trial
from crossdraft.framework.lm.attention_masks import AttentionMasks, Visibility
from crossdraft.framework.lm.forward_pass import ForwardPass, ModelDims
from crossdraft.framework.lm.kv_cache import WritePlan
from crossdraft.framework.lm.layer_surgery import resolved
from crossdraft.framework.lm.ragged_lm import RaggedLM
from crossdraft.framework.util.tensors import ancestor_mask, counting

from .graph import BLOCK, PRECISIONS, Graph, ModelGraph, has_bfloat16, versions

logger = logging.getLogger(__name__)


class BlockCache:
    """A `KVCache` in blocks of memory that OpenVINO reads and writes; the blocks of a row are adjacent.

    Attributes:
        nodes: ``[B, N]``, the tokens of the speculative nodes.
    """

    recordable = False

    def __init__(self, batch_size: int, max_length: int, layouts: Sequence[tuple[int, int]], dtype: torch.dtype):
        self.blocks = -(-max_length // BLOCK)
        self.nodes: Tensor | None = None
        shapes = [(batch_size * self.blocks, heads, BLOCK, size) for heads, size in layouts for _ in "kv"]
        self._memory = [torch.zeros(shape, dtype=dtype) for shape in shapes]
        self._rows = counting(batch_size, torch.device("cpu"))[:, None]

    def tensors(self) -> dict[str, Any]:
        """The memory as inputs of a graph."""
        named = {}
        for i, memory in enumerate(self._memory):
            numbers = memory.view(torch.int16 if memory.dtype == torch.bfloat16 else memory.dtype).numpy()
            kind = PRECISIONS[memory.dtype]
            named[f"{('keys', 'values')[i % 2]}.{i // 2}"] = openvino.Tensor(
                numbers, openvino.Shape(numbers.shape), kind
            )
        return named

    def reserve(self, row: int, length: int) -> None:
        """Every row has its blocks from the start."""

    def move(self, source: Tensor, target: Tensor) -> None:
        first = self._rows * self.blocks
        for memory in self._memory:
            memory[first + target // BLOCK, :, target % BLOCK] = memory[first + source // BLOCK, :, source % BLOCK]

    def commit(self, lengths: Sequence[int]) -> None:
        self.nodes = None

    def clear(self, row: int) -> None:
        for memory in self._memory:
            memory[row * self.blocks : (row + 1) * self.blocks].zero_()

    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self._memory)


class OpenVINOPass(ForwardPass):
    """Passes of ``model`` over a `BlockCache`."""

    cache: Any

    def __init__(self, model: Any, source: ModelGraph, batch_size: int, max_length: int):
        self._source, self._graph = source, source.compiled(())
        check_window(max_length, self._graph.window)
        layers = BlockCache(batch_size, max_length, self._graph.layouts, model.dtype)
        masks = AttentionMasks(text_config(model), model.dtype, torch.device("cpu"), max_length)
        super().__init__(model, ModelDims.of(model), masks, layers, preparations=())  # type: ignore[arg-type]
        self._weights = list(model.parameters())
        self._version = versions(self._weights)
        self._start(self._graph)

    def _start(self, graph: Graph) -> None:
        self._graph, self._request = graph, graph.compiled.create_infer_request()
        for name, tensor in self.cache.tensors().items():
            self._request.set_tensor(name, tensor)

    def score(
        self,
        kv_len: int,
        start: int | None,
        layers: tuple[float, ...],
        tokens: Tensor,
        starts: Tensor,
        parents: Tensor | None = None,
        tree: Tensor | None = None,
        **inputs: Tensor,
    ) -> Any:
        known, (rows, width) = self.cache.nodes, tokens.shape
        nodes = self.cache.nodes = tokens if known is None else torch.cat([known, tokens], 1)
        if tree is None:
            positions = starts[:, None] + self.masks.slots[:width]
            return *self._infer(range(rows), starts.tolist(), list(tokens), list(positions), layers), None
        assert parents is not None
        first = tree.shape[1]
        tree = torch.cat([tree, parents], 1)
        ancestors = ancestor_mask(tree, tree.shape[1])
        past = starts - first
        positions = past[:, None] + ancestors.sum(-1) - 1
        outputs = self._infer(
            range(rows), past.tolist(), list(nodes[:, -tree.shape[1] :]), list(positions), layers, width, ancestors
        )
        return *outputs, tree

    def run(
        self,
        tokens: Tensor,
        plan: WritePlan,
        visibility: Visibility,
        inputs: Mapping[str, Tensor],
        layers: tuple[float, ...],
        want_logits: bool = True,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Feed prompts, see `PromptPrefill`; computes one row of logits."""
        past, counts = plan.start or 0, plan.counts
        if counts is None:
            assert plan.row is not None
            counts = {plan.row: tokens.shape[1]}
        texts = [row[:count] for row, count in zip(tokens, counts.values(), strict=True)]
        positions = [past + self.masks.slots[:count] for count in counts.values()]
        _, hidden = self._infer(list(counts), [past] * len(counts), texts, positions, layers, width=0)
        return None, hidden

    def _infer(
        self,
        rows: Sequence[int],
        past: Sequence[int],
        tokens: list[Tensor],
        positions: list[Tensor],
        layers: tuple[float, ...],
        width: int | None = None,
        allowed: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Logits and hidden states of the last ``width`` tokens of each row; 0: all hidden states, no logits.

        Args:
            past: tokens of each of ``rows`` in the cache.
            allowed: ``[R, N, N]``, what nodes of a tree attend to.
        """
        if versions(self._weights) != self._version:
            raise ModelError(
                f"the weights of {type(self.model).__name__} changed after OpenVINO compiled them; make its slots "
                "anew, or set CROSSDRAFT_OPENVINO=0"
            )
        counts = [len(row) for row in tokens]
        ends = list(accumulate(counts))
        kept = counts if not width else [width] * len(counts)
        chosen = np.concatenate([np.arange(end - k, end) for end, k in zip(ends, kept, strict=True)])
        lengths = [before + count for before, count in zip(past, counts, strict=True)]
        blocks = [-(-length // BLOCK) for length in lengths]
        first = [row * self.cache.blocks for row in rows]
        indices = [np.arange(start, start + count) for start, count in zip(first, blocks, strict=True)]
        context = self.dims.context_length
        flat = torch.cat(positions).numpy()
        bias = np.zeros(0, np.uint8) if allowed is None else allowed.numpy().astype(np.uint8).reshape(-1)
        squares = [0] if allowed is None else [0, *accumulate(count * count for count in counts)]
        numbers = [self._number(layer) for layer in resolved(layers, self.dims.num_layers)]
        if not self._graph.outputs.keys() >= set(numbers):
            self._start(self._source.compiled(numbers))
        self._request.infer(
            {
                0: torch.cat(tokens).numpy(),
                1: flat if context is None else np.minimum(flat, context - 1),
                2: chosen[:1] if width == 0 else chosen,
                "past_lens": np.array(past, np.int32),
                "subsequence_begins": np.array([0, *ends], np.int32),
                "block_indices": np.concatenate(indices).astype(np.int32),
                "block_indices_begins": np.array([0, *accumulate(blocks)], np.int32),
                "max_context_len": np.array(max(lengths), np.int32),
                "qq_bias": bias,
                "qq_bias_begins": np.array(squares, np.int32),
            }
        )
        logits = None if width == 0 else self._output(0).unflatten(0, (len(rows), -1))
        if not numbers:
            return logits, None
        states = torch.stack([self._output(number)[chosen] for number in numbers], 1).to(self.model.dtype)
        return logits, pad_sequence(list(states.split(kept)), batch_first=True)

    def _number(self, layer: int) -> int:
        """Number of an output, see `Graph`."""
        count = self.dims.num_layers
        return count + 2 if layer == count else 1 + range(count + 1)[layer]

    def _output(self, number: int) -> Tensor:
        return torch.from_numpy(self._request.get_output_tensor(self._graph.outputs[number]).data).clone()


class OpenVINOLM(RaggedLM):
    """B slots of a causal LM: :class:`~crossdraft.framework.contracts.lm.LM` without forks.

    Raises:
        ModelError: OpenVINO does not compute the passes of the model, with the reason.
    """

    def __init__(self, model: Any, batch_size: int, max_length: int):
        check(model, max_length)
        model.eval()
        graph = ModelGraph.of(model)
        if not graph.tried:
            trial(RaggedLM(OpenVINOPass(model, graph, 2, TRIAL_LENGTH), 2, TRIAL_LENGTH))
            graph.tried = True
        super().__init__(OpenVINOPass(model, graph, batch_size, max_length), batch_size, max_length)

    def fork(self, layers: Sequence[int], **_: Any) -> Any:
        raise ModelError(
            f"some layers of {type(self.model).__name__} cannot be run alone by OpenVINO; set CROSSDRAFT_OPENVINO=0"
        )


def check(model: Any, max_length: int) -> None:
    """Raise ModelError for a model whose passes OpenVINO would compute wrongly, or not at all."""
    config = text_config(model)
    tensors = [*model.parameters(), *model.buffers()]
    kinds = {(tensor.device.type, tensor.dtype) for tensor in model.parameters()}
    if kinds not in [{("cpu", dtype)} for dtype in PRECISIONS] or any(
        hasattr(t, "__tensor_flatten__") for t in tensors
    ):
        raise ModelError("its weights are not all on the CPU in float32, or all in bfloat16")
    if model.dtype == torch.bfloat16 and not has_bfloat16():
        raise ModelError("this processor has no products in bfloat16")
    refuse_unsupported(model, max_length)
    for window in (sliding_window(config), getattr(config, "attention_chunk_size", None)):
        check_window(max_length, window or sys.maxsize)
    ropes = {kind for m in model.modules() for kind in _kinds(getattr(m, "rope_type", None))}
    if changing := ropes & {"dynamic", "longrope"}:
        raise ModelError(f"the frequencies of its {changing.pop()} positions change with the length of a text")


def check_window(max_length: int, window: int) -> None:
    """Raise ModelError for slots longer than a window: masks of trees do not respect one."""
    if max_length > window:
        raise ModelError(f"slots reach {max_length} tokens, more than its window of {window}")


def _kinds(rope_type: Any) -> list[Any]:
    return list(rope_type.values()) if isinstance(rope_type, dict) else [rope_type]


@cache
def tried_classes() -> frozenset[str]:
    """Classes for which OpenVINO's passes equal transformers'; ``try_classes.py`` in the tests writes the list."""
    return frozenset(files("crossdraft_openvino").joinpath("tried.txt").read_text(encoding="utf-8").split())


class OpenVINOSlots(ModelPreparation):
    """`OpenVINOLM` for models of tried classes, with ``CROSSDRAFT_OPENVINO=1``."""

    name = "openvino"

    @classmethod
    def slots(cls, model: Any, batch_size: int, max_length: int) -> OpenVINOLM | None:
        if os.environ.get("CROSSDRAFT_OPENVINO") != "1":
            return None
        kind = type(model)
        try:
            if kind.__name__ not in tried_classes() or not kind.__module__.startswith("transformers."):
                raise ModelError("its class is not among those tried (crossdraft_openvino/tried.txt)")
            return OpenVINOLM(model, batch_size, max_length)
        except (CrossdraftError, OSError) as error:  # of the model, or of the cache directory
            _warn_once(kind.__name__, str(error))
            return None


@cache
def _warn_once(name: str, reason: str) -> None:
    logger.warning("crossdraft: PyTorch computes the passes of %s, not OpenVINO: %s", name, reason)
