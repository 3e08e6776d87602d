"""Runs killed at random moments and resumed equal undisturbed runs."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet
from tiny_runs import RECIPE, cells, output

pytestmark = pytest.mark.slow

MOMENTS = 50
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


#: Run the command line; at the n-th call of a function, Python's or C's, by the main thread, it gets a signal. Modules
#: that an earlier run imported are imported before: one whose import is interrupted may crash at the end of Python.
COMMAND = """
import importlib, json, os, sys
from contextlib import suppress
from pathlib import Path
from crossdraft.framework.cli.main import main

moment, number, file, calls = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), 0
del sys.argv[1:4]
modules = file.with_suffix(".modules")
for name in json.loads(modules.read_text()) if modules.exists() else ():
    with suppress(Exception):
        importlib.import_module(name)

def count(frame, event, _):
    global calls
    if event in ("call", "c_call"):
        calls += 1
        if calls == moment:
            os.kill(os.getpid(), number)

sys.setprofile(count)
try:
    status = main()
finally:
    sys.setprofile(None)
    file.write_text(str(calls))
if not moment:
    modules.write_text(json.dumps(list(sys.modules)))
sys.exit(status)
"""


def start(recipe: str, folder: Path, moment: int = 0, number: int = 0) -> tuple[int, str, int]:
    """Exit status, errors and calls of a run that gets a signal at a moment; calls are 0 if it was killed."""
    file = folder / "calls.txt"
    file.unlink(missing_ok=True)
    command = [sys.executable, "-c", COMMAND, str(moment), str(number), str(file), "run", recipe]
    command += ["--out", str(folder / "runs"), "--quiet"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CROSSDRAFT_CACHE": str(folder / "cache")}
    run = subprocess.run(command, text=True, capture_output=True, env=environment)
    return run.returncode, run.stderr, int(file.read_text(encoding="utf-8")) if file.exists() else 0


def pieces(out: Path) -> int:
    """Number of finished pieces, in groups and in cells."""
    return len(list(out.glob("*/groups/*/[0-9]*.json"))) + 6 * len(list(out.glob("*/cells/*/metrics.json")))


def outputs(tmp_path: Path) -> dict[str, Any]:
    return {d.name: (output(d), parquet.read_table(d / "steps.parquet").to_pylist()) for d in cells(tmp_path)}


def test_killed_at_many_moments(tmp_path: Path, models: dict[str, str], recipe_file: Any, write_prompts: Any) -> None:
    recipe = recipe_file(RECIPE.format(prompts=write_prompts(tmp_path / "prompts.jsonl"), **models))
    for name in ("importing", "undisturbed"):
        status, err, calls = start(recipe, tmp_path)
        assert status == 0, err
        expected = outputs(tmp_path)
        (tmp_path / "runs").rename(tmp_path / name)

    kills, steps, unhandled, chance = 0, 0, 0, random.Random(0)
    while kills < MOMENTS:
        kept = 0
        while True:
            moment = chance.randint(1, calls) if kills < MOMENTS else 0
            number = SIGNALS[kills % len(SIGNALS)]
            status, err, ended_after = start(recipe, tmp_path, moment, number)
            if not moment or 0 < ended_after < moment:  # it ended before the moment came
                assert status == 0, err
                break
            assert "Traceback" not in err, err
            # Python remembers a KeyboardInterrupt inside of `eval`, and ends by SIGINT: 130 in a shell. Before
            # the handlers are set and beyond the last line a signal ends the process, or has no effect.
            if number != signal.SIGKILL and status not in (130, -signal.SIGINT):
                assert status in (0, -number), err
                unhandled += 1
            kills += 1
            now = pieces(tmp_path / "runs")
            assert now >= kept, "a finished piece was lost"
            kept = now
        assert outputs(tmp_path) == expected
        assert not [path for path in (tmp_path / "runs").glob("*/cells/.*")]
        (tmp_path / "runs").rename(tmp_path / f"round {steps}")
        steps += 1
    assert unhandled <= MOMENTS // 5, "signals had no effect"
    print(f"{kills} kills in {steps} runs, each of which ended like the undisturbed one")
