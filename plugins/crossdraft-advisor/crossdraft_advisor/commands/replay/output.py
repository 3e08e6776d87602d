"""Output of ``crossdraft replay``: tables, CSV and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from crossdraft import Estimate, Sampling, Table
from crossdraft.framework.models.segments import ANSWER
from crossdraft.runs import counted, estimate_text, spread

from ...engines.counter_definitions import CounterDefinition
from ...replay.aggregate import MAX_GROUPS, Row, Tally, difference, segment_difference
from ...replay.replay import Candidate, ReplayResult
from ...report import right, without_empty

Key = tuple[Candidate, str, int, int]  # a pair at a draft length: candidate, verifier, K and gamma


def keys(result: ReplayResult) -> Iterator[Key]:
    for candidate in result.candidates:
        for verifier, k in candidate.tallies:
            for gamma in candidate.gammas:
                yield candidate, verifier, k, gamma


def differences(result: ReplayResult, key: Key) -> dict[str, tuple[str, Estimate | None]]:
    """Paired differences of block efficiency to the first verifier, the first drafter and the next shorter draft."""
    candidate, verifier, k, gamma = key
    tally, pairs = candidate.tallies[verifier, k], {}
    first = next(iter(candidate.tallies))
    if first != (verifier, k):
        pairs["verifier"] = (verifier_title(*first), difference(tally, gamma, candidate.tallies[first], gamma))
    other = result.candidates[0]
    if other is not candidate and (verifier, k) in other.tallies and gamma in other.gammas:
        pairs["drafter"] = (other.title, difference(tally, gamma, other.tallies[verifier, k], gamma))
    shorter = [g for g in candidate.gammas if g < gamma]
    if shorter:
        pairs["gamma"] = (str(max(shorter)), difference(tally, gamma, tally, max(shorter)))
    return pairs


def verifier_title(verifier: str, k: int) -> str:
    return verifier if k == 1 else f"{verifier}, K = {k}"


def tables(result: ReplayResult, sampling: Sampling | None, assumed: Mapping[str, int]) -> str:
    """Tables of block efficiency, acceptance by position and categories, with notes."""
    setting = f"temperature {sampling.temperature:g}" if sampling else "sampling parameters unknown"
    grouped = " or groups of them" if any(len(ids) >= MAX_GROUPS for ids in result.groups.by_category.values()) else ""
    prompts = f"{counted(len(result.groups.category), 'prompt')}{grouped}"
    head = f"{counted(result.responses, 'response')}, {counted(result.tokens, 'token')}, {prompts}, {setting}"
    parts, definition = [head, _efficiency(result), _acceptance(result)], result.definition
    notes = [
        "block efficiency: tokens per target call in steps where a draft of gamma tokens fits [95 % interval over "
        "prompts; the responses are fixed]"
    ]
    if definition is not None:
        parts.append(_engine_counts(result, definition))
    if len(result.groups.by_category) > 1:
        parts.append(_categories(result))
    if result.segment_tokens:
        parts.append(_segments(result))
        notes.append(
            "a step is of the segment of its first token; vs answer: on the prompts that have both; steps: share of all"
        )
    if definition is not None:
        notes += _engine_notes(result, definition)
    if any("oracle" in candidate.title for candidate in result.candidates):
        notes.append("oracle: drafts exactly the tokens that are accepted; an upper bound")
    notes += [f"{counted(count, 'response')} {assumption}" for assumption, count in assumed.items()]
    return "\n\n".join([*parts, "\n".join(notes)])


def _titles(key: Key) -> list[str]:
    candidate, verifier, k, gamma = key
    return [candidate.title, verifier_title(verifier, k), str(gamma)]


def _longest(result: ReplayResult) -> list[Key]:
    """The pairs at their longest draft."""
    return [key for key in keys(result) if key[3] == key[0].gammas[-1]]


def _efficiency(result: ReplayResult) -> str:
    others = ("vs first verifier", "vs first drafter", "vs shorter draft")
    columns = ["drafter", "verifier", *right("gamma"), "block efficiency"]
    columns += [*right("all steps", "drafted per step", "drafted per token", "rows per token"), *others]
    rows = []
    for key in keys(result):
        candidate, verifier, k, gamma = key
        row, by_kind = candidate.tallies[verifier, k].row(gamma), differences(result, key)
        numbers = (row.block_efficiency_all_steps, row.drafted_per_step, row.drafted / row.tokens)
        cells = [*(f"{n:.2f}" for n in numbers), f"{'≤ ' if k > 1 else ''}{row.target_rows_per_token:.2f}"]
        cells += [estimate_text(by_kind.get(kind, ("", None))[1], "+") for kind in ("verifier", "drafter", "gamma")]
        rows.append([*_titles(key), estimate_text(row.block_efficiency), *cells])
    return without_empty(Table(columns, rows), *others).text()


def _acceptance(result: ReplayResult) -> str:
    rows = []
    for key in _longest(result):
        row = key[0].tallies[key[1], key[2]].row(key[3])
        for name, values in (("marginal", row.marginal), ("conditional", row.conditional)):
            rows.append([*_titles(key)[:2], name, *(f"{value:.3f}" for value in values)])
    deepest = max((key[3] for key in _longest(result)), default=0)
    return Table(["drafter", "verifier", "Pr(tau >= i)", *right(*map(str, range(1, deepest + 1)))], rows).text()


def _engine_counts(result: ReplayResult, definition: CounterDefinition) -> str:
    ratios = {definition.length: "length", definition.rate: "rate", definition.tokens_per_step: "tokens_per_step"}
    ratios.pop("", None)
    columns = ["drafter", "verifier", *right("gamma", *ratios, "drafts", "draft tokens", "accepted")]
    rows = []
    for candidate, verifier, _, gamma in keys(result):
        counts = candidate.counts[verifier, gamma]
        values = [getattr(counts, name) for name in ratios.values()]
        cells = ["" if value is None else f"{value:.3f}" for value in values]
        cells += [_count(value) for value in (counts.drafts, counts.draft_tokens, counts.accepted)]
        rows.append([candidate.title, verifier, str(gamma), *cells, ", ".join(map(_count, counts.per_position))])
    return Table([*columns, "accepted by position"], rows).text()


def _count(value: float) -> str:
    """An expected count, without decimals if it is whole."""
    return f"{value:.0f}" if abs(value - round(value)) < 1e-6 else f"{value:.1f}"


def _engine_notes(result: ReplayResult, definition: CounterDefinition) -> list[str]:
    source = "as measured" if definition.measured else "as read from its source code"
    notes = [
        f"counters as of {definition.engine} {definition.version}, {source}: of {definition.meaning} (docs/engines.md)"
    ]
    unknown = max((counts.unknown for each in result.candidates for counts in each.counts.values()), default=0)
    if unknown:
        notes.append(
            f"up to {_count(unknown)} drafted tokens lie past the end of a response, and {definition.engine} accepts "
            "some of them; record the 'continuation' of the responses to count those"
        )
    return notes


def _categories(result: ReplayResult) -> str:
    names, rows = list(result.groups.by_category), []
    for key in _longest(result):
        tally = key[0].tallies[key[1], key[2]]
        values = [tally.row(key[3], name).block_efficiency if name in tally.categories else None for name in names]
        rows.append([*_titles(key), *map(estimate_text, values)])
    return Table(["drafter", "verifier", *right("gamma"), *names], rows).text()


def _segments(result: ReplayResult) -> str:
    columns = ["drafter", "verifier", *right("gamma"), "segment", *right("tokens", "steps"), "block efficiency"]
    rows, total = [], sum(result.segment_tokens.values())
    for key in _longest(result):
        candidate, verifier, k, gamma = key
        tally, steps = candidate.by_segment[verifier, k], candidate.tallies[verifier, k].row(gamma).steps
        for name, row in _rows_of_segments(tally, gamma).items():
            shares = [result.segment_tokens[name] / total, row.steps / steps]
            cells = [*_titles(key), name, *(f"{100 * share:.0f} %" for share in shares)]
            other = segment_difference(tally, gamma, name, ANSWER) if name != ANSWER else None
            cells += [estimate_text(row.block_efficiency), f"{row.marginal[0]:.3f}" if row.marginal else ""]
            rows.append([*cells, estimate_text(other, "+")])
    return Table([*columns, *right("Pr(tau >= 1)"), "vs answer"], rows).text()


def _rows_of_segments(tally: Tally, gamma: int) -> dict[str, Row]:
    """Results by segment in which steps start, the answer last."""
    names = sorted(tally.categories, key=lambda name: name == ANSWER)
    return {name: tally.row(gamma, name) for name in names if tally.sums(gamma, name)[:, 3].sum() > 0}


def as_json(result: ReplayResult, sampling: Sampling | None, assumed: Mapping[str, int]) -> dict[str, Any]:
    """All results, by category as well, and all differences; ``by_prompt``: counted tokens and steps of each prompt."""
    rows = []
    for key in keys(result):
        candidate, verifier, k, gamma = key
        tally = candidate.tallies[verifier, k]
        fields = _key_fields(key) | _numbers(tally.row(gamma))
        fields["differences"] = {
            kind: {"from": other, "block_efficiency": asdict(value) if value else None}
            for kind, (other, value) in differences(result, key).items()
        }
        fields["by_prompt"] = [[round(n, 6) for n in sums] for sums in tally.sums(gamma)[:, :2].tolist()]
        fields["by_category"] = {name: _numbers(tally.row(gamma, name)) for name in tally.categories}
        if result.segment_tokens:
            segments = candidate.by_segment[verifier, k]
            fields["by_segment"] = {name: _numbers(row) for name, row in _rows_of_segments(segments, gamma).items()}
        if result.definition is not None:
            fields["counters"] = _counters(key)
        rows.append(fields)
    return {
        "responses": result.responses,
        "tokens": result.tokens,
        "prompts": len(result.groups.category),
        "prompt_ids": result.groups.names(),
        "sampling": sampling.model_dump() if sampling else None,
        "assumed": dict(assumed),
        "segments": dict(result.segment_tokens),
        "as": result.definition.engine if result.definition else None,
        "warnings": [result.log_p.warning] if result.log_p.warning else [],
        "rows": rows,
    }


def records(result: ReplayResult) -> Iterator[dict[str, Any]]:
    """A row per drafter, verifier, K, gamma and category or segment; if both are empty, of all."""
    for key in keys(result):
        candidate, verifier, k, gamma = key
        tally = candidate.tallies[verifier, k]
        parts = [("category", name, tally.row(gamma, name)) for name in ("", *tally.categories)]
        if result.segment_tokens:
            segments = _rows_of_segments(candidate.by_segment[verifier, k], gamma)
            parts += [("segment", name, row) for name, row in segments.items()]
        for kind, category, row in parts:
            numbers = _numbers(row)
            del numbers["block_efficiency"]
            kinds = {name: numbers.pop(f"acceptance_{name}") for name in ("marginal", "conditional")}
            fields = _key_fields(key) | {"category": ""} | {kind: category} | numbers
            fields |= spread("block_efficiency", row.block_efficiency)
            fields |= {f"{name}_{i}": value for name, values in kinds.items() for i, value in enumerate(values, 1)}
            if result.definition is not None and not category:
                counters = _counters(key)
                by_position = enumerate(counters.pop("accepted_per_position"), 1)
                fields |= counters | {f"accepted_{i}": value for i, value in by_position}
            yield fields


def _counters(key: Key) -> dict[str, Any]:
    """Counters as of an engine."""
    candidate, verifier, _, gamma = key
    counts = candidate.counts[verifier, gamma]
    return {
        "drafts": counts.drafts,
        "draft_tokens": counts.draft_tokens,
        "accepted_tokens": counts.accepted,
        "accepted_per_position": counts.per_position.tolist(),
        "acceptance_length": counts.length,
        "acceptance_rate": counts.rate,
        "tokens_per_step": counts.tokens_per_step,
        "unknown_past_end": counts.unknown,
    }


def _key_fields(key: Key) -> dict[str, Any]:
    candidate, verifier, k, gamma = key
    return {"drafter": candidate.title, "verifier": verifier, "k": k, "gamma": gamma}


def _numbers(row: Row) -> dict[str, Any]:
    return {
        "tokens": round(row.tokens),
        "steps": row.steps,
        "block_efficiency": asdict(row.block_efficiency) if row.block_efficiency else None,
        "block_efficiency_all_steps": row.block_efficiency_all_steps,
        "drafted_per_step": row.drafted_per_step,
        "drafted_per_token": row.drafted / row.tokens,
        "target_rows_per_token": row.target_rows_per_token,
        "acceptance_marginal": row.marginal,
        "acceptance_conditional": row.conditional,
    }
