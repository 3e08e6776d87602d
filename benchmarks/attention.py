"""Attention of a few queries over a cache with shared heads: three PyTorch implementations compared.

    python benchmarks/attention.py [--device cuda] [--heads 9 3] [--dim 64]

repeat: transformers' ``sdpa``, which copies keys and values for every head; gqa: PyTorch's ``enable_gqa``; rows: ours
(``framework/lm/attention/sdpa.py``), which stacks heads that share keys as rows of one product. Prints medians in
microseconds. Keys and values are a slice of a longer buffer and have an additive mask, as in the decode loop. Buffers
rotate, so that a KV cache of realistic size does not stay in the processor's cache.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from itertools import cycle, product
from typing import Any

import torch
from tabulate import tabulate
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from crossdraft.framework.lm.attention.sdpa import grouped_sdpa


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--width", type=int, nargs="+", default=[1, 5, 9], help="queries of a row")
    parser.add_argument("--reach", type=int, nargs="+", default=[128, 512], help="slots attended over")
    parser.add_argument("--heads", type=int, nargs=2, default=[9, 3], help="query heads and key-value heads")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=8, help="number of rotating buffers")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    heads, shared = args.heads
    module: Any = torch.nn.Module()
    module.num_key_value_groups = heads // shared
    rows = []
    for b, width, reach in product(args.batch, args.width, args.reach):
        buffers = torch.randn(args.layers, 2, b, shared, reach + 88, args.dim, dtype=dtype, device=device)
        query = torch.randn(b, width, heads, args.dim, dtype=dtype, device=device).transpose(1, 2)
        mask = torch.zeros(b, 1, width, reach, dtype=dtype, device=device)
        ways = {
            "repeat": partial(sdpa_attention_forward, module),
            "gqa": partial(functional.scaled_dot_product_attention, enable_gqa=True),
            "rows": partial(grouped_sdpa, module),
        }
        used: dict[str, list[float]] = {name: [] for name in ways}
        layers = cycle(buffers[..., :reach, :])
        for repeat in range(args.repeats + 1):
            for name, way in ways.items():
                if device.type == "cuda":
                    torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(args.layers):
                    key, value = next(layers)
                    way(query, key, value, mask)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                if repeat:
                    used[name].append((time.perf_counter() - start) / args.layers * 1e6)
        medians = {name: statistics.median(times) for name, times in used.items()}
        rows.append([b, width, reach, *medians.values(), medians["rows"] / medians["repeat"]])
    print(f"torch {torch.__version__}, {device}, {heads} heads over {shared}, {args.layers} layers")
    print(tabulate(rows, ["B", "W", "reach", *(f"{w} µs" for w in ways), "rows / repeat"], floatfmt=".2f"))


if __name__ == "__main__":
    main()
