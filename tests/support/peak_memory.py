"""Peak memory of tensors, without a device."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from typing import Any

from cpu_shortcuts import no_cpu_shortcuts
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(TorchDispatchMode):
    """Counter of bytes of tensors that are allocated in its context and still referenced.

    The CPU shortcuts of strategies (``eager_on_cpu``) are disabled meanwhile.

    Attributes:
        held, peak: current and maximum bytes.
        at: the operation at the peak.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self.at = ""
        self._known: set[int] = set()
        self._patches = ExitStack()

    def __enter__(self) -> Peak:
        self._patches.enter_context(no_cpu_shortcuts())
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {storage._cdata for storage in _storages((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for storage in _storages(out):
            if storage._cdata not in before and storage._cdata not in self._known:
                self._hold(storage, str(func))
        return out

    def _hold(self, storage: Any, name: str) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.held += size
        if self.held > self.peak:
            self.peak, self.at = self.held, name

        def freed() -> None:
            self._known.discard(key)
            self.held -= size

        weakref.finalize(storage, freed)


def _storages(tree: Any) -> list[Any]:
    """Storages of the tensors in ``tree``; copies of weights in oneDNN's layout have none."""
    return [t.untyped_storage() for t in tree_leaves(tree) if isinstance(t, Tensor) and not t.is_mkldnn]
