"""Run a command beside noisy neighbours: programs that intermittently occupy a core.

    python benchmarks/noisy_neighbour.py [--neighbours 1] [--busy 0.5] [--spell 5] [--seed 0] COMMAND ...

A neighbour alternates between multiplying matrices in one thread and sleeping, both for random times (exponential,
``--spell`` seconds on average), so that it occupies one core for a share ``--busy`` of the time. ``--neighbours 2``
starts two independent ones. Without a command this is one neighbour, until it is killed. docs/reliability.md compares
runs of a recipe with and without neighbours.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time


def neighbour(spell: float, busy: float, seed: str) -> None:
    """Occupy one core for a share of the time, until killed."""
    import numpy as np

    chance, a = random.Random(seed), np.ones((512, 512), np.float32)
    while True:
        end = time.monotonic() + chance.expovariate(1 / spell)
        while time.monotonic() < end:
            a = a @ a * np.float32(1 / 512)
        time.sleep(chance.expovariate(busy / (spell * (1 - busy))) if busy < 1 else 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--neighbours", type=int, default=1, help="number of neighbours, one core each")
    parser.add_argument("--busy", type=float, default=0.5, help="share of the time that each is busy")
    parser.add_argument("--spell", type=float, default=5.0, help="average seconds of a busy or sleeping period")
    parser.add_argument("--seed", default="0", help="of the times")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="a program and its arguments")
    args = parser.parse_args()
    if not args.command:  # this process is a neighbour
        neighbour(args.spell, args.busy, args.seed)
    own = [sys.executable, __file__, "--spell", str(args.spell), "--busy", str(args.busy), "--seed"]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    others = [subprocess.Popen([*own, f"{args.seed}-{i}"], env=one_thread) for i in range(args.neighbours)]
    try:
        sys.exit(subprocess.run(args.command).returncode)
    finally:
        for other in others:
            other.kill()
            other.wait()


if __name__ == "__main__":
    main()
