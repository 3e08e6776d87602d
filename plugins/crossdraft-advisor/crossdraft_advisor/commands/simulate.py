"""``crossdraft simulate SOURCE...``: latency and goodput of draft-length policies under an arrival process."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from crossdraft import Argument, Command, Table, UsageError
from crossdraft.commands import MOST_ROWS, MOST_TOKENS, JsonOptions, TrustOptions, kind_of
from crossdraft.framework.util.limits import MOST_REPEATS
from crossdraft.runs import counted, estimate_text

from ..limits import MOST_DEVICES, MOST_REPLAYED, MOST_REQUESTS
from ..report import Report, right
from .costs import CostOptions

if TYPE_CHECKING:
    from ..advise.caveats import Remarks
    from ..simulate.arrivals import ArrivalProcess
    from ..simulate.outcome import PolicyResult
    from ..simulate.policies import StepCost, StepPolicy
    from ..simulate.request import Pool

REQUESTS = 200  # requests of a simulation by default
_ARRIVALS, _ENGINE, _MEASURED = "arrivals (one of --rate, --trace and --concurrency)", "engine", "measurement"
Positive = Annotated[float, Field(gt=0)]


class Simulate(CostOptions, TrustOptions, JsonOptions, Command):
    """Simulation of draft lengths under traffic.

    Raises UsageError: options that cannot be combined, invalid sources or files.
    """

    name: ClassVar[str] = "simulate"

    sources: Annotated[tuple[str, ...], Argument("SOURCE", positional=True)] = Field(
        description="recorded responses, as for crossdraft replay: a run or JSONL"
    )
    drafter: Annotated[str, Argument("NAME")] = Field(
        description="drafter of the replay: a name, or '{name: .., model: ..}'"
    )
    verifier: Annotated[str, Argument("NAME")] = Field("", description="verifier (default: the first compatible one)")
    gamma: Annotated[int, MOST_REPLAYED] = Field(8, ge=1, description="longest draft")
    temperature: Annotated[float | None, Argument("T")] = Field(None, ge=0, description="temperature of the responses")
    policy: Annotated[tuple[str, ...], Argument("NAME")] = Field(
        (),
        description="draft lengths: off; static:N; schedule:1=4,8=2,32=0 (by running requests; without numbers: "
        "computed); budget:N (drafted tokens per step, shared); oracle (repeatable; default: off, static:4, schedule, "
        "oracle)",
    )
    rate: Annotated[tuple[Positive, ...], Argument("R,R,...", group=_ARRIVALS, commas=True)] = Field(
        (), description="requests per second, of all replicas"
    )
    burstiness: Annotated[float, Argument(group=_ARRIVALS, requires="rate")] = Field(
        1.0, gt=0, description="shape of the gamma-distributed gaps: 1 is Poisson, less is burstier (1)"
    )
    trace: Annotated[str, Argument("FILE", group=_ARRIVALS)] = Field(
        "",
        description="recorded arrivals and lengths, CSV or JSONL: as in the traces of Azure, BurstGPT, Mooncake or "
        "Bailian",
    )
    time_unit: Annotated[Literal["s", "ms", "us", "ns"] | None, Argument(group=_ARRIVALS, requires="trace")] = Field(
        None, description="unit of times of the trace that are numbers (that of the published trace with the same keys)"
    )
    concurrency: Annotated[
        tuple[Annotated[int, Field(ge=1), MOST_ROWS], ...], Argument("N,N,...", group=_ARRIVALS, commas=True)
    ] = Field((), description="closed loop: so many requests at all times")
    batch_size: Annotated[int, Argument("B", group=_ENGINE), MOST_ROWS] = Field(
        64, ge=1, description="most running requests"
    )
    batched_tokens: Annotated[int, Argument(group=_ENGINE), MOST_TOKENS] = Field(
        2048, ge=1, description="most tokens of a pass, prefill included"
    )
    replicas: Annotated[int, Argument(group=_ENGINE), MOST_DEVICES] = Field(1, ge=1, description="independent replicas")
    router: Annotated[Literal["round-robin", "least-loaded"], Argument(group=_ENGINE)] = Field(
        "round-robin", description="router"
    )
    loop: Annotated[Literal["engine", "crossdraft"], Argument(group=_ENGINE)] = Field(
        "engine",
        description="engine: ragged rows, prefill within the steps; crossdraft: padded rows, prefill before the step "
        "(engine)",
    )
    prefill_cost: Annotated[str, Argument("FILE", group="cost of a step")] = Field(
        "", description="as --cost, for prefills: lines of batch size 1, width = prompt tokens"
    )
    overhead: Annotated[float, Argument("S", group="cost of a step")] = Field(
        0.0, ge=0, description="further seconds of every step (0)"
    )
    requests: Annotated[int | None, Argument(group=_MEASURED), MOST_REQUESTS] = Field(
        None, ge=1, description="requests per simulation (200; all of a trace)"
    )
    seeds: Annotated[int, Argument(group=_MEASURED), MOST_REPEATS] = Field(
        8, ge=1, description="independent simulations"
    )
    slo_first_token: Annotated[float | None, Argument("S", group=_MEASURED)] = Field(
        None, gt=0, description="most seconds to the first token"
    )
    slo_token: Annotated[float | None, Argument("S", group=_MEASURED)] = Field(
        None, gt=0, description="most seconds per token after the first"
    )
    csv: Annotated[bool, Argument(exclusive="format")] = Field(
        False, description="print CSV: a row per arrival process and policy"
    )

    @model_validator(mode="after")
    def _combinable(self) -> Simulate:
        if bool(self.rate) + bool(self.trace) + bool(self.concurrency) != 1:
            raise UsageError("simulate requires one of --rate, --trace and --concurrency")
        requests = self.requests or REQUESTS
        if max(self.concurrency, default=0) >= requests:
            raise UsageError(
                f"--concurrency {max(self.concurrency)} of {requests} requests leaves none to arrive when another "
                "ends; raise --requests, or lower it"
            )
        if not (self.cost or self.target):
            raise UsageError(
                "the cost of the target is unknown: give --cost FILE, --target with --on, or --target measured by "
                "crossdraft cost"
            )
        return self

    def run(self) -> int:
        from ..advise.caveats import Remarks
        from ..simulate.outcome import ServiceLevel, compare
        from ..simulate.policies import parse_policy
        from ..simulate.replica import EngineSettings

        remarks = Remarks()
        processes = _processes(self, remarks)
        pool, title, draft_model = _pool(self, remarks)
        cost = _cost(self, draft_model, remarks)
        policies: dict[str, StepPolicy] = {}
        longest = f"static:{min(4, pool.gamma)}"
        for text in self.policy or ["off", longest, "schedule", "oracle"]:
            policy = parse_policy(text, pool, cost, self.batch_size)
            if policy.name in policies:
                raise UsageError(f"--policy {text} is given twice, as {policy.name}; remove one")
            policies[policy.name] = policy
        settings = EngineSettings(self.batch_size, self.batched_tokens, first_token=self.loop == "engine")
        level = None
        if self.slo_first_token is not None or self.slo_token is not None:
            level = ServiceLevel(self.slo_first_token, self.slo_token)
        results = [
            result
            for process in processes
            for result in compare(
                pool,
                process,
                list(policies.values()),
                cost,
                settings,
                requests=self.requests or (MOST_REQUESTS if self.trace else REQUESTS),
                seeds=self.seeds,
                service_level=level,
                replicas=self.replicas,
                router=self.router,
            )
        ]
        _remark(self, pool, remarks)
        data = {"title": title, "results": results, "remarks": remarks}
        Report(lambda: as_text(title, results, remarks), lambda: data, lambda: map(vars, results)).emit(self)
        return 0


def _processes(args: Simulate, remarks: Remarks) -> list[ArrivalProcess]:
    from ..simulate.arrivals import ClosedLoop, GammaArrivals, read_trace

    if args.trace:
        trace = read_trace(args.trace, args.requests, args.time_unit)
        remarks.assume(f"times of the trace {trace.name} are {trace.times}")
        return [trace]
    if args.rate:
        return [GammaArrivals(rate, args.burstiness) for rate in dict.fromkeys(args.rate)]
    return [ClosedLoop(n) for n in dict.fromkeys(args.concurrency)]


def _pool(args: Simulate, remarks: Remarks) -> tuple[Pool, str, str]:
    """The recorded responses with their acceptance, a title, and the draft model."""
    from crossdraft import Sampling

    from ..replay.candidates import candidates_of
    from ..replay.responses import Reader
    from ..simulate.request import read_pool

    target = "" if args.on and kind_of(args.target) else args.target  # a config.json has no tokenizer
    consent = args.trusted([target or None], [args.drafter])
    sampling = None if args.temperature is None else Sampling(temperature=args.temperature)
    reader = Reader(target=target, sampling=sampling, trust_remote_code=target in consent)
    responses, sampling = reader.sampled(args.sources, sampling)
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
    draft_model = str(getattr(candidate.drafter[1], "model", "") or "")
    pool = read_pool(responses, candidate, int(args.loop == "engine"))
    for assumption, count in reader.assumed.items():
        remarks.assume(f"{counted(count, 'response')} {assumption}")
    return pool, f"{candidate.title} × {verifier}, drafts of up to {pool.gamma} tokens", draft_model


def _cost(args: Simulate, draft_model: str, remarks: Remarks) -> StepCost:
    from crossdraft.runs import CostCurve

    from ..cost.step_cost import StepCost as PublishedCost
    from ..cost.tables import read_cost_table
    from ..simulate.policies import StepCost

    costs = args.costs(remarks)
    assert costs.target is not None  # checked by the model
    drafter = (costs.drafter or costs.by_name(draft_model)) if draft_model else None
    prefill = read_cost_table(args.prefill_cost) if args.prefill_cost else None
    if prefill is not None and prefill.batch_sizes != [1]:
        raise UsageError(f"--prefill-cost {args.prefill_cost}: the batch sizes must be 1: a line is one prompt")
    crossdraft = args.loop == "crossdraft"
    cost = StepCost(costs.target, drafter, prefill, args.overhead, padded=crossdraft, separate=crossdraft)
    if draft_model and not (isinstance(costs.target, CostCurve) and (drafter is not None or args.cost)):
        published = PublishedCost()
        cost.floor = lambda drafted: published.ratio(drafted).value
        remarks.assume("drafts take at least as long as in published series (docs/predictions.md)")
    else:
        remarks.assume("verification and bookkeeping are free")
    return cost


def _remark(args: Simulate, pool: Pool, remarks: Remarks) -> None:
    remarks.measure(f"acceptance at every token of {counted(len(pool.responses), 'response')}, by replay")
    remarks.assume("requests draw recorded responses with replacement; intervals are over simulations of these")
    if args.trace:
        remarks.assume("lengths are those of the trace; a longer output repeats the acceptance of its response")
    remarks.assume("the cache holds all running requests; routing, sampling and streaming take no time")
    if args.replicas > 1:
        remarks.assume(f"{args.replicas} equal replicas behind a {args.router} router share nothing")
    if not args.prefill_cost:
        remarks.assume("a prefill costs its tokens in a pass of the cost curve, extrapolated beyond its widths")
    if len(pool.responses) < 10:
        remarks.warn(f"{counted(len(pool.responses), 'response')} are few; record more")


def as_text(title: str, results: Sequence[PolicyResult], remarks: Remarks) -> str:
    parts = [title]
    for arrivals, rows in groupby(results, key=lambda result: result.arrivals):
        parts.append(f"{arrivals}\n\n{_table(list(rows))}")
    legend = (
        "B: mean decoding rows; p95: of requests; goodput: within the service level; regret: excess of the mean latency"
    )
    parts.append(f"{legend} over the oracle's")
    return "\n\n".join([*parts, "\n".join(remarks.lines())])


def _table(rows: Sequence[PolicyResult]) -> str:
    goodput, regret = any(row.goodput for row in rows), any(row.regret for row in rows)
    names = ["B", "tok/step", "tok/s", "first token ms", "p95", "ms/token", "p95 "]
    names += ["goodput /s"] * goodput + ["regret %"] * regret
    body = []
    for row in rows:
        cells = [row.policy, f"{row.batch_size:.1f}", f"{row.block_efficiency_all_steps:.2f}"]
        cells.append(f"{row.tokens_per_second.value:.0f}")
        cells += [f"{1000 * s:.0f}" for s in (row.first_token_seconds.value, row.first_token_seconds_p95)]
        per_token = (row.token_seconds.value, row.token_seconds_p95) if row.token_seconds else ()
        cells += [f"{1000 * s:.1f}" for s in per_token] or ["", ""]
        cells += [estimate_text(row.goodput, digits=1)] * goodput
        cells += [estimate_text(row.regret.scaled(100) if row.regret else None, digits=1)] * regret
        body.append(cells)
    return Table(["policy", *right(*names)], body).text()
