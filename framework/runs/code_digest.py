"""Identity of the code behind a class: distribution, version, and a digest of its source files.

The digest covers the module of the class and its transitive imports within the same top-level package and in packages
outside of the installed libraries (an editable install, a file next to the recipe). Installed libraries are identified
by their versions. Files are read, not executed.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

from ..._published import homes
from ..util.releases import release

#: Directories of a Python installation; libraries in them are identified by version.
_INSTALLED = tuple(Path(sysconfig.get_path(key)).resolve() for key in ("stdlib", "platstdlib", "purelib", "platlib"))


def source_of(cls: type[Any], *wrapped: type[Any]) -> dict[str, str]:
    """Return distribution, version and code digest of a class and of the ``wrapped`` classes that it runs.

    Returns:
        ``distribution`` and ``version`` (empty for code that is not installed), and ``sha256`` over all files of the
        class and its bases. ``sha256`` is empty for a class without a file (defined in an interactive session), whose
        changes cannot be detected.
    """
    package = cls.__module__.partition(".")[0]
    distribution = next(iter(_distributions().get(package, ())), "")
    digests = [
        code_sha256([base.__module__ for base in strategy.__mro__ if base.__module__ != "builtins"])
        for strategy in (cls, *wrapped)
    ]
    if len(digests) > 1:
        digests = [hashlib.sha256("".join(digests).encode()).hexdigest() if all(digests) else ""]
    return {"distribution": distribution, "version": release(distribution), "sha256": digests[0]}


@cache
def _distributions() -> Mapping[str, Sequence[str]]:
    """Distributions of every top-level package; cached, because the lookup is slow."""
    try:
        return packages_distributions()
    except Exception:  # the metadata of some distribution is damaged
        return {}


def code_sha256(modules: Sequence[str]) -> str:
    """SHA-256 over the files of these modules and their imports; empty if the first module has no file."""
    if _file(modules[0]) is None:
        return ""
    return _digest(tuple(dict.fromkeys(modules)))


@cache
def _digest(modules: tuple[str, ...]) -> str:
    files = sorted(_closure(modules).items())
    listing = "".join(f"{name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n" for name, file in files)
    return hashlib.sha256(listing.encode()).hexdigest()


def _closure(modules: Sequence[str]) -> dict[str, Path]:
    """Files by module name, of modules and their transitive imports outside of installed libraries.

    The ``__init__`` files of parent packages are included, but their imports are not followed.
    """
    home = modules[0].partition(".")[0]
    files: dict[str, Path] = {}
    pending = list(modules)
    while pending:
        name = pending.pop()
        top = name.partition(".")[0]
        # Check the top-level package first, because find_spec imports the parent packages of a module.
        if name in files or (top != home and _installed(top)) or (file := _file(name)) is None:
            continue
        files[name] = file
        pending += _imports(name, file)
    for name in list(files):
        for package in _parents(name):
            if package not in files and (file := _file(package)) is not None:
                files[package] = file
    return files


@cache
def _installed(package: str) -> bool:
    """Return True if a top-level package is an installed library or has no file."""
    file = _file(package)
    if file is None:
        return True
    return bool({"site-packages", "dist-packages"} & set(file.parts)) or any(map(file.is_relative_to, _INSTALLED))


@cache
def _file(module: str) -> Path | None:
    loaded = sys.modules.get(module)
    origin = getattr(loaded, "__file__", None) if loaded is not None else None
    if origin is None:
        try:
            spec = importlib.util.find_spec(module)
        except Exception:  # it imports the parent packages, which may fail in any way
            return None
        origin = spec.origin if spec is not None else None
    path = Path(origin).resolve() if origin else None
    return path if path is not None and path.suffix == ".py" and path.is_file() else None


@cache
def _imports(module: str, file: Path) -> tuple[str, ...]:
    """Return the names of all modules that a file may import, imports inside functions included."""
    try:
        tree = ast.parse(file.read_bytes())
    except SyntaxError:
        return ()
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    names: dict[str, None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names |= dict.fromkeys([alias.name, *homes(alias.name).values()])
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, package)
            # ``from package import name``: the name may be a module, an attribute, or published for another module.
            parts = [homes(base).get(alias.name, f"{base}.{alias.name}") for alias in node.names]
            names |= dict.fromkeys([base, *parts])
    return tuple(names)


def _parents(module: str) -> Iterator[str]:
    parts = module.split(".")
    return (".".join(parts[:n]) for n in range(1, len(parts)))


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    base = ".".join(parts[: len(parts) - node.level + 1])
    return f"{base}.{node.module}" if node.module else base
