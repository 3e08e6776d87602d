"""Float32 products of a few rows on a CPU: `functional.linear` against `lm/small_batch_linear.py`.

    python benchmarks/small_linear.py

Prints the best time of each in milliseconds and their ratio; weights rotate so that they do not stay in cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from tabulate import tabulate
from torch.nn import functional

from crossdraft.framework.lm.small_batch_linear import SmallBatchLinear


def best(run: Callable[[], object], repeats: int = 15) -> float:
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


@torch.inference_mode()
def main() -> None:
    rows = []
    for k, n in ((576, 576), (576, 1536), (1536, 576), (576, 49152)):
        layers = [SmallBatchLinear(k, n, bias=False) for _ in range(max(2, 30_000_000 // (k * n)))]
        for m in (1, 2, 3, 5, 9, 16, 24, 40, 72, 128):
            x = torch.randn(m, k)
            plain = best(lambda x=x, ls=layers: [functional.linear(x, layer.weight) for layer in ls]) / len(layers)
            ours = best(lambda x=x, ls=layers: [layer(x) for layer in ls]) / len(layers)
            rows.append([k, n, m, plain * 1e3, ours * 1e3, plain / ours])
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    print(tabulate(rows, ["in", "out", "rows", "linear ms", "ours ms", "ratio"], floatfmt=".3f"))


if __name__ == "__main__":
    main()
