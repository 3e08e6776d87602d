"""``crossdraft advise``: recommend drafters and draft lengths from acceptance and cost; export engine settings."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, model_validator

from crossdraft import MOST_LEVELS, Argument, Command, Table, UnknownNameError, UsageError
from crossdraft.commands import MOST_PROMPTS, MOST_TOKENS, BatchSizes, Contexts, JsonOptions, TrustOptions, kind_of
from crossdraft.framework import plugins
from crossdraft.runs import estimate_text

from ..engines.acceptance import Acceptance
from ..engines.engine import Schedule, Settings, not_servable
from ..engines.formats import CounterSource, read_acceptances
from ..report import Report, without_empty
from .costs import CostOptions

if TYPE_CHECKING:
    from ..advise.candidates import Candidate
    from ..advise.caveats import Remarks
    from ..advise.decision import Choice, Step
    from ..cost.step_cost import SpeedPoint

_REPLAYED = "acceptance by replaying responses (docs/replay.md)"
_ABOUT = "facts missing in an engine's numbers"


class Advise(CostOptions, TrustOptions, JsonOptions, Command):
    """Recommendation of a drafter, a verifier and a draft length for each batch size.

    Raises UsageError: insufficient data, unknown names, or options that cannot be combined.
    """

    name: ClassVar[str] = "advise"

    sources: Annotated[tuple[str, ...], Argument("SOURCE", positional=True)] = Field(
        (),
        description="source of acceptance: directory of a finished run; file or URL of an engine's log, metrics or "
        "responses",
    )
    batch_size: BatchSizes = Field((1, 2, 4, 8, 16, 32, 64), description="batch sizes")
    context: Contexts = Field((), description="context lengths (as measured in a run; else 1024)")
    export: Annotated[str, Argument("ENGINE")] = Field(
        "", description="print settings for an engine, see crossdraft list engines"
    )
    replay: Annotated[tuple[str, ...], Argument("SOURCE", group=_REPLAYED)] = Field(
        (), description="recorded responses (repeatable)"
    )
    prompts: Annotated[str, Argument("SOURCE", group=_REPLAYED, requires="target")] = Field(
        "", description="prompts; their responses are decoded here without drafting"
    )
    responses: Annotated[int, Argument("N", group=_REPLAYED, requires="prompts"), MOST_PROMPTS] = Field(
        32, ge=1, description="number of prompts to decode"
    )
    max_new_tokens: Annotated[int, Argument("N", group=_REPLAYED, requires="prompts"), MOST_TOKENS] = Field(
        128, ge=1, description="maximum tokens per response"
    )
    since: Annotated[str, Argument("FILE", group=_ABOUT)] = Field(
        "", description="an earlier scrape of the same counters, to subtract"
    )
    drafter: Annotated[tuple[str, ...], Argument("NAME", group=_ABOUT)] = Field(
        (),
        description="drafter (draft-model, eagle3, prompt-lookup, ...); for a replay a name, or a mapping such as "
        "'{name: .., model: ..}' (repeatable)",
    )
    verifier: Annotated[tuple[str, ...], Argument("NAME", group=_ABOUT)] = Field(
        (), description="verifier (token, block, ...); for a replay: all compatible ones (repeatable)"
    )
    temperature: Annotated[float | None, Argument("T", group=_ABOUT)] = Field(
        None, ge=0, description="temperature of the target; selects cells of a run"
    )
    gamma: Annotated[int | None, Argument("N", group=_ABOUT), MOST_LEVELS] = Field(
        None, ge=1, description="draft length, if only the mean acceptance length is known"
    )
    draft_path: Annotated[str, Argument("PATH", group=_ABOUT, requires="export")] = Field(
        "", description="draft model in the exported settings"
    )
    overlap: Annotated[bool, Argument(group="cost of a step")] = Field(
        False, description="assume that drafting and verification overlap"
    )

    @property
    def replays(self) -> bool:
        """True if acceptance is computed by replaying responses."""
        return bool(self.replay or self.prompts)

    @model_validator(mode="after")
    def _combinable(self) -> Advise:
        for kind, names in (("drafter", self.drafter), ("verifier", self.verifier), ("engine", (self.export,))):
            for name in names:
                if name and name not in (known := plugins.entries(f"{kind}s")) and not name.lstrip().startswith("{"):
                    raise UnknownNameError.among(kind, name, known)
        if bool(self.sources) + bool(self.replay) + bool(self.prompts) != 1:
            raise UsageError(
                "advise requires one source of acceptance: a run, an engine's log or metrics, --replay or --prompts"
            )
        if self.export and len(self.context) > 1:
            raise UsageError("--export takes one --context: engine settings do not depend on the context length")
        if not self.replays:
            if len(self.drafter) > 1 or len(self.verifier) > 1 or any("{" in name for name in self.drafter):
                raise UsageError(
                    "several drafters or verifiers, and options of drafters, require --replay or --prompts; an "
                    "engine's numbers are for one of each"
                )
            if self.trust_remote_code:
                raise UsageError("--trust-remote-code requires --replay or --prompts; no model is run without them")
            if self.target and self.cost:
                raise UsageError("--target and --cost cannot be combined: both give the cost of the target")
        elif not self.drafter:
            raise UsageError("--drafter is missing: give at least one drafter to replay")
        elif self.gamma is not None or self.since:
            raise UsageError("--gamma and --since are for an engine's numbers; a replay has all draft lengths")
        return self

    def run(self) -> int:
        from ..advise.caveats import Remarks
        from ..advise.decision import decide

        remarks = Remarks()
        groups = _groups(self, remarks)
        sizes = _sizes(self, groups, remarks)
        steps = {
            title: [decide(candidates, b, c) for c in self.context or [None] for b in sizes]
            for title, candidates in groups.items()
        }
        for title, candidates in groups.items():
            remarks.of_steps(steps[title], candidates)
        settings, schedule = _settings(self, groups, sizes, remarks) if self.export else (None, None)
        Report(
            lambda: as_text(steps, remarks) if settings is None else settings.text,
            lambda: as_json(steps, remarks, settings, schedule),
        ).emit(self)
        if schedule is not None and not self.json_:
            lines = [*remarks.first_lines(), "", schedule_text(schedule), "", *remarks.lines()]
            print("\n".join(lines), file=sys.stderr)
        return 0


CONTEXT = 1024
#: Engines whose formats have their name at the beginning.
_PRICED = ("vllm", "sglang", "llama.cpp", "tensorrt-llm")


# -- candidates --------------------------------------------------------------------------------------------------


def _groups(args: Advise, remarks: Remarks) -> dict[str, list[Candidate]]:
    """The candidates, grouped by target and sampling parameters."""
    runs, texts = _kinds(args)
    candidates = _candidates(args, runs, texts, remarks)
    remarks.of_costs(candidates)
    if args.overlap:
        remarks.assume(
            "drafting and verification overlap: a step takes at least as long as the longer of the two; after a "
            "rejection the draft has to be repeated"
        )
        candidates = [replace(candidate, overlap=True) for candidate in candidates]
    groups: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        if args.temperature is None or candidate.acceptance.temperature == args.temperature:
            groups.setdefault(candidate.group, []).append(candidate)
    if not groups:
        place = "" if args.temperature is None else f" at temperature {args.temperature:g}"
        reason = "; ".join(remarks.warnings) or f"the sources have no drafter{place}"
        raise UsageError(f"no candidates: {reason}")
    return groups


def _kinds(args: Advise) -> tuple[list[str], list[CounterSource]]:
    """The sources that are finished runs, and the others. Raises UsageError if options do not fit them."""
    sources = [CounterSource.parse(text, "SOURCE") for text in args.sources]
    kinds = {
        item.source: "url" if item.source.startswith(("http://", "https://")) else kind_of(item.source)
        for item in sources
    }
    if missing := [source for source, kind in kinds.items() if not kind]:
        raise UsageError(f"{missing[0]} does not exist; give a finished run, or an engine's log, metrics or responses")
    runs = [source for source, kind in kinds.items() if kind == "directory"]
    texts = [item for item in sources if item.source not in runs]
    if args.since and len(texts) != 1:
        raise UsageError(
            "--since requires exactly one SOURCE, a later scrape of the same counters; several have one each: "
            "'{source: FILE, since: EARLIER}'"
        )
    if runs and not texts and (args.drafter or args.verifier or args.gamma):
        raise UsageError("--drafter, --verifier and --gamma are for an engine's numbers; a finished run has its own")
    return runs, texts


def _candidates(args: Advise, runs: Sequence[str], texts: Sequence[CounterSource], remarks: Remarks) -> list[Candidate]:
    """The candidates of finished runs and of other sources."""
    from crossdraft.runs import read_run, stored_curves

    from ..advise.candidates import imported, of_run, pair_of

    costs = args.costs(remarks)
    candidates: list[Candidate] = []
    finished = [read_run(Path(run)) for run in runs]
    cells = [result.config for run in finished for result in run.summary.results]
    machine = None if costs.target is None else (costs.target, costs.by_name)
    for run in finished:
        own, notes = of_run(run.summary.results, run.name, [*run.summary.curves, *stored_curves()], machine, cells)
        remarks.of_run(run.summary.results, run.name, notes, own_seconds=machine is None)
        candidates += own
    speeds: dict[str, list[SpeedPoint]] = {}
    if args.replays:
        from ..advise.replayed import replayed_acceptances

        acceptances = replayed_acceptances(args, remarks)
    else:
        acceptances = []
        for source in texts:
            read, points = _read_source(args, source, remarks)
            acceptances += read
            for point in points:
                for pair in {pair_of(acceptance) for acceptance in read} if point.gamma else {""}:
                    speeds.setdefault(pair, []).append(point)
    context = (args.context or (CONTEXT,))[0]
    for acceptance in acceptances:
        curve = costs.drafter
        if args.replays and not acceptance.model:
            curve = None
        elif args.replays:
            curve = curve or costs.by_name(acceptance.model)
        drafting = speeds.get(pair_of(acceptance), [])
        measured = [*speeds.get("", []), *drafting] if drafting else []
        # the names of vLLM's formats begin with that of the engine, as do those of other engines
        engine = next((name for name in _PRICED if acceptance.format.startswith(name)), args.export)
        candidates += imported([acceptance], costs.target, curve, context, measured, engine)
    if speeds and not candidates:
        raise UsageError(
            "no candidates: the sources have speeds of plain decoding only; give one with drafts of the same server"
            ", too"
        )
    return candidates


def _read_source(args: Advise, source: CounterSource, remarks: Remarks) -> tuple[list[Acceptance], list[SpeedPoint]]:
    """Acceptances and speeds in a source, in the format of any engine, completed by the options."""
    from ..advise.candidates import of_pair
    from ..engines.speeds import speed_notes, speed_points

    content, acceptances = read_acceptances(
        source.source, source.since or args.since or None, source.gamma or args.gamma, plain=True
    )
    remarks.of_source(content, acceptances, speed_notes(content))
    temperature = args.temperature if source.temperature is None else source.temperature
    fields = {"drafter": "".join(args.drafter), "verifier": "".join(args.verifier), "temperature": temperature}
    fields |= {"model": args.draft_path or args.draft_model}
    fields = {name: value for name, value in fields.items() if value not in (None, "")}
    parts = [part for acceptance in acceptances for part in acceptance.parts or (acceptance,)]
    named = [part for part in parts if part.drafter in args.drafter]
    drafters = {part.drafter: part for part in parts if part.drafter}
    if args.drafter and not named and len(drafters) > 1:
        raise UsageError(f"{source.source} has the drafters {', '.join(drafters)}; name one of them as --drafter")
    chosen = []
    for acceptance in named or acceptances:
        if not acceptance.marginal and acceptance.draft_length is None:
            raise UsageError(
                f"{acceptance.source} has the mean acceptance length {acceptance.length:.2f} and not the draft length; "
                "give it as --gamma, or as '{source: FILE, gamma: N}'"
            )
        if not acceptance.marginal:  # a constant rate with the same mean length
            acceptance = acceptance.with_constant_rate(acceptance.draft_length or 0)
        chosen.append(of_pair(replace(acceptance, **fields)))
    return chosen, speed_points(content)


def _sizes(args: Advise, groups: Mapping[str, Sequence[Candidate]], remarks: Remarks) -> list[int]:
    """The batch sizes; by default those within a factor of two of measured speeds, if these are all that is known."""
    sizes = sorted(set(args.batch_size))
    candidates = [candidate for group in groups.values() for candidate in group]
    measured = [p.batch_size for c in candidates if c.target is None for p in c.speeds if p.gamma]
    if len(measured) == 0 or any(c.target is not None for c in candidates):
        return sizes
    far = [b for b in sizes if not min(measured) / 2 <= b <= 2 * max(measured)]
    if "batch_size" in args.model_fields_set or len(far) == len(sizes):
        if far:
            remarks.warn(f"no speed was measured within a factor of two of B = {', '.join(map(str, far))}")
        return sizes
    return [b for b in sizes if b not in far]


# -- settings ----------------------------------------------------------------------------------------------------


def _settings(
    args: Advise, groups: dict[str, list[Candidate]], sizes: list[int], remarks: Remarks
) -> tuple[Settings, Schedule]:
    """Settings for the engine of --export and their schedule; adds remarks on its limitations and their cost."""
    from ..advise.decision import decide, schedule_for

    if len(groups) > 1:
        raise UsageError(
            f"--export takes one group, and the sources have {'; '.join(groups)}; choose with --temperature, or give a "
            "source with one of them"
        )
    ((_, candidates),) = groups.items()
    engine = plugins.get("engines", args.export)()
    context = args.context[0] if args.context else None
    if args.draft_path:
        candidates = [replace(c, acceptance=replace(c.acceptance, model=args.draft_path)) for c in candidates]
    reasons = {c.pair: reason for c in candidates if (reason := not_servable(c.acceptance.model))}
    for reason in dict.fromkeys(reasons.values()):
        remarks.warn(f"left out: {reason}")
    candidates = [c for c in candidates if c.pair not in reasons]
    if not candidates:
        raise UsageError(f"--export {args.export}: {'; '.join(dict.fromkeys(reasons.values()))}")
    with plugins.guarded("engines", args.export, "cannot() or scheduled()"):
        choice = schedule_for(candidates, engine, sizes, context)
    remarks.of_schedule(choice, engine, {b: decide(candidates, b, context) for b in choice.schedule.speed_ups})
    with plugins.guarded("engines", args.export, "export()"):
        settings = engine.export(choice.schedule)
    if not isinstance(settings, Settings):
        raise plugins.unusable("engines", args.export, "export() must return crossdraft_advisor.Settings")
    remarks.of_settings(engine, settings)
    return settings, choice.schedule


# -- output ------------------------------------------------------------------------------------------------------


_LEGEND = (
    "speed-up: predicted, over plain decoding, with a 95 % interval; ~: the interval includes the runner-up; "
    "?: it includes 1"
)


def as_text(steps: Mapping[str, Sequence[Step]], remarks: Remarks) -> str:
    parts = [f"{title}\n\n{_table(steps_of_title)}" for title, steps_of_title in steps.items()]
    first = ["\n".join(remarks.first_lines())] if remarks.first else []
    return "\n\n".join([*first, *parts, _LEGEND, "\n".join(remarks.lines())])


def _table(steps: Sequence[Step]) -> str:
    rows = []
    for step in steps:
        best = step.best
        pair = [best.candidate.title, best.candidate.acceptance.verifier or "?", str(best.gamma)]
        cells = [str(step.batch_size), f"{step.context or 0:g}", step.advice + " ?" * (not step.sure), *pair]
        others = [_pair(step.runner_up) + " ~" * step.close, _pair(step.measured)]
        rows.append([*cells, estimate_text(best.speed_up), *others])
    header = ["B", "context", "advice", "drafter", "verifier", "gamma", "speed-up", "runner-up", "measured best"]
    table = without_empty(Table(header, rows), "measured best")
    return (table if len({step.context for step in steps}) > 1 else table.without("context")).text()


def schedule_text(schedule: Schedule) -> str:
    """The draft length and the predicted speed-up of exported settings, by batch size."""
    from ..advise.decision import excludes_one

    acceptance = schedule.acceptance
    pair = f"{acceptance.drafter or 'drafts'} × {acceptance.verifier or '?'}"
    rows = []
    for row in schedule_rows(schedule):
        mark = " ?" if row["gamma"] and not excludes_one(row["speed_up"]) else ""
        rows.append([str(row["batch_size"]), str(row["gamma"]), estimate_text(row["speed_up"]) + mark])
    unsure = "\n\n?: the interval includes 1" * any(row[2].endswith("?") for row in rows)
    return Table(["B", "gamma", "speed-up"], rows, title=f"{pair}, with these settings").text() + unsure


def schedule_rows(schedule: Schedule) -> list[dict[str, Any]]:
    """Batch size, draft length and speed-up (an `Estimate`) of exported settings."""
    ranges = sorted(schedule.ranges, key=lambda item: item.low)
    return [
        {"batch_size": b, "gamma": [r.gamma for r in ranges if r.low <= b][-1], "speed_up": speed_up}
        for b, speed_up in sorted(schedule.speed_ups.items())
    ]


def _pair(choice: Choice | None) -> str:
    if choice is None:
        return ""
    pair = f"{choice.candidate.title} × {choice.candidate.acceptance.verifier or '?'}"
    return f"{pair}, {choice.gamma}: {choice.speed_up.value:.2f}"


def as_json(
    steps: Mapping[str, Sequence[Step]], remarks: Remarks, settings: Settings | None, schedule: Schedule | None = None
) -> dict[str, Any]:
    kinds = asdict(remarks)
    first = kinds.pop("first")  # of all warnings
    report: dict[str, Any] = {
        "advice": [
            {
                "group": title,
                "batch_size": step.batch_size,
                "context": step.context,
                "draft": step.draft,
                "sure": step.sure,
                "best": _choice(step.best),
                "runner_up": _choice(step.runner_up) if step.runner_up else None,
                "measured_best": _choice(step.measured) if step.measured else None,
            }
            for title, steps_of_title in steps.items()
            for step in steps_of_title
        ],
        "remarks": {**kinds, "warnings": [*first, *remarks.warnings]},
    }
    if settings is not None and schedule is not None:
        report |= {"settings": settings.text, "schedule": schedule_rows(schedule)}
    return report


def _choice(choice: Choice) -> dict[str, Any]:
    acceptance = choice.candidate.acceptance
    return {
        "drafter": acceptance.drafter or None,
        "model": acceptance.model or None,
        "verifier": acceptance.verifier or None,
        "gamma": choice.gamma,
        "options": dict(acceptance.options),
        "source": acceptance.source,
        "speed_up": choice.speed_up,
        "tokens_per_second": choice.tokens_per_second,
    }
