"""Pipes, sockets and links to endless devices in run and model directories: rejected with their names."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from companions import has_command, has_format
from html_runs import SMALL, finished_run, on_disk

from crossdraft.framework.cli import main as cli
from crossdraft.framework.runs.run_directory import RunDirectory

SPECIAL = ("fifo", "zero")
IT_IS = "it is a device, a pipe or a socket"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: Any) -> Path:
    finished = finished_run(tmp_path_factory.mktemp("runs") / "small-abc", SMALL, tokens=12)
    directory = RunDirectory(on_disk(finished))
    for name in ("environment.json", "cost_curves.json"):
        directory.write_json(name, {})
    directory.write_json("state.json", {"state": "finished", "cells": 3})
    return directory.path


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "runs" / finished.name))


def put(kind: str, path: Path) -> None:
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")


FILES = ("recipe.json", "environment.json", "summary.csv", "summary.md", "cost_curves.json")
CELL_FILES = ("config.json", "metrics.json", "responses.jsonl", "steps.parquet")


@pytest.mark.with_companions
@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", [*FILES, *CELL_FILES])
def test_in_run(kind: str, name: str, run: Path, refused: Any) -> None:
    file = run / name if name in FILES else next(run.glob(f"cells/none_*/{name}"))
    put(kind, file)
    for command in (
        ["report", str(run)],
        ["report", str(run), "--rows", "drafter"],
        ["compare", str(run), str(run)],
        *[["report", str(run), "--format", "png"]] * has_format("png"),
        ["cost", "--run", str(run)],
        ["advise", str(run)],
    ):
        if has_command(command[0]):
            refused(command, IT_IS if name != "recipe.json" else "has no recipe.json", file.name)
    if name in ("config.json", "responses.jsonl") and has_command("replay"):
        refused(["replay", str(run), "--drafter", "prompt-lookup"], IT_IS, file.name)
        refused(["replay", str(file.parent), "--drafter", "prompt-lookup"])


@pytest.mark.parametrize("kind", SPECIAL)
def test_in_list_of_runs(kind: str, run: Path, refused: Any, capsys: Any) -> None:
    put(kind, run / "state.json")
    assert cli.main(["runs", str(run.parent)]) in (0, 1)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.with_companions
@pytest.mark.parametrize("kind", [*SPECIAL, "socket"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"])
def test_in_model(kind: str, name: str, models: dict[str, str], tmp_path: Path, capsys: Any) -> None:
    model = Path(shutil.copytree(models["target"], tmp_path / "model"))
    if kind == "socket":
        (model / name).unlink(missing_ok=True)
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(model / name))
        server.close()
    else:
        put(kind, model / name)
    source = tmp_path / "f.jsonl"
    source.write_text('{"prompt": [1, 2], "tokens": [3, 4], "temperature": 0}\n', encoding="utf-8")
    for command in (
        ["cost", "--target", str(model)],
        ["replay", str(source), "--drafter", f"{{name: draft-model, model: {model}}}", "--target", models["target"]],
        ["certify-model", str(model), "--drafter", models["same"], "--prompt", "w5"],
    ):
        if not has_command(command[0]):
            continue
        assert cli.main(command) == 1
        err = capsys.readouterr().err
        assert IT_IS in err and name in err and "Traceback" not in err, err


@pytest.mark.parametrize("kind", SPECIAL)
def test_in_recipe_and_its_data(kind: str, tmp_path: Path, models: dict[str, str], refused: Any) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for name in ("p.json", "p.jsonl", "p.parquet"):
        put(kind, data / name)
        recipe = tmp_path / "recipe.yaml"
        for prompts in (data / name, data):
            text = f"{{target: {models['target']}, prompts: {prompts}, drafters: [prompt-lookup], verifiers: [token]}}"
            recipe.write_text(text, encoding="utf-8")
            refused(["run", str(recipe)], IT_IS, name)
        (data / name).unlink()
    put(kind, tmp_path / "toys.json")
    refused(["certify", "--verifier", "token", "--toy", str(tmp_path / "toys.json")], IT_IS)


def test_tokenizer_without_end(models: dict[str, str], tmp_path: Path, refused: Any) -> None:
    model = Path(shutil.copytree(models["target"], tmp_path / "model"))
    with (model / "tokenizer.json").open("r+b") as file:
        file.truncate(2**40)  # a hole: takes no room
    assert "tokenizer.json: it has 1099511627776 bytes" in refused(["cost", "--target", str(model)], code=1)
