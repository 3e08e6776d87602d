"""Separate and batched prefill compared: time, and difference of the next token's log-probabilities.

    python benchmarks/prefill.py [--target smollm2-135m-instruct] [--prompts 8] [--tokens 100] [--repeats 7]

Prompts are random tokens; their lengths are within 10 % of ``--tokens``. Both alternate; prints medians.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from tabulate import tabulate

from crossdraft import load_model, on_device
from crossdraft.framework.lm.transformers_lm import TransformersLM


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = load_model(args.target, dtype=args.dtype).model
    lengths = [round(args.tokens * (0.9 + 0.2 * i / max(args.prompts - 1, 1))) for i in range(args.prompts)]
    lm = TransformersLM(model, args.prompts, max(lengths) + 1)
    prompts = [torch.randint(lm.vocab_size, (length,)).tolist() for length in lengths]
    root = on_device([[prompt[-1]] for prompt in prompts], lm.device)

    def time_to_start(batched: bool) -> tuple[float, torch.Tensor]:
        start = time.perf_counter()
        if batched:
            lm.prefill({row: prompt[:-1] for row, prompt in enumerate(prompts)})
        for row, prompt in enumerate(prompts):
            lm.start(row, prompt)
        if lm.device.type == "cuda":
            torch.cuda.synchronize()
        seconds, logits = time.perf_counter() - start, lm.forward(root)[0]
        lm.commit([0] * args.prompts)
        for row in range(args.prompts):
            lm.free(row)
        return seconds, logits[:, 0].float().log_softmax(-1)

    took: dict[bool, list[float]] = {False: [], True: []}
    output = {}
    for repeat in range(args.repeats + 1):
        for batched in took:
            seconds, output[batched] = time_to_start(batched)
            if repeat:  # the first repetition is a warm-up
                took[batched].append(seconds)
    separate, shared = (statistics.median(took[way]) * 1e3 for way in (False, True))
    apart = (output[True] - output[False]).abs()[output[False] > -20]
    print(f"{args.target}, {model.dtype}, {lm.device}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"{args.prompts} prompts of {lengths[0]} to {lengths[-1]} tokens; medians of {args.repeats}")
    header = ["one by one, ms", "together, ms", "ratio", "log P apart, at most"]
    row = [separate, shared, separate / shared, f"{apart.max().item():.1e}"]
    print(tabulate([row], header, floatfmt=".2f", disable_numparse=[3]))


if __name__ == "__main__":
    main()
