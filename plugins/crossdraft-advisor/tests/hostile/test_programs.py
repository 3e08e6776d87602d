"""Recipes that start or steer programs: refused without consent that names the program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from crossdraft_advisor.engines.server import EngineServer, ServerEvent, ServerOptions
from pydantic import Field
from tiny_models import save_model

from crossdraft.framework.cli import main as cli

URLS = "url: 'http://127.0.0.1:9', baseline_url: 'http://127.0.0.1:9'"


class Theirs(EngineServer):
    """A server of a third party that declares its program and one harmless option."""

    class Options(ServerOptions):
        binary: str = Field(default="their-server")
        metrics_on: bool = False
        plugin: str = ""

    name = "theirs"
    Config = Options
    executable = "binary"
    harmless = EngineServer.harmless | {"metrics_on"}

    def command(self, port: int) -> list[str]:
        return [self.options.binary, *self.options.args]

    def body(self, prompt: Any, max_tokens: int) -> dict[str, Any]:
        return {}

    def event(self, data: Any) -> ServerEvent:
        return ServerEvent()


class Undeclared(Theirs):
    """One that declares nothing, and starts its server by itself."""

    name = "undeclared"
    executable = ""
    harmless = EngineServer.harmless
    command = EngineServer.command

    def start(self) -> None:
        raise AssertionError("started")


@pytest.fixture
def recipe(tmp_path: Path, target: str, install: Any) -> Any:
    install("servers", ("theirs", Theirs), ("undeclared", Undeclared))

    def write(engine: str) -> str:
        file = tmp_path / "recipe.yaml"
        file.write_text(
            f"target: {target}\ndrafters: [prompt-lookup]\nverifiers: [token]\nlimit: 1\nengine: {engine}\n",
            encoding="utf-8",
        )
        return str(file)

    return write


@pytest.mark.parametrize(
    ("engine", "program", "words"),
    [
        ("theirs", "their-server", []),
        ("{name: theirs, binary: ./x.sh}", "./x.sh", []),
        ("{name: theirs, binary: their-server}", "their-server", []),
        ("{name: theirs, env: {LD_PRELOAD: ./x.so}}", "their-server", ["env: {'LD_PRELOAD': './x.so'}"]),
        ("{name: theirs, args: [--trust-remote-code]}", "their-server", ["args: ['--trust-remote-code']"]),
        (f"{{name: theirs, {URLS}, plugin: x.py}}", "their-server", ["plugin: 'x.py'"]),
        ("{name: undeclared, binary: ./x.sh}", "undeclared", ["binary: './x.sh'"]),
        (f"{{name: undeclared, {URLS}, metrics_on: true}}", "undeclared", ["metrics_on: True"]),
    ],
)
def test_program_needs_consent(recipe: Any, refused: Any, engine: str, program: str, words: list[str]) -> None:
    needed = [f"starts '{program}'", f"--allow-program {program}"]
    for command in ("run", "verify-engine"):
        refused([command, recipe(engine)], "recipe.yaml:5", *needed, *words)
        refused([command, recipe(engine), "--allow-program", "other"], *needed)
        matrix = ["--set", f"matrix.engine=[crossdraft, {engine}]", "--set", "engine=crossdraft"]
        refused([command, recipe("crossdraft"), *matrix], *needed, *words)


def test_program_that_is_not_started_is_refused(recipe: Any, refused: Any) -> None:
    words = ["--allow-program './x.sh' is not a program of this recipe", "its programs: none"]
    refused(["run", recipe("crossdraft"), "--allow-program", "./x.sh"], *words)


@pytest.mark.parametrize("engine", [f"{{name: theirs, {URLS}, metrics_on: true}}", f"{{name: openai, {URLS}}}"])
def test_running_server_needs_no_consent(recipe: Any, capsys: Any, engine: str) -> None:
    assert cli.main(["run", recipe(engine), "--out", "/proc/none"]) != 0
    assert "allow-program" not in capsys.readouterr().err


def test_program_with_consent_is_started(recipe: Any, capsys: Any, tmp_path: Path) -> None:
    program, mark = tmp_path / "x.sh", tmp_path / "mark"
    program.write_text(f"#!/bin/sh\ntouch {mark}\n")
    program.chmod(0o755)
    engine, out = recipe(f"{{name: theirs, binary: {program}}}"), ["--out", str(tmp_path / "runs")]
    out += ["--set", f"target={save_model(tmp_path / 'model')}", "--set", "max_new_tokens=2"]
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    out += ["--set", f"prompts={tmp_path / 'prompts.jsonl'}"]
    assert cli.main(["run", engine, *out]) == 2 and not mark.exists()
    assert cli.main(["run", engine, "--allow-program", str(program), *out]) == 1 and mark.exists()
