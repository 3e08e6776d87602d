"""Speed and memory of replaying recorded responses with drafters that need no model.

    python benchmarks/replay_speed.py [--responses 100000]

Writes JSONL files of random texts with repetitions (64 tokens after a prompt of 64), runs ``crossdraft replay`` on each
in a new process on one core, and prints processor seconds, tokens/s and peak memory. The first file is small and
measures the start-up time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

PROMPT, TOKENS, VOCABULARY = 64, 64, 49_152
DRAFTERS = {
    "prompt-lookup": ["prompt-lookup"],
    "suffix": ["suffix"],
    "two lookups": ["prompt-lookup", "{name: prompt-lookup, max_ngram: 8, match: first, label: 8-grams}"],
}


def write(path: Path, responses: int) -> None:
    """Random texts of frequent and rare words with repeated phrases."""
    random = np.random.default_rng(0)
    with path.open("w", encoding="utf-8") as file:
        for i in range(responses):
            words = random.choice(random.zipf(1.3, 40).clip(1, VOCABULARY - 1), PROMPT + TOKENS)
            for source, place in random.integers(0, PROMPT + TOKENS - 12, (4, 2)):
                words[place : place + 12] = words[source : source + 12].copy()
            row = {
                "id": i,
                "prompt": words[:PROMPT].tolist(),
                "tokens": words[PROMPT:].tolist(),
                "finish_reason": "length",
            }
            file.write(json.dumps(row) + "\n")


def replay(path: Path, drafters: list[str]) -> tuple[float, float]:
    """Processor seconds and peak memory, in MiB, of one replay."""
    arguments = [part for drafter in drafters for part in ("--drafter", drafter)]
    command = [sys.executable, "-m", "crossdraft", "replay", str(path), *arguments, "--json"]
    one_core = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | one_core)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"the replay of {path} failed")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / (1024 if sys.platform != "darwin" else 2**20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", type=int, default=100_000)
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    print(f"{'drafters':>14} {'responses':>10} {'seconds':>8} {'tokens/s':>9} {'without start':>13} {'peak MiB':>9}")
    with tempfile.TemporaryDirectory() as directory:
        for name, drafters in DRAFTERS.items():
            start = 0.0
            for count in (100, args.responses // 10, args.responses):
                path = Path(directory) / f"{count}.jsonl"
                if not path.exists():
                    write(path, count)
                seconds, memory = replay(path, drafters)
                start = start or seconds
                rate, net = (count * TOKENS * len(drafters) / max(s, 1e-9) for s in (seconds, seconds - start))
                shown = f"{net:13,.0f}" if count > 100 else f"{'':13}"
                print(f"{name:>14} {count:>10,} {seconds:8.1f} {rate:9,.0f} {shown} {memory:9.0f}", flush=True)


if __name__ == "__main__":
    main()
