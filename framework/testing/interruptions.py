"""Injection of errors in the middle of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from torch.utils._python_dispatch import TorchDispatchMode

from ..engine.decoder import Decoder

Place = Literal["drafter", "target", "verifier"]


class Interrupted(Exception):
    """The injected error."""


@contextmanager
def interrupted(decoder: Decoder, place: Place) -> Iterator[None]:
    """Context in which the second step raises `Interrupted`.

    It is raised halfway through ``propose``, after the target's pass, or after ``verify``.
    """
    strategy: Any = {"drafter": decoder.drafter, "target": decoder.target, "verifier": decoder.verifier}[place]
    name = {"drafter": "propose", "target": "forward", "verifier": "verify"}[place]
    own: Callable[..., Any] = getattr(strategy, name)
    operations: list[int] = []  # of the first call

    def call(*arguments: Any, **more: Any) -> Any:
        maximum = operations[0] // 2 if operations and place == "drafter" else None
        with _Counted(maximum) as counted:
            out = own(*arguments, **more)
        if operations:
            raise Interrupted
        operations.append(counted.operations)
        return out

    setattr(strategy, name, call)
    try:
        yield
    finally:
        delattr(strategy, name)


class _Counted(TorchDispatchMode):
    """Counter of tensor operations; raises `Interrupted` after ``maximum``."""

    def __init__(self, maximum: int | None):
        super().__init__()
        self.operations, self._most = 0, maximum

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._most is not None and self.operations >= self._most:
            raise Interrupted
        self.operations += 1
        return func(*args, **(kwargs or {}))
