"""Benchmarks print their help, the options that pages give them exist, and the cheap ones run on tiny models."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest
from tiny_models import save_model

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += sorted(ROOT.glob("plugins/*/README.md"))
SCRIPTS = [
    file.relative_to(ROOT).as_posix()
    for pattern in ("benchmarks/*.py", "plugins/*/benchmarks/*.py")
    for file in sorted(ROOT.glob(pattern))
    if "__main__" in file.read_text(encoding="utf-8")
]
#: Package of the environment that a script is for.
FOREIGN = {"openvino_genai"}
#: Arguments of the cheap ones. TARGET and MODEL are tiny models.
RUNS = [
    "benchmarks/roofline_check.py",
    "benchmarks/verifier_cost.py --batch 1 --vocab 64 --repeats 1",
    "benchmarks/suffix_growth.py --sizes 1000 2000 3000 --steps 10",
    "benchmarks/published.py --read benchmarks/published/predictions.csv",
    "benchmarks/diagnose_signatures.py --servers 1 --responses 8 --fault healthy --fault 'a cliff'",
    "benchmarks/sibling_acceptance.py --target TARGET --model MODEL --limit 2 --siblings 2 --nodes 2",
    "benchmarks/draft_acceptance.py --target TARGET --model MODEL --limit 2 --max-new-tokens 9",
    "benchmarks/loop_overhead.py --target TARGET --model MODEL --batch 1 --steps 1 --max-new-tokens 9",
]


class _Parsed(BaseException):
    """Raised when the arguments of a script are parsed."""


def commands() -> list[str]:
    """Commands of pages that give a benchmark options: lines of code blocks, and code within lines."""
    results = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        fenced = re.findall(r"^```.*?^```", text, flags=re.DOTALL | re.MULTILINE)
        pieces = [line.partition(" #")[0] for block in fenced for line in block.splitlines()]
        for block in fenced:
            text = text.replace(block, "")
        for piece in [*pieces, *re.findall(r"`([^`]+)`", text)]:
            if match := re.search(r"python ((?:plugins/\S+/)?benchmarks/\w+\.py .*)", " ".join(piece.split())):
                results.add(match[1])
    return sorted(results)


def run(command: str, monkeypatch: Any) -> None:
    script, *words = shlex.split(command)
    monkeypatch.setattr(sys, "argv", [script, *words])
    monkeypatch.chdir(ROOT)
    try:
        runpy.run_path(script, run_name="__main__")
    except ModuleNotFoundError as error:
        if error.name not in FOREIGN:
            raise
        pytest.skip(str(error))


@pytest.mark.companions
@pytest.mark.parametrize("script", SCRIPTS)
def test_help_is_printed(script: str, monkeypatch: Any, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        run(f"{script} --help", monkeypatch)
    assert ended.value.code == 0 and Path(script).name in capsys.readouterr().out


@pytest.mark.companions
@pytest.mark.parametrize("command", commands())
def test_options_of_pages_exist(command: str, monkeypatch: Any) -> None:
    parse = ArgumentParser.parse_args

    def parse_only(*args: Any) -> None:
        parse(*args)
        raise _Parsed

    monkeypatch.setattr(ArgumentParser, "parse_args", parse_only)
    with pytest.raises(_Parsed):
        run(command, monkeypatch)


@pytest.fixture(scope="module")
def models(tmp_path_factory: Any) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    names = {"TARGET": 0, "MODEL": 1}
    return {name: save_model(folder / name.lower(), seed=seed, context=2048) for name, seed in names.items()}


@pytest.mark.companions
@pytest.mark.parametrize("command", RUNS)
def test_cheap_ones_run(command: str, models: dict[str, str], monkeypatch: Any, capsys: Any) -> None:
    for name, path in models.items():
        command = command.replace(name, path)
    run(command, monkeypatch)
    assert len(capsys.readouterr().out.splitlines()) > 2


def test_commands_of_pages_are_found() -> None:
    assert len(commands()) >= 24
