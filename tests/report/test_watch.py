"""The server of ``report --watch``: its version and its page change as cells finish."""

import json
from pathlib import Path
from typing import Any

import pytest
from html_runs import SMALL, finished_run

from crossdraft.framework.cli import main as cli
from crossdraft.framework.runs.run_directory import RunDirectory

pytest.importorskip("jinja2", reason="the extra html is not installed")
pytest.importorskip("starlette", reason="the extra serve is not installed")


def test_page_follows_run(tmp_path: Path) -> None:
    from starlette.testclient import TestClient

    from crossdraft.framework.report.watch import ReportServer

    run = finished_run(tmp_path / "run", SMALL)
    directory = RunDirectory(run.summary.directory)
    directory.path.mkdir()
    running = directory.locked()
    running.__enter__()
    client = TestClient(ReportServer([directory.path]).application(), base_url="http://localhost")
    assert client.get("/page", headers={"Host": "evil.example"}).status_code == 403, "DNS rebinding"
    frame = client.get("/").text
    assert "default-src 'none'" in frame and "http" not in frame.replace("http-equiv", "")
    assert client.get("/version").text == "" and "has no recipe.json" in client.get("/page").text
    directory.write_json("recipe.json", run.summary.recipe.model_dump(mode="json"))
    directory.write_json("state.json", {"state": "running", "cells": 3})
    assert client.get("/version").text == "" and "no finished cell" in client.get("/page").text

    plain, token, block = run.summary.results
    directory.save(plain)
    directory.save(token)
    unfinished = directory.path / "cells" / ".aside.1"  # a cell that is being written
    unfinished.mkdir()
    (unfinished / "config.json").write_text("{")
    first, page = client.get("/version").text, client.get("/page").text
    assert first and "running: 2 of 3 cells so far" in page
    assert '"token"' in json.dumps(page) or ">token<" in page
    assert client.get("/version").text == first and client.get("/page").text == page
    directory.save(block)
    assert client.get("/version").text != first
    assert "running: 3 of 3 cells so far" in client.get("/page").text
    running.__exit__(None, None, None)
    assert "interrupted: 3 of 3 cells so far" in ReportServer([directory.path]).page()


def test_failed_cells_are_reported(tmp_path: Path) -> None:
    from crossdraft.framework.cost.load_run import read_runs

    run = finished_run(tmp_path / "run", SMALL)
    directory = RunDirectory(run.summary.directory)
    directory.path.mkdir()
    directory.write_json("recipe.json", run.summary.recipe.model_dump(mode="json"))
    plain, token, block = run.summary.results
    block.metrics, block.error = None, "out of memory"
    for result in (plain, token, block):
        directory.save(result)
    (actual,) = read_runs([directory.path], running=True)
    assert [result.config.hash for result in actual.summary.results] == [plain.config.hash, token.config.hash]
    assert any(line.startswith("- failed: ") and "out of memory" in line for line in actual.remarks)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["missing", "--watch"], "missing is not a directory"),
        ([".", "--watch", "--html", "x.html"], "--watch does not write files"),
        ([".", "--port", "1"], "--port requires --watch"),
        ([".", "--watch", "--port", "70000"], "cannot listen"),
    ],
)
def test_invalid_arguments(tmp_path: Path, monkeypatch: Any, capsys: Any, arguments: list[str], message: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", *arguments]) == 2
    assert message in capsys.readouterr().err
