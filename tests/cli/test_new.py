"""``crossdraft new``: the created packages work without changes, and invalid names are rejected."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tiny_models import save_model

from crossdraft import Verdict
from crossdraft.framework import plugins
from crossdraft.framework.cli import main as cli
from crossdraft.framework.cli import new

LEFT = re.compile(r"example.?name", re.IGNORECASE)
KINDS = {"drafter": "my-drafter", "verifier": "rule-2", "prompts": "cities"}


@pytest.fixture
def written(tmp_path: Path, monkeypatch: Any) -> Iterator[Callable[[str], tuple[Path, ModuleType]]]:
    """``written(kind)`` creates a package in the working directory and registers it, as pip would."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CROSSDRAFT_CACHE", str(tmp_path / "cache"))
    modules: list[ModuleType] = []

    def make(kind: str) -> tuple[Path, ModuleType]:
        assert cli.main(["new", kind, KINDS[kind]]) == 0
        folder = tmp_path / KINDS[kind]
        monkeypatch.syspath_prepend(folder / "src")
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
        (module,) = project["project"]["entry-points"]["crossdraft"].values()
        modules.append(import_module(module))
        plugins.manager().register(modules[-1], "a new package")
        return folder, modules[-1]

    yield make
    for module in modules:
        plugins.manager().unregister(module)
        for name in [name for name in sys.modules if name.partition(".")[0] == module.__name__]:
            sys.modules.pop(name)


@pytest.mark.parametrize("kind", KINDS)
def test_package_runs_with_its_recipe(kind: str, written: Any, tmp_path: Path, capsys: Any) -> None:
    folder, module = written(kind)
    out = capsys.readouterr().out
    for file in folder.rglob("*.*"):
        if file.is_file() and file.parent.name != "__pycache__":
            assert file.name in out and not LEFT.search(file.name + file.read_text(encoding="utf-8"))
    assert module.__name__ == KINDS[kind].replace("-", "_")
    if kind != "prompts":
        assert plugins.get(f"{kind}s", KINDS[kind]).__name__ == {"drafter": "MyDrafter", "verifier": "Rule2"}[kind]
    shorter = [
        "--set",
        f"target={save_model(tmp_path / 'target', context=2048)}",
        "--set",
        "max_new_tokens=4",
        "--limit",
        "2",
    ]
    assert cli.main(["run", str(folder / "recipe.yaml"), *shorter, "--quiet"]) == 0
    assert ("prompt-lookup" if kind == "prompts" else KINDS[kind]) in capsys.readouterr().out


@pytest.mark.parametrize("kind, against", [("drafter", ["--verifier", "token"]), ("verifier", ["--draft", "chain"])])
def test_package_is_certified(kind: str, against: list[str], written: Any, capsys: Any) -> None:
    written(kind)
    assert cli.main(["certify", f"--{kind}", KINDS[kind], *against]) == 0
    rows = [
        line for line in capsys.readouterr().out.splitlines() if line.endswith((" yes", " no")) or "nothing" in line
    ]
    assert rows and all(row.endswith(" yes") for row in rows), rows


def test_lossy_change_is_detected(written: Any, capsys: Any, monkeypatch: Any) -> None:
    """A verifier that accepts every draft fails certification."""
    written("verifier")
    rule = plugins.get("verifiers", "rule-2")

    def accept_all(self: Any, draft: Any, p: Any, rng: Any) -> Any:
        return Verdict(draft.count, rng.draw(p[:, -1]))

    monkeypatch.setattr(rule, "verify", accept_all)
    assert cli.main(["certify", "--verifier", "rule-2", "--draft", "chain"]) == 1
    assert "NO" in capsys.readouterr().out


def python(*arguments: str, at: Path, **more: str) -> str:
    """Run a command with this interpreter, which must succeed, and return its output."""
    result = subprocess.run(
        [sys.executable, *arguments], cwd=at, capture_output=True, text=True, env={**os.environ, **more}
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


#: Not imported here: setuptools fails in a process that has imported distutils.
needs_setuptools = pytest.mark.skipif(find_spec("setuptools") is None, reason="setuptools is not installed")


@needs_setuptools
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_installed_package_passes_its_tests(kind: str, tmp_path: Path) -> None:
    """pip, editable, into a folder of its own; without network, so setuptools has to be here already."""
    name = KINDS[kind]
    folder, site = new.write_package(kind, name, tmp_path / name), tmp_path / "site"
    offline = ["--no-build-isolation", "--no-deps", "--no-index", "--quiet"]
    python("-m", "pip", "install", *offline, "--target", str(site), str(folder), at=tmp_path)
    listed = python("-m", "crossdraft", "list", new.KINDS[kind], "--json", at=tmp_path, PYTHONPATH=str(site))
    assert f'"name": "{name}"' in listed and f'"provider": "{name} 0.1.0"' in listed
    printed = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", at=folder, PYTHONPATH=str(site))
    assert re.search(r"^\d+ passed", printed, re.MULTILINE), printed


@needs_setuptools
@pytest.mark.thorough
@pytest.mark.parametrize(
    "kind", ["drafter", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("verifier", "prompts"))]
)
def test_installed_package_is_found_from_parent_directory(kind: str, tmp_path: Path) -> None:
    """Without a hyphen, folder and module have the same name.

    With a flat layout, Python would import the outer folder, because pip's editable finder comes last.
    """
    new.write_package(kind, "plain", tmp_path / "plain")
    site = tmp_path / "site"
    offline = ["--no-build-isolation", "--no-deps", "--no-index", "--quiet", "--disable-pip-version-check"]
    python("-m", "pip", "install", *offline, "--target", str(site), "-e", "plain", at=tmp_path)
    code = (
        f"import site, sys; site.addsitedir({str(site)!r})\n"
        "from crossdraft.framework.cli.main import main\n"
        f"sys.exit(main(['list', {new.KINDS[kind]!r}, '--json']))"
    )
    assert '"provider": "plain 0.1.0"' in python("-c", code, at=tmp_path)


@pytest.mark.parametrize("entry", ["shady", "shady.hooks"])
def test_folder_that_shadows_plugin_is_reported(entry: str, tmp_path: Path) -> None:
    metadata = tmp_path / "site" / "shady-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: shady\nVersion: 1.0\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text(f"[crossdraft]\nshady = {entry}\n", encoding="utf-8")
    folder = tmp_path / "here" / "shady"
    folder.mkdir(parents=True)
    result = subprocess.run(
        [sys.executable, "-m", "crossdraft", "list", "plugins"],
        cwd=folder.parent,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
    )
    printed = " ".join((result.stdout + result.stderr).split())
    assert f"the folder {folder} shadows the installed package 'shady'" in printed, printed
    assert "start Python in another folder, or rename" in printed and "no hook" not in printed


@pytest.mark.parametrize(
    "name, message",
    [
        ("My-Drafter", "'My-Drafter' is not a valid name; use lower-case letters, digits and single hyphens"),
        ("my_drafter", "is not a valid name"),
        ("2fast", "is not a valid name"),
        ("a--b", "is not a valid name"),
        ("a-", "is not a valid name"),
        ("", "'' is not a valid name"),
        ("../up", "is not a valid name"),
        ("ünder", "is not a valid name"),
        ("a" * 201, "has 201 characters; the maximum is 200"),
        ("prompt-lookup", "drafter 'prompt-lookup' is already provided by crossdraft"),
        ("lambda", "'lambda' is a Python keyword"),
        ("none-such-", "is not a valid name"),
        ("true", "'true' is a Python keyword"),
        ("json", "Python module 'json' already exists"),
        ("torch", "Python module 'torch' already exists"),
        ("crossdraft", "Python module 'crossdraft' already exists"),
    ],
)
def test_invalid_names(name: str, message: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", "drafter", name]) == 2
    err = capsys.readouterr().err
    assert message in err and err.startswith("crossdraft: error: ") and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_existing_folder_is_not_changed(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "file").touch()
    for arguments in (["mine"], ["other", "--out", "mine"], ["other", "--out", "file"], ["other", "--out", "file/x"]):
        assert cli.main(["new", "prompts", *arguments]) == 2
        assert "already exists" in (err := capsys.readouterr().err) or "cannot be written" in err
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "mine"]
    assert cli.main(["new", "prompts", "mine", "--out", "deep/down"]) == 0
    assert (tmp_path / "deep" / "down" / "src" / "mine.py").is_file()
