"""Copies of a model in separate modules that share its weights; outputs of its layers."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, nn

from ..errors import ModelError, UsageError
from .cuda_graphs import runner_for
from .idle import ATTRIBUTE, CONTAINERS, Structure, borrow, put


def layer_stack(model: Any, count: int) -> nn.ModuleList | None:
    """The list of the ``count`` layers of a causal LM's decoder; None if it does not have exactly one."""
    stacks = [m for _, m in model.get_decoder().named_children() if isinstance(m, nn.ModuleList) and len(m) == count]
    return stacks[0] if len(stacks) == 1 else None


def close(logits: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """True if logits are equal up to the rounding of a different order of summation."""
    error = (logits.double() - expected.double()).square().mean().sqrt() / expected.double().std()
    return bool(error <= (1e-3 if dtype in (torch.float32, torch.float64) else 0.1))


def own_modules(model: Any) -> Any:
    """The same model in separate modules, which share its weights.

    Changes to them (eval mode, other classes of linear layers, hooks, buffers that a pass replaces) affect neither the
    caller's ``model`` nor another thread that decodes with it.
    """
    twins: dict[nn.Module, Any] = {}  # a module may occur several times, or in a cycle

    def twin(module: nn.Module) -> Any:
        if module not in twins:
            twins[module] = new = shallow_copy(module)
            for name, child in module._modules.items():
                new._modules[name] = None if child is None else twin(child)
        return twins[module]

    return twin(model)


@dataclass
class OwnModules:
    """`own_modules`, and draft models and heads for them; without graphs, ``structure`` is None and nothing is kept."""

    model: Any
    structure: Structure | None
    _made: dict[Hashable, Any] = field(default_factory=dict)
    _used: set[Hashable] = field(default_factory=set)

    @classmethod
    def borrow(cls, model: Any) -> OwnModules:
        """Modules of an earlier borrower, with their graphs, or new ones if ``model`` was changed since."""
        if not runner_for(model).records:
            return cls(own_modules(model), None)
        structure = Structure(model)
        own = borrow(model, cls, structure) or cls(own_modules(model), structure)
        own._used.clear()
        return own

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """``make()``, or what it returned earlier; a new result takes the memory of those not used by this borrower."""
        if key not in self._made:
            self._made = {used: self._made[used] for used in self._used}
            self._made[key] = make()
        self._used.add(key)
        return self._made[key]

    def lend(self, model: Any, borrower: Any) -> None:
        """Let the modules be idle when ``borrower`` is freed."""
        if self.structure is not None:
            finalize(borrower, put, model, OwnModules, self.structure, self).atexit = False


def shallow_copy(module: nn.Module) -> Any:
    """A module with the same parameters and children, whose attributes can be replaced."""
    twin = copy.copy(module)
    attributes = vars(twin)  # bypasses the slow nn.Module.__setattr__
    for name in CONTAINERS:
        attributes[name] = attributes[name].copy()
    attributes.pop(ATTRIBUTE, None)
    return twin


def resolved(layers: Sequence[float], count: int) -> list[int]:
    """Resolve shares of the depth in ``layers`` for a model of ``count`` layers."""
    return [int(i * count) if isinstance(i, float) else int(i) for i in layers]


@contextmanager
def recorded(model: Any, layers: Sequence[int], count: int) -> Iterator[LastLayerRecorder]:
    """Within the context, record the last layer's output if ``layers`` has it: transformers returns it normed only.

    Raises:
        ModelError: it is requested of a model without one list of ``count`` layers.
    """
    recorder = LastLayerRecorder(count)
    if not count or count not in layers:
        yield recorder
        return
    stack = layer_stack(model, count)
    if stack is None:
        raise ModelError(
            f"{type(model).__name__} does not have exactly one list of {count} layers, so the output of layer {count} "
            "before the final norm is unknown; use heads that read other layers"
        )
    handle = stack[-1].register_forward_hook(recorder)
    try:
        yield recorder
    finally:
        handle.remove()


class LastLayerRecorder:
    """A forward hook of the last layer, for passes of the thread that made it."""

    def __init__(self, count: int):
        self._count, self._thread = count, threading.get_ident()
        self._last: Tensor | None = None

    def __call__(self, module: Any, arguments: Any, output: Any) -> None:
        if threading.get_ident() == self._thread:
            self._last = output[0] if isinstance(output, tuple) else output

    def select(self, layers: Sequence[int], states: Any) -> list[Tensor]:
        """Return the hidden states ``[B, W, H]`` of ``layers``, given the ``hidden_states`` that the model returned.

        Raises:
            UsageError: the model returns something else for one of them.
        """
        count = self._count
        out = [self._last if self._last is not None and i == count else states[i] for i in layers]
        if any(state.shape != out[0].shape or state.dim() != 3 for state in out):
            raise UsageError(
                f"the target does not return one hidden state per token and layer, but tensors of shapes "
                f"{[list(state.shape) for state in out]} for layers {list(layers)}; read the last layer (-1) only"
            )
        return out
