"""Counting of kernel launches and copies of a step, without a device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from cpu_shortcuts import no_cpu_shortcuts
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from crossdraft.framework.lm.forward_pass import ForwardPass

#: Allocations and views, which do not launch kernels.
_NO_WORK = ("detach", "empty", "new_empty", "_unsafe_view", "_reshape_alias", "resize")
#: Host reads of values.
_READS = ("tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "item", "__index__")


class Launches(TorchDispatchMode):
    """Counter of operations outside of the forward passes of ``models``.

    Views, allocations and operations on empty tensors are not counted; lists copied to the device are. The CPU
    shortcuts of strategies (``eager_on_cpu``) are disabled meanwhile.

    Attributes:
        work: kernels and copies to the device, by name.
        recorded: how many of them are bookkeeping of a pass (positions, masks, cache moves), which CUDA graphs replay.
        reads: host reads of values, which synchronise, by kind.
        passes: forward passes of the models.
    """

    def __init__(self, *models: torch.nn.Module):
        super().__init__()
        self.work: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()
        self.recorded = self.passes = self._inside = self._recordable = 0
        self._patches = ExitStack()
        for model in models:
            model.register_forward_pre_hook(self._enter_pass)
            model.register_forward_hook(self._leave_pass, always_call=True)

    def _enter_pass(self, *_: Any) -> None:
        self.passes += not self._inside
        self._inside += 1

    def _leave_pass(self, *_: Any) -> None:
        self._inside -= 1

    def __enter__(self) -> Launches:
        for name in _READS:
            self._replace(Tensor, name, self._counted(getattr(Tensor, name), self.reads, name))
        self._replace(torch, "from_numpy", self._counted(torch.from_numpy, self.work, "from_numpy"))
        for name in ("score", "compact"):
            self._replace(ForwardPass, name, self._recorded(getattr(ForwardPass, name)))
        self._patches.enter_context(no_cpu_shortcuts())
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self._inside and _works(func, out):
            self.work[str(func)] += 1
            self.recorded += self._recordable
        return out

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        own = getattr(owner, name)
        self._patches.callback(setattr, owner, name, own)
        setattr(owner, name, value)

    def _recorded(self, function: Callable) -> Callable:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            self._recordable += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._recordable -= 1

        recorded.__name__ = function.__name__
        return recorded

    def _counted(self, function: Callable, counter: Counter[str], name: str) -> Callable:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if not self._inside:
                counter[name] += 1
            with self._paused():
                return function(*args, **kwargs)

        return counted

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Skip operations inside a counted call."""
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1


def _works(func: Any, out: Any) -> bool:
    name = func.overloadpacket.__name__
    if name == "lift_fresh":  # a tensor of a list
        return True
    views = any(a.alias_info is not None and not a.alias_info.is_write for a in func._schema.arguments)
    if views or name.startswith(_NO_WORK):
        return False
    tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
    return not tensors or any(tensor.numel() for tensor in tensors)
