"""The contract tests of all drafters as cases of other tests, and heads for them."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from crossdraft_simulated_cuda import installed
from head_checkpoints import write_heads
from pydantic import ValidationError

from crossdraft.framework.plugins import entries
from crossdraft.testing import DrafterContract

ROOT = Path(__file__).parents[2]


@cache
def contracts() -> dict[str, DrafterContract]:
    """Contract tests of drafters, by name: those of the core, and of packages of this repository that can be imported.

    Tests whose options a fixture makes are left out.
    """
    companions = [
        path for path in ROOT.glob("plugins/crossdraft-*") if importlib.util.find_spec(path.name.replace("-", "_"))
    ]
    tops = [ROOT / "tests" / "contract", *sorted(companions)]
    files = [path for top in tops for path in sorted(top.rglob("test_*.py"))]
    results: dict[str, DrafterContract] = {}
    for path in files:
        text = path.read_text(encoding="utf-8")
        if path.stem == "test_mistakes" or not any(base in text for base in ("(DrafterContract)", "(Heads)")):
            continue
        for name, value in vars(_module(path)).items():
            if isinstance(value, type) and issubclass(value, DrafterContract) and name.startswith("Test"):
                if hasattr(value, "use"):
                    value.use(Path("heads"))
                contract = value()
                with suppress(ValidationError):
                    assert contract.config
                    results[name] = contract
    return results


def pytest_generate_tests(metafunc: Any) -> None:
    """Parametrise tests with an argument ``case`` by the names of `contracts`, without those that no tiny model fits.

    Those that the module does not name in ``QUICK`` are slow.
    """
    if "case" in metafunc.fixturenames:
        # Only runs on the simulated device import the tests of all drafters.
        names = [
            name
            for name, contract in (contracts() if installed() else {}).items()
            if contract.drafting.name in entries("drafters") and contract.options.get("mode") != "slem"
        ]
        marks = {True: (), False: pytest.mark.slow}
        metafunc.parametrize("case", [pytest.param(n, marks=marks[n in metafunc.module.QUICK]) for n in names])


def _module(path: Path) -> Any:
    if path.stem not in sys.modules:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[path.stem])
    return sys.modules[path.stem]


def write_all_heads(root: Path, target: Any) -> Path:
    """Heads for ``target`` of every drafter that can be imported."""
    write_heads(root, target, target_ids=torch.tensor([0, 1, 2, 3, 4, 5, 7, 8, 11]))
    for entry in entries("drafters").values():  # a companion's own heads
        if entry.provider.startswith("crossdraft-drafters "):
            from further_heads import write_further_heads

            write_further_heads(root, target, mask_token=12)
            break
    return root


def with_files(name: str, heads: Path, model: str) -> dict[str, Any]:
    """The drafter of a contract test, with its heads in ``heads`` or the draft model ``model``."""
    contract = contracts()[name]
    options = {"name": contract.drafting.name, **contract.options}
    if "model" in options:
        directory = heads / (getattr(contract, "directory", "") or options["name"])
        options["model"] = str(directory) if directory.is_dir() else model
    return options
