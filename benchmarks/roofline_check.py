"""Error of the roofline: its predictions beside published batch-size series.

    python benchmarks/roofline_check.py

Three kinds of comparison, none with parameters fitted to the machine:

- plain decoding, tokens/s, without a free parameter;
- a speed-up published with its accepted length, without a free parameter;
- series of speed-ups over batch sizes without a published accepted length. The acceptance probability of a drafted
  token is fitted to the smallest batch size, and the others are compared.

Sources of the published numbers:

[1] Li, Wei, Zhang and Zhang, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time
    Test", 2025, Tables 3 (SGLang, H100, chains of 3), 4 (plain decoding) and 5 (vLLM, chains of 2; its text names
    RTX 3090 and a caption of another version A100, so both are shown). LLaMA-3.1-8B, MT-bench.
[2] Model card of a block-diffusion drafter for Qwen3-8B (Dogacel/Qwen3-8B-DSpark, 2026): blocks of 7, accepted length
    2.33, one H100, SPEED-Bench coding, temperature 1, at concurrency 1 and 32.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median

from crossdraft_advisor.roofline.accelerators import accelerator
from crossdraft_advisor.roofline.roofline import EFFICIENCY, Products, Roofline, Shape
from scipy.optimize import brentq
from tabulate import tabulate

from crossdraft.framework.cost.prediction import CellStatistics, predict, stops_paying
from crossdraft.runs import Curve

#: Context length in tokens: not published; MT-bench and short answers come to a few hundred.
CONTEXT = 512


def shape(name: str, layers: int, intermediate: int, vocab: int, fusion: int = 0) -> Shape:
    """The shape of a Llama of width 4096; ``fusion``: columns of a projection before its layers."""
    config = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
    sizes = {"num_hidden_layers": layers, "intermediate_size": intermediate, "vocab_size": vocab}
    result = Shape.from_config(config | sizes, name)
    return replace(result, head=result.head + Products(4096 * fusion, 4096 + fusion))


LLAMA_8B, QWEN_8B = shape("Llama-3.1-8B", 32, 14336, 128256), shape("Qwen3-8B", 36, 12288, 151936)
# One decoder layer. EAGLE joins embedding and feature into one vector first and uses the target's head; EAGLE-3 joins
# three features, doubles the width of its attention and has its own head of 32000 tokens.
EAGLE = shape("EAGLE head", 1, 14336, 128256, 2 * 4096)
EAGLE_3 = shape("EAGLE-3 head", 1, 14336, 32000, 3 * 4096 + 128 * 48)
# Five layers over the whole block, and the target's head.
BLOCK = shape("block drafter", 5, 12288, 151936, 5 * 4096)

BATCH_SIZES = (2, 4, 8, 16, 24, 32, 48, 56, 64)
SERIES = {  # name: accelerators, gamma, drafter, speed-ups by batch size
    "SGLang, EAGLE": (("h100",), 3, EAGLE, (1.40, 1.38, 1.23, 1.02, 0.93, 0.94, 0.88, 0.99, 0.99)),
    "SGLang, EAGLE-3": (("h100",), 3, EAGLE_3, (1.81, 1.82, 1.62, 1.48, 1.39, 1.32, 1.38, 1.34, 1.38)),
    "vLLM, EAGLE": (("rtx-3090", "a100-80g"), 2, EAGLE, (1.30, 1.25, 1.21, 1.10, 1.03, 0.93, 0.82, 0.71)),
    "vLLM, EAGLE-3": (("rtx-3090", "a100-80g"), 2, EAGLE_3, (1.75, 1.68, 1.58, 1.49, 1.42, 1.36, 1.21, 1.01)),
}
PLAIN = (  # model, batch size, tokens/s on one H100, source
    (LLAMA_8B, 1, 158.34, "[1] SGLang"),
    (QWEN_8B, 1, 147.4, "[2]"),
    (QWEN_8B, 32, 2994.8, "[2]"),
)
KNOWN = ((1, 259.9 / 147.4), (32, 3875.6 / 2994.8))  # [2]: batch size, speed-up
BLOCK_SIZE, ACCEPTED_LENGTH = 7, 2.33


def fitted_acceptance(gamma: int, speed_up: float, target: Curve, drafter: Curve) -> float:
    """The acceptance whose prediction at the first batch size is ``speed_up``, clamped to [0, 1]."""

    def off(acceptance: float) -> float:
        cell = CellStatistics.chain(BATCH_SIZES[0], gamma, acceptance, CONTEXT)
        return predict(cell, target, drafter).speed_up - speed_up

    return 0.0 if off(0.0) > 0 else 1.0 if off(1.0) < 0 else float(brentq(off, 0.0, 1.0))


def stops(speed_up: Callable[[int], float]) -> int | None:
    """Smallest batch size at which drafting is slower than plain decoding."""
    return next((b for b in range(1, 1025) if speed_up(b) < 1), None)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the roofline with published numbers.")
    parser.add_argument("--efficiency", nargs=2, type=float, default=EFFICIENCY, metavar=("M", "C"))
    efficiency = tuple(parser.parse_args().efficiency)

    def roofline(shape: Shape, name: str) -> Roofline:
        return Roofline(shape, accelerator(name), efficiency=efficiency)

    print(f"efficiency {efficiency[0]:g} of the bandwidth, {efficiency[1]:g} of the FLOP rate; context {CONTEXT}\n")
    rows, off = [], []
    for shape, b, published, source in PLAIN:
        result = b / roofline(shape, "h100").seconds(b, 1, CONTEXT)
        off.append(result / published - 1)
        rows.append([shape.name, b, published, result, f"{100 * off[-1]:+.0f}", source])
    print("plain decoding on one H100, tokens/s\n")
    print(tabulate(rows, ["model", "B", "published", "roofline", "off %", "source"], floatfmt=".1f"))
    print(f"\nmedian error {100 * median(map(abs, off)):.0f} %\n")

    rows, off = [], []
    target, drafter = roofline(QWEN_8B, "h100"), roofline(BLOCK, "h100")
    for b, published in KNOWN:
        cell = CellStatistics(
            b, b, ACCEPTED_LENGTH, {BLOCK_SIZE: 1.0}, CONTEXT, draft_seconds=drafter.seconds(b, BLOCK_SIZE, CONTEXT)
        )
        result = predict(cell, target).speed_up
        off.append(result / published - 1)
        rows.append([b, published, result, f"{100 * off[-1]:+.0f}"])
    print("Qwen3-8B with a block drafter on one H100, speed-up, accepted length as published [2]\n")
    print(tabulate(rows, ["B", "published", "roofline", "off %"], floatfmt=".2f"))
    print(f"\nmedian error {100 * median(map(abs, off)):.0f} %\n")

    lines, everything, ends = [], [], []
    for name, (machines, gamma, head, published) in SERIES.items():
        lines.append([name, "published", "", *published])
        for machine in machines:
            target, drafter = roofline(LLAMA_8B, machine), roofline(head, machine)
            a = fitted_acceptance(gamma, published[0], target, drafter)
            result = [
                predict(CellStatistics.chain(b, gamma, a, CONTEXT), target, drafter).speed_up
                for b in BATCH_SIZES[: len(published)]
            ]
            lines.append(["", machine, f"{a:.2f}", *result])
            off = [f / p - 1 for f, p in zip(result[1:], published[1:], strict=True)]
            everything += off
            cells = partial(CellStatistics.chain, gamma=gamma, acceptance=a, context=CONTEXT)
            end = stops(lambda b, c=cells, t=target, d=drafter: predict(c(b), t, d).speed_up)
            ends.append([name, machine, stops_paying(BATCH_SIZES[: len(published)], published), end])
            error = f"median {100 * median(map(abs, off)):.0f} %"
            lines.append(["", f"off % ({error})", "", "", *(f"{100 * x:+.0f}" for x in off)])
    print("LLaMA-3.1-8B with an EAGLE head, speed-up by batch size; acceptance a set at B = 2 [1]\n")
    print(tabulate(lines, ["series", "", "a", *map(str, BATCH_SIZES)], floatfmt=".2f"))
    print(f"\nmedian error over all series {100 * median(map(abs, everything)):.0f} %\n")
    print("smallest batch size at which drafting is slower (none: faster at all published sizes)\n")
    print(tabulate(ends, ["series", "", "published", "roofline"], missingval="none"))


if __name__ == "__main__":
    main()
