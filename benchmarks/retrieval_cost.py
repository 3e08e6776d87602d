"""Share of a step taken by drafters without a model, for one request with a long prompt.

    pip install -e plugins/crossdraft-suffix -e plugins/crossdraft-rest
    python benchmarks/retrieval_cost.py [--target smollm2-135m-instruct] [--prompt 4096] [--steps 48] [--device auto]

The prompt is a concatenation of built-in prompts; decoding is greedy and ignores the end of the answer. The memory of
``suffix`` is filled with random tokens, and ``rest`` has a datastore of ``--datastore`` random tokens. Prints medians
over steps: milliseconds of a step and of the drafter (`propose` and `observe`), and its share in per cent.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from crossdraft_rest.datastore import build, tokenizer_sha256
from tabulate import tabulate

from crossdraft.framework.api.generate import pair_decoder
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.engine.stopwatch import Stopwatch
from crossdraft.framework.models.load import load_model
from crossdraft.framework.recipe.prompts import load_prompts

#: Warm-up steps, in which buffers are allocated and every draft is validated.
WARM_UP = 10
#: Upper bound of the tokens of a step.
LONGEST = 20
PHASES = ("draft", "target", "verify", "rest")


def long_prompt(tokenizer: Any, length: int) -> list[int]:
    """The built-in prompts' tokens, repeated up to a length."""
    ids: list[int] = []
    for prompt in cycle(load_prompts("builtin")):
        ids += tokenizer(" ".join(prompt.turns) + "\n", add_special_tokens=False)["input_ids"]
        if len(ids) >= length:
            return ids[:length]
    raise AssertionError


def steps_of(target: Any, drafter: dict[str, Any], prompt: list[int], steps: int) -> list[dict[str, float]]:
    """Seconds of each phase of each step."""
    clock = Stopwatch(target.model.device)
    result, last = [], dict(clock.seconds)

    def note(_: Any) -> None:
        now = dict(clock.seconds)
        result.append({phase: now[phase] - last[phase] for phase in PHASES})
        last.update(now)

    options = {"sampling": Sampling(temperature=0), "batch_size": 1, "max_new_tokens": LONGEST * steps}
    length = len(prompt) + LONGEST * steps
    decoder = pair_decoder(target, drafter, None, length, stopwatch=clock, on_step=note, **options)
    if (memory := getattr(decoder.drafter, "_memory", None)) is not None:
        memory.extend(np.random.default_rng(0).integers(0, decoder.target.vocab_size, memory.capacity))
    decoder.start(0, prompt, eos=())
    last.update(clock.seconds)
    while len(result) < steps:
        decoder.step()
    decoder.abandon()
    return result[WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of the prompt")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--datastore", type=int, default=1_000_000, help="number of tokens in the datastore of 'rest'")
    parser.add_argument("--drafter", action="append", help="measure these alone")
    args = parser.parse_args()
    target = load_model(args.target, device=args.device)
    prompt, table = long_prompt(target.tokenizer, args.prompt), []
    with tempfile.TemporaryDirectory() as directory:
        store, random = Path(directory) / "store", np.random.default_rng(1)
        build([(random.zipf(1.2, args.datastore) - 1) % 1000], store, tokenizer=tokenizer_sha256(target.tokenizer))
        drafters: dict[str, dict[str, Any]] = {
            "none": {"name": "none"},
            "prompt-lookup": {"name": "prompt-lookup"},
            "suffix": {"name": "suffix"},
            "suffix (tree)": {"name": "suffix", "tree": True},
            "rest": {"name": "rest", "datastore": str(store)},
            "token-recycling": {"name": "token-recycling"},
        }
        for title in args.drafter or drafters:
            steps = steps_of(target, drafters[title], prompt, args.steps)
            whole = [1e3 * sum(item.values()) for item in steps]
            own = [1e3 * item["draft"] for item in steps]
            share = [100 * a / b for a, b in zip(own, whole, strict=True)]
            table.append([title, *(statistics.median(values) for values in (whole, own, share))])
            print(tabulate(table[-1:], tablefmt="plain", floatfmt=".3f"), flush=True)
    print(tabulate(table, headers=["drafter", "round ms", "draft ms", "share %"], floatfmt=".3f"))


if __name__ == "__main__":
    main()
