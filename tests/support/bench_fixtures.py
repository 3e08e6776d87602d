"""Fixtures: a recipe for the tests of the bench, with and without the command line."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from run_fixtures import save_models
from tiny_runs import RECIPE

from crossdraft.framework.cli import main as cli
from crossdraft.framework.cli.run import command
from crossdraft.framework.contracts.drafter import Drafter
from crossdraft.framework.report import write

#: Class attributes that count the calls until a drafter of these tests interrupts the run.
COUNTERS = ("after", "kill_after")


def _below(cls: type) -> Iterator[type]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _below(subclass)


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: Any) -> None:
    """Isolate the cache (no measured cost curves) and skip charts, which take seconds."""
    monkeypatch.setattr(write, "notify", lambda *_, **__: None)
    monkeypatch.setenv("CROSSDRAFT_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def certificates_are_not_counted(monkeypatch: Any) -> None:
    """Let drafters that end the process at their n-th call count those of the run, not those of its certificates."""
    certify = command.certify_missing

    def certify_uncounted(*args: Any) -> None:
        counters = [(cls, name) for cls in _below(Drafter) for name in COUNTERS if name in vars(cls)]
        kept = [(cls, name, getattr(cls, name)) for cls, name in counters]
        for cls, name, _ in kept:
            setattr(cls, name, 10**9)
        try:
            certify(*args)
        finally:
            for cls, name, count in kept:
                setattr(cls, name, count)

    monkeypatch.setattr(command, "certify_missing", certify_uncounted)


@pytest.fixture(scope="session")
def models(tmp_path_factory: Any) -> dict[str, str]:
    """Models of one layer: runs of many cells take half the time."""
    return save_models(tmp_path_factory.mktemp("models"), layers=1)


@pytest.fixture
def recipe(tmp_path: Path, models: dict[str, str], recipe_file: Any, write_prompts: Any) -> str:
    return recipe_file(RECIPE.format(prompts=write_prompts(tmp_path / "prompts.jsonl"), **models))


@pytest.fixture
def bench(recipe: str, tmp_path: Path, capsys: Any) -> Callable[..., tuple[int, str, str]]:
    """``bench(*settings, flags=[...])`` runs the recipe: exit code, standard output, standard error."""

    def go(*settings: str, flags: Any = ()) -> tuple[int, str, str]:
        arguments = [part for setting in settings for part in ("--set", setting)]
        code = cli.main(["run", recipe, "--out", str(tmp_path / "runs"), *arguments, *flags])
        return code, *capsys.readouterr()

    return go
