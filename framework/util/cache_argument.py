"""Signatures of models and layers of transformers: the argument for the cache, which release 5.24 renamed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

#: By release: from 5.24 on; before; before, of purely recurrent layers.
NAMES = ("cache", "past_key_values", "cache_params")


def cache_argument(forward: Callable[..., Any]) -> str:
    """Name of the argument that receives the cache in a call of ``forward``; empty for one without a cache."""
    return _name(getattr(forward, "__func__", forward))


@cache
def _name(function: Callable[..., Any]) -> str:
    parameters = inspect.signature(function).parameters
    return next((name for name in NAMES if name in parameters), "")


@cache
def plain_signature(cls: type) -> inspect.Signature:
    """Signature of the ``forward`` behind that of the first base of ``cls``, without ``self``."""
    signature = inspect.signature(cls.__mro__[2].forward)  # type: ignore[attr-defined]
    return signature.replace(parameters=list(signature.parameters.values())[1:])
