"""Simulation against measurements: a real llama.cpp server at Poisson rates.

    pip install -e plugins/crossdraft-llamacpp
    python benchmarks/simulate_check.py [--prompts builtin] [--loads 0.3,0.6,0.9] [--repeats 2] --engine \
        '{name: llama.cpp, executable: PATH/llama-server, model: TARGET.gguf, draft_model: DRAFT.gguf}'

A server with and one without the draft model. On each, closed loops of 1, 2, .. requests give the cost tables that
`crossdraft run` writes (`cost.tables`); then the same requests arrive at each rate (a share of the closed loop's
capacity), and the costs are measured again. The simulation gets the arrivals, the prompts, the mean tables, and the
acceptance of the responses by replay, and nothing of the measured traffic.

``waited``: seconds per second that tasks of the machine waited for a processor while the traffic ran.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from crossdraft_advisor.cost.tables import cost_tables, read_cost_table
from crossdraft_advisor.engines.engine_cell import EngineCell, piece_of, without_weights
from crossdraft_advisor.engines.server import ServedResponse
from crossdraft_advisor.replay.candidates import candidates_of
from crossdraft_advisor.replay.response import Response
from crossdraft_advisor.simulate.arrivals import Arrival
from crossdraft_advisor.simulate.outcome import RequestTimes
from crossdraft_advisor.simulate.policies import LengthSchedule, StepCost
from crossdraft_advisor.simulate.replica import EngineSettings, simulate
from crossdraft_advisor.simulate.request import Pool, SimulatedRequest, read_pool
from tabulate import tabulate

from crossdraft import Sampling, load_prompts
from crossdraft.framework.cost.curve import Point
from crossdraft.models import encode
from crossdraft.runs import CellConfig, CellResult, CostCurve


def waited() -> float:
    """Seconds that tasks of this machine have waited for a processor (pressure stall information)."""
    try:
        return int(Path("/proc/pressure/cpu").read_text().split("total=")[1].split()[0]) / 1e6
    except OSError:
        return float("nan")


@contextmanager
def served(args: argparse.Namespace, config: CellConfig) -> Iterator[EngineCell]:
    target = without_weights(config.target, trust_remote_code=False)
    with tempfile.TemporaryDirectory() as logs:
        cell = EngineCell(config, target, args.length, Path(logs), lambda: None)
        try:
            cell.warm_up(32)
            yield cell
        finally:
            cell.close()


def open_loop(
    cell: EngineCell, prompts: Sequence[list[int]], arrivals: Sequence[float], maximum: int
) -> tuple[float, list[ServedResponse]]:
    """Send each prompt at its time. Returns the time of the first arrival, and the responses."""
    start, running = time.perf_counter() + 0.05 - arrivals[0], []
    with ThreadPoolExecutor(len(prompts)) as pool:
        for prompt, arrival in zip(prompts, arrivals, strict=True):
            time.sleep(max(start + arrival - time.perf_counter(), 0))
            running.append(pool.submit(cell.server.complete, prompt, maximum))
        return start + arrivals[0], [future.result() for future in running]


def measure_costs(
    cell: EngineCell, config: CellConfig, prompts: Sequence[list[int]], args: argparse.Namespace
) -> list[CellResult]:
    results = []
    for b in args.concurrency:
        with ThreadPoolExecutor(b) as pool:  # a closed loop
            complete = partial(cell.server.complete, max_tokens=args.max_new_tokens)
            responses = list(pool.map(complete, prompts[: max(12, 3 * b)]))
        for i, response in enumerate(responses):
            cell._response(i, prompts[i], response)
        result = CellResult(config.model_copy(update={"batch_size": b}), pieces=[piece_of([responses], b)])
        result.responses = [
            {"prompt_tokens": len(p), "tokens": r.tokens} for p, r in zip(prompts, responses, strict=False)
        ]
        result.metrics = True  # type: ignore[assignment]  # only its presence counts
        results.append(result)
    return results


def run_server(args: argparse.Namespace) -> list[dict[str, Any]]:
    tokenizer = without_weights(args.target, trust_remote_code=False).tokenizer
    prompts = [encode(tokenizer, [prompt.turns[0]]) for prompt in load_prompts(args.prompts, limit=args.limit)]
    args.length = max(map(len, prompts)) + args.max_new_tokens + args.gamma + 8
    common: dict[str, Any] = {
        "target": args.target, "engine": args.engine, "batch_size": args.slots, "verifier": "greedy",
        "sampling": {"temperature": 0}, "max_new_tokens": args.max_new_tokens,
    }  # fmt: skip
    drafter = {"name": "draft-model", "model": args.drafter_model, "gamma": args.gamma}
    configs = {
        "off": CellConfig(**common, drafter={"name": "none"}),  # type: ignore[arg-type]
        f"static:{args.gamma}": CellConfig(**common, drafter=drafter),  # type: ignore[arg-type]
    }
    rows = []
    for repeat in range(args.repeats):
        random = np.random.default_rng(repeat)
        order = [random.permutation(len(prompts))[: args.requests] for _ in args.loads]
        gaps = [random.exponential(size=len(o)).cumsum() for o in order]
        costs: dict[str, list[list[CellResult]]] = {}
        measured = []
        for name, config in configs.items():
            with served(args, config) as cell:
                costs[name] = [measure_costs(cell, config, prompts, args)]
                (piece,) = costs[name][0][-1].pieces  # of the widest closed loop
                maximum = len(piece.requests) / (sum(piece.seconds.values()) + piece.tail_seconds)
                for load, chosen, gap in zip(args.loads, order, gaps, strict=True):
                    arrivals, before = gap / (load * maximum), (waited(), time.perf_counter())
                    sent = [prompts[i] for i in chosen]
                    start, responses = open_loop(cell, sent, arrivals, args.max_new_tokens)
                    share = (waited() - before[0]) / (time.perf_counter() - before[1])
                    measured.append((name, load, load * maximum, start, arrivals, sent, responses, share))
                costs[name].append(measure_costs(cell, config, prompts, args))
        for name, load, rate, start, arrivals, sent, responses, share in measured:
            row = {"repeat": repeat, "policy": name, "load": load, "rate": rate, "waited": share}
            cost = [
                step_cost(name, [costs["off"][i], costs[name][i]] if name != "off" else [costs["off"][i]])
                for i in range(2)
            ]
            width = 1 if name == "off" else args.gamma + 1
            row["costs"] = [[c.target.seconds(b, width, 0) for b in args.concurrency] for c in cost]
            row["drift"] = float(np.mean(np.divide(row["costs"][1], row["costs"][0])))
            pool = replayed(args, sent, responses)
            first = np.array([r.sent + r.steps[0].seconds for r in responses])
            last = np.array([r.sent + r.steps[-1].seconds for r in responses])
            tokens = np.array([len(r.tokens) for r in responses])
            row["measured"] = {
                "tokens_per_second": tokens.sum() / (last.max() - start),
                "token_seconds": (last - first).sum() / (tokens - 1).sum(),
                "first_token_seconds": float(np.mean([r.steps[0].seconds for r in responses])),
            }
            row["simulated"] = simulated(
                pool, arrivals, mean_cost(cost), 0 if name == "off" else args.gamma, args.slots
            )
            row["steps"] = {
                "measured": float(sum(len(r.steps) - 1 for r in responses)),
                "simulated": row["simulated"].pop("rows"),
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def step_cost(name: str, results: Sequence[Sequence[CellResult]]) -> StepCost:
    """The tables of `cost_tables`, read as `crossdraft simulate` reads them."""
    tables = cost_tables([result for part in results for result in part])
    beginnings = ("cost-", "prefill-cost-") if name == "off" else ("step-cost-", "prefill-cost-")
    names = [[table for table in tables if table.startswith(beginning)][-1] for beginning in beginnings]
    with tempfile.TemporaryDirectory() as folder:
        curves = []
        for table in names:
            (Path(folder) / table).write_text(tables[table], encoding="utf-8")
            curves.append(read_cost_table(str(Path(folder) / table)))
    return StepCost(curves[0], prefill=curves[1])


def mean_cost(costs: Sequence[StepCost]) -> StepCost:
    """Costs before and after, averaged; the prefills of both have the same prompts."""

    def mean(curves: Sequence[CostCurve]) -> CostCurve:
        a, b = curves
        points = [p for p in a.points if any(p[:2] == q[:2] for q in b.points)]
        both = [(p, next(q for q in b.points if p[:2] == q[:2])) for p in points]
        return CostCurve(
            a.model, "", "", a.device,
            tuple(Point(*p[:2], 0, s := (p.median + q.median) / 2, s, s) for p, q in both),
        )  # fmt: skip

    return StepCost(mean([c.target for c in costs]), prefill=mean([c.prefill for c in costs]))  # type: ignore[misc]


def replayed(args: argparse.Namespace, prompts: Sequence[list[int]], responses: Sequence[ServedResponse]) -> Pool:
    drafter = f"{{name: draft-model, model: {args.drafter_model}, gamma: {args.gamma}}}"
    sampling = Sampling(temperature=0)
    (candidate,) = candidates_of(
        [drafter], ["greedy"], (args.gamma,), sampling=sampling, target=args.target, dtype="float32", device="cpu"
    )
    recorded = [
        Response(
            str(i), "", prompt, r.tokens, np.zeros(len(r.tokens)), r.finish_reason == "stop", args.max_new_tokens,
            sampling,
        )
        for i, (prompt, r) in enumerate(zip(prompts, responses, strict=True))
    ]  # fmt: skip
    return read_pool(recorded, candidate)


def simulated(pool: Pool, arrivals: Sequence[float], cost: StepCost, gamma: int, slots: int) -> dict[str, float]:
    """Each request with its own response."""
    random = np.random.default_rng(0)
    requests = [
        SimulatedRequest(Arrival(float(t)), item, random) for t, item in zip(arrivals, pool.responses, strict=True)
    ]
    counts = simulate(requests, LengthSchedule("", ((1, gamma),)), cost, EngineSettings(slots))
    times = RequestTimes.of(requests, counts)
    return {
        "tokens_per_second": times.tokens.sum() / times.seconds,
        "token_seconds": times.later.sum() / (times.tokens - 1).sum(),
        "first_token_seconds": times.first.mean(),
        "rows": float(counts.rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", type=yaml.safe_load, help="engine with its options, as in a recipe")
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--drafter-model", default="smollm2-draft-model")
    parser.add_argument("--prompts", default="builtin")
    parser.add_argument("--limit", type=int, default=60)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--gamma", type=int, default=3)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--loads", type=lambda text: [float(x) for x in text.split(",")], default=[0.3, 0.6, 0.9])
    parser.add_argument("--repeats", type=int, default=1)
    args = parser.parse_args()
    args.concurrency = sorted({b for b in (1, 2, 4, 8, 16) if b < args.slots} | {args.slots})
    table = []
    for row in run_server(args):
        ratios = [row["simulated"][key] / row["measured"][key] for key in row["measured"]]
        steps = row["steps"]["simulated"] / row["steps"]["measured"]
        head = [row["repeat"], row["policy"], row["load"], row["rate"]]
        table.append([*head, *ratios, steps, row["drift"], row["waited"]])
    headers = ["repeat", "policy", "load", "requests/s", "tok/s", "token_seconds", "first_token", "steps"]
    print(tabulate(table, headers=[*headers, "drift", "waited"], floatfmt=".3f"))
    print("ratios of simulated to measured; drift: costs after over before; waited: see above")


if __name__ == "__main__":
    main()
