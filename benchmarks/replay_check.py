"""Replay compared with measured runs: block efficiency of each cell of a grid, measured and replayed.

    python benchmarks/replay_check.py [--limit 12] [--max-new-tokens 32] [--gammas 1-8]

Runs the drafters of the SmolLM2 pack (chains with token and block verification, i.i.d. sequences with SpecInfer and
SpecTr at K = 2 and 4), then replays the responses of every cell with its drafter, verifier, draft length and K.
Prints the number of cells whose replayed block efficiency is inside the run's 95 % interval, the worst cells, and for
block against token verification the paired difference of the run and of one replay of the same prompts, with
intervals. The batch size does not change any token, so the grid runs batched.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from crossdraft_advisor.replay.aggregate import difference
from crossdraft_advisor.replay.candidates import candidates_of
from crossdraft_advisor.replay.replay import ReplayResult, replay
from crossdraft_advisor.replay.responses import Reader
from tabulate import tabulate

from crossdraft.framework.bench.config import log_to_stderr
from crossdraft.framework.bench.matrix import load_recipe
from crossdraft.framework.bench.run import run
from crossdraft.framework.metrics.cell_metrics import paired_difference, uncut_steps
from crossdraft.framework.metrics.intervals import Estimate
from crossdraft.framework.runs.records import CellResult
from crossdraft.framework.runs.run_directory import cell_name

CHAINS = [
    {"name": "draft-model", "model": "smollm2-draft-model"},
    {"name": "eagle3", "model": "smollm2-eagle3"},
    {"name": "medusa", "model": "smollm2-medusa"},
]
HEADS = 5  # the depth of the pack's Medusa heads
SEVERAL = [{"name": "draft-model-iid", "label": f"iid K={k}", "model": "smollm2-draft-model", "K": k} for k in (2, 4)]


def recipes(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Verifiers to run: at temperature 0 all accept alike, and i.i.d. sequences need sampling."""
    common = {
        "target": "smollm2-135m-instruct",
        "prompts": args.prompts,
        "limit": args.limit,
        "max_new_tokens": args.max_new_tokens,
    }
    matrix = _matrix(args, [0, 1])
    deeper = [gamma for gamma in matrix["gamma"] if gamma > HEADS]
    exclude = [{"drafter": "medusa", "gamma": deeper}] if deeper else []
    yield common | {"drafters": CHAINS, "verifiers": ["token", "block"], "matrix": matrix, "exclude": exclude}
    yield common | {"drafters": SEVERAL, "verifiers": ["specinfer", "spectr"], "matrix": _matrix(args, [1])}


def _matrix(args: argparse.Namespace, temperatures: list[int]) -> dict[str, Any]:
    low, _, high = args.gammas.partition("-")
    gammas = list(range(int(low), int(high or low) + 1))
    return {"temperature": temperatures, "batch_size": [args.batch_size], "gamma": gammas}


def replayed(directory: Path, config: Any, verifiers: list[str]) -> ReplayResult:
    """Recorded responses of one cell, with its configuration."""
    options = {key: value for key, value in config.drafter.config.items() if key not in ("gamma", "K")}
    drafter = yaml.safe_dump({"name": config.drafter.name, **options}, default_flow_style=True, width=10_000).strip()
    reader = Reader(target=config.target, sampling=config.sampling)
    candidates = candidates_of(
        [drafter],
        verifiers,
        [config.drafter.config["gamma"]],
        ks=(config.drafter.config.get("K", 1),),
        sampling=config.sampling,
        target=config.target,
    )
    return replay(reader.read([str(directory)]), candidates)


def width(one: Estimate | None) -> float:
    return float("nan") if one is None or one.low is None or one.high is None else one.high - one.low


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", default="builtin")
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=12)
    parser.add_argument("--gammas", default="1-8")
    parser.add_argument("--out", type=Path, default=Path("runs"))
    args = parser.parse_args()
    rows: list[tuple[Any, ...]] = []
    narrower: list[tuple[Any, ...]] = []
    outside = cells = 0
    seconds = 0.0
    for number, recipe in enumerate(recipes(args)):
        args.out.mkdir(parents=True, exist_ok=True)
        path = args.out / f"replay-check-{number}.yaml"
        path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
        outcome = run(load_recipe(str(path)), args.out, log=log_to_stderr)
        group: dict[str, dict[str, CellResult]] = {}
        for result in outcome.results:
            config, metrics = result.config, result.metrics
            if config.is_baseline or metrics is None:
                continue
            assert metrics.block_efficiency is not None
            start = time.perf_counter()
            actual = replayed(outcome.directory / "cells" / cell_name(config), config, [config.verifier.name])
            seconds += time.perf_counter() - start
            gamma, k = config.drafter.config["gamma"], config.drafter.config.get("K", 1)
            measured = metrics.block_efficiency
            efficiency = actual.candidates[0].tallies[config.verifier.name, k].row(gamma).block_efficiency
            assert efficiency is not None
            inside = measured.low is None or measured.high is None or measured.low <= efficiency.value <= measured.high
            cells, outside = cells + 1, outside + (not inside)
            key = f"T={config.sampling.temperature:g} {config.drafter.title} gamma={gamma}"
            group.setdefault(key, {})[config.verifier.name] = result
            spread = f"[{measured.low:.2f}, {measured.high:.2f}]" if measured.low is not None else ""
            off = abs(efficiency.value - measured.value) / (width(measured) or float("nan"))
            rows.append(
                (key, config.verifier.name, f"{measured.value:.3f} {spread}", f"{efficiency.value:.3f}", inside, off)
            )
            print(*rows[-1][:5], sep="  ", file=sys.stderr, flush=True)
        for key, rules in group.items():
            if set(rules) == {"token", "block"} and key.startswith("T=1"):
                block, token = rules["block"], rules["token"]
                config, gamma = token.config, token.config.drafter.config["gamma"]
                actual = replayed(outcome.directory / "cells" / cell_name(config), config, ["token", "block"])
                theirs = paired_difference(uncut_steps(block.records, gamma), uncut_steps(token.records, gamma))
                tallies = actual.candidates[0].tallies
                ours = difference(tallies["block", 1], gamma, tallies["token", 1], gamma)
                narrower.append((key, _text(theirs), _text(ours), width(theirs) / (width(ours) or float("nan"))))
    heads = ("cell", "rule", "run, BE [95 %]", "replay", "inside", "off, widths")
    print(tabulate(sorted(rows, key=lambda row: -row[-1]), heads, tablefmt="github", floatfmt=".2f"))
    print(f"\n{cells - outside} of {cells} cells have the replayed block efficiency inside the run's interval\n")
    heads = ("cell", "block - token, run", "block - token, replay", "times as narrow")
    print(tabulate(narrower, heads, tablefmt="github", floatfmt=".1f", disable_numparse=[1, 2]))
    print(f"\nreplays: {seconds:.0f} s")


def _text(one: Estimate | None) -> str:
    if one is None:
        return "-"
    return f"{one.value:+.3f}" + ("" if one.low is None else f" [{one.low:+.3f}, {one.high:+.3f}]")


if __name__ == "__main__":
    main()
