"""Fixtures for whole runs: tiny models, prompts, recipes, and names that are registered for one test."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_models import VOCAB, make_tokenizer, save_model

from crossdraft.framework import plugins
from crossdraft.framework.contracts.hookspecs import hookimpl


@pytest.fixture(scope="session")
def models(tmp_path_factory: Any) -> dict[str, str]:
    """Directories of a target and of models that draft for it."""
    return save_models(tmp_path_factory.mktemp("models"))


def save_models(root: Path, layers: int = 2) -> dict[str, str]:
    return {
        "target": save_model(root / "target", layers=layers),
        "same": save_model(root / "same", layers=layers),  # predicts the same tokens as the target
        "narrow": save_model(root / "narrow", seed=2, width=64, layers=layers),
        "wide": save_model(root / "wide", seed=3, width=80, layers=layers),
        "short": save_model(root / "short", seed=4, context=16, layers=layers),
        "other": save_model(root / "other", seed=5, vocab=VOCAB | {"w5": 6, "w6": 5}, layers=layers),
        "nan": save_model(root / "nan", nan=True, layers=layers),
    }


@pytest.fixture(scope="session")
def write_prompts() -> Callable[..., str]:
    """``write_prompts(path, n=6, length=5)``: n prompts of some words, every third one with a second turn."""
    return _write_prompts


def _write_prompts(path: Path, n: int = 6, length: int = 5) -> str:
    rows = []
    for i in range(n):
        words = " ".join(f"w{5 + (7 * i + k) % 12}" for k in range(length))
        turns = [words, "w9 w8"] if i % 3 == 0 else [words]
        rows.append({"question_id": f"q{i}", "category": "abc"[i % 3], "turns": turns})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def recipe_file(tmp_path: Path) -> Callable[[str], str]:
    """``recipe_file(text)`` writes ``recipe.yaml`` and returns its path."""

    def write(text: str) -> str:
        path = tmp_path / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def install() -> Iterator[Callable[..., None]]:
    """``install("drafters", ("name", object))`` registers names for the length of one test."""
    added: list[Any] = []

    def add(kind: str, *names: tuple[str, Any]) -> None:
        def hook(register: Any) -> None:
            for name in names:
                register(*name)

        plugin = SimpleNamespace(**{f"crossdraft_register_{kind}": hookimpl(hook)})
        plugins.manager().register(plugin, f"test-{kind}-{len(added)}")
        added.append(plugin)

    yield add
    for plugin in added:
        plugins.manager().unregister(plugin)


@pytest.fixture(scope="session")
def tokenizers() -> tuple[Any, Any]:
    """One with a chat template, one without."""
    return make_tokenizer(), make_tokenizer(chat=False)
