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
from dataclasses import dataclass, field
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


@dataclass
class Memory:
    """A memory of one size, with the times of its steps."""

    tokens: int
    history: History
    bytes: float
    lookup_seconds: list[float] = field(default_factory=list)
    update_seconds: list[float] = field(default_factory=list)
    drafted: int = 0

    def play(self, tail: list[int], new: list[int], options: Suffix.Config) -> None:
        """One step."""
        start = time.perf_counter()
        result = speculate([self.history], tail, options.factor, options.min_prob, options.tree)
        middle = time.perf_counter()
        self.history.extend(new)
        self.lookup_seconds.append(middle - start)
        self.update_seconds.append(time.perf_counter() - middle)
        self.drafted += len(result.tokens)

    def row(self) -> dict[str, float]:
        results = {"tokens": self.tokens, "drafted a step": self.drafted / len(self.lookup_seconds)}
        for name, seconds in (("look-up", self.lookup_seconds), ("update", self.update_seconds)):
            results[f"{name} median us"] = 1e6 * float(np.median(seconds))
            results[f"{name} p95 us"] = 1e6 * float(np.quantile(seconds, 0.95))
        return results | {"process bytes a token": self.bytes}


def measure(sizes: Sequence[int], steps: int, options: Suffix.Config) -> list[dict[str, float]]:
    """Rows by size; the steps of all sizes alternate."""
    memories, source = [], texts(2)
    for size in sorted(sizes):
        before = resident()
        history = History(size + steps * NEW, options.depth, options.occurrences)
        pieces = texts(1)
        while history.total < size:
            history.extend(next(pieces)[: size - history.total])
        memories.append(Memory(size, history, (resident() - before) / size))
    text = np.concatenate([next(source) for _ in range(1 + (steps * NEW + options.depth) // STEP)])
    for place in range(options.depth, options.depth + steps * NEW, NEW):
        tail, new = text[place - options.depth : place].tolist(), text[place : place + NEW].tolist()
        for memory in memories:
            memory.play(tail, new, options)
    return [memory.row() for memory in memories]


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
