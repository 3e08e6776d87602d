"""Objects of a model that wait for their next use: caches with their CUDA graphs, and separate modules.

Capturing graphs takes longer than many passes. Idle objects are attributes of the model, so they are freed with it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import partial
from operator import is_
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

#: Most idle objects of one kind: as many threads may take turns on a model without capturing again.
MOST_IDLE = 2
ATTRIBUTE = "_crossdraft_idle"
#: Containers of every module (parameters, buffers, submodules, hooks), which a copy must not share.
CONTAINERS = [name for name, value in vars(nn.Module()).items() if isinstance(value, dict | set)]


class Idle(defaultdict[Hashable, deque[Any]]):
    """The idle objects of one model by kind, each with the `Structure` that it was made for."""

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__(partial(deque, maxlen=MOST_IDLE))
        _instances.add(self)

    def __reduce__(self) -> Any:
        """Copies of a model start without idle objects."""
        return Idle, ()


_instances: WeakSet[Idle] = WeakSet()


def borrow(model: Any, kind: Hashable, structure: Structure, fits: Callable[[Any], bool] = bool) -> Any:
    """Take an idle object that fits; otherwise return None and drop all: a new one needs their memory."""
    with suppress(KeyError, IndexError):  # all are dropped, or another thread took the last one
        while True:
            made_for, item = vars(model)[ATTRIBUTE][kind].pop()
            if made_for == structure and fits(item):
                return item


def put(model: Any, kind: Hashable, structure: Structure, item: Any) -> None:
    vars(model).setdefault(ATTRIBUTE, Idle())[kind].append((structure, item))


def free_idle() -> None:
    """Free the idle objects of all models."""
    for idle in list(_instances):
        idle.clear()


class Structure:
    """Everything that graphs of a model depend on besides values: its modules, hooks, settings and addresses."""

    def __init__(self, model: Any):
        self._objects: list[Any] = []
        for module in model.modules():
            self._objects.append(type(module))
            for name, value in list(vars(module).items()):  # another thread may add the attribute of `put`
                if name != ATTRIBUTE:
                    self._objects += value.values() if name in CONTAINERS and isinstance(value, dict) else [value]
        tensors = [item for item in self._objects if isinstance(item, Tensor)]
        addresses = [tensor.data_ptr() for tensor in tensors if not hasattr(tensor, "__tensor_flatten__")]
        self._values = repr(vars(model.config)), addresses

    def __eq__(self, other: Any) -> bool:
        same = len(other._objects) == len(self._objects) and all(map(is_, other._objects, self._objects))
        return same and other._values == self._values
