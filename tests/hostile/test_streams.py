"""Closed or full standard streams and readers that exit, with real processes and a real shell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import RECIPE

CROSSDRAFT = f"'{sys.executable}' -m crossdraft"
pytestmark = [pytest.mark.thorough, pytest.mark.skipif(os.name != "posix", reason="a POSIX shell")]


@pytest.fixture(autouse=True)
def in_time() -> None:
    """Longer time limit, because tests start processes."""


@pytest.fixture
def recipe(tmp_path: Path, models: dict[str, str], recipe_file: Any, write_prompts: Any) -> str:
    one_group = RECIPE.partition("matrix:")[0].replace("greedy, ", "")
    return recipe_file(one_group.format(prompts=write_prompts(tmp_path / "prompts.jsonl", n=2), **models))


def shell(command: str, directory: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"CROSSDRAFT_CACHE": str(directory / "cache"), "OMP_NUM_THREADS": "1"}
    script = ["bash", "-o", "pipefail", "-c", command]
    return subprocess.run(
        script, cwd=directory, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.parametrize(
    "streams",
    [
        "2>&1 >&- | head -n 1",
        *(pytest.param(one, marks=pytest.mark.slow) for one in (">&-", "2>&-", ">&- 2>&- <&-", "| head -n 1")),
    ],
)
def test_run_is_whole(streams: str, recipe: str, tmp_path: Path) -> None:
    """The run exits with 0 and has the same records as with open streams."""
    result = shell(f"{CROSSDRAFT} run '{recipe}' --out runs {streams}", tmp_path)
    assert result.returncode == 0, result.stderr
    assert "Traceback (most recent" not in result.stderr and "crossdraft: error" not in result.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert (run / "summary.md").read_text(encoding="utf-8").startswith("# recipe")
    rows = (run / "summary.csv").read_text(encoding="utf-8").splitlines()[1:]
    assert rows and len(list(run.glob("cells/*/metrics.json"))) == len(rows)


@pytest.mark.parametrize("streams", [">&-", "2>&-"])
def test_closed_streams(streams: str, tmp_path: Path) -> None:
    assert shell(f"{CROSSDRAFT} list {streams}", tmp_path).returncode == 0


def test_unread_error(tmp_path: Path) -> None:
    for streams in (">&- 2>&-", "2>/dev/full"):
        assert shell(f"{CROSSDRAFT} new drafter X {streams}", tmp_path).returncode == 2


def test_no_file_takes_number_of_closed_stream(tmp_path: Path) -> None:
    code = "import os; from crossdraft.framework.cli import standard_streams as streams; streams.open_closed();"
    code += "print('x', flush=True); print('y', file=__import__('sys').stderr, flush=True);"
    code += "raise SystemExit(0 if os.open('f', os.O_CREAT | os.O_WRONLY) > 2 else 3)"
    assert shell(f"'{sys.executable}' -c \"{code}\" <&- >&- 2>&-", tmp_path).returncode == 0
    assert (tmp_path / "f").read_bytes() == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_full_disk_behind_standard_output(tmp_path: Path) -> None:
    result = shell(f"{CROSSDRAFT} list > /dev/full", tmp_path)
    assert result.returncode == 1 and result.stderr.count("\n") == 1
    assert "No space left on device" in result.stderr and "report is welcome" not in result.stderr
