"""Cache of models with recurrent layers: keys and values by slot, recurrent states by speculative node.

A recurrent state cannot be cut at a token. So each recurrent module runs one node at a time, from the state behind the
node's parent, and the state behind every node is kept until the next commit, which selects that of the last accepted
node. Everything else of the model (embeddings, attention, feed-forward networks, head) runs for all nodes at once: one
pass of the model a step, for chains and trees, and nothing is computed again after a rejection. Rows are independent,
so each may accept another number of nodes.

Prompts run in one call of a module per row (or per length of row), without padding, and longer ones in pieces.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import Cache

from crossdraft import ModelError, ModelPreparation, cache_argument, counting, on_device
from crossdraft.framework.lm.architectures import recurrent_layers
from crossdraft.models import RaggedCache, WritePlan, close

from .recurrent_layers import Adapter, extend_modules, keep_states, recurrent_modules

#: Arguments that hide padding from recurrent modules; rows run without padding instead.
_MASKS = {"attention_mask", "conv_mask"}


class _Call:
    """The call of a recurrent module for ``[R, W]`` tokens, and parts of it.

    Attributes:
        shape: R and W.
    """

    def __init__(self, module: Any, adapter: Adapter, forward: Callable[..., Any], arguments: dict[str, Any]):
        self._module, self._adapter, self._forward = module, adapter, forward
        own = adapter.cache or cache_argument(forward)
        self._arguments = {name: value for name, value in arguments.items() if name != own}
        self._arguments |= dict.fromkeys(_MASKS & arguments.keys())
        self.shape = next(iter(arguments.values())).shape[:2]  # the hidden states come first

    def initial(self) -> list[Tensor]:
        """States ``[1, ..]`` before the first token."""
        return self._adapter.initial(self._module, self._forward, self._part(slice(0, 1), [0, 0]))

    def run(self, rows: slice, tokens: slice, states: list[Tensor] | None) -> tuple[Any, list[Tensor]]:
        """Output and new states of these tokens, in one call; ``states`` may be overwritten."""
        return self._adapter.call(self._module, self._forward, self._part(rows, tokens), states)

    def step(self, token: int, states: list[Tensor]) -> tuple[Any, list[Tensor]]:
        """Output and new states of one token of every row; ``states`` may be overwritten."""
        tokens = slice(token, token + 1)
        if self._adapter.joint_rows:
            return self.run(slice(None), tokens, states)
        rows = [slice(row, row + 1) for row in range(self.shape[0])]
        parts = [self.run(row, tokens, [state[row] for state in states]) for row in rows]
        after = [torch.cat(rows_after) for rows_after in zip(*(states for _, states in parts), strict=True)]
        return _cat([output for output, _ in parts], 0, 1), after

    def steps(self, rows: slice, count: int, states: list[Tensor]) -> tuple[Any, list[Tensor]]:
        """Output and new states of the first ``count`` tokens, in one call per token."""
        outputs = []
        for token in range(count):
            output, states = self.run(rows, slice(token, token + 1), states)
            outputs.append(output)
        return _cat(outputs, 1, 1), states

    def _part(self, rows: slice, tokens: slice | list[int]) -> dict[str, Any]:
        r, w = self.shape

        def part(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(part, value))
            if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[1] != w or value.shape[0] not in (1, r):
                return value
            return (value[rows] if value.shape[0] == r else value)[:, tokens]

        return {name: part(value) for name, value in self._arguments.items()}


def _cat(outputs: list[Any], dim: int, width: int) -> Any:
    """Join outputs of a module over rows (``dim`` 0) or tokens (1); each has ``width`` tokens."""
    first = outputs[0]
    if isinstance(first, tuple):
        return tuple(_cat(list(parts), dim, width) for parts in zip(*outputs, strict=True))
    if isinstance(first, Tensor) and first.dim() > 1 and first.shape[1] == width:
        return torch.cat(outputs, dim)
    return first  # no sequence: weights or states, which the models ignore


def _padded(output: Any, count: int, width: int) -> Any:
    """The output of ``count`` tokens, padded to ``width`` with zeros."""
    if isinstance(output, tuple):
        return tuple(_padded(part, count, width) for part in output)
    if isinstance(output, Tensor) and output.dim() > 1 and output.shape[1] == count:
        return functional.pad(output, (*(0, 0) * (output.dim() - 2), 0, width - count))
    return output


class _ModuleStates:
    """States of one recurrent module: behind the committed tokens of every row, and behind every speculative node.

    Attributes:
        initial: ``[1, ..]`` for each state, before the first token.
        buffers: ``[1 + nodes, B, ..]`` for each state; index 0 = committed tokens, 1 + i = node i.
        continues: True if one call of several tokens may continue from a state; None = not tested yet.
    """

    def __init__(self, initial: list[Tensor], batch_size: int):
        self.initial = initial
        self.buffers = [state.repeat(batch_size, *[1] * (state.dim() - 1))[None].clone() for state in initial]
        self.continues: bool | None = None

    def reserve(self, nodes: int) -> None:
        """Provide space for ``nodes`` nodes."""
        missing = 1 + nodes - len(self.buffers[0])
        if missing > 0:
            self.buffers = [torch.cat([b, b.new_zeros(missing, *b.shape[1:])]) for b in self.buffers]

    @property
    def device(self) -> torch.device:
        return self.buffers[0].device

    def of(self, row: int) -> list[Tensor]:
        """A copy of the states ``[1, ..]`` behind the committed tokens of ``row``."""
        return [buffer[0, row : row + 1].clone() for buffer in self.buffers]

    def clear(self, row: int) -> None:
        for buffer, initial in zip(self.buffers, self.initial, strict=True):
            buffer[:, row] = initial[0]


class RecurrentCache(RaggedCache):
    """A `KVCache`, and the `StateStore` of the model's recurrent modules.

    Args:
        rows: number of rows.
        max_length: number of slots per row.

    Attributes:
        committed: by row, the number of tokens behind which its state is kept.
    """

    recordable = forkable = False

    def __init__(self, batch_size: int, max_length: int):
        super().__init__(batch_size, max_length)
        self.committed = [0] * batch_size
        self._reserved = [0] * batch_size
        self._modules: dict[int, _ModuleStates] = {}
        self._first = 0  # speculative nodes before those of the pass
        self._path: Tensor | None = None  # [B, D], the slots of an accepted path

    # -- KVCache ----------------------------------------------------------------------------------------

    def reserve(self, row: int, length: int) -> None:
        self._reserved[row] = length

    def begin_pass(self, plan: WritePlan) -> RecurrentCache:
        if plan.row is None and plan.rows is None:
            self._first = self._reserved[0] - self.committed[0] - plan.slots.shape[1]
        elif plan.row is not None:
            self.committed[plan.row] = plan.kv_len
        else:
            assert plan.counts is not None
            for row, count in plan.counts.items():
                self.committed[row] = count
        super().begin_pass(plan)
        return self

    def move(self, source: Tensor, target: Tensor) -> None:
        super().move(source, target)
        self._path = source

    def commit(self, lengths: Sequence[int]) -> None:
        super().commit(lengths)
        counts = [length - committed for length, committed in zip(lengths, self.committed, strict=True)]
        for row, length in enumerate(lengths):
            if length == 0 and self.committed[row]:  # a new text
                self._clear_states(row)
                counts[row] = 0
        if any(counts):
            self._select(counts)
        self.committed = list(lengths)
        self._path = None

    def clear(self, row: int) -> None:
        super().clear(row)
        self._clear_states(row)
        self.committed[row] = 0

    def nbytes(self) -> int:
        return super().nbytes() + sum(b.nbytes for states in self._modules.values() for b in states.buffers)

    def _clear_states(self, row: int) -> None:
        for states in self._modules.values():
            states.clear(row)

    def _select(self, counts: list[int]) -> None:
        """Keep the state behind the first ``counts[b]`` nodes of each row, or of the path that was moved."""
        by_device: dict[torch.device, Tensor] = {}
        for states in self._modules.values():
            device = states.device
            if device not in by_device:
                by_device[device] = self._kept(counts, device)
            for buffer in states.buffers:
                buffer[0] = buffer[by_device[device], counting(self.num_rows, device)]

    def _kept(self, counts: list[int], device: torch.device) -> Tensor:
        """``[B]`` int64, the index in the buffers of the state to keep."""
        accepted = on_device(counts, device)
        if self._path is None:
            return accepted
        last = self._path.to(device).gather(1, (accepted - 1).clamp(min=0)[:, None])[:, 0]
        return torch.where(accepted > 0, last - on_device(self.committed, device) + 1, 0)

    # -- recurrent modules ------------------------------------------------------------------------------

    def run(
        self, index: int, module: Any, adapter: Adapter, forward: Callable[..., Any], arguments: dict[str, Any]
    ) -> Any:
        """See `StateStore.run`; the first argument is the hidden states ``[R, W, H]``."""
        call, plan = _Call(module, adapter, forward, arguments), self.plan
        if index not in self._modules:
            self._modules[index] = _ModuleStates(call.initial(), self.num_rows)
        states = self._modules[index]
        if plan.counts is not None:
            pairs = enumerate(plan.counts.items())
            outputs = [self._prompt(call, states, slice(i, i + 1), row, 0, count) for i, (row, count) in pairs]
            return _cat(outputs, 0, call.shape[1])
        if plan.row is not None:
            return self._prompt(call, states, slice(0, 1), plan.row, plan.start or 0, call.shape[1])
        return self._nodes(call, states, plan)

    def _nodes(self, call: _Call, states: _ModuleStates, plan: WritePlan) -> Any:
        """Run the module node by node for all rows."""
        states.reserve(self._first + call.shape[1])
        rows, parents = counting(self.num_rows, states.device), plan.to(states.device).parents
        outputs = []
        for i in range(call.shape[1]):
            node = self._first + i
            if parents is None:
                before = [buffer[node].clone() for buffer in states.buffers]
            else:
                before = [buffer[1 + parents[:, node], rows] for buffer in states.buffers]
            output, after = call.step(i, before)
            for buffer, state in zip(states.buffers, after, strict=True):
                buffer[1 + node] = state
            outputs.append(output)
        return _cat(outputs, 1, 1)

    def _prompt(self, call: _Call, states: _ModuleStates, part: slice, row: int, start: int, count: int) -> Any:
        """``count`` prompt tokens of ``row`` from ``start`` on, which are row ``part`` of the call."""
        if start == 0:
            states.clear(row)
        before = states.of(row)
        if start == 0 and count > 1:
            output, after = call.run(part, slice(0, count), None)
        elif count > 1 and self._continues(call, states, row):
            output, after = call.run(part, slice(0, count), before)
        else:
            output, after = call.steps(part, count, before)
        for buffer, state in zip(states.buffers, after, strict=True):
            buffer[0, row] = state[0]
        return _padded(output, count, call.shape[1])

    @staticmethod
    def _continues(call: _Call, states: _ModuleStates, row: int) -> bool:
        """True if one call of several tokens continues from a state, as calls of one token do; tested once."""
        if states.continues is None:
            count = min(call.shape[1], 8)
            try:
                joint = call.run(slice(0, 1), slice(0, count), states.of(row))
                steps = call.steps(slice(0, 1), count, states.of(row))
                pairs = [(_first(joint[0]), _first(steps[0])), *zip(joint[1], steps[1], strict=True)]
                states.continues = all(a.shape == b.shape and close(a, b, a.dtype) for a, b in pairs)
            except (RuntimeError, ValueError, IndexError):
                states.continues = False
        return states.continues


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


class RecurrentLayers(ModelPreparation):
    """Recurrent modules run over a `RecurrentCache`; without one they run as before."""

    name = "recurrent-layers"

    def __init__(self, model: Any):
        self._cache: type[RecurrentCache] = RecurrentCache
        if type(model).__name__ == "MiniMaxForCausalLM":  # accepts only its own class of cache
            self._cache = _minimax_cache(inspect.getmodule(type(model)).MiniMaxCache)  # type: ignore[union-attr]

    @classmethod
    def prepare(cls, model: Any) -> RecurrentLayers | None:
        """Raises ModelError for a model with recurrent layers that have no adapter."""
        extend_modules(model)
        if recurrent_modules(model) or type(model).__name__ == "MiniMaxForCausalLM":
            return cls(model)
        if layers := recurrent_layers(model):
            raise ModelError(
                f"{type(model).__name__} has {layers}: crossdraft cannot reset their state when a draft is rejected, "
                "so speculative decoding would silently continue from rejected tokens; use a model whose layers are "
                "all attention"
            )
        return None

    def new_cache(self, batch_size: int, max_length: int) -> RecurrentCache:
        return self._cache(batch_size, max_length)

    def around_pass(self, cache: Any, visibility: Any) -> AbstractContextManager[object]:
        return keep_states(cache, visibility.positions, visibility.key_positions)


@cache
def _minimax_cache(own: type) -> type[RecurrentCache]:
    return type("RecurrentMiniMaxCache", (RecurrentCache, own), {"__len__": Cache.__len__})
