"""Runs killed at random moments and resumed equal undisturbed runs."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet
from tiny_runs import RECIPE, cells, output

pytestmark = pytest.mark.slow

MOMENTS = 50
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


def start(recipe: str, out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "crossdraft", "run", recipe, "--out", str(out), "--quiet"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CROSSDRAFT_CACHE": str(out.parent / "cache")}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, text=True, stdout=pipe, stderr=pipe, env=environment)


def pieces(out: Path) -> int:
    """Number of finished pieces, in groups and in cells."""
    return len(list(out.glob("*/groups/*/[0-9]*.json"))) + 6 * len(list(out.glob("*/cells/*/metrics.json")))


def outputs(tmp_path: Path) -> dict[str, Any]:
    return {d.name: (output(d), parquet.read_table(d / "steps.parquet").to_pylist()) for d in cells(tmp_path)}


def test_killed_at_many_moments(tmp_path: Path, models: dict[str, str], recipe_file: Any, write_prompts: Any) -> None:
    recipe = recipe_file(RECIPE.format(prompts=write_prompts(tmp_path / "prompts.jsonl"), **models))
    began = time.monotonic()
    whole = start(recipe, tmp_path / "runs")
    assert whole.wait() == 0
    seconds = time.monotonic() - began
    expected = outputs(tmp_path)
    (tmp_path / "runs").rename(tmp_path / "undisturbed")

    kills, steps, unhandled, chance = 0, 0, 0, random.Random(0)
    while kills < MOMENTS:
        kept, before = 0, kills
        while True:
            began = time.monotonic()
            run = start(recipe, tmp_path / "runs")
            try:
                run.wait(chance.uniform(0.3, 1.0) * seconds if kills < MOMENTS else None)
            except subprocess.TimeoutExpired:
                number = SIGNALS[kills % len(SIGNALS)]
                run.send_signal(number)
                _, err = run.communicate(timeout=60)
                assert "Traceback" not in err, err
                # Python remembers a KeyboardInterrupt inside of `eval`, and ends by SIGINT: 130 in a shell. Before
                # the handlers are set and beyond the last line a signal ends the process, or has no effect.
                if number != signal.SIGKILL and run.returncode not in (130, -signal.SIGINT):
                    assert run.returncode in (0, -number), err
                    unhandled += 1
                kills += 1
                now = pieces(tmp_path / "runs")
                assert now >= kept, "a finished piece was lost"
                kept = now
                continue
            assert run.returncode == 0, run.communicate()[1]
            if before == kills:
                seconds = time.monotonic() - began  # the load of the machine changes
            break
        assert outputs(tmp_path) == expected
        assert not [path for path in (tmp_path / "runs").glob("*/cells/.*")]
        (tmp_path / "runs").rename(tmp_path / f"round {steps}")
        steps += 1
    assert unhandled <= MOMENTS // 5, "signals had no effect"
    print(f"{kills} kills in {steps} runs, each of which ended like the undisturbed one")
