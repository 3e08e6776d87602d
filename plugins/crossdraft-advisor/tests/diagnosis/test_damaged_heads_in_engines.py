"""``crossdraft diagnose`` names the damage of a head that vLLM or llama.cpp's server serves.

    export CROSSDRAFT_VLLM_PYTHON=/path/to/vllm-env/bin/python CROSSDRAFT_LLAMA_SERVER=/path/to/llama-server
    pytest -m engine plugins/crossdraft-advisor/tests/diagnosis

A tiny head is trained first, so it takes minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

BENCHMARK = Path(__file__).parents[4] / "benchmarks" / "diagnose_engines.py"
PROGRAMS = {"--vllm": "CROSSDRAFT_VLLM_PYTHON", "--llama-server": "CROSSDRAFT_LLAMA_SERVER"}
#: Number of damages that an engine can be given, none included.
DAMAGES = {"--vllm": 4, "--llama-server": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.mark.parametrize("option", PROGRAMS)
def test_damage_is_named_from_the_log_and_32_responses(option: str, folder: Path) -> None:
    program = os.environ.get(PROGRAMS[option])
    if not program:
        pytest.skip(f"{PROGRAMS[option]} is not set")
    command = [sys.executable, str(BENCHMARK), "--out", str(folder), option, program]
    done = subprocess.run(command, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    titles = [line for line in done.stdout.splitlines() if line.startswith("## ")]
    assert len(titles) == DAMAGES[option] and ": named" in titles[0]
    assert all(title.endswith(": named") for title in titles[1:])  # alone: each costs acceptance
