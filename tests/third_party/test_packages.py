"""The packages under ``plugins/`` that bring strategies: their own tests, their recipes, and pip's view of them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import crossdraft_by_shape
import crossdraft_ngram_cache
import pytest
import test_crossdraft_by_shape
import test_crossdraft_ngram_cache
from crossdraft_ngram_cache.drafter import NgramCache
from test_crossdraft_by_shape import test_rules_that_cannot_be_wrapped  # noqa: F401
from test_crossdraft_ngram_cache import (  # noqa: F401
    test_sizes_that_cannot_be,
    test_the_most_frequent_follower_of_the_longest_context,
    test_the_oldest_context_is_forgotten_first,
    test_thresholds_keep_guesses_back,
)
from tiny_models import save_model

import crossdraft
from crossdraft.framework.bench.matrix import load_recipe, plan
from crossdraft.framework.cli import main as cli
from crossdraft.framework.plugins import entries, manager

ROOT = Path(__file__).parents[2]
PACKAGES = {"drafters": {"ngram-cache": crossdraft_ngram_cache}, "verifiers": {"by-shape": crossdraft_by_shape}}


@pytest.fixture(autouse=True, scope="module")
def installed() -> Iterator[None]:
    """As pip would have it, if it is not."""
    missing = [module for kind, ours in PACKAGES.items() for n, module in ours.items() if n not in entries(kind)]
    for module in missing:
        manager().register(module)
    yield
    for module in missing:
        manager().unregister(module)


@pytest.mark.slow
class TestNgramCache(test_crossdraft_ngram_cache.TestNgramCache):
    pass


@pytest.mark.slow
class TestByShape(test_crossdraft_by_shape.TestByShape):
    pass


def test_certified(capsys: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("CROSSDRAFT_CACHE", str(tmp_path))
    assert cli.main(["certify", "--drafter", "{name: ngram-cache, gamma: 2}", "--verifier", "token"]) == 0
    shapes = ["chain", "tree-top-2-1"]  # the others are slow ones
    assert cli.main(["certify", "--verifier", "by-shape", *(word for s in shapes for word in ("--draft", s))]) == 0
    assert capsys.readouterr().out.count(" yes") >= 1 + len(shapes)


@pytest.mark.parametrize("folder", ["crossdraft-ngram-cache", "crossdraft-by-shape"])
def test_its_recipe_is_one(folder: str, tmp_path: Path) -> None:
    target = save_model(tmp_path / "target")
    changes = [f"target={target}"]
    if folder == "crossdraft-by-shape":
        changes += [f"drafters.{i}.model={target}" for i in range(3)]
    found = plan(load_recipe(str(ROOT / "plugins" / folder / "recipe.yaml"), changes))
    names = {name for cell in found.cells for name in (cell.drafter.name, cell.verifier.name)}
    assert folder.removeprefix("crossdraft-") in names and not found.skipped
    project = tomllib.loads((ROOT / "plugins" / folder / "pyproject.toml").read_text(encoding="utf-8"))
    assert list(project["project"]["entry-points"]["crossdraft"]) == [folder.removeprefix("crossdraft-")]


@pytest.fixture(scope="module")
def target(tmp_path_factory: Any) -> crossdraft.LoadedModel:
    return crossdraft.load_model(save_model(tmp_path_factory.mktemp("m") / "target"), dtype="float32", device="cpu")


def test_a_cache_that_is_held_knows_the_last_answers(target: Any) -> None:
    """The same question twice: the second answer is drafted from the first one."""
    cache = NgramCache(NgramCache.Config(gamma=4))
    ask = {"max_new_tokens": 16, "temperature": 0}
    (first,) = crossdraft.generate(target, [[5, 9, 3]], drafter=cache, **ask)
    (again,) = crossdraft.generate(target, [[5, 9, 3]], drafter=cache, **ask)
    (fresh,) = crossdraft.generate(target, [[5, 9, 3]], drafter=NgramCache, **ask)
    assert first.tokens == again.tokens == fresh.tokens
    rounds = [[r.tau for r in response.rounds] for response in (first, again, fresh)]
    assert rounds[0] == rounds[2] and sum(rounds[1]) > sum(rounds[0]) and len(rounds[1]) == 4  # 5 + 5 + 5 + 1 tokens


def test_by_shape_says_what_the_rule_of_the_shape_says(target: Any) -> None:
    ask = {"max_new_tokens": 12, "seed": 3}
    for drafter, rule in {"prompt-lookup": "block", "small-lm-tree": "traversal", "small-lm-iid": "spectr"}.items():
        given = {"name": drafter} | ({"model": target.name} if drafter != "prompt-lookup" else {})
        tokens = [
            crossdraft.generate(target, [[5, 9, 5, 9, 5]], drafter=given, verifier=verifier, **ask)[0].tokens
            for verifier in ("by-shape", rule)
        ]
        assert tokens[0] == tokens[1], drafter
