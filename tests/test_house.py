"""Structure of the code: imports point downwards, few packages, a complete public interface."""

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import crossdraft
from crossdraft._published import homes

ROOT = Path(__file__).parents[1]
#: What belongs to the house: the package, not its tests.
PARTS = ("framework", "drafters", "verifiers", "recipes", "benchmarks", "plugins")


def lint(root: Path, inside: Path) -> subprocess.CompletedProcess:
    """`lint-imports` on the package whose folder lies in ``inside``, with the contracts of ``root``."""
    command = [
        str(Path(sys.executable).with_name("lint-imports")),
        "--config",
        str(root / "pyproject.toml"),
        "--no-cache",
    ]
    path = os.pathsep.join([str(inside), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(command, capture_output=True, text=True, cwd=inside, env={**os.environ, "PYTHONPATH": path})


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package in a folder of its own, to be spoilt."""
    for part in ("framework", "drafters", "verifiers", "recipes", "testing"):
        ignore = shutil.ignore_patterns("__pycache__", "*.yaml", "*.jsonl")
        shutil.copytree(ROOT / part, tmp_path / "crossdraft" / part, ignore=ignore)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    for module in settings["root_packages"][1:]:
        shutil.copytree(ROOT / "plugins" / module.replace("_", "-") / module, tmp_path / module)
    for file in [*ROOT.glob("*.py"), *ROOT.glob("*.pyi"), ROOT / "pyproject.toml"]:
        shutil.copy(file, tmp_path / "crossdraft" / file.name)
    return tmp_path


def test_imports_point_downwards(copy: Path) -> None:
    result = lint(copy / "crossdraft", copy)
    assert result.returncode == 0, result.stdout


#: Wrong imports, of each contract: file, line, broken contract, and the complaint about this import.
WRONG_IMPORTS = [
    (
        "framework/errors.py",
        "from .engine import decoder",
        "layers import downward BROKEN",
        "crossdraft.framework.errors -> crossdraft.framework.engine.decoder",
    ),
    (
        "framework/lm/kv_cache.py",
        "from . import transformers_lm",
        "no cycles BROKEN",
        "No cycles are allowed in crossdraft.framework.lm.",
    ),
    (
        "drafters/none.py",
        "from ..framework.engine import decoder",
        "contracts and their family BROKEN",
        "crossdraft.drafters.none -> crossdraft.framework.engine.decoder",
    ),
    (
        "drafters/heads/eagle.py",
        "from ..draft_model import draft_model",
        "families of drafters are independent BROKEN",
        "crossdraft.drafters.heads.eagle -> crossdraft.drafters.draft_model.draft_model",
    ),
    (
        "../crossdraft_cluster/numbers.py",
        "from crossdraft.framework.bench import run",
        "companions import the kernel, not the lab BROKEN",
        "crossdraft_cluster.numbers -> crossdraft.framework.bench.run",
    ),
    (
        "../crossdraft_advisor/engines/acceptance.py",
        "from ..replay import replay",
        "the advisor's rooms import downward BROKEN",
        "crossdraft_advisor.engines.acceptance -> crossdraft_advisor.replay.replay",
    ),
    (
        "../crossdraft_advisor/commands/replay/counted.py",
        "from . import command",
        "no cycles BROKEN",
        "No cycles are allowed in crossdraft_advisor.commands.replay.",
    ),
    (
        "../crossdraft_page/charts/style.py",
        "from . import charts",
        "no cycles BROKEN",
        "No cycles are allowed in crossdraft_page.charts.",
    ),
    (
        "../crossdraft_drafters/online.py",
        "import crossdraft_trainers",
        "companions are independent but for engines and trainers BROKEN",
        "crossdraft_drafters.online -> crossdraft_trainers",
    ),
]


@pytest.mark.thorough
def test_wrong_imports_are_found_even_inside_functions(copy: Path) -> None:
    for file, line, _, _ in WRONG_IMPORTS:
        with (copy / "crossdraft" / file).open("a", encoding="utf-8") as opened:
            opened.write(f"\n\ndef spoilt():\n    {line}\n")
    result = lint(copy / "crossdraft", copy)
    assert result.returncode == 1
    for _, _, broken, complaint in WRONG_IMPORTS:
        assert broken in result.stdout and complaint in " ".join(result.stdout.split()), complaint


def test_every_package_is_in_the_wheel() -> None:
    packages = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    )
    folders = [path.parent.relative_to(ROOT) for part in PARTS[:4] for path in (ROOT / part).rglob("__init__.py")]
    names = {".".join(["crossdraft", *folder.parts]) for folder in folders if "templates" not in folder.parts}
    assert names <= packages, names - packages


@pytest.mark.parametrize("companion", sorted(file.parent.name for file in (ROOT / "plugins").glob("*/pyproject.toml")))
def test_every_package_of_a_companion_is_in_its_wheel(companion: str) -> None:
    """An editable installation would have it without being listed."""
    root = ROOT / "plugins" / companion
    packages = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    folders = (file.parent.relative_to(root) for file in (root / companion.replace("-", "_")).rglob("__init__.py"))
    assert sorted(packages) == sorted(".".join(folder.parts) for folder in folders)


#: Most modules of a package.
MOST_MODULES = 17


@pytest.mark.parametrize("package", ["framework", "drafters", "verifiers"])
def test_no_package_is_flat_and_large(package: str) -> None:
    """The aim is fifteen modules; three packages of strategies and reports are a little above it."""
    for folder in (path.parent for path in (ROOT / package).rglob("__init__.py")):
        modules = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(modules) <= MOST_MODULES, (str(folder.relative_to(ROOT)), len(modules))


#: What crossdraft publishes besides its face.
PUBLISHED = sorted(f"crossdraft.{stub.stem}" for stub in ROOT.glob("*.pyi") if stub.stem != "__init__")


@pytest.mark.parametrize("module", ["crossdraft", *PUBLISHED])
def test_published_names_exist_and_have_docstrings(module: str) -> None:
    published = importlib.import_module(module)
    values = {name: getattr(published, name) for name in published.__all__ if name != "__version__"}
    assert values and (module == "crossdraft" or f"`{module}`" in (ROOT / "docs/plugins.md").read_text("utf-8"))
    assert not [name for name, value in values.items() if callable(value) and not value.__doc__]
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = published.nonsense


def test_strategies_use_only_public_contracts() -> None:
    """Our strategies use only what a third party's can use, too."""
    private = {}
    for file in [*(ROOT / "drafters").rglob("*.py"), *(ROOT / "verifiers").glob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and "contracts" in (node.module or "") and "training" not in file.stem:
                names = {name.name for name in node.names} - set(crossdraft.__all__)
                private |= {file.name: names} if names else {}
    assert not private


#: Most lines, and most lines of code, of the core distribution.
MOST_LINES, MOST_CODE = 36_076, 23_907


def test_core_is_small() -> None:
    """`.ci/count` prints the packages; what is not the framework itself is a companion in `plugins/`."""
    command = [sys.executable, str(ROOT / ".ci" / "count"), *PARTS[:3]]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines, code, name = done.stdout.splitlines()[-1].split()
    assert name == "core" and int(lines) <= MOST_LINES and int(code) <= MOST_CODE, done.stdout


def test_tests_with_oldest_releases_exist() -> None:
    """`.ci/covering` chooses them; whatever is renamed has to be chosen again."""
    names = [line.split("::") for line in (ROOT / ".ci/covering.txt").read_text("utf-8").splitlines() if "::" in line]
    texts = {file: (ROOT / file).read_text("utf-8") for file, *_ in names if (ROOT / file).is_file()}
    missing = [name for name in names if not re.search(rf"^(def|class) {name[1]}\b", texts.get(name[0], ""), re.M)]
    assert names and not missing, missing


def test_reading_order_leads_through_the_kernel() -> None:
    """Every file that the pages name exists, and no contract, no part of the loop and no verifier is left out."""
    named = re.findall(
        r"`((?:framework|drafters|verifiers)/[\w/]+\.py)`", (ROOT / "docs/reading-order.md").read_text("utf-8")
    )
    assert len(named) == len(set(named)) and all((ROOT / name).is_file() for name in named)
    advisor = ROOT / "plugins/crossdraft-advisor"
    twelve = re.findall(r"`([\w/]+\.py)`", (advisor / "README.md").read_text("utf-8"))
    assert len(set(twelve)) == 12 and all((advisor / "crossdraft_advisor" / name).is_file() for name in twelve)
    kernel = [*(ROOT / "framework/contracts").glob("*.py"), *(ROOT / "framework/engine").glob("*.py")]
    kernel += (ROOT / "verifiers").glob("*.py")
    missing = {
        str(file.relative_to(ROOT)) for file in kernel if file.parent.name == "verifiers" or file.name != "__init__.py"
    }
    assert not missing - set(named)


def test_names_are_unique_in_the_core() -> None:
    """Two classes or functions with one name are two meanings of one word."""
    files = [file for part in PARTS[:3] for file in (ROOT / part).rglob("*.py") if "templates" not in file.parts]
    homes: dict[str, list[str]] = {}
    for file in files:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith(
                ("_", "crossdraft_register_")
            ):
                homes.setdefault(node.name, []).append(str(file.relative_to(ROOT)))
    shared = {name: paths for name, paths in homes.items() if len(paths) > 1}
    assert not shared


#: Most lines of a function.
MOST_LINES_OF_FUNCTION = 70


def test_functions_are_short() -> None:
    long = {}
    for file in (file for part in PARTS for file in (ROOT / part).rglob("*.py") if "tests" not in file.parts):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                long |= {f"{file.relative_to(ROOT)}: {node.name}": lines} if lines > MOST_LINES_OF_FUNCTION else {}
    assert not long


#: Most names of modules that companions import and that are not published.
MOST_UNPUBLISHED = 144


def test_companions_import_few_unpublished_names() -> None:
    """Publish what companions share, and move what one of them needs to it; import what is published from there."""
    names: set[tuple[str, str]] = set()
    for file in (ROOT / "plugins").glob("crossdraft-*/crossdraft_*/**/*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("crossdraft."):
                names |= {(node.module or "", name.name) for name in node.names}
    unpublished = {name for name in names if name[0] not in PUBLISHED}
    assert len(unpublished) <= MOST_UNPUBLISHED, sorted(unpublished)
    published = {(home, name) for module in ("crossdraft", *PUBLISHED) for name, home in homes(module).items()}
    assert not unpublished & published
