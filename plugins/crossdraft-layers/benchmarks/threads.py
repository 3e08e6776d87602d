"""Plain decoding on a CPU beside busy neighbours: threads that spin, threads that wait passively, one thread.

    python plugins/crossdraft-layers/benchmarks/threads.py [--model smollm2-135m-instruct] [--neighbours 0 1 2]
        [--repeats 9] [--tokens 16] [--batch-size 1]

One process for each setting holds the model, because the wait policy is read when PyTorch is loaded. In each
repetition the settings decode the same number of tokens one after the other, in random order. A neighbour is a process
that never sleeps. Prints the median of tokens/s for each setting and number of neighbours, the median ratio to the
first setting of the same repetition with its quartiles and the lowest number of threads of the last repetition.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import time

from tabulate import tabulate

PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
#: Environment variables of each setting; OMP_NUM_THREADS turns the comparison off.
SETTINGS = {
    "all threads, spinning (PyTorch's default)": {"OMP_NUM_THREADS": str(os.cpu_count())},
    "all threads, passive": PASSIVE | {"OMP_NUM_THREADS": str(os.cpu_count())},
    "one thread": {"OMP_NUM_THREADS": "1"},
    "compared, spinning (`generate` in Python)": {},
    "compared, passive (the command line beside a neighbour)": PASSIVE,
}
VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "MKL_NUM_THREADS")


def child(model: str, batch_size: int) -> None:
    """Decode as many tokens as each line of standard input requests; write tokens/s and the number of threads."""
    import torch

    import crossdraft

    target = crossdraft.load_model(model, device="cpu")
    print("ready", flush=True)
    for line in sys.stdin:
        used: set[int] = set()
        started = time.perf_counter()
        responses = crossdraft.generate(
            target,
            ["Tell me a long story about a lighthouse."] * batch_size,
            batch_size=batch_size,
            drafter="none",
            temperature=0,
            max_new_tokens=int(line),
            ignore_eos=True,
            on_step=lambda event, used=used: used.add(torch.get_num_threads()),
        )
        seconds = time.perf_counter() - started
        print(sum(len(response.tokens) for response in responses) / seconds, min(used), flush=True)


def request(process: subprocess.Popen[str], tokens: int) -> tuple[float, int]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{tokens}\n")
    process.stdin.flush()
    speed, threads = process.stdout.readline().split()
    return float(speed), int(threads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--neighbours", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=16, help="of each of the sequences decoded at once")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--spin", type=int, nargs="*", default=[], help="also measure these values of GOMP_SPINCOUNT")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.model, args.batch_size)
        return
    settings = dict(SETTINGS)
    for count in args.spin:
        settings[f"all threads, GOMP_SPINCOUNT={count}"] = {
            "GOMP_SPINCOUNT": str(count),
            "OMP_NUM_THREADS": str(os.cpu_count()),
        }
    clean = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    command = [sys.executable, __file__, "--child", "--model", args.model, "--batch-size", str(args.batch_size)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    children: dict[str, subprocess.Popen[str]] = {}
    rows = []
    try:
        for name, variables in settings.items():
            children[name] = subprocess.Popen(command, env=clean | variables, **pipes)
            assert children[name].stdout.readline() == "ready\n"
            request(children[name], 4)
        for count in args.neighbours:
            busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
            try:
                results: dict[str, list[tuple[float, int]]] = {name: [] for name in settings}
                for repeat in range(args.repeats):
                    for name in random.Random(repeat).sample(list(children), len(children)):
                        results[name].append(request(children[name], args.tokens))
            finally:
                for process in busy:
                    process.kill()
                    process.wait()
            first = [speed for speed, _ in next(iter(results.values()))]
            for name, pairs in results.items():
                ratios = [speed / base for (speed, _), base in zip(pairs, first, strict=True)]
                low, middle, high = statistics.quantiles(ratios, n=4)
                speed = statistics.median(speed for speed, _ in pairs)
                rows.append((count, name, f"{speed:.1f}", f"{middle:.2f} [{low:.2f}, {high:.2f}]", pairs[-1][1]))
    finally:
        for process in children.values():
            process.kill()
            process.wait()
    heads = ("neighbours", "setting", "tokens/s", "ratio [quartiles]", "threads")
    print(tabulate(rows, heads, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
