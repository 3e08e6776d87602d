"""Which code a result was made with: the distribution, its version, and a digest of the files behind a class.

A class is followed through the imports of its module to every Python file that is its project's own: of its own
top-level package, and of any package that does not lie among the installed libraries (an editable install, a file
beside the recipe). Installed libraries are known by their versions. Files are read, never run.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from typing import Any

#: Packages whose files belong to a Python installation; what lies in them is known by its version.
_INSTALLED = tuple(Path(sysconfig.get_path(key)).resolve() for key in ("stdlib", "platstdlib", "purelib", "platlib"))


def source_of(cls: type[Any], *wrapped: type[Any]) -> dict[str, str]:
    """What provides a class, and the SHA-256 of its code, and that of the ``wrapped`` ones which it runs.

    Returns:
        ``distribution`` and ``version`` (empty for code that is not installed), and ``sha256``: of all files that its
        module, and those of its bases, lead to. Empty for a class that has no file (made in an interactive session):
        nothing can tell whether it changed.
    """
    package = cls.__module__.partition(".")[0]
    distribution = next(iter(_distributions().get(package, ())), "")
    try:
        number = version(distribution) if distribution else ""
    except PackageNotFoundError:
        number = ""
    digests = [
        code_sha256([base.__module__ for base in one.__mro__ if base.__module__ != "builtins"])
        for one in (cls, *wrapped)
    ]
    if len(digests) > 1:
        digests = [hashlib.sha256("".join(digests).encode()).hexdigest() if all(digests) else ""]
    return {"distribution": distribution, "version": number, "sha256": digests[0]}


@cache
def _distributions() -> Mapping[str, Sequence[str]]:
    """The distributions of every top-level package, which takes a while to find out."""
    return packages_distributions()


def code_sha256(modules: Sequence[str]) -> str:
    """The SHA-256 of every file that these modules lead to, empty if the first has none."""
    if _file(modules[0]) is None:
        return ""
    return _digest(tuple(dict.fromkeys(modules)))


@cache
def _digest(modules: tuple[str, ...]) -> str:
    files = sorted(_closure(modules).items())
    listing = "".join(f"{name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n" for name, file in files)
    return hashlib.sha256(listing.encode()).hexdigest()


def _closure(modules: Sequence[str]) -> dict[str, Path]:
    """The files of modules and of all they import, as far as they are ours to follow, by module name.

    The packages around a module are read, not followed: what they import is for others.
    """
    home = modules[0].partition(".")[0]
    found: dict[str, Path] = {}
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        top = name.partition(".")[0]
        # Asked of the top-level package first, because looking for a module imports the packages around it.
        if name in found or (top != home and _installed(top)) or (file := _file(name)) is None:
            continue
        found[name] = file
        waiting += _imports(name, file)
    for name in list(found):
        for package in _parents(name):
            if package not in found and (file := _file(package)) is not None:
                found[package] = file
    return found


@cache
def _installed(package: str) -> bool:
    """Whether a top-level package is a library of this environment or of one below it, or has no file."""
    file = _file(package)
    if file is None:
        return True
    return bool({"site-packages", "dist-packages"} & set(file.parts)) or any(map(file.is_relative_to, _INSTALLED))


@cache
def _file(module: str) -> Path | None:
    """The Python file of a module, None for one that has none."""
    loaded = sys.modules.get(module)
    origin = getattr(loaded, "__file__", None) if loaded is not None else None
    if origin is None:
        try:
            spec = importlib.util.find_spec(module)
        except (ImportError, ValueError, AttributeError):
            return None
        origin = spec.origin if spec is not None else None
    path = Path(origin).resolve() if origin else None
    return path if path is not None and path.suffix == ".py" and path.is_file() else None


@cache
def _imports(module: str, file: Path) -> tuple[str, ...]:
    """Every module that a file imports, inside functions too, and the packages around it."""
    try:
        tree = ast.parse(file.read_bytes())
    except SyntaxError:
        return ()
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    found: dict[str, None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= dict.fromkeys(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, package)
            # ``from package import name``: the name is a module, or something in the package.
            found |= dict.fromkeys([base, *(f"{base}.{alias.name}" for alias in node.names)])
    return tuple(found)


def _parents(module: str) -> Iterator[str]:
    parts = module.split(".")
    return (".".join(parts[:n]) for n in range(1, len(parts)))


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    base = ".".join(parts[: len(parts) - node.level + 1])
    return f"{base}.{node.module}" if node.module else base
