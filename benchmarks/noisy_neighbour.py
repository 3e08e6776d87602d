"""Effect of noisy neighbours on speed-ups: a recipe alone, then beside programs that intermittently occupy a core.

    python benchmarks/noisy_neighbour.py [--recipe quickstart] [--runs 10] [--neighbours 1] [--busy 0.5] [--spell 5]

A neighbour alternates between multiplying matrices in one thread and sleeping, both for random times (exponential,
``--spell`` seconds on average), so that it occupies one core for a share ``--busy`` of the time. ``--neighbours 2``
starts two independent ones. Every run is a new process with a new directory. Prints for each cell the speed-up of the
run alone with its interval; of the other runs the minimum and maximum, the number of intervals that overlap the first,
of values inside it, and of withheld speed-ups; and the same for the wall-clock speed-up, for comparison.
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

#: A cell's speed-up: the value, the ends of its interval, and by wall clock.
SpeedUp = tuple[float, float, float, float]
#: A withheld speed-up.
WITHHELD = math.nan


def neighbour(spell: float, busy: float, seed: int) -> None:
    """Occupy one core for a share of the time, until killed."""
    import numpy as np

    chance, a = random.Random(seed), np.ones((512, 512), np.float32)
    while True:
        end = time.monotonic() + chance.expovariate(1 / spell)
        while time.monotonic() < end:
            a = a @ a * np.float32(1 / 512)
        time.sleep(chance.expovariate(busy / (spell * (1 - busy))) if busy < 1 else 0)


def run(args: argparse.Namespace, out: Path) -> dict[str, SpeedUp]:
    """Speed-ups of a run in a new process, by cell, without baselines."""
    command = [sys.executable, "-m", "crossdraft", "run", args.recipe, "--time", "none", "--out", str(out), "--quiet"]
    for setting in args.set:
        command += ["--set", setting]
    began = time.monotonic()
    done = subprocess.run(command, text=True, capture_output=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    (summary,) = out.glob("*/summary.csv")
    results = {}
    for row in csv.DictReader(summary.open(encoding="utf-8")):
        if row["drafter"] != "none" and not row["error"]:
            pair = f"{row['drafter_label']} × {row['verifier_label']}"
            name = f"T={float(row['temperature']):g} B={row['batch_size']} {pair}"
            ends = (float(row[f"speed_up{end}"] or WITHHELD) for end in ("", "_low", "_high", "_wall"))
            results[name] = tuple(ends)
    print(f"{out.name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--neighbours", type=int, default=1, help="number of neighbours, one core each")
    parser.add_argument("--busy", type=float, default=0.5, help="share of the time that each is busy")
    parser.add_argument("--spell", type=float, default=5.0, help="average seconds of a busy or sleeping period")
    parser.add_argument("--set", action="append", default=[], help="as of crossdraft run")
    parser.add_argument("--neighbour", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.neighbour is not None:
        neighbour(args.spell, args.busy, args.neighbour)
    with tempfile.TemporaryDirectory() as folder:
        separate, noisy = run(args, Path(folder) / "alone"), []
        for i in range(args.runs):
            command = [sys.executable, __file__, "--spell", str(args.spell), "--busy", str(args.busy), "--neighbour"]
            one_thread = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            seeds = range(i * args.neighbours, (i + 1) * args.neighbours)
            others = [subprocess.Popen([*command, str(seed)], env=one_thread) for seed in seeds]
            try:
                noisy.append(run(args, Path(folder) / f"beside {i + 1}"))
            finally:
                for other in others:
                    other.kill()
                    other.wait()

    rows = []
    for name, (value, low, high, wall) in separate.items():
        printed = [result[name] for result in noisy if not math.isnan(result[name][0])]
        walls = [result[name][3] for result in noisy]
        overlap = sum(other[1] <= high and low <= other[2] for other in printed)
        inside = sum(low <= other[0] <= high for other in printed)
        row = [name, "withheld" if math.isnan(value) else f"{value:.2f} [{low:.2f}, {high:.2f}]", spread(printed)]
        row += [f"{overlap}/{len(printed)}", f"{inside}/{len(printed)}", str(len(noisy) - len(printed))]
        rows.append([*row, f"{wall:.2f}", f"{min(walls):.2f}–{max(walls):.2f}"])
    heads = [
        "cell",
        "alone [95 %]",
        "beside",
        "intervals overlap",
        "inside",
        "withheld",
        "alone, clock",
        "beside, clock",
    ]
    print(tabulate(rows, heads, tablefmt="github", disable_numparse=True))


def spread(printed: list[SpeedUp]) -> str:
    values = [value for value, *_ in printed]
    return f"{min(values):.2f}–{max(values):.2f}" if values else ""


if __name__ == "__main__":
    main()
