"""Acceptance benchmark of the GPU path: all figures in eight minutes, measured alternately in one process.

    python benchmarks/gpu.py [--parts tests plain ...] [--out gpu-report] [--seconds 480]
    python benchmarks/gpu.py --device cpu --tiny        # smoke test: meaningless numbers

Needs no network and no installation of crossdraft: models have random weights, with random tokens as prompts, unless
``--model`` and ``--drafter`` name models. ``report.json`` and ``report.md`` are written after every row. A part that
fails or runs out of time does not end the others, and the time that it does not use is left to the later ones.

    tests       the tests that need CUDA: ``pytest -m "gpu and not slow"`` (if pytest is installed; only on CUDA)
    plain       transformers' generate against ours with and without CUDA graphs, one sequence, temperature 0: models in
                the shape of SmolLM2-135M and of Llama 2 7B
    bandwidth   ours on the same models as a share of the memory bandwidth limit: the time to copy as many bytes as a
                pass reads of the weights, over the time of a token (without prefill)
    batch       the 7B model at B = 1 .. 64: tokens per second and peak memory, plain and with a draft model in the
                shape of SmolLM2
    cost        cost curves of the 7B model and of the draft model, in OUT for ``crossdraft advise --cost``
    launches    launches of a step, of kernels and of CUDA graphs, and host-device synchronizations by source line
    overhead    share of a step outside of the models, see loop_overhead.py
    attention   a pass with explicit masks against one with FlexAttention, precompiled: one token per row, a chain, a
                tree; rows of different lengths; eight layers in the shape of Llama 3 8B
    verify      the verifier's share of a step, eager and compiled, temperature 1, gamma 8, B = 32,
                V = 128256: a target in the shape of Llama 3 8B, a draft model in that of SmolLM2; compiled only on CUDA
    assisted    transformers' assisted generation against draft-model, the same pair of models and the same gamma

Ratios are medians over prompts of ours / theirs in tokens per second, prefill included on both sides; the sides
alternate, in rotating order. As warm-up, ours runs twice on every prompt (a graph is recorded when a shape first
occurs), the others twice on the first.

A machine with only torch and transformers gets the other packages as wheels in a folder beside the repository::

    PACKAGES="pydantic pluggy tabulate pytest pytest-xdist hypothesis"
    pip download --only-binary=:all: --python-version 3.12 -d wheels $PACKAGES
    pip install --no-index --find-links wheels $PACKAGES && python benchmarks/gpu.py
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import checkout
import loop_overhead
import torch
from gpu_bench import LLAMA2_7B, SMOLLM2, Bench, Ids
from torch.profiler import ProfilerActivity, profile

from crossdraft.framework.api.build import make_slots
from crossdraft.framework.bench import memory
from crossdraft.framework.cli.cost.pass_timing import measure_curve
from crossdraft.framework.contracts.models import LoadedModel
from crossdraft.framework.engine.compiled_verifier import CompiledVerifier
from crossdraft.framework.engine.decoder import Decoder
from crossdraft.framework.lm.attention.flex import DEVICES, FLEX

#: Repetitions for a single prompt or batch, and the number of warm-up repetitions until all graphs are recorded.
REPEATS, WARM_UP = 5, 2
#: Steps that are profiled; reading the profile of a step takes longer than the step.
PROFILED = 16
LLAMA3_8B = LLAMA2_7B | {"intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256}
#: Functions of the CUDA runtime and driver that launch work.
LAUNCHES = {"kernels": ("cudaLaunchKernel", "cuLaunchKernel"), "graphs": ("cudaGraphLaunch",)}


def tests(bench: Bench) -> None:
    table = bench.report.table("pytest -m gpu", ["exit status", "last line"])
    if bench.device.type != "cuda":
        return bench.report.add(table, None, "not run: needs CUDA")
    if missing := [name for name in ("pytest", "xdist", "hypothesis") if importlib.util.find_spec(name) is None]:
        return bench.report.add(table, None, f"not run: {', '.join(missing)} not installed")
    command = [sys.executable, "-m", "pytest", "-q", "-n8", "--dist=load", "-m", "gpu and not slow"]
    command += ["-p", "no:cacheprovider", "tests"]
    process = subprocess.Popen(command, cwd=checkout.ROOT, stdout=subprocess.PIPE, text=True)
    try:
        output, _ = process.communicate()
    finally:
        process.kill()
    (bench.report.folder / "tests.txt").write_text(output, encoding="utf-8")
    bench.report.add(table, process.returncode, output.strip().rpartition("\n")[2])


def plain_models(bench: Bench) -> Iterator[tuple[str, LoadedModel]]:
    yield "7B", bench.seven
    yield "SmolLM2", bench.smollm2


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
    rate = bench.copied_per_second
    table = bench.report.table("plain decoding, B = 1", ["model", "ms a token", "ms to read the weights", "share"])
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
        bench.report.add(table, name, token * 1e3, limit * 1e3, limit / token)
        bench.report.number(f"plain {name}, share of the memory's limit", limit / token, f"{rate / 1e9:.0f} GB/s")


def weights_read(model: Any) -> int:
    """Bytes of weights that a pass over one token reads: all of them, but only one row of an untied embedding."""
    tensors = {p.data_ptr(): p for p in model.parameters()}
    embedding = model.get_input_embeddings().weight
    if embedding.data_ptr() != model.get_output_embeddings().weight.data_ptr():
        tensors.pop(embedding.data_ptr())
    return sum(p.nbytes for p in tensors.values())


def assisted(bench: Bench) -> None:
    target, small, new, gamma = bench.smollm2, bench.small, bench.args.max_new_tokens, bench.args.gamma
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
    target, new, gamma = bench.seven, bench.args.max_new_tokens, bench.args.gamma
    small = bench.random("7B drafter", SMOLLM2 | {"vocab_size": LLAMA2_7B["vocab_size"]}, seed=1)
    title = f"7B, {new} new tokens, gamma {gamma}, prefill included"
    table = bench.report.table(title, ["B", "drafter", "tok/s", "times B = 1", "peak memory"])
    first: dict[str, float] = {}
    for size, (label, drafter) in product(bench.args.batch, (("none", None), ("draft-model", small))):
        gc.collect()  # release the slots of the previous size
        memory.start(bench.device)
        prompts = bench.prompts(target, size)
        decoder = bench.decoder(target, drafter, size, new=new, longest=max(map(len, prompts)), gamma=gamma)
        rate = statistics.median([whole_rate(bench, decoder, prompts) for _ in range(REPEATS)][WARM_UP:])
        peak = bench.peak().removeprefix("peak memory ")
        bench.report.add(table, size, label, rate, rate / first.setdefault(label, rate), peak)


def whole_rate(bench: Bench, decoder: Decoder, prompts: Sequence[Ids]) -> float:
    """Tokens per second of all prompts."""
    elapsed_times, answers = bench.seconds(lambda: list(decoder.run(prompts)))
    return sum(len(answer.tokens) for answer in answers) / elapsed_times


def cost(bench: Bench) -> None:
    tiny = bench.args.tiny
    axes: dict[str, Any] = {"batch_sizes": [1, 2], "contexts": [16]} if tiny else {}
    widths: list[int] = [1, 2, 3, 5] if tiny else [1, 2, 3, 5, 9]
    axes = axes or {"batch_sizes": [1, 4, 16, 64], "contexts": [128, 512]}
    for model, file, own in ((bench.seven, "cost.json", widths), (bench.smollm2, "draft-cost.json", [1, 2])):
        gc.collect()
        curve = measure_curve(model, widths=own, repeats=REPEATS, **axes)
        (bench.report.folder / file).write_text(json.dumps(curve.to_json(), indent=1), encoding="utf-8")
        head = ["context", "B", *(f"W = {width}" for width in curve.widths)]
        table = bench.report.table(f"{model.name}, ms a pass ({file})", head)
        for context, size in product(curve.contexts, curve.batch_sizes):
            bench.report.add(
                table, context, size, *(1e3 * curve.seconds(size, width, context) for width in curve.widths)
            )


def verify(bench: Bench) -> None:
    size, gamma = (2, 3) if bench.args.tiny else (32, 8)
    target = bench.random("8B", LLAMA3_8B)
    small = bench.random("drafter", SMOLLM2 | {"vocab_size": LLAMA3_8B["vocab_size"]}, seed=1)
    prompts, new = bench.prompts(target, size), bench.args.max_new_tokens
    table = bench.report.table(f"verify: share of a step, B = {size}, gamma {gamma}", ["verifier", "share", "steps"])
    cuda = bench.device.type == "cuda"  # elsewhere a compiler of C++ would take minutes
    for rule, compiled in (("token", False), ("block", False), *([("block", True)] if cuda else [])):
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
        done = compiled and decoder.compiled_verifier.compiled
        title = f"{rule}{' compiled' if done else ', not compiled' * compiled}"
        bench.report.add(table, title, median, len(shares))
        bench.report.number(f"verify {title}, share of a step", median, bench.peak())


def attention(bench: Bench) -> None:
    size, layers = 8, {"num_hidden_layers": 8}
    sides = {"masks": "sdpa", "flex": FLEX} if bench.device.type in DEVICES else {"masks": "sdpa"}
    targets = {side: bench.random(side, LLAMA3_8B | layers, attention=name) for side, name in sides.items()}
    kinds = {
        "one token": [-1],
        "chain of 5": list(range(-1, 5)),
        "tree of 14": [-1, 0, 0, *(i // 2 for i in range(2, 14))],
    }
    head = ["pass", "slots", *(f"{side} ms" for side in sides)]
    table = bench.report.table(f"milliseconds of a pass, B = {size}, shortest row 1/8 of the longest", head)
    if len(sides) == 1:
        bench.report.add(table, f"{FLEX} runs only on {' and '.join(DEVICES)}", None)
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
            bench.report.add(table, kind, slots, *passes)
            if len(passes) > 1:
                bench.report.number(f"attention {kind}, {slots} slots, masks / flex", passes[0] / passes[1])


def launches(bench: Bench) -> None:
    target, small, gamma, new = bench.smollm2, bench.small, bench.args.gamma, bench.args.max_new_tokens
    prompts, cuda = bench.prompts(target, 4), bench.device.type == "cuda"
    make = partial(bench.decoder, target, new=new, longest=max(map(len, prompts)), batch_size=len(prompts))
    head = ["drafter", "CUDA graphs", *(f"{kind} a step" for kind in LAUNCHES), "waits a step", "most", "steps"]
    table = bench.report.table(f"SmolLM2, B = {len(prompts)}" + ", counted only on CUDA" * (not cuda), head)
    lines = bench.report.table("waits a step by source line", ["drafter", "CUDA graphs", "waits", "line"])
    for (label, options), graphs in product(
        (("none", {"small": None}), ("draft-model", {"small": small, "gamma": gamma})), (False, True)
    ):
        decoder = make(graphs=graphs, **options)
        waits: list[int] = []
        places: Counter[str] = Counter()
        launched: Counter[str] = Counter()
        for repeat in range(WARM_UP + 2):
            steps = bench.steps(decoder, prompts)
            next(steps)
            if repeat == WARM_UP + 1:
                launched, count = profiled(islice(steps, PROFILED), cuda)
            while repeat <= WARM_UP and decoder.occupied == len(prompts):
                with counted_waits(bench.device) as result:
                    next(steps)
                if repeat == WARM_UP:
                    waits.append(result.total())
                    places += result
            list(steps)
        median = statistics.median(waits)
        bench.report.add(
            table, label, graphs, *(launched[kind] / count for kind in LAUNCHES), median, max(waits), len(waits)
        )
        for place, number in places.most_common(8):
            bench.report.add(lines, label, graphs, number / len(waits), place)
        if cuda and graphs:
            bench.report.number("waits of the host in a step", median, f"{label}; most {max(waits)}")


def profiled(steps: Iterator[int], cuda: bool) -> tuple[Counter[str], int]:
    """Launches by kind during the steps, and their number."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as profiler:
        count = sum(1 for _ in steps)
    result: Counter[str] = Counter()
    for event in profiler.key_averages():
        for kind, beginnings in LAUNCHES.items():
            if event.key.startswith(beginnings):
                result[kind] += event.count
    return result, max(count, 1)


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


def overhead(bench: Bench) -> None:
    target, draft_model = replace(bench.smollm2, eos_token_ids=()), bench.small  # sequences do not end early
    clocks = loop_overhead.ForwardClock(target.model), loop_overhead.ForwardClock(draft_model.model)
    del bench.smollm2, bench.small  # clocks stay on their models, and would wait in the captures of later parts
    columns, new = loop_overhead.COLUMNS, bench.args.max_new_tokens
    table = bench.report.table("per cent of a step, SmolLM2, token verification, T = 1", ["drafter", "B", *columns])
    for size, small in product((1, 8), (None, draft_model)):
        prompts, label = bench.prompts(target, size), "draft-model" if small else "none"
        make = partial(bench.decoder, verifier="token", temperature=1.0, timed=True, gamma=bench.args.gamma)
        decoder = make(target, small, size, new=new, longest=max(map(len, prompts)))
        loop_overhead.watch(decoder, clocks)
        result = loop_overhead.measure(decoder, clocks, prompts, 3 if bench.args.tiny else 40)
        bench.report.add(table, label, size, *(result[column] for column in columns))
        bench.report.number(f"overhead {label}, B = {size}, per cent of a step", result["outside"])


#: Parts in the order of their importance, and their shares of the time.
PARTS: dict[str, tuple[Callable[[Bench], None], float]] = {
    "tests": (tests, 0.2),
    "plain": (plain, 0.16),
    "bandwidth": (bandwidth, 0.04),
    "batch": (batch, 0.2),
    "cost": (cost, 0.1),
    "launches": (launches, 0.06),
    "overhead": (overhead, 0.06),
    "attention": (attention, 0.1),
    "verify": (verify, 0.08),
    "assisted": (assisted, 0.05),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tiny", action="store_true", help="use tiny random models and prompts")
    parser.add_argument("--model", default="", help="target instead of random weights in the shape of SmolLM2")
    parser.add_argument("--drafter", default="smollm2-draft-model", help="draft model of --model")
    parser.add_argument("--limit", type=int, default=5, help="number of prompts of plain and assisted")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--gamma", type=int, default=4, help="draft length, except that of verify")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--seconds", type=float, default=480, help="time of all parts")
    parser.add_argument("--out", type=Path, default=Path("gpu-report"), help="folder of the report and the cost curves")
    args = parser.parse_args(arguments)

    bench = Bench(args)
    run(bench, {name: PARTS[name] for name in args.parts}, args.seconds)
    print(f"\n{bench.report.summary()}\n\n{bench.report.folder / 'report.md'}")


def run(bench: Bench, parts: dict[str, tuple[Callable[[Bench], None], float]], seconds: float) -> None:
    """Run the parts; time that one does not use is left to the later ones."""
    whole = sum(share for _, share in parts.values())
    deadline = time.monotonic()
    for name, (part, share) in parts.items():
        deadline += seconds * share / whole
        with bench.report.part(name, deadline - time.monotonic()):
            part(bench)
        gc.collect()
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
