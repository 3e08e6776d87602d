"""Decoding speed of crossdraft, transformers, vLLM, llama.cpp and OpenVINO GenAI: same models, prompts and threads.

    python benchmarks/peers.py --vllm ENV/bin/python --llama-server BUILD/bin/llama-server \
        --gguf float32=target.gguf,draft.gguf --gguf Q8_0=target-q8.gguf,draft-q8.gguf \
        --openvino ENV/bin/python --openvino-model target-f16.gguf

Each program decodes plainly, with n-gram drafts from the text and with a draft model, in ``--dtype`` (llama.cpp: in the
type of its GGUF file). In one repetition every program decodes the same B prompts once, one program at a time, in
random order; the next repetition has the next prompts. Servers (plugins/crossdraft-vllm, plugins/crossdraft-llamacpp)
stay up and get B requests at once; a program without its option is left out. transformers' assisted generation supports
only B = 1. OpenVINO GenAI cannot load a draft model from GGUF.

``--rows`` adds crossdraft with passes by OpenVINO (crossdraft-openvino), and passes alone: over these numbers of tokens
in each of B rows, both ways in turn.

Prints a Markdown table for each B: the median tokens per second, prefill included (``--prompt-tokens`` shortens it);
the median ratio to plain `generate` of transformers with its 95 % interval over repetitions; the same for plain
crossdraft (by OpenVINO, if it is there) over the program; and the number of responses that equal those of transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, cycle, islice, product
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

import crossdraft_openvino  # noqa: F401  # before torch, whose threads sleep then, as in a run
import numpy as np
import torch
from crossdraft_advisor.engines.engine_cell import EngineCell
from tabulate import tabulate
from transformers import __version__ as TRANSFORMERS

from crossdraft import LoadedModel, Sampling, load_model, load_prompts
from crossdraft.framework.lm.cuda_graphs import CaptureLimits, recording
from crossdraft.framework.lm.layer_surgery import own_modules
from crossdraft.models import encode, make_slots, pair_decoder
from crossdraft.runs import CellConfig, estimate, estimate_text

Ids = list[int]
MODES = PLAIN, NGRAM, DRAFT_MODEL = "plain", "n-gram", "draft-model"
BASE = "transformers", PLAIN
#: crossdraft by the class of its slots; the second one is that of crossdraft-openvino.
SLOTS = {"crossdraft": "TransformersLM", "crossdraft by OpenVINO": "OpenVINOLM"}
#: Repetitions after which the time limit ends the measurement.
LEAST_REPETITIONS = 3
#: Repetitions of a pass alone, and the tokens before it.
PASSES, CONTEXT = 15, 100


@dataclass
class Program:
    """A decoding program in one mode, and its results.

    Attributes:
        run: decodes prompts at a time and returns the new tokens of each.
        largest: maximum number of prompts.
        repetitions: tokens and seconds by batch size, one pair for each repetition.
        same: by batch size, the number of responses that equal those of `BASE`.
    """

    name: str
    mode: str
    run: Callable[[list[Ids]], list[Ids]]
    largest: float = float("inf")
    repetitions: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    same: dict[int, int] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str]:
        return self.name, self.mode


def load_pair(args: argparse.Namespace) -> tuple[LoadedModel, LoadedModel]:
    target = load_model(args.model, dtype=args.dtype, device="cpu")
    return target, load_model(args.drafter, share_with=target)


def of_transformers(args: argparse.Namespace) -> Iterator[Program]:
    target, small = load_pair(args)  # of its own: crossdraft replaces the linear layers of a model that it runs
    model: Any = target.model
    ends = list(target.eos_token_ids)
    # transformers reads the draft length from the assistant's own generation config.
    small.model.generation_config.update(
        num_assistant_tokens=args.gamma, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    sampled = {"temperature": args.temperature, "top_k": 0, "top_p": 1.0} if args.temperature else {}

    def run(prompts: list[Ids], **options: Any) -> list[Ids]:
        width = max(map(len, prompts))
        ids = torch.tensor([[ends[0]] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        options |= {"max_new_tokens": args.max_new_tokens, "eos_token_id": ends, "pad_token_id": ends[0]}
        out = model.generate(ids, attention_mask=mask, do_sample=bool(sampled), **sampled, **options)
        return [until_end(tokens, ends) for tokens in out[:, width:].tolist()]

    lookup = partial(run, prompt_lookup_num_tokens=args.gamma, max_matching_ngram_size=3)
    yield Program("transformers", PLAIN, run)
    yield Program("transformers", NGRAM, lookup, largest=1)
    yield Program("transformers", DRAFT_MODEL, partial(run, assistant_model=small.model), largest=1)


def until_end(tokens: Sequence[int], ends: Sequence[int]) -> Ids:
    """Tokens of a padded row, the first end-of-sequence token included."""
    end = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return list(tokens[: end + 1])


def drafters(args: argparse.Namespace, ngram: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Mode and drafter of the selected modes, with ``ngram`` as the drafter of n-grams."""
    lm = {"name": "draft-model", "model": args.drafter, "gamma": args.gamma}
    for mode, drafter in zip(MODES, ("none", {"gamma": args.gamma, **ngram}, lm), strict=True):
        if mode in args.modes:
            yield mode, drafter


@contextmanager
def slots_of(name: str) -> Iterator[list[Any]]:
    """Within the context, slots are those of `SLOTS`; checks the class of those that are added to the list."""
    os.environ["CROSSDRAFT_OPENVINO"] = str(int(name != next(iter(SLOTS))))
    slots: list[Any] = []
    yield slots
    if {type(lm).__name__ for lm in slots} != {SLOTS[name]}:
        raise SystemExit(f"{name} has other slots than {SLOTS[name]}; the warnings above have the reason")


def of_crossdraft(
    args: argparse.Namespace, target: LoadedModel, small: LoadedModel, longest: int, name: str
) -> Iterator[Program]:
    for mode, drafter in drafters(args, {"name": "prompt-lookup", "match": "first"}):
        decoders: dict[int, Any] = {}

        def run(prompts: list[Ids], drafter: Any = drafter, decoders: dict[int, Any] = decoders) -> list[Ids]:
            if len(prompts) not in decoders:
                with slots_of(name) as slots:
                    decoders[len(prompts)] = pair_decoder(
                        target,
                        drafter,
                        None,
                        longest,
                        sampling=Sampling(temperature=args.temperature),
                        batch_size=len(prompts),
                        max_new_tokens=args.max_new_tokens,
                        load=lambda name, target: small,
                    )
                    slots.append(decoders[len(prompts)].target)
            responses = sorted(decoders[len(prompts)].run(prompts), key=lambda response: response.index)
            return [response.tokens for response in responses]

        yield Program(name, mode, run)


def time_passes(target: LoadedModel, size: int, widths: Sequence[int], order: random.Random) -> dict[Any, list[float]]:
    """Seconds of passes over ``widths`` tokens in each of ``size`` rows, by slots of `SLOTS` and width, in turn.

    Only the second of two passes counts: threads of the program before may still spin in the first one.
    """
    lms: dict[str, Any] = {}
    for name in SLOTS:
        with slots_of(name) as slots:
            model = replace(target, model=own_modules(target.model))
            slots.append(make_slots(model, size, CONTEXT + max(widths)))
        lms[name] = slots[0]
        for row in range(size):
            slots[0].start(row, range(10 + row, 11 + row + CONTEXT))
    times: dict[Any, list[float]] = {key: [] for key in product(SLOTS, widths)}
    for repetition in range(PASSES + 1):
        for name, width in order.sample(list(times), len(times)):
            tokens = torch.arange(10, 10 + width).repeat(size, 1)
            with recording(CaptureLimits(width, width)) if repetition == 0 else nullcontext():  # compiles
                for _ in range(2):
                    start = time.perf_counter()
                    lms[name].forward(tokens)
                    lms[name].commit([0] * size)
                    seconds = time.perf_counter() - start
            times[name, width].append(seconds)
    return {key: values[1:] for key, values in times.items()}


def pass_table(times: dict[int, dict[Any, list[float]]]) -> str:
    """Medians of times, and of ratios of the same repetition, by batch size and width."""
    first, second = SLOTS
    table = []
    for size, by_slots in times.items():
        for width in sorted({width for _, width in by_slots}):
            line: list[Any] = [size, width]
            line += [1e3 * median(by_slots[name, width]) for name in SLOTS]
            line.append(ratio([(1, s) for s in by_slots[second, width]], [(1, s) for s in by_slots[first, width]]))
            for name in SLOTS:
                line.append(median(map(truediv, by_slots[name, width], by_slots[name, min(w for _, w in by_slots)])))
            table.append(line)
    head = ["B", "tokens a row", *(f"ms, {name}" for name in SLOTS), "gain", *(f"of one, {name}" for name in SLOTS)]
    return tabulate(table, head, "github", floatfmt=".2f")


def of_server(
    args: argparse.Namespace,
    name: str,
    engine: dict[str, Any],
    ngram: dict[str, Any],
    target: LoadedModel,
    longest: int,
) -> Iterator[tuple[Program, EngineCell]]:
    """Start a server for each mode."""
    for mode, drafter in drafters(args, ngram):
        config = CellConfig.model_validate(
            {
                "target": args.model,
                "engine": engine,
                "dtype": args.dtype,
                "max_new_tokens": args.max_new_tokens,
                "batch_size": max(args.batch),
                "sampling": {"temperature": args.temperature},
                "drafter": drafter,
                "verifier": "token",
            }
        )
        print(f"starting {name}, {mode}", file=sys.stderr, flush=True)
        cell = EngineCell(config, target, longest, args.logs / f"{name} {mode}".replace(" ", "-"), lambda: None)

        def run(prompts: list[Ids], server: Any = cell.server) -> list[Ids]:
            with ThreadPoolExecutor(len(prompts)) as pool:
                return [
                    r.tokens for r in pool.map(lambda prompt: server.complete(prompt, args.max_new_tokens), prompts)
                ]

        yield Program(name, mode, run), cell


def engines(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Name, recipe entry and n-gram drafter of each engine."""
    cores = sorted(os.sched_getaffinity(0))
    if args.vllm:
        env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores))}
        uncached = ["--no-enable-prefix-caching", *args.vllm_args.split()]  # prompts recur, as do their beginnings
        engine = {"name": "vllm", "python": args.vllm, "args": uncached, "env": env, "per_request": False}
        yield "vLLM", engine, {"name": "prompt-lookup", "match": "first"}
    for gguf in args.gguf if args.llama_server else ():
        label, _, files = gguf.partition("=")
        model, _, draft = files.partition(",")
        threads = ["--threads", str(len(cores)), *args.llama_args.split()]
        engine = {"name": "llama.cpp", "executable": args.llama_server, "model": model, "draft_model": draft}
        yield f"llama.cpp {label}", {**engine, "args": threads}, {"name": "ngram-simple", "n": 2}


def of_openvino(args: argparse.Namespace, servers: ExitStack) -> Iterator[Program]:
    """Start a worker for each mode."""
    worker = [args.openvino, str(Path(__file__).with_name("openvino_worker.py")), args.openvino_model]
    worker += ["--threads", str(torch.get_num_threads()), "--max-new-tokens", str(args.max_new_tokens)]
    worker += ["--dtype", {"float32": "f32", "bfloat16": "bf16"}[args.dtype]]
    for mode, options in ((PLAIN, []), (NGRAM, ["--prompt-lookup", str(args.gamma)])):
        if mode not in args.modes:
            continue
        print(f"starting OpenVINO GenAI, {mode}", file=sys.stderr, flush=True)
        process = subprocess.Popen([*worker, *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        servers.callback(process.terminate)

        def run(prompts: list[Ids], process: Any = process) -> list[Ids]:
            print(json.dumps(prompts), file=process.stdin, flush=True)
            return json.loads(process.stdout.readline())

        version = json.loads(process.stdout.readline()) if process.stdout else ""
        yield Program(f"OpenVINO GenAI {version.partition('-')[0]}", mode, run)


def without(tokens: Ids, ends: Sequence[int]) -> Ids:
    """Tokens without end-of-sequence tokens, which not every program returns."""
    return [token for token in tokens if token not in ends]


def measure(programs: list[Program], prompts: list[Ids], args: argparse.Namespace, ends: Sequence[int]) -> None:
    """Repeat until the time is over; raises KeyboardInterrupt if the user interrupts."""
    order, source = random.Random(args.seed), cycle(prompts)
    with recording(CaptureLimits(args.gamma, args.gamma)):  # compilation and first allocations
        for size in args.batch:
            warm_up = list(islice(source, size))
            for program in programs:
                if size <= program.largest:
                    program.run(warm_up)
    deadline = time.monotonic() + 60 * args.minutes
    for repetition in count():
        for size in args.batch:
            if repetition >= LEAST_REPETITIONS and time.monotonic() > deadline:
                return
            own, results = list(islice(source, size)), {}
            for program in order.sample(programs, len(programs)):
                if size <= program.largest:
                    start = time.perf_counter()
                    responses = program.run(own)
                    results[program.key] = responses, time.perf_counter() - start
            expected = [without(response, ends) for response in results[BASE][0]]
            for program in programs:
                if program.key in results:
                    responses, seconds = results[program.key]
                    equal = (without(r, ends) == e for r, e in zip(responses, expected, strict=True))
                    program.repetitions.setdefault(size, []).append((sum(map(len, responses)), seconds))
                    program.same[size] = program.same.get(size, 0) + sum(equal)
        print(f"repetition {repetition + 1}", file=sys.stderr, flush=True)


def ratio(own: Sequence[tuple[int, float]], other: Sequence[tuple[int, float]]) -> str:
    """Median ratio of two rates over the repetitions, with its interval."""
    sums = np.array([(*a, *b) for a, b in zip(own, other, strict=False)])
    ratios = sums[:, 0] / sums[:, 1] / (sums[:, 2] / sums[:, 3])
    if np.allclose(ratios, 1):
        return "1"
    result = estimate(lambda s: s[..., 0] / s[..., 1] / (s[..., 2] / s[..., 3]), sums, value=float(median(ratios)))
    return estimate_text(result)


def table(programs: list[Program], size: int) -> str:
    by_key = {program.key: program.repetitions[size] for program in programs if size in program.repetitions}
    if BASE not in by_key:
        return f"B = {size}: no repetition is finished"
    plain = [by_key[name, PLAIN] for name in SLOTS if (name, PLAIN) in by_key][-1]
    rows = [
        [
            program.name,
            program.mode,
            median(tokens / seconds for tokens, seconds in own),
            ratio(own, by_key[BASE]),
            ratio(plain, own),
            f"{program.same[size]} of {size * len(own)}",
        ]
        for program in programs
        if (own := by_key.get(program.key))
    ]
    head = ["program", "drafts", "tokens/s", "/ transformers", "crossdraft plain / it", "same text"]
    return f"B = {size}, {len(by_key[BASE])} repetitions\n\n{tabulate(rows, head, 'github', floatfmt='.1f')}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", default="", help="Python of the environment of vLLM")
    parser.add_argument(
        "--vllm-args", default="", help="further arguments of vLLM's server, as in --vllm-args=--enforce-eager"
    )
    parser.add_argument("--llama-server", default="", help="llama.cpp's server")
    parser.add_argument("--llama-args", default="", help="further arguments of llama.cpp's server")
    parser.add_argument("--gguf", action="append", default=[], help="LABEL=TARGET.gguf,DRAFT.gguf; may be repeated")
    parser.add_argument("--openvino", default="", help="Python of the environment of OpenVINO GenAI")
    parser.add_argument("--openvino-model", default="", help="its target, a GGUF file of 16 or 8 bits")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--drafter", default="smollm2-draft-model", help="draft model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--prompts", default="builtin")
    parser.add_argument(
        "--prompt-tokens", type=int, default=0, help="only the last N tokens of each prompt, for less prefill; 0: all"
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="plain is always measured")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument(
        "--rows",
        type=int,
        nargs="*",
        default=[],
        help="measure passes by OpenVINO, too, also alone over these numbers of tokens",
    )
    parser.add_argument("--gamma", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--minutes", type=float, default=6.0, help="time of the repetitions, without start and warm-up")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the programs")
    parser.add_argument("--logs", type=Path, default=Path("peers-logs"), help="folder for the logs of servers")
    args = parser.parse_args(arguments)

    args.modes = {PLAIN, *args.modes}
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    target, small = load_pair(args)
    prompts = [encode(target.tokenizer, p.turns[:1])[-args.prompt_tokens :] for p in load_prompts(args.prompts)]
    longest = max(map(len, prompts)) + args.max_new_tokens
    programs = [p for p in of_transformers(args) if p.mode in args.modes]
    names = list(SLOTS)[: 2 if args.rows else 1]
    programs += [program for name in names for program in of_crossdraft(args, target, small, longest, name)]
    versions = [f"torch {torch.__version__}", f"transformers {TRANSFORMERS}"]
    with ExitStack() as servers:
        for name, engine, ngram in engines(args):
            for program, cell in of_server(args, name, engine, ngram, target, longest + 2 * args.gamma):
                servers.enter_context(closing(cell))
                programs.append(program)
            path, key = ("/version", "version") if name == "vLLM" else ("/props", "build_info")
            versions.append(f"{name} {json.loads(cell.server.get(path)[1])[key]}")
        if args.openvino:
            programs += of_openvino(args, servers)
        try:
            measure(programs, prompts, args, target.eos_token_ids)
        except KeyboardInterrupt:
            print("interrupted; the tables have the finished repetitions", file=sys.stderr)
    print(
        f"{target.name} and {small.name}, {args.dtype}, temperature {args.temperature:g}, gamma {args.gamma}, "
        f"{args.max_new_tokens} tokens, {torch.get_num_threads()} threads; {', '.join(versions)}"
    )
    for size in args.batch:
        print(f"\n{table(programs, size)}", flush=True)
    if args.rows:
        order = random.Random(args.seed)
        passes = {size: time_passes(target, size, args.rows, order) for size in args.batch}
        print(f"\nPasses behind {CONTEXT} tokens, {PASSES} repetitions\n\n{pass_table(passes)}")


if __name__ == "__main__":
    main()
