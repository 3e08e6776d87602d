"""Runs of two groups as processes, for tests of launchers."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import RECIPE, output

TWO_GROUPS = ["matrix.batch_size=1", "drafters=[prompt-lookup]"]
FOR_LONG = "max_new_tokens=60"
LOCAL = ["--launcher", "local", "--workers", "2", "--untimed"]


def texts(directory: Path) -> dict[str, Any]:
    return {cell.name: output(cell) for cell in sorted(directory.glob("cells/*"))}


@pytest.fixture
def start(tmp_path: Path, models: dict[str, str], recipe_file: Any, write_prompts: Any) -> Iterator[Callable[..., Any]]:
    """``start(out, *settings, flags=[...])`` starts the command as a process."""
    recipe = recipe_file(RECIPE.format(prompts=write_prompts(tmp_path / "prompts.jsonl"), **models))
    own = {"OMP_NUM_THREADS": "1", "CROSSDRAFT_CACHE": str(tmp_path / "cache")}
    processes: list[subprocess.Popen[str]] = []

    def go(out: str, *settings: str, flags: Any = ()) -> subprocess.Popen[str]:
        words = [part for setting in (*TWO_GROUPS, *settings) for part in ("--set", setting)]
        command = [sys.executable, "-m", "crossdraft", "run", recipe, "--out", str(tmp_path / out), *words, *flags]
        processes.append(subprocess.Popen(command, text=True, stdout=-1, stderr=-1, env=os.environ | own, cwd=tmp_path))
        return processes[-1]

    yield go
    for process in processes:
        if process.poll() is None:
            process.kill()


def finished(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    out, err = process.communicate(timeout=200)
    assert process.returncode == code, err + out
    return out, err


def run_in(folder: Path) -> Path:
    (result,) = folder.glob("recipe-*")
    return result


def wait_for(subject: Callable[[], Any], process: subprocess.Popen[str]) -> Any:
    for _ in range(1000):
        if result := subject():
            return result
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError("it took too long")


def owner(shard: Path) -> int | None:
    """Process of a shard after its first finished piece."""
    if not list(shard.glob("groups/*/0.json")):
        return None
    return json.loads((shard / ".owner.json").read_text(encoding="utf-8"))["pid"]


def check_tokens(start: Callable[..., Any], tmp_path: Path, flags: list[str]) -> None:
    """A launched run has the tokens of one process, and its files."""
    finished(start("whole"))
    out, err = finished(start("runs", flags=flags))
    assert err.count(": measured\n") == 2 and "not timed (--untimed)" in out
    whole, run = run_in(tmp_path / "whole"), run_in(tmp_path / "runs")
    assert texts(run) == texts(whole) and len(texts(run)) == 5
    for name in ("summary.md", "summary.csv", "environment.json"):
        assert (run / name).is_file()
