"""Does a noisy neighbour decide speed-ups? A recipe alone, then beside a program that takes a core half of the time.

    python benchmarks/noisy_neighbour.py [--recipe quickstart] [--runs 10] [--spell 5] [--set max_new_tokens=16]

The neighbour multiplies matrices in one thread, for a random time (exponential, ``--spell`` seconds on average), and
sleeps for another one, and so on: half of the time one core is gone, and nobody knows which half. Every run is a new
process with a directory of its own; nothing is taken over from the one before. Printed, for each cell: the speed-up
of the quiet run with its interval, the least and greatest of the noisy runs and how many of them fell into that
interval; the same for the speed-up by the clock, which is what a benchmark without quiet rounds would have said. The
last line counts the runs in which every cell, or all but one in twenty, did.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tabulate import tabulate

#: One cell's speed-up: on a quiet machine, the interval's ends, and by the clock.
SpeedUp = tuple[float, float, float, float]


def neighbour(spell: float, seed: int) -> None:
    """Take one core half of the time, until killed."""
    import numpy as np

    chance, a = random.Random(seed), np.ones((512, 512), np.float32)
    while True:
        end = time.monotonic() + chance.expovariate(1 / spell)
        while time.monotonic() < end:
            a = a @ a * np.float32(1 / 512)
        time.sleep(chance.expovariate(1 / spell))


def run(args: argparse.Namespace, out: Path) -> dict[str, SpeedUp]:
    """Speed-ups of a run in a new process, by cell; baselines have none."""
    command = [sys.executable, "-m", "crossdraft", "run", args.recipe, "--time", "none", "--out", str(out), "--quiet"]
    for setting in args.set:
        command += ["--set", setting]
    began = time.monotonic()
    done = subprocess.run(command, text=True, capture_output=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    (summary,) = out.glob("*/summary.csv")
    found = {}
    for row in csv.DictReader(summary.open(encoding="utf-8")):
        if row["speed_up_low"]:
            pair = f"{row['drafter_label']} × {row['verifier_label']}"
            name = f"T={float(row['temperature']):g} B={row['batch_size']} {pair}"
            ends = (float(row[f"speed_up{end}"]) for end in ("", "_low", "_high", "_wall"))
            found[name] = tuple(ends)
    print(f"{out.name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument(
        "--spell", type=float, default=5.0, help="seconds that the neighbour works or sleeps, on average"
    )
    parser.add_argument("--set", action="append", default=[], help="as of crossdraft run")
    parser.add_argument("--neighbour", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.neighbour is not None:
        neighbour(args.spell, args.neighbour)
    with tempfile.TemporaryDirectory() as folder:
        quiet, noisy = run(args, Path(folder) / "quiet"), []
        for i in range(args.runs):
            command = [sys.executable, __file__, "--neighbour", str(i), "--spell", str(args.spell)]
            busy = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})
            try:
                noisy.append(run(args, Path(folder) / f"noisy {i + 1}"))
            finally:
                busy.kill()
                busy.wait()

    rows, inside = [], []
    for name, (value, low, high, wall) in quiet.items():
        values, walls = [run[name][0] for run in noisy], [run[name][3] for run in noisy]
        held = [low <= v <= high for v in values]
        inside.append(held)
        clock = sum(low <= v <= high for v in walls)
        cells = (f"{min(values):.2f}–{max(values):.2f}", f"{sum(held)}/{len(held)}", f"{wall:.2f}")
        rows.append((name, f"{value:.2f} [{low:.2f}, {high:.2f}]", *cells, f"{min(walls):.2f}–{max(walls):.2f}", clock))
    heads = ("cell", "quiet [95 %]", "noisy", "inside", "quiet, clock", "noisy, clock", "inside, clock")
    print(tabulate(rows, heads, tablefmt="github", disable_numparse=True))
    runs = list(zip(*inside, strict=True))
    nearly = sum(sum(run) >= math.ceil(0.95 * len(run)) for run in runs)
    print(f"\n{sum(map(all, runs))} of {len(runs)} runs with every cell inside, {nearly} with 95 % of the cells")


if __name__ == "__main__":
    main()
