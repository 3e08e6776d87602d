"""The names that a module publishes: each is imported from its home when it is first used (PEP 562).

The stub beside the module lists them, once for type checkers and programs.
"""

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def published(module: str, file: str) -> tuple[Callable[[str], Any], list[str]]:
    """``__getattr__`` and ``__all__`` of a module: what the stub of its ``file`` imports."""
    homes = {
        name.name: "." * node.level + (node.module or "")
        for node in ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8")).body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(import_module(homes[name], __package__), name)

    return get, sorted(homes)
