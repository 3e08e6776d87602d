"""The server of ``report --watch``: its version and its page change as cells finish."""

import json
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from crossdraft_page.html.watch import WatchedRuns, report_server
from html_runs import SMALL, finished_run

from crossdraft.framework.cli import main as cli
from crossdraft.framework.runs.run_directory import RunDirectory


@pytest.fixture
def get() -> Iterator[Callable[..., tuple[int, str]]]:
    """Status and text of a path of a server for the runs in a directory."""
    servers = {}

    def get(directory: Path, path: str, host: str = "localhost") -> tuple[int, str]:
        if directory not in servers:
            servers[directory] = report_server([directory], 0)
            Thread(target=servers[directory].serve_forever, daemon=True).start()
        connection = HTTPConnection("127.0.0.1", servers[directory].server_port)
        connection.request("GET", path, headers={"Host": host})
        answer = connection.getresponse()
        return answer.status, answer.read().decode("utf-8")

    yield get
    for server in servers.values():
        server.shutdown()
        server.server_close()


def test_page_follows_run(tmp_path: Path, get: Callable[..., tuple[int, str]]) -> None:
    run = finished_run(tmp_path / "run", SMALL)
    directory = RunDirectory(run.summary.directory)
    directory.path.mkdir()
    running = directory.locked()
    running.__enter__()

    def text(path: str) -> str:
        return get(directory.path, path)[1]

    assert get(directory.path, "/page", host="evil.example")[0] == 403, "DNS rebinding"
    assert get(directory.path, "/other")[0] == 404
    frame = text("/")
    assert "default-src 'none'" in frame and "http" not in frame.replace("http-equiv", "")
    assert text("/version") == "" and "has no recipe.json" in text("/page")
    directory.write_json("recipe.json", run.summary.recipe.model_dump(mode="json"))
    directory.write_json("state.json", {"state": "running", "cells": 3})
    assert text("/version") == "" and "no finished cell" in text("/page")

    plain, token, block = run.summary.results
    directory.save(plain)
    directory.save(token)
    unfinished = directory.path / "cells" / ".aside.1"  # a cell that is being written
    unfinished.mkdir()
    (unfinished / "config.json").write_text("{")
    first, page = text("/version"), text("/page?x")
    assert first and "running: 2 of 3 cells so far" in page
    assert '"token"' in json.dumps(page) or ">token<" in page
    assert text("/version") == first and text("/page") == page
    directory.save(block)
    assert text("/version") != first
    assert "running: 3 of 3 cells so far" in text("/page")
    running.__exit__(None, None, None)
    assert "interrupted: 3 of 3 cells so far" in WatchedRuns([directory.path]).page()


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
        ([".", "--watch", "--out", "x.html"], "--out cannot be combined with --watch"),
        ([".", "--port", "1"], "--port requires --watch"),
        ([".", "--watch", "--port", "70000"], "--port 70000: should be less than or equal to 65535"),
    ],
)
def test_invalid_arguments(tmp_path: Path, monkeypatch: Any, capsys: Any, arguments: list[str], message: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", *arguments]) == 2
    assert message in capsys.readouterr().err
