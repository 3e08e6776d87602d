"""Plug-ins: names, look-up, and what happens to broken ones."""

import pickle
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from crossdraft.framework import plugins
from crossdraft.framework.contracts.drafter import Drafter
from crossdraft.framework.contracts.hookspecs import hookimpl
from crossdraft.framework.errors import ContractError, UnknownNameError


@pytest.fixture
def install() -> Iterator[Any]:
    """Register plug-in objects in this process for the length of one test."""
    added: list[Any] = []

    def add(plugin: Any, name: str = "extra") -> None:
        plugins.manager().register(plugin, name)
        added.append(plugin)

    yield add
    for plugin in added:
        plugins.manager().unregister(plugin)


def registers(kind: str, *names: tuple[Any, ...]) -> Any:
    """A plug-in that registers `names`, each ``(name, reference[, summary])``, as `kind`."""

    def hook(register: Any) -> None:
        for item in names:
            register(*item)

    return SimpleNamespace(**{f"crossdraft_register_{kind}": hookimpl(hook)})


def test_entries_name_their_provider(install: Any) -> None:
    install(registers("models", ("toy", Path("/nowhere"), "a toy")))
    entry = plugins.entries("models")["toy"]
    assert (entry.summary, entry.provider) == ("a toy", "extra (in this process)")


def test_unregistering_takes_names_away() -> None:
    plugin = registers("models", ("toy", Path("/nowhere")))
    plugins.manager().register(plugin)
    assert "toy" in plugins.entries("models")
    plugins.manager().unregister(plugin)
    assert "toy" not in plugins.entries("models")


def test_builtin_strategies_keep_their_contract() -> None:
    for kind in ("drafters", "verifiers"):
        result = plugins.entries(kind)
        assert result
        for name in result:
            assert plugins.get(kind, name).name == name


def test_unknown_name_suggests_and_lists(install: Any) -> None:
    install(registers("models", ("smol", Path("/nowhere"))))
    with pytest.raises(UnknownNameError, match=r"no model named 'smoll'; did you mean 'smol'\? Installed: .*smol"):
        plugins.get("models", "smoll")
    with pytest.raises(UnknownNameError, match="kind of plug-in"):
        plugins.entries("drafter")


def test_errors_survive_trip_from_worker() -> None:
    error = UnknownNameError.among("model", "x", ["y"])
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_taken_name_stays_with_first(install: Any) -> None:
    install(registers("models", ("toy", Path("/first"))), "first")
    install(registers("models", ("toy", Path("/second")), ("other", Path("/other"))), "second")
    assert plugins.entries("models")["toy"].ref == Path("/first")
    assert "other" in plugins.entries("models")
    assert any("already provided by first" in b.error for b in plugins.broken() if "second" in b.provider)


def test_registration_that_raises_is_skipped_whole(install: Any, caplog: Any) -> None:
    @hookimpl
    def crossdraft_register_models(register: Any) -> None:
        register("early", Path("/nowhere"))
        raise RuntimeError("boom")

    install(SimpleNamespace(crossdraft_register_models=crossdraft_register_models))
    assert "early" not in plugins.entries("models")
    assert any(b.error == "RuntimeError: boom" for b in plugins.broken())
    assert "boom" in caplog.text


@pytest.mark.parametrize("name, reference", [("", "m:o"), (" x", "m:o"), ("x", "no-colon"), ("x", "m:")])
def test_bad_registrations_are_reported(install: Any, name: str, reference: str) -> None:
    install(registers("drafters", (name, reference)))
    assert any("extra" in b.provider for b in plugins.broken())


def test_misspelt_hooks_and_empty_plugins_are_refused() -> None:
    misspelt = SimpleNamespace(crossdraft_register_drafter=hookimpl(lambda register: None))
    with pytest.raises(Exception, match="crossdraft_register_drafter"):
        plugins.manager().register(misspelt)
    with pytest.raises(ContractError, match="no hook"):
        plugins.manager().register(SimpleNamespace())
    assert not plugins.manager().is_registered(misspelt)


def test_registering_twice_keeps_first(install: Any) -> None:
    plugin = registers("models", ("toy", Path("/nowhere")))
    install(plugin)
    with pytest.raises(ValueError, match="already registered"):
        plugins.manager().register(plugin, "again")
    assert "toy" in plugins.entries("models")


class _Incomplete(Drafter):
    name = "incomplete"


@pytest.mark.parametrize(
    "reference, sentence",
    [
        ("no_such_module:X", "ModuleNotFoundError"),
        ("json:NoSuchThing", "AttributeError"),
        ("json:JSONDecoder", r"not a subclass of crossdraft\.Drafter"),
        (_Incomplete, "does not define propose, traits"),
        (
            type("NoTraits", (_Incomplete,), {"traits": None, "propose": None}),
            r"NoTraits\.traits must be a classmethod",
        ),
        (type("Misnamed", (_Incomplete,), {"traits": print, "propose": None}), "it must be 'broken'"),
    ],
)
def test_get_reports_error(install: Any, reference: Any, sentence: str) -> None:
    install(registers("drafters", ("broken", reference)))
    with pytest.raises(ContractError, match=f"the drafter 'broken' of extra .* is unusable: .*{sentence}"):
        plugins.get("drafters", "broken")


def test_entry_points_that_fail_do_not_stop_others(monkeypatch: Any, tmp_path: Path) -> None:
    (tmp_path / "good_plugin.py").write_text(
        "from crossdraft import hookimpl\n"
        "@hookimpl\ndef crossdraft_register_models(register): register('good', 'a:b')\n"
    )
    (tmp_path / "bad_plugin.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    results = [EntryPoint(name, f"{name}_plugin", "crossdraft") for name in ("absent", "bad", "good")]
    monkeypatch.setattr(plugins, "entry_points", lambda group: results)
    manager = plugins.Manager()
    manager.load_entry_points()
    names, broken = manager.collected()
    assert list(names["models"]) == ["good"]
    assert [b.error.partition(":")[0] for b in broken] == ["ModuleNotFoundError", "ZeroDivisionError"]
    for module in ("good_plugin", "bad_plugin"):
        sys.modules.pop(module, None)


def test_notifications_reach_everyone(install: Any, caplog: Any) -> None:
    events: list[Any] = []

    def failing(run: Any) -> None:
        raise RuntimeError("tracker is down")

    def working(run: Any, cell: Any) -> None:
        events.append((run, cell))

    install(SimpleNamespace(crossdraft_run_started=hookimpl(failing)), "failing")
    install(SimpleNamespace(crossdraft_cell_finished=hookimpl(working)), "working")
    plugins.notify("crossdraft_run_started", run={"name": "r"})
    plugins.notify("crossdraft_cell_finished", run={"name": "r"}, cell={"id": "c"})
    assert events == [({"name": "r"}, {"id": "c"})]
    assert "tracker is down" in caplog.text


@pytest.mark.parametrize("name", plugins._CALLED)
def test_missing_companion_is_named(name: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(plugins, "find_spec", lambda module: None)
    with pytest.raises(UnknownNameError, match=f"the {name} is part of crossdraft-.*: pip install plugins/crossdraft-"):
        plugins.of_companion(name)
