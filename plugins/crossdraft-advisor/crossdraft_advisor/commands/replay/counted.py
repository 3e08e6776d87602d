"""``crossdraft replay SOURCE... --as ENGINE... --counted FILE...``: counters of engines against those of replay.

The same pair in two engines has three numbers in each: what the engine counted, what it should have counted for its own
responses by its own definition, and crossdraft's block efficiency of these responses, which has one definition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from shlex import quote
from typing import Any

from crossdraft import Table, UsageError
from crossdraft.runs import Strategy, estimate_text

from ...engines.counter_definitions import DEFINITIONS
from ...engines.formats import read_acceptances
from ...engines.prometheus import DRAFTED, summed, totals_by_model
from ...gate import GateCheck, Sample, checked
from ...replay.aggregate import Row
from ...replay.engine_counts import DTYPE, TEMPLATE, Cause, Counted, EngineCounts, cause_of, differing, variants_of
from ...replay.jsonl_formats import OTHER_TEMPLATE
from ...replay.response import Response
from ...report import Report, change_text, log, right
from .checkpoints import has_weights


@dataclass
class EngineCheck:
    """Counters of one engine for one source."""

    engine: str
    source: str
    file: str
    counted: Counted  # by the engine, in ``file``; reference: by replay, with the engine's definition
    reference: EngineCounts
    row: Row  # crossdraft's own metrics of the same responses; ``sample``: by prompt
    sample: Sample
    # of a difference between counted and reference; None if they agree, or if no cause explains it
    cause: Cause | None = None
    prompts: dict[str, int] = field(default_factory=dict)  # hashes of the prompts' tokens by id
    # with which the engine's drafter differs from crossdraft's default
    options: Mapping[str, Any] = field(default_factory=dict)
    next_check: str = "run crossdraft verify-engine"  # if no cause explains the difference

    @property
    def agrees(self) -> bool:
        return self.counted.agrees(self.reference)


def counted_of(
    triples: Iterable[tuple[str, str, str]], target: str, drafter: str, dtype: str, replayed: Callable[..., Any]
) -> Report:
    """Compare the counters of each engine with replay: tables and causes.

    ``triples``: sources, engines and files; ``replayed``: replays the responses of sources as an engine counts them.
    Raises UsageError: several drafters or lengths, or a file without the counters.
    """
    checks = [_checked(*triple, target, drafter, dtype, replayed) for triple in triples]
    difference, compared = None, _compared(checks)
    if compared is not None:
        difference = {"change": compared[0].change, "paired": compared[0].paired, "causes": compared[1]}
    data = {"engines": list(map(_json, checks)), "difference": difference}
    return Report(lambda: _text(checks, compared), lambda: data)


def _checked(
    source: str, engine: str, file: str, target: str, drafter: str, own_dtype: str, replayed: Callable[..., Any]
) -> EngineCheck:
    text, acceptances = read_acceptances(file)
    if len(acceptances) > 1:
        raise UsageError(f"{file} holds the counters of {len(acceptances)} models or draft lengths; give those of one")
    drafted = summed(totals_by_model(DEFINITIONS[engine], text), DRAFTED) if DEFINITIONS[engine].prefix else None
    counted = Counted.of(acceptances[0], None if drafted is None else drafted.value)
    variants, prompts = list(variants_of(DEFINITIONS[engine])), dict[str, int]()
    definitions = [definition for _, definition in variants]

    def note(response: Response) -> None:
        prompts.setdefault(response.id, hash(tuple(response.prompt)))

    replay_in = partial(replayed, [source], target, engine, definitions, note=note)
    log(f"replaying {source} as {engine}")
    result, sampling, assumed = replay_in()
    (candidate,) = result.candidates
    pair = verifier, gamma = _single(candidate, counted, file)
    reference, tally = candidate.counts[pair], candidate.tallies[verifier, 1]
    sums = [(t, s) for t, s in tally.sums(gamma)[:, :2].tolist()]
    sample = Sample(source, sums, tuple(result.groups.names()), maximum=1.0 + gamma)
    check = EngineCheck(engine, source, file, counted, reference, tally.row(gamma), sample, prompts=prompts)
    strategy = Strategy.parse(drafter, "--drafter")
    defaults = DEFINITIONS[engine].drafter_options.get(strategy.name, {})
    check.options = {key: value for key, value in defaults.items() if key not in strategy.config}
    weights = has_weights(candidate.drafter, sampling)
    if target and weights:
        option = "" if own_dtype == "auto" else f" --dtype {own_dtype}"
        check.next_check = (
            f"find how it drafts: crossdraft diagnose --target {target} --drafter {quote(drafter)} --replay "
            f"{quote(source)} --counters {quote(file)} --as {engine}{option}"
        )
    if check.agrees:
        return check
    for dtype in ("float32", "bfloat16"):
        if weights and dtype != own_dtype and counted.agrees(replay_in(dtype=dtype)[0].candidates[0].counts[pair]):
            text = f"replayed in {dtype}, the counts agree: the engine computes in it; add --dtype {dtype}"
            check.cause = Cause(DTYPE, text)
            return check
    if templates := assumed[OTHER_TEMPLATE]:
        check.cause = Cause(
            TEMPLATE,
            f"{templates} prompts differ from the messages in the target's chat template; request prompt token ids, "
            "or set the engine's chat template",
        )
        return check
    causes = [(cause, counts) for (cause, _), counts in zip(variants, candidate.variants[pair], strict=True)]
    check.cause = cause_of(counted, reference, causes)
    return check


def _single(candidate: Any, counted: Counted, file: str) -> tuple[str, int]:
    """The verifier and draft length to compare. Raises UsageError for several verifiers or another draft length."""
    if len(candidate.verifiers) > 1:
        raise UsageError(f"--counted: give one --verifier of {', '.join(candidate.verifiers)}, as the engine verifies")
    gamma = candidate.gammas[-1] if counted.total else len(counted.per_position)
    if gamma not in candidate.gammas:
        raise UsageError(f"{file} counted drafts of {gamma} tokens; set --gamma {gamma}")
    return next(iter(candidate.verifiers)), gamma


def _text(checks: Sequence[EngineCheck], compared: tuple[GateCheck, list[Cause]] | None) -> str:
    deepest = max(check.reference.gamma for check in checks)
    columns = ["engine", "numbers", *right("drafts", "accepted", "length", *(f"at {i + 1}" for i in range(deepest)))]
    rows, lines = [], []
    for check in checks:
        counted, reference, row = check.counted, check.reference, check.row
        rates = [] if counted.total else [f"{rate:.3f}" for rate in counted.rates]
        rows.append([check.engine, "counted", *_cells(counted.drafts, float(counted.per_position.sum())), *rates])
        rates = [f"{n / reference.drafts:.3f}" if reference.drafts else "" for n in reference.per_position]
        rows.append([check.engine, "replayed", *_cells(reference.drafts, reference.accepted), *rates])
        own = [f"{rate:.3f}" for rate in row.marginal]
        rows.append([check.engine, "block efficiency", "", "", estimate_text(row.block_efficiency), *own])
        verdict = f"counted as replayed{' up to chance' * check.reference.random}"
        if not check.agrees:
            reason = f"and not by its way of counting; {check.next_check}"
            reason = reason if check.cause is None else f"{check.cause.name}: {check.cause.text}"
            verdict = f"counted otherwise than replayed{', ' if check.cause is None else ': '}{reason}"
        lines.append(f"{check.engine}: {verdict}")
    if compared is not None:
        (a, b), (change, causes) = checks[:2], compared
        against, same = f"{b.engine} against {a.engine}", ", on the same prompts" * change.paired
        lines.append(f"{against}: block efficiency {change_text(change.change)}{same}")
        lines.append(f"{against}: counted length {b.counted.length - a.counted.length:+.3f}")
        lines += [f"- {cause.name}: {cause.text}" for cause in causes]
    table = Table(columns, rows).text()
    legend = "replayed: from the engine's own responses, as it counts; block efficiency: of them, as crossdraft counts"
    return "\n\n".join([table, legend, "\n".join(lines)])


def _cells(drafts: float, accepted: float) -> list[str]:
    length = f"{1 + accepted / drafts:.3f}" if drafts else ""
    return [f"{drafts:.0f}", f"{accepted:.0f}", length]


def _compared(checks: Sequence[EngineCheck]) -> tuple[GateCheck, list[Cause]] | None:
    """Difference of the block efficiencies of the first two, and reasons why their counters differ."""
    if len(checks) < 2 or not all(len(check.sample.sums) for check in checks[:2]):
        return None
    a, b = checks[:2]
    causes = [Cause("definition of the counter", text) for text in differing(*(DEFINITIONS[c.engine] for c in (a, b)))]
    both = a.prompts.keys() & b.prompts.keys()
    if others := sum(a.prompts[name] != b.prompts[name] for name in both):
        text = f"{others} of {len(both)} prompts have other tokens in {b.engine} than in {a.engine}"
        causes.append(Cause(TEMPLATE, text))
    for own, other in ((a, b), (b, a)):
        options = own.options if own.options != other.options else {}
        causes += [Cause("drafter", f"{own.engine} drafts with {key}: {value}") for key, value in options.items()]
    return checked(a.sample, b.sample, 0.05), causes


def _json(check: EngineCheck) -> dict[str, Any]:
    reference = check.reference
    return {
        "engine": check.engine,
        "source": check.source,
        "counted": {"drafts": check.counted.drafts, "per_position": check.counted.per_position},
        "replayed": {"drafts": reference.drafts, "per_position": reference.per_position},
        "unknown_past_end": reference.unknown,
        "block_efficiency": check.row.block_efficiency,
        "acceptance_marginal": check.row.marginal,
        "agrees": check.agrees,
        "cause": check.cause,
    }
