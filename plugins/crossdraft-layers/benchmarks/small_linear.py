"""Products and passes over a few rows on a CPU, relative to one row.

    python plugins/crossdraft-layers/benchmarks/small_linear.py [--model NAME] [--threads 2] [--dtype bfloat16]

Layers: `functional.linear`, the product ``(W x^T)^T`` of layers without a packed copy, and packed weights (see
`small_batch_linear.py`), relative to `functional.linear` of one row; weights rotate so that they do not stay in
cache. Passes: a whole model with each of the three, relative to its own pass over one token; then the gain of packed
weights. In bfloat16 layers without a packed copy compute `functional.linear`, and on processors without instructions
for it there are no packed weights.

Kernels are measured in turn. Each ratio is one of medians, followed by one of minima. With one thread, times are its
processor time, which other programs disturb less.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from crossdraft_layers import small_batch_linear
from crossdraft_layers.small_batch_linear import SmallBatchLinear, packed, packed_product, transposed_product
from tabulate import tabulate
from torch import nn
from torch.nn import functional

from crossdraft import load_model
from crossdraft.framework.lm.transformers_lm import TransformersLM

KERNELS = ("linear", "transposed", "packed")
PARTS = ("layers", "passes")
#: Inputs and outputs of SmolLM2's layers, queries with keys and values and gate with up as one.
SHAPES = ((576, 576), (576, 960), (576, 3072), (1536, 576), (576, 49152))


def seconds(runs: Mapping[Any, Callable[[], object]], repeats: int) -> dict[Any, list[float]]:
    """Times of ``runs``, in turn, after one repetition that does not count."""
    times: dict[Any, list[float]] = {key: [] for key in runs}
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    for _ in range(repeats + 1):
        for key, run in runs.items():
            start = clock()
            run()
            times[key].append(clock() - start)
    return {key: values[1:] for key, values in times.items()}


def ratio(a: list[float], b: list[float]) -> str:
    return f"{statistics.median(a) / statistics.median(b):.2f} {min(a) / min(b):.2f}"


def layer_table(
    shapes: tuple[tuple[int, int], ...], rows: tuple[int, ...], repeats: int, dtype: torch.dtype
) -> list[list[Any]]:
    table = []
    packs = small_batch_linear._available(dtype)
    kernels = KERNELS if packs else KERNELS[:2]
    for k, n in shapes:
        weights = [torch.randn(n, k, dtype=dtype) for _ in range(max(2, 12_000_000 // (k * n)))]
        runs: dict[Any, Callable[[], object]] = {}
        for m in rows:
            x = torch.randn(m, k, dtype=dtype)
            runs["linear", m] = lambda x=x, ws=weights: [functional.linear(x, w) for w in ws]
            runs["transposed", m] = lambda x=x, ws=weights: [transposed_product(x, w, None) for w in ws]
            if packs:
                runs["packed", m] = lambda x=x, ws=weights: [packed_product(x, packed(w), None) for w in ws]
        times = seconds(runs, repeats)
        table += [[f"{k} -> {n}", m, *(ratio(times[name, m], times["linear", 1]) for name in kernels)] for m in rows]
    return table


def pass_table(model: Any, rows: tuple[int, ...], repeats: int, committed: int = 100) -> list[list[Any]]:
    lm = TransformersLM(model, 1, committed + max(rows) + 1)
    layers = [layer for layer in model.modules() if type(layer) is SmallBatchLinear]
    lm.start(0, list(range(10, 11 + committed)))
    available = small_batch_linear._available

    def run(kernel: str, ids: torch.Tensor) -> None:
        for layer in layers:
            layer.__class__ = nn.Linear if kernel == "linear" else SmallBatchLinear
        small_batch_linear._available = available if kernel == "packed" else lambda _: False
        lm.forward(ids)
        lm.commit([0])

    tokens = torch.arange(10, 10 + max(rows))[None]
    runs = {(name, m): lambda name=name, m=m: run(name, tokens[:, :m]) for m in rows for name in KERNELS}
    try:
        times = seconds(runs, repeats)
    finally:
        small_batch_linear._available = available
    relative = {m: [ratio(times[name, m], times[name, 1]) for name in KERNELS] for m in rows}
    return [[m, *relative[m], ratio(times["linear", m], times["packed", m])] for m in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{args.dtype}, {args.threads} threads, torch {torch.__version__}")
    if "layers" in args.parts:
        with torch.no_grad():
            table = layer_table(SHAPES, (1, 2, 3, 4, 5, 8, 12, 16, 32), args.repeats, getattr(torch, args.dtype))
        print(tabulate(table, ["layer", "rows", *KERNELS]), "\n")
    if "passes" in args.parts:
        model = load_model(args.model, dtype=args.dtype, device="cpu").model
        table = pass_table(model, (1, 2, 4, 8, 16, 128, 512), args.repeats)
        print(tabulate(table, ["rows", *KERNELS, "linear / packed"]))


if __name__ == "__main__":
    main()
