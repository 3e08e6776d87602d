"""Look-up and update time of the drafter ``suffix``, as its memory grows to ten million tokens.

    pip install -e plugins/crossdraft-suffix
    python benchmarks/suffix_growth.py [--sizes 10000 100000 1000000 10000000]

The memory is filled with text of frequent and rare tokens and repeated phrases. At each size, steps are simulated: the
last 24 tokens are looked up and extended to a draft, then 4 tokens are added. Prints medians and 95th percentiles in
microseconds, and the growth of the process in bytes per token.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from crossdraft_suffix.drafter import Suffix
from crossdraft_suffix.history import History
from crossdraft_suffix.speculation import speculate

VOCABULARY, STEP, NEW = 49_152, 8_192, 4


def texts(seed: int) -> Iterator[np.ndarray]:
    """Pieces of `STEP` tokens: Zipf's law, and a third of each copied from a hundred phrases, with a fixed seed."""
    phrases = np.random.default_rng(0).integers(0, VOCABULARY, (100, 40))
    random = np.random.default_rng(seed)
    while True:
        piece = (random.zipf(1.2, STEP) - 1) % VOCABULARY
        for start in random.integers(0, STEP - 40, STEP // 120):
            phrase = phrases[int(random.integers(len(phrases)))]
            piece[start : start + 40] = phrase
        yield piece


def resident() -> int:
    """Resident memory of this process in bytes; 0 if the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def measure(sizes: Sequence[int], steps: int, options: Suffix.Config) -> Iterator[dict[str, float]]:
    """Rows by size; the steps of all sizes alternate."""
    histories, grown, source = {}, {}, texts(2)
    for size in sorted(sizes):
        before, pieces = resident(), texts(1)
        history = histories[size] = History(size + steps * NEW, options.depth, options.occurrences)
        while history.total < size:
            history.extend(next(pieces)[: size - history.total])
        grown[size] = (resident() - before) / size
    text = np.concatenate([next(source) for _ in range(1 + (steps * NEW + options.depth) // STEP)])
    times, drafted = {size: np.zeros((2, steps)) for size in histories}, dict.fromkeys(histories, 0)
    for step, place in enumerate(range(options.depth, options.depth + steps * NEW, NEW)):
        tail, new = text[place - options.depth : place].tolist(), text[place : place + NEW].tolist()
        for size, history in histories.items():
            start = time.perf_counter()
            result = speculate([history], tail, options.factor, options.min_prob, options.tree)
            middle = time.perf_counter()
            history.extend(new)
            times[size][:, step] = middle - start, time.perf_counter() - middle
            drafted[size] += len(result.tokens)
    for size in histories:
        row = {"tokens": size, "drafted a step": drafted[size] / steps}
        for name, seconds in zip(("look-up", "update"), 1e6 * times[size], strict=True):
            row |= {f"{name} median us": np.median(seconds), f"{name} p95 us": np.quantile(seconds, 0.95)}
        yield row | {"process bytes a token": grown[size]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10**4, 10**5, 10**6, 10**7])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--tree", action="store_true", help="draft trees")
    args = parser.parse_args()
    for row in measure(args.sizes, args.steps, Suffix.Config(tree=args.tree)):
        print(", ".join(f"{name} {value:,.1f}" for name, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
