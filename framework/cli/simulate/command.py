"""``crossdraft simulate SOURCE...``: latency and goodput of draft-length policies under an arrival process."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING

from ...errors import UsageError
from ...util.input_files import kind_of
from ...util.limits import MOST_DEVICES, MOST_REPEATS, MOST_REPLAYED, MOST_REQUESTS, MOST_ROWS, MOST_TOKENS
from ..advise.costs import costs_of
from ..advise.options import add_costs, check_costs
from ..cost.options import check_numbers, floats, integer, integers, number, option
from ..options.trust import add_trust_argument, trusted_with_drafter

if TYPE_CHECKING:
    from ...advise.caveats import Remarks
    from ...simulate.arrivals import ArrivalProcess
    from ...simulate.policies import StepPolicy
    from ...simulate.request import Pool
    from ...simulate.step_cost import StepCost

#: Requests of a simulation by default.
REQUESTS = 200
ROUTERS = ("round-robin", "least-loaded")
#: Policies by default.
POLICIES = ("off", "static:4", "schedule", "oracle")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sources", nargs="+", metavar="SOURCE", help="recorded responses, as for crossdraft replay: a run or JSONL"
    )
    parser.add_argument(
        "--drafter", required=True, metavar="NAME", help="drafter of the replay: a name, or '{name: .., model: ..}'"
    )
    parser.add_argument("--verifier", metavar="NAME", help="verifier (the first compatible one)")
    parser.add_argument("--gamma", type=integer, default=8, metavar="N", help="longest draft (8)")
    parser.add_argument("--temperature", type=number, metavar="T", help="temperature of the responses")
    add_trust_argument(parser)
    parser.add_argument(
        "--policy",
        action="append",
        metavar="NAME",
        help="draft lengths: off; static:N; schedule:1=4,8=2,32=0 (by running requests; without numbers: computed); "
        f"budget:N (drafted tokens per step, shared); oracle (repeatable; {', '.join(POLICIES)})",
    )
    traffic = parser.add_argument_group("arrivals (one of them)")
    traffic.add_argument("--rate", type=floats, metavar="R,R,...", help="requests per second, of all replicas")
    traffic.add_argument(
        "--burstiness",
        type=number,
        default=1.0,
        metavar="X",
        help="shape of the gamma-distributed gaps: 1 is Poisson, less is burstier (1)",
    )
    traffic.add_argument(
        "--trace",
        metavar="FILE",
        help="recorded arrivals and lengths, CSV or JSONL: as in the traces of Azure, BurstGPT, Mooncake or Bailian",
    )
    traffic.add_argument(
        "--time-unit",
        choices=("s", "ms", "us", "ns"),
        help="unit of times of the trace that are numbers (that of the published trace with the same keys)",
    )
    traffic.add_argument(
        "--concurrency", type=integers, metavar="N,N,...", help="closed loop: so many requests at all times"
    )
    engine = parser.add_argument_group("engine")
    engine.add_argument("--batch-size", type=integer, default=64, metavar="B", help="most running requests (64)")
    engine.add_argument(
        "--batched-tokens",
        type=integer,
        default=2048,
        metavar="N",
        help="most tokens of a pass, prefill included (2048)",
    )
    engine.add_argument("--replicas", type=integer, default=1, metavar="N", help="independent replicas (1)")
    engine.add_argument("--router", choices=ROUTERS, default=ROUTERS[0], help=f"router ({ROUTERS[0]})")
    engine.add_argument(
        "--loop",
        choices=("engine", "crossdraft"),
        default="engine",
        help="engine: ragged rows, prefill within the steps; crossdraft: padded rows, prefill before the step (engine)",
    )
    costs = add_costs(parser, "cost of a step")
    costs.add_argument(
        "--prefill-cost", metavar="FILE", help="the same for prefills: lines of batch size 1, width = prompt tokens"
    )
    costs.add_argument("--overhead", type=number, default=0.0, metavar="S", help="further seconds of every step (0)")
    measured = parser.add_argument_group("measurement")
    measured.add_argument("--requests", type=integer, metavar="N", help="requests per simulation (200; all of a trace)")
    measured.add_argument("--seeds", type=integer, default=8, metavar="N", help="independent simulations (8)")
    measured.add_argument("--slo-first-token", type=number, metavar="S", help="most seconds to the first token")
    measured.add_argument("--slo-token", type=number, metavar="S", help="most seconds per token after the first")
    formats = parser.add_mutually_exclusive_group()
    formats.add_argument("--json", action="store_true", help="print JSON")
    formats.add_argument("--csv", action="store_true", help="print CSV: a row per arrival process and policy")


def main(args: argparse.Namespace) -> int:
    """Return 0. Raises UsageError (exit status 2) for invalid options, sources or files."""
    _check(args)
    from ...advise.caveats import Remarks
    from ...simulate.outcome import ServiceLevel, compare
    from ...simulate.policies import parse_policy
    from ...simulate.replica import EngineSettings
    from .output import as_csv, as_json, as_text

    remarks = Remarks()
    processes = _processes(args, remarks)
    pool, title = _pool(args, remarks)
    cost = _cost(args, remarks)
    policies: dict[str, StepPolicy] = {}
    for text in args.policy or _default_policies(pool):
        policy = parse_policy(text, pool, cost, args.batch_size)
        if policy.name in policies:
            raise UsageError(f"--policy {text} is given twice, as {policy.name}; remove one")
        policies[policy.name] = policy
    settings = EngineSettings(args.batch_size, args.batched_tokens, first_token=args.loop == "engine")
    level = None
    if args.slo_first_token is not None or args.slo_token is not None:
        level = ServiceLevel(args.slo_first_token, args.slo_token)
    results = [
        result
        for process in processes
        for result in compare(
            pool,
            process,
            list(policies.values()),
            cost,
            settings,
            requests=args.requests or (MOST_REQUESTS if args.trace else REQUESTS),
            seeds=args.seeds,
            service_level=level,
            replicas=args.replicas,
            router=args.router,
        )
    ]
    _remark(args, pool, remarks)
    if args.json:
        print(as_json(title, results, remarks))
    elif args.csv:
        print(as_csv(results), end="")
    else:
        print(as_text(title, results, remarks))
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raise UsageError for options that are invalid or cannot be combined."""
    limits = {"gamma": MOST_REPLAYED, "batch_size": MOST_ROWS, "batched_tokens": MOST_TOKENS, "seeds": MOST_REPEATS}
    limits |= {"replicas": MOST_DEVICES, "requests": MOST_REQUESTS, "concurrency": MOST_ROWS}
    check_numbers(args, limits)
    check_costs(args)
    processes = [name for name in ("rate", "trace", "concurrency") if getattr(args, name) is not None]
    if len(processes) != 1:
        names = " and ".join(map(option, processes)) or "none of them"
        raise UsageError(f"simulate requires one of --rate, --trace and --concurrency, got {names}")
    requests = args.requests or REQUESTS
    if args.concurrency and max(args.concurrency) >= requests:
        raise UsageError(
            f"--concurrency {max(args.concurrency)} of {requests} requests leaves none to arrive when another ends; "
            "raise --requests, or lower it"
        )
    if args.time_unit and not args.trace:
        raise UsageError("--time-unit requires --trace; remove it")
    if args.burstiness != 1 and not args.rate:
        raise UsageError("--burstiness requires --rate; remove it")
    for name in ("rate", "burstiness", "slo_first_token", "slo_token"):
        value = getattr(args, name)
        for x in value if isinstance(value, list) else [value] if value is not None else []:
            if not 0 < x < math.inf:
                raise UsageError(f"{option(name)} must be a positive number, got {x:g}")
    if not 0 <= args.overhead < math.inf:
        raise UsageError(f"--overhead must be at least 0, got {args.overhead:g}")
    if args.temperature is not None and not 0 <= args.temperature < math.inf:
        raise UsageError(f"--temperature must be at least 0, got {args.temperature:g}")
    if not (args.cost or args.target):
        raise UsageError(
            "the cost of the target is unknown: give --cost FILE, --target with --on, or --target measured by "
            "crossdraft cost"
        )


def _processes(args: argparse.Namespace, remarks: Remarks) -> list[ArrivalProcess]:
    from ...simulate.arrivals import ClosedLoop, GammaArrivals, read_trace

    if args.trace:
        trace = read_trace(args.trace, args.requests, args.time_unit)
        remarks.assume(f"times of the trace {trace.name} are {trace.times}")
        return [trace]
    if args.rate:
        return [GammaArrivals(rate, args.burstiness) for rate in dict.fromkeys(args.rate)]
    return [ClosedLoop(n) for n in dict.fromkeys(args.concurrency)]


def _pool(args: argparse.Namespace, remarks: Remarks) -> tuple[Pool, str]:
    """The recorded responses with their acceptance, and a title."""
    from ...contracts.sampling import Sampling
    from ...replay.responses import Reader
    from ...simulate.request import read_pool
    from ..replay.candidates import candidates_of
    from ..replay.command import read_responses

    target = "" if args.on and kind_of(args.target) else args.target or ""  # a config.json has no tokenizer
    consent = trusted_with_drafter(args, target)
    sampling = None if args.temperature is None else Sampling(temperature=args.temperature)
    reader = Reader(target=target, sampling=sampling, trust_remote_code=target in consent)
    responses, sampling = read_responses(reader, args.sources, sampling)
    (candidate,) = candidates_of(
        [args.drafter],
        [args.verifier] if args.verifier else [],
        (args.gamma,),
        sampling=sampling,
        target=target or reader.target,
        trust_remote_code=consent,
    )
    verifier, ks = next(iter(candidate.verifiers.items()))
    if ks != (1,):
        raise UsageError(f"--drafter {args.drafter} drafts several sequences, whose cost is not modelled; set K to 1")
    candidate.verifiers = {verifier: ks}
    args.draft_name = str(getattr(candidate.drafter[1], "model", "") or "")
    pool = read_pool(responses, candidate, int(args.loop == "engine"))
    for assumption, count in reader.assumed.items():
        remarks.assume(f"{count} responses {assumption}")
    return pool, f"{candidate.title} × {verifier}, drafts of up to {pool.gamma} tokens"


def _cost(args: argparse.Namespace, remarks: Remarks) -> StepCost:
    from ...advise.cost_tables import read_cost_table
    from ...simulate.step_cost import StepCost

    costs = costs_of(args, remarks)
    assert costs.target is not None  # checked by _check
    drafter = (costs.drafter or costs.by_name(args.draft_name)) if args.draft_name else None
    prefill = read_cost_table(args.prefill_cost) if args.prefill_cost else None
    if prefill is not None and prefill.batch_sizes != [1]:
        raise UsageError(f"--prefill-cost {args.prefill_cost}: the batch sizes must be 1: a line is one prompt")
    remarks.free(drafting=drafter is None and bool(args.draft_name))
    crossdraft = args.loop == "crossdraft"
    return StepCost(costs.target, drafter, prefill, args.overhead, padded=crossdraft, separate=crossdraft)


def _default_policies(pool: Pool) -> list[str]:
    return [text if not text.startswith("static") else f"static:{min(4, pool.gamma)}" for text in POLICIES]


def _remark(args: argparse.Namespace, pool: Pool, remarks: Remarks) -> None:
    remarks.measured.append(f"acceptance at every token of {len(pool.responses)} responses, by replay")
    remarks.assume("requests draw recorded responses with replacement; intervals are over simulations of these")
    if args.trace:
        remarks.assume("lengths are those of the trace; a longer output repeats the acceptance of its response")
    remarks.assume("the cache holds all running requests; routing, sampling and streaming take no time")
    if args.replicas > 1:
        remarks.assume(f"{args.replicas} equal replicas behind a {args.router} router share nothing")
    if args.prefill_cost is None:
        remarks.assume("a prefill costs its tokens in a pass of the cost curve, extrapolated beyond its widths")
    if len(pool.responses) < 10:
        remarks.warn(f"{len(pool.responses)} responses are few; record more")
