"""The locks pin whatever an installation brings, so that a release of tomorrow cannot break the commands of today."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
#: What a PyTorch with CUDA brings by exact versions of its own.
CUDA = re.compile(r"(nvidia|cuda)-.*|triton")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = set(PROJECT["optional-dependencies"])
#: The extras that each lock is made for.
LOCKS = {"constraints.txt": EXTRAS, "constraints-oldest.txt": {"test", "quantize"}}


def pins(lock: str) -> list[Requirement]:
    lines = (ROOT / lock).read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if not line.startswith("#")]


def pinned_here(lock: str) -> dict[str, str]:
    """The versions that ``lock`` pins for this Python and platform."""
    directory = (pin for pin in pins(lock) if not pin.marker or pin.marker.evaluate())
    return {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in directory}


def brought(extras: set[str], pinned: dict[str, str]) -> dict[str, str]:
    """Each distribution that ``crossdraft[extras]`` installs, and the one that requires it.

    Only the requirements of pinned versions are followed: another version's may differ.
    """
    results: dict[str, str] = {}
    visited: set[tuple[str, str]] = set()
    waiting = [("crossdraft", extra) for extra in ("", *sorted(extras))]
    while waiting:
        one = waiting.pop()
        if one in visited:
            continue
        visited.add(one)
        try:
            if one[0] == "crossdraft":  # what is installed may be older than pyproject.toml
                lines = PROJECT["optional-dependencies"][one[1]] if one[1] else PROJECT["dependencies"]
            else:
                known = version(one[0]).partition("+")[0] == pinned.get(one[0])
                lines = (requires(one[0]) or []) if known else []
        except PackageNotFoundError:  # of an extra that is not installed: its own requirements are not known here
            continue
        for requirement in map(Requirement, lines):
            name = canonicalize_name(requirement.name)
            if CUDA.fullmatch(name) or (requirement.marker and not requirement.marker.evaluate({"extra": one[1]})):
                continue
            results.setdefault(name, one[0])
            waiting += [(name, extra) for extra in ("", *sorted(requirement.extras))]
    return {name: by for name, by in results.items() if not name.startswith("crossdraft")}  # of this repository


@pytest.mark.parametrize("lock", LOCKS)
def test_whatever_is_installed_is_pinned(lock: str) -> None:
    pinned = pinned_here(lock)
    expected = brought(LOCKS[lock], pinned)
    assert {"torch", "pyyaml", "markupsafe", "sympy", "pytest"} <= set(expected), "direct and transitive ones"
    missing = {name: by for name, by in expected.items() if name not in pinned}
    assert not missing, f"{lock} does not pin {missing} (and what requires it); run .ci/lock"


@pytest.mark.parametrize("lock", LOCKS)
def test_pins_satisfy_requirements(lock: str) -> None:
    pinned = pinned_here(lock)
    lines = [*PROJECT["dependencies"], *(line for e in LOCKS[lock] for line in PROJECT["optional-dependencies"][e])]
    for file in ROOT.glob("plugins/*/pyproject.toml"):
        if file.parent.name != "crossdraft-llamacpp":  # its library is built from source for its machine
            lines += tomllib.loads(file.read_text(encoding="utf-8"))["project"]["dependencies"]
    for requirement in map(Requirement, lines):
        name = canonicalize_name(requirement.name)
        if not name.startswith("crossdraft"):  # of this repository
            assert requirement.specifier.contains(pinned[name]), f"{lock} pins {name} {pinned[name]}: {requirement}"


@pytest.mark.parametrize("lock", LOCKS)
def test_lock_holds_exact_versions_only(lock: str) -> None:
    """No address, path or hash, so that it serves any index; no CUDA library, which PyTorch pins itself."""
    for pin in pins(lock):
        assert re.fullmatch(r"==[^*,]+", str(pin.specifier)) and not pin.url, pin
        assert not CUDA.fullmatch(pin.name), pin
