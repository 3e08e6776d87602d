"""Acceptance benchmark of the GPU path: all figures, measured alternately in one process.

    python benchmarks/gpu.py [--parts plain bandwidth assisted batch verify attention waits] [--device cuda]
    python benchmarks/gpu.py --device cpu --tiny        # smoke test: no network, meaningless numbers

    plain       transformers' generate against ours with and without CUDA graphs, one sequence, temperature 0: SmolLM2,
                and a model of random weights in the shape of Llama 2 7B
    bandwidth   ours on the same models as a share of the memory bandwidth limit: the time to copy as many bytes as a
                pass reads of the weights, over the time of a token (without prefill)
    assisted    transformers' assisted generation against draft-model, the same pair of models and the same gamma
    batch       tokens per second and peak memory at B = 1 .. 64, plain and with draft-model
    verify      the verifier's share of a step, eager and compiled, temperature 1, gamma 8, B = 32,
                V = 128256: a target in the shape of Llama 3 8B, a draft model in that of SmolLM2, both of random
                weights
    attention   a pass with explicit masks against one with FlexAttention, precompiled: one token per row, a chain, a
                tree; rows of different lengths; eight layers in the shape of Llama 3 8B, random weights
    waits       number of host-device synchronizations of a step, by source line (only on CUDA)

Models with random weights get random tokens as prompts. Ratios are medians over prompts of ours / theirs in tokens per
second, prefill included on both sides; the sides alternate, in rotating order. As warm-up, ours runs twice on every
prompt (a graph is recorded at the second occurrence of a shape), the others twice on the first.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from gpu_bench import Bench, Ids
from tabulate import tabulate

from crossdraft.framework.api.build import make_slots
from crossdraft.framework.bench import memory
from crossdraft.framework.contracts.models import LoadedModel
from crossdraft.framework.engine.compiled_verifier import CompiledVerifier
from crossdraft.framework.engine.decoder import Decoder
from crossdraft.framework.lm.attention.flex import DEVICES, FLEX

#: Required values: a "least" is a lower bound, a "most" an upper bound.
WANTED: dict[str, tuple[str, float]] = {
    "plain SmolLM2, ours / transformers": ("least", 3.0),
    "plain 7B, share of the memory's limit": ("least", 0.7),
    "assisted, ours / transformers": ("least", 3.0),
    "verify block compiled, share of a step": ("most", 0.02),
    "waits of the host in a step": ("most", 1.0),
}
#: Repetitions for a single prompt or batch, and the number of warm-up repetitions until all graphs are recorded.
REPEATS, WARM_UP = 5, 2
LLAMA2_7B = dict(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, intermediate_size=11008)
LLAMA3_8B = dict(**{**LLAMA2_7B, "intermediate_size": 14336}, num_key_value_heads=8, vocab_size=128256)
SMOLLM2 = dict(
    hidden_size=576,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    intermediate_size=1536,
    tie_word_embeddings=True,
)


def plain_models(bench: Bench) -> Iterator[tuple[str, LoadedModel]]:
    yield "SmolLM2", bench.smollm2()
    yield "7B", bench.random("7B", LLAMA2_7B | {"vocab_size": 32000})


def plain(bench: Bench) -> None:
    new = bench.args.max_new_tokens
    for name, target in plain_models(bench):
        prompts = bench.prompts(target, bench.args.limit)
        make = partial(bench.decoder, target, None, 1, new=new, longest=max(map(len, prompts)))
        sides: dict[str, Callable[[Ids], int]] = {"transformers": partial(bench.theirs, target, None, new)}
        for label, graphs in (("ours without graphs", False), ("ours", True)):
            sides[label] = partial(produced, make(graphs=graphs))
        bench.compare(f"plain {name}", sides, prompts)


def produced(decoder: Decoder, prompt: Ids) -> int:
    return sum(len(response.tokens) for response in decoder.run([prompt]))


def bandwidth(bench: Bench) -> None:
    rate = bench.copied_per_second()
    for name, target in plain_models(bench):
        prompt, new = bench.prompts(target, 1)[0], bench.args.max_new_tokens
        decoder = bench.decoder(target, None, 1, new=new, longest=len(prompt))
        elapsed_times = []
        for _ in range(REPEATS):
            steps = bench.steps(decoder, [prompt])
            next(steps)  # prefill and the first step
            elapsed, count = bench.seconds(lambda: max(steps, default=1))  # noqa: B023
            elapsed_times.append(elapsed / max(count - 1, 1))
        token, limit = statistics.median(elapsed_times[WARM_UP:]), weights_read(target.model) / rate
        print(f"\n{name}: {token * 1e3:.3f} ms a token, reading the weights takes {limit * 1e3:.3f} ms")
        bench.found.append((f"plain {name}, share of the memory's limit", limit / token, f"{rate / 1e9:.0f} GB/s"))


def weights_read(model: Any) -> int:
    """Bytes of weights that a pass over one token reads: all of them, but only one row of an untied embedding."""
    tensors = {p.data_ptr(): p for p in model.parameters()}
    embedding = model.get_input_embeddings().weight
    if embedding.data_ptr() != model.get_output_embeddings().weight.data_ptr():
        tensors.pop(embedding.data_ptr())
    return sum(p.nbytes for p in tensors.values())


def assisted(bench: Bench) -> None:
    target, new, gamma = bench.smollm2(), bench.args.max_new_tokens, bench.args.gamma
    small = bench.drafting(target)
    # transformers reads the draft length from the assistant's own generation config.
    small.model.generation_config.update(  # type: ignore[union-attr]
        num_assistant_tokens=gamma, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    prompts = bench.prompts(target, bench.args.limit)
    make = partial(bench.decoder, target, small, 1, new=new, longest=max(map(len, prompts)), gamma=gamma)
    sides: dict[str, Callable[[Ids], int]] = {"transformers": partial(bench.theirs, target, small, new)}
    for label, graphs in (("ours without graphs", False), ("ours", True)):
        sides[label] = partial(produced, make(graphs=graphs))
    bench.compare("assisted", sides, prompts)


def batch(bench: Bench) -> None:
    target, new, gamma = bench.smollm2(), bench.args.max_new_tokens, bench.args.gamma
    small = bench.drafting(target)
    rows = []
    for size in bench.args.batch:
        prompts = bench.prompts(target, size)
        row: list[Any] = [size]
        for drafter in (None, small):
            gc.collect()  # release the slots of the previous size
            memory.start(bench.device)
            decoder = bench.decoder(target, drafter, size, new=new, longest=max(map(len, prompts)), gamma=gamma)
            rates = [whole_rate(bench, decoder, prompts) for _ in range(REPEATS)]
            rate = statistics.median(rates[WARM_UP:])
            row += [rate, bench.peak().removeprefix("peak memory ")]
            bench.found.append((f"batch {size}, {'draft-model' if drafter else 'plain'}, tok/s", rate, bench.peak()))
        rows.append(row)
    print(f"\nbatch: SmolLM2, {new} new tokens, gamma {gamma}, prefill included")
    print(tabulate(rows, ["B", "plain tok/s", "peak memory", "draft-model tok/s", "peak memory"], floatfmt=".1f"))


def whole_rate(bench: Bench, decoder: Decoder, prompts: Sequence[Ids]) -> float:
    """Tokens per second of all prompts."""
    elapsed_times, answers = bench.seconds(lambda: list(decoder.run(prompts)))
    return sum(len(answer.tokens) for answer in answers) / elapsed_times


def verify(bench: Bench) -> None:
    size, gamma = (2, 3) if bench.args.tiny else (32, 8)
    target = bench.random("8B", LLAMA3_8B)
    small = bench.random("drafter", SMOLLM2 | {"vocab_size": LLAMA3_8B["vocab_size"]}, seed=1)
    prompts, new = bench.prompts(target, size), bench.args.max_new_tokens
    for rule, compiled in product(("token", "block"), (False, True)):
        memory.start(bench.device)
        decoder = bench.decoder(
            target,
            small,
            size,
            new=new,
            longest=len(prompts[0]),
            gamma=gamma,
            verifier=rule,
            temperature=1.0,
            timed=True,
        )
        if compiled:
            decoder.compiled_verifier = CompiledVerifier(decoder.verifier)
        shares: list[float] = []
        for repeat in range(WARM_UP + 1):
            before: dict[str, float] = {}
            for count in bench.steps(decoder, prompts):
                after = dict(decoder.stopwatch.seconds)
                if count > 1 and repeat == WARM_UP:
                    spent = {phase: after[phase] - before[phase] for phase in after}
                    shares.append(spent["verify"] / sum(spent.values()))
                before = after
        median = statistics.median(shares) if shares else 0.0
        title = f"verify {rule}{' compiled' * compiled}"
        print(f"\n{title}: {median:.2%} of a step (median of {len(shares)}), B {size}, gamma {gamma}")
        bench.found.append((f"{title}, share of a step", median, bench.peak()))


def attention(bench: Bench) -> None:
    size, layers = 8, {"num_hidden_layers": 8}
    sides = {"masks": "sdpa", "flex": FLEX} if bench.device.type in DEVICES else {"masks": "sdpa"}
    targets = {side: bench.random(side, LLAMA3_8B | layers, attention=name) for side, name in sides.items()}
    kinds = {
        "one token": [-1],
        "chain of 5": list(range(-1, 5)),
        "tree of 14": [-1, 0, 0, *(i // 2 for i in range(2, 14))],
    }
    rows = []
    for slots in (96, 160) if bench.args.tiny else (1024, 4096):
        lms = {side: make_slots(target, size, slots) for side, target in targets.items()}
        for kind, parents in kinds.items():
            tokens = torch.ones(size, len(parents), dtype=torch.long, device=bench.device)
            tree = torch.tensor([parents] * size, device=bench.device) if kind.startswith("tree") else None
            elapsed_times: dict[str, list[float]] = {side: [] for side in lms}
            for _, (side, lm) in product(range(WARM_UP + REPEATS), lms.items()):
                lm.lengths[:] = [(slots - 32) * (row + 1) // size for row in range(size)]
                elapsed_times[side].append(bench.seconds(partial(lm.forward, tokens, tree))[0] * 1e3)
                lm.commit([0] * size)
            passes = [statistics.median(times[WARM_UP:]) for times in elapsed_times.values()]
            rows.append([kind, slots, *passes])
            if len(passes) > 1:
                bench.found.append((f"attention {kind}, {slots} slots, masks / flex", passes[0] / passes[1], ""))
    print(f"\nattention: milliseconds of a pass, B {size}, shortest row 1/8 of the longest")
    print(tabulate(rows, ["pass", "slots", *(f"{side} ms" for side in sides)], floatfmt=".3f"))
    if len(sides) == 1:
        print(f"({FLEX} runs only on {' and '.join(DEVICES)})")


def waits(bench: Bench) -> None:
    target, gamma = bench.smollm2(), bench.args.gamma
    small, new = bench.drafting(target), bench.args.max_new_tokens
    prompts = bench.prompts(target, 4)
    make = partial(bench.decoder, target, new=new, longest=max(map(len, prompts)), batch_size=len(prompts))
    for label, decoder in (("plain", make(small=None)), ("draft-model", make(small=small, gamma=gamma))):
        counts: list[int] = []
        places: Counter[str] = Counter()
        for repeat in range(WARM_UP + 1):
            steps = bench.steps(decoder, prompts)
            next(steps)
            while decoder.occupied == len(prompts):
                with counted_waits(bench.device) as result:
                    next(steps)
                if repeat == WARM_UP:
                    counts.append(result.total())
                    places += result
            list(steps)
        median = statistics.median(counts)
        print(f"\nwaits, {label}: {median:g} a step (median of {len(counts)}), by place:")
        for place, count in places.most_common(12):
            print(f"  {count / len(counts):6.2f}  {place}")
        if bench.device.type == "cuda":
            bench.found.append(("waits of the host in a step", median, f"{label}; most {max(counts)}"))
        else:
            print("  (counted only on CUDA)")


@contextmanager
def counted_waits(device: torch.device) -> Iterator[Counter[str]]:
    """Number of host synchronizations with CUDA, by file and line of the Python code that caused them."""
    places: Counter[str] = Counter()
    if device.type != "cuda":
        yield places
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for warning in caught:
        if "synchronizing" in str(warning.message):
            places[f"{Path(warning.filename).name}:{warning.lineno}"] += 1


PARTS: dict[str, Callable[[Bench], None]] = {
    "plain": plain,
    "bandwidth": bandwidth,
    "assisted": assisted,
    "batch": batch,
    "verify": verify,
    "attention": attention,
    "waits": waits,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tiny", action="store_true", help="use tiny random models and prompts")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--drafter", default="smollm2-draft-model")
    parser.add_argument("--limit", type=int, default=8, help="number of prompts of plain and assisted")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--gamma", type=int, default=4, help="draft length of assisted, batch and waits")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    args = parser.parse_args(arguments)

    bench = Bench(args)
    cuda = bench.device.type == "cuda"
    where = torch.cuda.get_device_name(bench.device) if cuda else f"{torch.get_num_threads()} CPU threads"
    print(f"torch {torch.__version__}, {where}{', tiny models: meaningless numbers' if args.tiny else ''}")
    for part in args.parts:
        PARTS[part](bench)
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
    rows = []
    for what, value, remark in bench.found:
        bound, expected = WANTED.get(what, ("", 0.0))
        reached = value >= expected if bound == "least" else value <= expected
        verdict = f"{'reached' if reached else 'MISSED'}: at {bound} {expected:g}" if bound else ""
        rows.append([what, value, verdict, remark])
    print("\n" + tabulate(rows, ["number", "value", "wanted", ""], floatfmt=".3f"))


if __name__ == "__main__":
    main()
