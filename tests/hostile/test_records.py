"""Run directories with a changed value: every report command works or reports the file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from companions import has_command
from html_runs import SMALL, finished_run, on_disk
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crossdraft.framework.cli import main as cli
from crossdraft.framework.runs.run_directory import RunDirectory

#: Values that stand where others belong.
WRONG: list[Any] = [
    *(None, True, 0, -1, 3, 10**30, 1e300, 0.5, float("nan"), float("inf"), "", "x", "\ud800", "a\x1b[31m\n"),
    *([], {}, [None], {"a": 1}, [[1]], {"": {}}, [{"a": []}], ["x", 1]),
]
JSON_FILES = ("recipe.json", "environment.json", "state.json", "cost_curves.json", "config.json", "metrics.json")


@pytest.fixture(scope="module")
def run(tmp_path_factory: Any) -> Path:
    """A run of three cells with all its files."""
    results = finished_run(tmp_path_factory.mktemp("runs") / "small-abc", SMALL, tokens=12)
    directory = RunDirectory(on_disk(results))
    machine = {"cpu": {"model": "a processor", "cores": 2}, "memory_gib": 8.0}
    gpu = {"name": "a device", "memory_gib": 16.0}
    about = {"versions": {"crossdraft": "0.1.0", "torch": None}, "python": "3.12.1", "git_commit": "abc+changes"}
    about |= {"gpus": [gpu], "elsewhere": [machine | {"gpus": []}], "models": {}, "conditions": [{"device": "cpu"}]}
    directory.write_json("environment.json", machine | about)
    directory.write_json("state.json", {"state": "finished", "cells": 3, "finished": 3})
    point = [[1, w, 128, 0.01 * w, 0.01 * w, 0.01 * w] for w in (1, 4)]
    curve = {"model": "org/name", "sha256": "ab" * 32, "dtype": "float32", "device": {"device": "cpu"}, "repeats": 5}
    directory.write_json("cost_curves.json", {"curves": [curve | {"measured": "", "points": point}]})
    return directory.path


def commands(run: Path, other: Path) -> list[list[str]]:
    path = str(run)
    every = [
        ["report", path],
        [
            "report",
            path,
            "--rows",
            "drafter",
            "--rows",
            "drafter",
            "--value",
            "block_efficiency,speed_up,tokens_per_second",
        ],
        ["compare", path, str(other)],
        ["runs", str(run.parent)],
        ["replay", path, "--drafter", "prompt-lookup", "--gamma", "1-2"],
        ["cost", "--run", path],
        ["advise", path],
    ]
    return [command for command in every if has_command(command[0])]


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values in a JSON value; of long lists only those of the first three items."""
    yield at
    entries = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    for key, item in entries:
        yield from places(item, (*at, key))


def changed(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    """Copy ``value`` with ``new`` at a path, or without that item if ``new`` is Ellipsis."""
    if not at:
        return {} if new is ... else new
    copy = dict(value) if isinstance(value, dict) else list(value)
    if len(at) == 1 and new is ...:
        del copy[at[0]]
    else:
        copy[at[0]] = changed(copy[at[0]], at[1:], new)
    return copy


def check(run: Path, other: Path, file: Path, capsys: Any) -> None:
    """Every command works, or ends with a one-line error with the file or the problem."""
    for command in commands(run, other):
        code = cli.main(command)
        out, err = capsys.readouterr()
        assert code in (0, 1, 2) and "report is welcome" not in err and "Traceback" not in out + err, (command, err)
        if code == 2:
            lines = [line for line in err.splitlines() if line.startswith("crossdraft: error: ")]
            assert len(lines) == 1, err
    if file.name in ("environment.json", "metrics.json"):  # nothing is made up for what report reads
        code = cli.main(["report", str(run)])
        out, err = capsys.readouterr()
        assert code == 0 or file.name in err, err


@pytest.mark.with_companions
@settings(max_examples=25, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_changed_value(run: Path, tmp_path: Path, capsys: Any, data: Any) -> None:
    copy = tmp_path / "runs" / "small-abc"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(run, copy)
    name = data.draw(st.sampled_from(JSON_FILES))
    file = data.draw(st.sampled_from(sorted(copy.rglob(name))))
    value = json.loads(file.read_text(encoding="utf-8"))
    at = data.draw(st.sampled_from(list(places(value))))
    new = data.draw(st.sampled_from([..., *WRONG]))
    text = json.dumps(changed(value, at, new), ensure_ascii=False)
    file.write_bytes(text.encode("utf-8", errors="surrogatepass"))
    check(copy, run, file, capsys)
