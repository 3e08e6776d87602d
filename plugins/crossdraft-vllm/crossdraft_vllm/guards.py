"""Checks that an engine is the one this package was written for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from crossdraft import UsageError


class EngineMismatch(UsageError):
    """An engine whose code differs from the code that this package replaces."""


def check_version(engine: str, version: str, tested: str) -> None:
    """Raise EngineMismatch if ``version`` is not a release of the minor version ``tested``."""
    if version.split(".")[:2] != tested.split("."):
        raise EngineMismatch(
            f"{engine} {version} is installed, but crossdraft's strategies were tested inside {engine} {tested} only; "
            f"install {engine} {tested}, or unset the variable that selects them"
        )


def check_signature(name: str, function: Callable[..., Any], parameters: Sequence[str]) -> None:
    """Raise EngineMismatch if the parameters of ``function`` are not ``parameters``."""
    actual = tuple(inspect.signature(function).parameters)
    if actual != tuple(parameters):
        raise EngineMismatch(
            f"{name} has the parameters {', '.join(actual)}, but crossdraft replaces one with {', '.join(parameters)}; "
            "install the tested version of the engine, or unset the variable that selects crossdraft's strategies"
        )
