"""The names that a module publishes: each is imported from its home when it is first used (PEP 562).

The stub beside the module lists them, once for type checkers and programs.
"""

import ast
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any


@cache
def homes(module: str) -> dict[str, str]:
    """The names that a module of this package publishes, each with the module that defines it; empty without a stub."""
    package, _, name = module.partition(".")
    stub = Path(__file__).with_name(f"{name or '__init__'}.pyi")
    if package != __package__ or not stub.is_file():
        return {}
    imports = (node for node in ast.parse(stub.read_bytes()).body if isinstance(node, ast.ImportFrom))
    return {name.name: f"{package}.{node.module}" for node in imports for name in node.names}


def published(module: str) -> tuple[Callable[[str], Any], list[str]]:
    """``__getattr__`` and ``__all__`` of a module with a stub."""

    def get(name: str) -> Any:
        if name not in homes(module):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(import_module(homes(module)[name]), name)

    return get, sorted(homes(module))
