"""Plug-ins that fail in all ways: reported by name, without effect on others."""

# ruff: noqa: E501 (an input and its words on one line can be read)

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, Field, field_serializer, model_validator

from crossdraft.framework import plugins
from crossdraft.framework.cli import main as cli
from crossdraft.framework.contracts.draft_kind import CHAIN
from crossdraft.framework.contracts.drafter import Drafter, DraftTraits, StrategyConfig
from crossdraft.framework.contracts.hookspecs import hookimpl
from crossdraft.framework.contracts.verifier import Verifier, VerifierTraits
from crossdraft.framework.util.releases import release

#: What the module of a plug-in holds, and words of the reason why it is skipped.
MODULES: dict[str, tuple[str, list[str]]] = {
    "raises": ("1 / 0", ["ZeroDivisionError: division by zero"]),
    "does not parse": ("def (", ["SyntaxError"]),
    "is no text": ("\0", ["SyntaxError", "null bytes"]),
    "exits": ("import sys; sys.exit(0)", ["SystemExit: 0"]),
    "exits with words": ("raise SystemExit('bye')", ["SystemExit: bye"]),
    "is cancelled": ("import asyncio; raise asyncio.CancelledError('late')", ["CancelledError: late"]),
    "raises a BaseException": ("class Odd(BaseException): pass\nraise Odd('odd')", ["Odd: odd"]),
    "raises what cannot be said": ("class Odd(Exception):\n  def __str__(self): raise ValueError\nraise Odd", ["Odd"]),
    "raises a megabyte": ("raise RuntimeError('x' * 10**6)", ["RuntimeError: xxx", "…"]),
    "raises escape codes": ("raise RuntimeError('\\x1b[31m')", ["RuntimeError: \\x1b[31m"]),
    "raises many lines": ("raise RuntimeError('first\\nsecond')", ["RuntimeError: first"]),
    "recurses": ("def f(): f()\nf()", ["RecursionError"]),
    "wants what is not there": ("import no_such_module_at_all", ["ModuleNotFoundError: No module named 'no_such_module_at_all'"]),
    "is empty": ("", ["it implements no hook"]),
    "misspells a hook": ("from crossdraft import hookimpl\n@hookimpl\ndef crossdraft_register_drafter(register): pass", ["crossdraft_register_drafter"]),
    "raises in a hook": ("HOOK raise RuntimeError('boom')", ["RuntimeError: boom"]),
    "exits in a hook": ("HOOK raise SystemExit(3)", ["SystemExit: 3"]),
    "registers no name": ("HOOK register('', 'a:b')", ["'' is not a name"]),
    "registers a number": ("HOOK register(3, 'a:b')", ["3 is not a name"]),
    "registers escape codes": ("HOOK register('\\x1b[31m', 'a:b')", ["'\\x1b[31m' is not a name"]),
    "registers two lines": ("HOOK register('a\\nb', 'a:b')", ["'a\\nb' is not a name"]),
    "registers half a pair": ("HOOK register('\\ud800', 'a:b')", ["'\\ud800' is not a name"]),
    "registers a long name": ("HOOK register('n' * 5000, 'a:b')", ["too long a name", "the maximum is 200"]),
    "registers a bad reference": ("HOOK register('a', 'b')", ["is not 'module:object'"]),
    "registers a number as a summary": ("HOOK register('a', 'b:c', summary=42)", ["the summary of 'a', 42"]),
    "registers a summary of two lines": ("HOOK register('a', 'b:c', summary='x\\ny')", ["the summary of 'a'"]),
    "registers with a wrong key": ("HOOK register('a', 'b:c', about='x')", ["TypeError"]),
    "takes a built-in name": ("from crossdraft import hookimpl\n@hookimpl\ndef crossdraft_register_prompts(register): register('builtin', 'a:b')", ["already provided by"]),
}  # fmt: skip
HOOK = "from crossdraft import hookimpl\n@hookimpl\ndef crossdraft_register_models(register): "


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: Any) -> Callable[[dict[str, str]], None]:
    """``manager({name: source})`` installs modules with these sources as plug-ins."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(sources: dict[str, str]) -> None:
        own = [
            p for p in plugins.entry_points(group="crossdraft") if p.dist is not None and p.dist.name == "crossdraft"
        ]
        results = []
        for name, source in sources.items():
            (tmp_path / f"{name}.py").write_text(source.replace("HOOK ", HOOK), encoding="utf-8")
            monkeypatch.delitem(sys.modules, name, raising=False)
            results.append(EntryPoint(name, name, "crossdraft"))
        monkeypatch.setattr(plugins, "entry_points", lambda group: [*own, *results])
        one = plugins.Manager()
        one.load_entry_points()
        monkeypatch.setattr(plugins, "manager", lambda: one)

    return make


@pytest.mark.parametrize("subject", MODULES)
def test_module(subject: str, manager: Any, capsys: Any) -> None:
    source, words = MODULES[subject]
    manager({"theirs": source, "zz_fine": "HOOK register('zz-fine', 'a:b')"})
    assert cli.main(["list", "plugins", "--json"]) == 0
    broken = json.loads(capsys.readouterr().out)["broken"]
    assert len(broken) == 1 and all(word in broken[0]["error"] for word in words), broken
    assert len(broken[0]["error"]) < 500 and broken[0]["error"].isprintable()
    for command in (["list", "plugins"], ["list"], ["list", "drafters", "prompt-lookup"], ["list", "env"]):
        assert cli.main(command) == 0
        assert "Traceback" not in "".join(capsys.readouterr())
    assert cli.main(["list", "models", "--json"]) == 0
    assert "zz-fine" in capsys.readouterr().out


def test_keyboard_interrupt_propagates(manager: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        manager({"theirs": "raise KeyboardInterrupt"})
    with pytest.raises(KeyboardInterrupt):
        manager({"theirs": "HOOK raise KeyboardInterrupt"})
        plugins.entries("models")


def test_plugin_prints_go_to_stderr(manager: Any, capsys: Any) -> None:
    manager({"theirs": "print('hello from theirs')\nHOOK print('registering'); register('a', 'theirs:x')"})
    for command in (["list", "--json"], ["list", "plugins", "--json"], ["list", "models", "--json"]):
        assert cli.main(command) == 0
        out, _ = capsys.readouterr()
        assert json.loads(out) and "hello" not in out and "registering" not in out


METADATA = b"Metadata-Version: 2.1\nName: theirs\nVersion: 1\n"
POINTS = b"[crossdraft]\nfirst = json:loads\n"
DISTRIBUTIONS: dict[str, tuple[bytes, bytes | None, list[str]]] = {
    "not a reference": (b"[crossdraft]\nfirst = a b\n", METADATA, ["theirs 1, first = a b", "module:object"]),
    "a reference with a space": (b"[crossdraft]\nfirst = a b:c\n", METADATA, ["theirs 1, first = a b:c", "module:"]),
    "no value": (b"[crossdraft]\nfirst =\n", METADATA, ["theirs 1, first =", "module:object"]),
    "a relative module": (b"[crossdraft]\nfirst = .json:x\n", METADATA, ["theirs 1, first = .json:x", "relative"]),
    "no = in a line": (b"[crossdraft]\nfirst\n", METADATA, ["theirs-1.dist-info", "TypeError"]),
    "not UTF-8": (b"[crossdraft]\nb\xff = json:loads\n", METADATA, ["theirs-1.dist-info", "UnicodeDecodeError"]),
    "escapes": (b"[crossdraft]\n\x1b[31m = json:loads\n", METADATA, [r"theirs 1, \x1b[31m = json:loads", "no hook"]),
    "no metadata": (POINTS, None, ["theirs-1.dist-info, first = json:loads", "no hook"]),
    "no version": (POINTS, b"Metadata-Version: 2.1\nName: theirs\n", ["theirs, first = json:loads", "no hook"]),
    "metadata that is not UTF-8": (POINTS, b"Name: \xff\nVersion: 1\n", ["theirs-1.dist-info, first", "no hook"]),
}


@pytest.mark.parametrize("subject", DISTRIBUTIONS)
def test_malformed_distribution(subject: str, monkeypatch: Any, tmp_path: Path, capsys: Any) -> None:
    """It is a line in ``crossdraft list plugins``, and affects neither others nor libraries with plug-ins of their own."""
    points, metadata, words = DISTRIBUTIONS[subject]
    directory = tmp_path / "theirs-1.dist-info"
    directory.mkdir()
    (directory / "entry_points.txt").write_bytes(points)
    if metadata is not None:
        (directory / "METADATA").write_bytes(metadata)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(plugins, "_damaged", {})
    fresh = plugins.Manager()
    fresh.load_entry_points()
    monkeypatch.setattr(plugins, "manager", lambda: fresh)
    assert "prompt-lookup" in plugins.entries("drafters") and entry_points(group="crossdraft") is not None
    assert cli.main(["list", "plugins"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "theirs" in line]
    assert all(word in line for word in words) and "\x1b" not in line
    assert release("theirs") in ("", "1")


@pytest.mark.parametrize("error", [RuntimeError("down"), SystemExit(0), GeneratorExit()])
def test_notification(error: BaseException, caplog: Any) -> None:
    def failing(run: Any) -> None:
        print("starting")
        raise error

    events: list[Any] = []
    bad = SimpleNamespace(crossdraft_run_started=hookimpl(failing))
    good = SimpleNamespace(crossdraft_run_started=hookimpl(lambda run: events.append(run)))
    for plugin, name in ((bad, "bad"), (good, "good")):
        plugins.manager().register(plugin, name)
    try:
        plugins.notify("crossdraft_run_started", run={"name": "r"})
    finally:
        for plugin in (bad, good):
            plugins.manager().unregister(plugin)
    assert events == [{"name": "r"}] and type(error).__name__ in caplog.text


# -- strategies ----------------------------------------------------------------------------------------------


def drafter(traits: Any = None, config: Any = StrategyConfig, base: Any = Drafter) -> Any:
    """Create a drafter called ``theirs`` with these traits (a value, or a function of the config) and this Config."""
    inputs = traits if callable(traits) else lambda *_: traits

    def propose(self: Any, sequences: Any, rng: Any) -> Any:
        raise AssertionError("nobody was to draft")

    members = {
        "name": "theirs",
        "Config": config,
        "traits": classmethod(lambda cls, *a: inputs(*a)),
        "propose": propose,
    }
    return type("Theirs", (base,), members)


def raises(error: BaseException) -> Any:
    def traits(*_: Any) -> Any:
        raise error

    return traits


CHAINS = DraftTraits(kind=CHAIN, point_mass=True, nodes=2)


class Wants(StrategyConfig):
    gamma: int


class Plain:
    gamma = 2


class Unstrict(BaseModel):
    gamma: int = 2


class Explodes(StrategyConfig):
    @model_validator(mode="after")
    def _boom(self) -> Any:
        raise ZeroDivisionError("boom")


class Exits(StrategyConfig):
    @model_validator(mode="after")
    def _exit(self) -> Any:
        sys.exit(0)


class NoJson(StrategyConfig):
    thing: Any = Field(default_factory=object)


class Infinite(StrategyConfig):
    thing: Any = float("inf")


class Forgets(StrategyConfig):
    gamma: int = 2

    @field_serializer("gamma")
    def _plus(self, gamma: int) -> int:
        return gamma + 1


class Property(StrategyConfig):
    """A config field called model that is not a model name."""

    size: int = 3

    @property
    def model(self) -> str:
        return "no such model anywhere"


class Inside(StrategyConfig):
    model_: str = "x"
    gamma: str = "2"


#: Drafters, and words of the sentence.
DRAFTERS: dict[str, tuple[Any, list[str]]] = {
    "no class": (lambda: 3, ["is not a subclass of crossdraft.Drafter"]),
    "another class": (dict, ["is not a subclass of crossdraft.Drafter"]),
    "a module that exits": ("exits_at_once:x", ["SystemExit: 0"]),
    "a module that is not there": ("no_such_module:x", ["ModuleNotFoundError"]),
    "an object that is not there": ("json:nothing", ["AttributeError"]),
    "another name": (type("Other", (drafter(CHAINS),), {"name": "other"}), ["it must be 'theirs'"]),
    "a config that is a plain class": (drafter(CHAINS, Plain), ["Theirs.Config is", "not a crossdraft.StrategyConfig"]),
    "a config that is None": (drafter(CHAINS, None), ["Theirs.Config is None"]),
    "a config that is a dict": (drafter(CHAINS, {"gamma": 2}), ["Theirs.Config is {'gamma': 2}"]),
    "a config of pydantic alone": (drafter(CHAINS, Unstrict), ["not a crossdraft.StrategyConfig"]),
    "a config that explodes": (drafter(CHAINS, Explodes), ["its Config raised ZeroDivisionError: boom"]),
    "a config that exits": (drafter(CHAINS, Exits), ["its Config raised SystemExit: 0"]),
    "a config that is no JSON": (drafter(CHAINS, NoJson), ["its Config, written as JSON and read again, raised"]),
    "a config with infinity": (drafter(CHAINS, Infinite), ["its Config, written as JSON", "thing=inf becomes thing=None"]),
    "a config that changes": (drafter(CHAINS, Forgets), ["its Config, written as JSON", "gamma=2 becomes gamma=3"]),
    "traits that raise": (drafter(raises(RuntimeError("boom"))), ["traits() raised RuntimeError: boom"]),
    "traits that exit": (drafter(raises(SystemExit(0))), ["traits() raised SystemExit: 0"]),
    "traits that are None": (drafter(None), ["traits() must return crossdraft.DraftTraits, not None"]),
    "traits that are a dict": (drafter({"kind": "chain"}), ["traits() must return crossdraft.DraftTraits"]),
    "traits of a verifier": (drafter(VerifierTraits(frozenset({"chain"}))), ["must return crossdraft.DraftTraits"]),
    "traits of an unknown shape": (drafter(DraftTraits("star", True, 2)), ["kind='star', which is not a DraftKind"]),  # type: ignore[arg-type]
    "traits of a list": (drafter(DraftTraits(["chain"], True, 2)), ["kind=['chain']"]),  # type: ignore[arg-type]
    "negative nodes": (drafter(DraftTraits(CHAIN, True, -1)), ["nodes=-1, which is not a number of nodes"]),
    "half a node": (drafter(DraftTraits(CHAIN, True, 1.5)), ["nodes=1.5"]),  # type: ignore[arg-type]
    "nodes in words": (drafter(DraftTraits(CHAIN, True, "2")), ["nodes='2'"]),  # type: ignore[arg-type]
    "no nodes": (drafter(DraftTraits(CHAIN, True, None)), ["nodes=None"]),  # type: ignore[arg-type]
    "200,000,000 nodes": (drafter(DraftTraits(CHAIN, True, 200_000_000)), ["nodes=200000000", "from 0 to 4096"]),
    "deeper than its nodes": (drafter(DraftTraits(CHAIN, True, 2, levels=3)), ["levels=3"]),
    "levels in words": (drafter(DraftTraits(CHAIN, True, 2, levels="2")), ["levels='2'"]),  # type: ignore[arg-type]
    "point_mass in words": (drafter(DraftTraits(CHAIN, "yes", 2)), ["point_mass='yes'"]),  # type: ignore[arg-type]
    "layers that are a number": (drafter(DraftTraits(CHAIN, True, 2, hidden_layers=3)), ["hidden_layers=3"]),  # type: ignore[arg-type]
    "layers that are NaN": (drafter(DraftTraits(CHAIN, True, 2, hidden_layers=(float("nan"),))), ["hidden_layers=(nan,)"]),
    "branching in words": (drafter(DraftTraits(CHAIN, True, 2, branching="22")), ["branching='22'"]),  # type: ignore[arg-type]
    "branching of nothing": (drafter(DraftTraits(CHAIN, True, 2, branching=(0,))), ["branching=(0,)"]),
    "nodes as the config says": (drafter(lambda config, _: DraftTraits(CHAIN, True, config.gamma), Inside), ["nodes='2'"]),
}  # fmt: skip


@pytest.fixture
def recipe(tmp_path: Path, target: str, monkeypatch: Any) -> str:
    (tmp_path / "exits_at_once.py").write_text("import sys; sys.exit(0)", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "recipe.yaml"
    file.write_text(f"target: {target}\ndrafters:\n  - theirs\nverifiers:\n  - token\n", encoding="utf-8")
    return str(file)


@pytest.mark.parametrize("subject", DRAFTERS)
def test_drafter(subject: str, refused: Any, recipe: str, install: Any) -> None:
    cls, words = DRAFTERS[subject]
    install("drafters", ("theirs", cls))
    refused(["run", recipe], "the drafter 'theirs' of test-drafters-0 (in this process) is unusable", *words, code=1)


@pytest.mark.parametrize("subject", DRAFTERS)
def test_drafter_in_list(subject: str, install: Any, capsys: Any) -> None:
    install("drafters", ("theirs", DRAFTERS[subject][0]))
    assert cli.main(["list"]) == 0
    code = cli.main(["list", "drafters", "theirs", "--json"])
    out, err = capsys.readouterr()
    assert code in (0, 1) and "Traceback" not in out + err
    assert code == 0 or err.count("crossdraft: error: the drafter 'theirs'") == 1


def test_error_location_is_reported(refused: Any, recipe: str, install: Any) -> None:
    install("drafters", ("theirs", drafter(raises(RuntimeError("boom")))))
    refused(["run", recipe], "recipe.yaml:3: the drafter 'theirs'", code=1)


def test_property_called_model_is_not_model(recipe: str, install: Any) -> None:
    from crossdraft.framework.bench.matrix import expand, load_recipe

    install("drafters", ("theirs", drafter(CHAINS, Property)))
    assert [c.drafter.config for c in expand(load_recipe(recipe)).cells] == [{}, {"size": 3}]


def test_config_with_required_options(refused: Any, recipe: str, install: Any, capsys: Any) -> None:
    install("drafters", ("theirs", drafter(CHAINS, Wants)))
    refused(["run", recipe], "recipe.yaml:3: drafter 'theirs' needs the key 'gamma'")
    assert cli.main(["list", "drafters", "theirs"]) == 0
    assert "(required)" in capsys.readouterr().out


def verifier(traits: Any, config: Any = StrategyConfig) -> Any:
    inputs = traits if callable(traits) else lambda *_: traits
    members = {"name": "theirs", "Config": config, "traits": classmethod(lambda cls, *a: inputs(*a)), "verify": None}
    return type("Theirs", (Verifier,), members)


VERIFIERS: dict[str, tuple[Any, list[str]]] = {
    "no class": (3, ["is not a subclass of crossdraft.Verifier"]),
    "a drafter": (drafter(CHAINS), ["is not a subclass of crossdraft.Verifier"]),
    "a plain config": (verifier(VerifierTraits(frozenset({"chain"})), Plain), ["not a crossdraft.StrategyConfig"]),
    "a config that exits": (verifier(VerifierTraits(frozenset({"chain"})), Exits), ["its Config raised SystemExit: 0"]),
    "traits that raise": (verifier(raises(RuntimeError("boom"))), ["traits() raised RuntimeError: boom"]),
    "traits that exit": (verifier(raises(SystemExit("bye"))), ["traits() raised SystemExit: bye"]),
    "traits that are None": (verifier(None), ["traits() must return crossdraft.VerifierTraits, not None"]),
    "traits of a drafter": (verifier(CHAINS), ["must return crossdraft.VerifierTraits"]),
    "an unknown shape": (verifier(VerifierTraits(frozenset({3}))), ["accepts=frozenset({3})"]),  # type: ignore[arg-type]
    "a text for shapes": (verifier(VerifierTraits("chain")), ["accepts='chain'"]),  # type: ignore[arg-type]
    "a kind for shapes": (verifier(VerifierTraits(CHAIN)), ["accepts=DraftKind("]),  # type: ignore[arg-type]
    "lossless perhaps": (verifier(VerifierTraits(frozenset({"chain"}), lossless="maybe")), ["lossless='maybe'"]),  # type: ignore[arg-type]
}  # fmt: skip


@pytest.mark.parametrize("subject", VERIFIERS)
def test_verifier(subject: str, refused: Any, recipe: str, install: Any) -> None:
    cls, words = VERIFIERS[subject]
    install("verifiers", ("theirs", cls))
    setting = ["--set", "drafters=[prompt-lookup]", "--set", "verifiers=[theirs]"]
    refused(["run", recipe, *setting], "the verifier 'theirs' of test-verifiers-0", *words, code=1)
    refused(["list", "verifiers", "theirs"], "the verifier 'theirs' of test-verifiers-0", *words, code=1)
    refused(["certify", "--verifier", "theirs"], "the verifier 'theirs' of test-verifiers-0", *words, code=1)


def test_unknown_names(refused: Any) -> None:
    refused(["list", "recipes", "nothing"], "there is no recipe named 'nothing'")
    refused(["list", "nothing"], "nothing")
    refused(["list", "drafters", "\x1b[31m"], "there is no drafter named '\\x1b[31m'")
    refused(["list", "drafters", "d" * 100_000], "there is no drafter named 'ddd", "…")


@pytest.mark.parametrize("error", [RuntimeError("boom"), SystemExit(0)])
def test_backend_that_fails_to_look(error: BaseException, install: Any, tmp_path: Path) -> None:
    from crossdraft.framework.contracts.models import Backend
    from crossdraft.framework.errors import ContractError
    from crossdraft.framework.models.load import load_model

    def supports(self: Any, path: Path) -> bool:
        raise error

    members = {"name": "theirs", "supports": supports, "load": None, "slots": None}
    install("backends", ("theirs", type("Theirs", (Backend,), members)))
    (tmp_path / "x.gguf").touch()
    with pytest.raises(ContractError, match=r"the backend 'theirs' of .* supports\(\) raised"):
        load_model(str(tmp_path / "x.gguf"))
