"""Plain greedy decoding speed of a GGUF file: crossdraft's loop against llama.cpp's server, same number of threads.

    pip install -e plugins/crossdraft-llamacpp
    python benchmarks/llamacpp_speed.py --server PATH/llama-server --model FILE.gguf [--limit 12] [--max-new-tokens 64]

The server and our loop alternate prompt by prompt. Prefill is excluded (the server reports its own decoding time).
Prints medians over prompts of both rates and of their ratio, and the number of identical texts.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from llamacpp_server import served
from tabulate import tabulate

from crossdraft import load_model
from crossdraft.framework.api.generate import pair_decoder
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.models.chat import encode
from crossdraft.framework.recipe.prompts import load_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the GGUF file")
    parser.add_argument("--server", required=True, help="llama-server")
    parser.add_argument("--prompts", default="builtin")
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--log", type=Path, default=Path("server.log"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    loaded = load_model(args.model)
    prompts = [encode(loaded.tokenizer, [p.turns[0]]) for p in load_prompts(args.prompts, limit=args.limit)]
    args.room = max(map(len, prompts)) + args.max_new_tokens + 64
    decoder = pair_decoder(
        loaded, "none", None, args.room, sampling=Sampling(temperature=0), batch_size=1,
        max_new_tokens=args.max_new_tokens,
    )  # fmt: skip

    def ours(prompt: list[int]) -> tuple[list[int], float]:
        decoder.start(0, prompt)
        start, result = time.perf_counter(), []
        while decoder.occupied:
            result += decoder.step()
        return result[0].tokens, time.perf_counter() - start

    rows: list[tuple[float, float, bool]] = []
    about: Any = (loaded.tokenizer, loaded.eos_token_ids)
    with served(args, ["--spec-type", "none"], *about) as server:
        server.answer(prompts[0], 8)
        ours(prompts[0])
        for prompt in prompts:
            theirs = server.answer(prompt, args.max_new_tokens)
            tokens, seconds = ours(prompt)
            if len(theirs.tokens) < 8 or len(tokens) < 8:
                continue
            # The server's first token comes from the prefill pass; each of ours takes a decoding pass.
            rates = (theirs.decoded - 1) / theirs.seconds, len(tokens) / seconds
            ends = loaded.eos_token_ids
            same = [[t for t in text if t not in ends] for text in (theirs.tokens, tokens)]
            rows.append((*rates, same[0] == same[1]))
            print(*(f"{value:.1f}" for value in rows[-1][:2]), file=sys.stderr, flush=True)
    ratios = [own / other for other, own, _ in rows]
    low, _, high = quantiles(ratios, n=4)
    print(f"{len(rows)} prompts, {args.threads} threads; {sum(row[2] for row in rows)} texts are identical")
    table = [[median(r[0] for r in rows), median(r[1] for r in rows), median(ratios), f"{low:.2f} to {high:.2f}"]]
    print(tabulate(table, ["server, tokens/s", "ours, tokens/s", "ratio", "half of them"], floatfmt=".2f"))


if __name__ == "__main__":
    main()
