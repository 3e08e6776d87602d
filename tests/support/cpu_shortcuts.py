"""`no_cpu_shortcuts`: strategies run as on a device that the host has to wait for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def no_cpu_shortcuts() -> Iterator[None]:
    """Within the context, ``eager_on_cpu`` returns False in every module that imported it."""
    from crossdraft.framework.util.tensors import eager_on_cpu

    def never(like: Any) -> bool:
        return False

    _replace(eager_on_cpu, never)
    try:
        yield
    finally:
        _replace(never, eager_on_cpu)  # also in modules imported meanwhile


def _replace(old: Any, new: Any) -> None:
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("eager_on_cpu") is old:
            module.eager_on_cpu = new  # type: ignore[attr-defined]
