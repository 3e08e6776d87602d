"""Output of ``crossdraft replay``: tables, CSV and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.models.segments import ANSWER
from crossdraft.framework.runs.labels import counted
from crossdraft.framework.util.estimate import Estimate, estimate_text, spread
from crossdraft.framework.util.table import Alignment, Table

from ...engines.counter_definitions import CounterDefinition
from ...replay.aggregate import MAX_GROUPS, PromptGroups, Row, Tally, difference, segment_difference
from ...replay.replay import Candidate, ReplayResult

#: A pair at a draft length: candidate, verifier, K and gamma.
Key = tuple[Candidate, str, int, int]


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


# -- tables ------------------------------------------------------------------------------------------------------


def tables(result: ReplayResult, sampling: Sampling | None, assumed: Mapping[str, int]) -> str:
    """Tables of block efficiency, acceptance by position and categories, with notes."""
    setting = f"temperature {sampling.temperature:g}" if sampling else "sampling parameters unknown"
    grouped = " or groups of them" if any(len(ids) >= MAX_GROUPS for ids in result.groups.by_category.values()) else ""
    prompts = f"{counted(len(result.groups.category), 'prompt')}{grouped}"
    head = f"{counted(result.responses, 'response')}, {counted(result.tokens, 'token')}, {prompts}, {setting}"
    parts = [head, _efficiency(result), _acceptance(result)]
    if result.definition is not None:
        parts.append(_engine_counts(result, result.definition))
    if len(result.groups.by_category) > 1:
        parts.append(_categories(result))
    if result.segment_tokens:
        parts.append(_segments(result))
    notes = [
        "block efficiency: tokens per target call in steps where a draft of gamma tokens fits [95 % interval over "
        "prompts; the responses are fixed]",
    ]
    if result.segment_tokens:
        notes.append(
            "a step is of the segment of its first token; vs answer: on the prompts that have both; steps: share of all"
        )
    if result.definition is not None:
        notes += _engine_notes(result, result.definition)
    if any("oracle" in candidate.title for candidate in result.candidates):
        notes.append("oracle: drafts exactly the tokens that are accepted; an upper bound")
    notes += [f"{counted(count, 'response')} {assumption}" for assumption, count in assumed.items()]
    return "\n\n".join([*parts, "\n".join(notes)])


def _efficiency(result: ReplayResult) -> str:
    columns: dict[str, Alignment] = {
        "drafter": "left",
        "verifier": "left",
        "gamma": "right",
        "block efficiency": "left",
    }
    columns |= {"all steps": "right", "drafted per step": "right", "drafted per token": "right"}
    columns |= {"rows per token": "right"}
    columns |= {"vs first verifier": "left", "vs first drafter": "left", "vs shorter draft": "left"}
    rows = []
    for key in keys(result):
        candidate, verifier, k, gamma = key
        tally = candidate.tallies[verifier, k]
        row, by_kind = tally.row(gamma), differences(result, key)
        bound = "≤ " if k > 1 else ""
        numbers = [f"{row.block_efficiency_all_steps:.2f}", f"{row.drafted_per_step:.2f}"]
        numbers.append(f"{row.drafted / row.tokens:.2f}")
        numbers.append(f"{bound}{row.target_rows_per_token:.2f}")
        kinds = ("verifier", "drafter", "gamma")
        cells = [estimate_text(by_kind[kind][1], "+") if kind in by_kind else "" for kind in kinds]
        titles = [candidate.title, verifier_title(verifier, k), str(gamma)]
        rows.append([*titles, estimate_text(row.block_efficiency), *numbers, *cells])
    return Table(columns, rows).without_empty("vs first verifier", "vs first drafter", "vs shorter draft").text()


def _acceptance(result: ReplayResult) -> str:
    rows, deepest = [], 0
    for candidate in result.candidates:
        for (verifier, k), tally in candidate.tallies.items():
            row = tally.row(candidate.gammas[-1])
            deepest = max(deepest, row.gamma)
            for name, values in (("marginal", row.marginal), ("conditional", row.conditional)):
                rows.append([candidate.title, verifier_title(verifier, k), name, *(f"{value:.3f}" for value in values)])
    columns: dict[str, Alignment] = {"drafter": "left", "verifier": "left", "Pr(tau >= i)": "left"}
    columns |= {str(i): "right" for i in range(1, deepest + 1)}
    return Table(columns, rows).text()


def _engine_counts(result: ReplayResult, definition: CounterDefinition) -> str:
    ratios = {definition.length: "length", definition.rate: "rate", definition.tokens_per_step: "tokens_per_step"}
    ratios.pop("", None)
    columns: dict[str, Alignment] = {
        "drafter": "left",
        "verifier": "left",
        "gamma": "right",
        **dict.fromkeys(ratios, "right"),
    }
    columns |= {"drafts": "right", "draft tokens": "right", "accepted": "right", "accepted by position": "left"}
    rows = []
    for candidate, verifier, _, gamma in keys(result):
        counts = candidate.counts[verifier, gamma]
        values = [getattr(counts, name) for name in ratios.values()]
        cells = ["" if value is None else f"{value:.3f}" for value in values]
        cells += [_count(value) for value in (counts.drafts, counts.draft_tokens, counts.accepted)]
        rows.append([candidate.title, verifier, str(gamma), *cells, ", ".join(map(_count, counts.per_position))])
    return Table(columns, rows).text()


def _count(value: float) -> str:
    """An expected count, without decimals if it is whole."""
    return f"{value:.0f}" if abs(value - round(value)) < 1e-6 else f"{value:.1f}"


def _engine_notes(result: ReplayResult, definition: CounterDefinition) -> list[str]:
    source = "as measured" if definition.measured else "as read from its source code"
    notes = [
        f"counters as of {definition.engine} {definition.version}, {source}: of {definition.meaning} (docs/engines.md)"
    ]
    unknown = max(
        (counts.unknown for candidate in result.candidates for counts in candidate.counts.values()), default=0
    )
    if unknown:
        notes.append(
            f"up to {_count(unknown)} drafted tokens lie past the end of a response, and {definition.engine} accepts "
            "some of them; record the 'continuation' of the responses to count those"
        )
    return notes


def _categories(result: ReplayResult) -> str:
    names = list(result.groups.by_category)
    columns: dict[str, Alignment] = {"drafter": "left", "verifier": "left", "gamma": "right"}
    columns.update(dict.fromkeys(names, "left"))
    rows = []
    for candidate in result.candidates:
        gamma = candidate.gammas[-1]
        for (verifier, k), tally in candidate.tallies.items():
            estimates = [estimate_text(_category_estimate(tally, gamma, name)) for name in names]
            rows.append([candidate.title, verifier_title(verifier, k), str(gamma), *estimates])
    return Table(columns, rows).text()


def _segments(result: ReplayResult) -> str:
    columns: dict[str, Alignment] = {
        "drafter": "left",
        "verifier": "left",
        "gamma": "right",
        "segment": "left",
        "tokens": "right",
    }
    columns |= {"steps": "right", "block efficiency": "left", "Pr(tau >= 1)": "right", "vs answer": "left"}
    rows, total = [], sum(result.segment_tokens.values())
    for candidate in result.candidates:
        gamma = candidate.gammas[-1]
        for (verifier, k), tally in candidate.by_segment.items():
            steps = candidate.tallies[verifier, k].row(gamma).steps
            for name, row in _rows_of_segments(tally, gamma).items():
                share = f"{100 * result.segment_tokens[name] / total:.0f} %"
                cells = [candidate.title, verifier_title(verifier, k), str(gamma), name, share]
                cells += [f"{100 * row.steps / steps:.0f} %", estimate_text(row.block_efficiency)]
                other = segment_difference(tally, gamma, name, ANSWER) if name != ANSWER else None
                rows.append([*cells, f"{row.marginal[0]:.3f}" if row.marginal else "", estimate_text(other, "+")])
    return Table(columns, rows).text()


def _rows_of_segments(tally: Tally, gamma: int) -> dict[str, Row]:
    """Results by segment in which steps start, the answer last."""
    names = sorted(tally.categories, key=lambda name: name == ANSWER)
    return {name: tally.row(gamma, name) for name in names if tally.sums(gamma, name)[:, 3].sum() > 0}


def _category_estimate(tally: Tally, gamma: int, category: str) -> Estimate | None:
    return tally.row(gamma, category).block_efficiency if category in tally.categories else None


# -- JSON and CSV --------------------------------------------------------------------------------------------------


def as_json(result: ReplayResult, sampling: Sampling | None, assumed: Mapping[str, int]) -> str:
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
    return json.dumps(
        {
            "responses": result.responses,
            "tokens": result.tokens,
            "prompts": len(result.groups.category),
            "prompt_ids": prompt_names(result.groups),
            "sampling": sampling.model_dump() if sampling else None,
            "assumed": dict(assumed),
            "segments": dict(result.segment_tokens),
            "as": result.definition.engine if result.definition else None,
            "warnings": [result.log_p.warning] if result.log_p.warning else [],
            "rows": rows,
        },
        indent=2,
    )


def prompt_names(groups: PromptGroups) -> list[str]:
    """Category and name of each prompt, or of the first prompt of its group, in the order of the groups."""
    names = [""] * len(groups.category)
    for category, members in groups.by_category.items():
        for name, number in members.items():
            names[number] = f"{category}: {name}"
    return names


def as_csv(result: ReplayResult) -> str:
    """A row per drafter, verifier, K, gamma and category or segment; if both are empty, of all."""
    rows = []
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
            rows.append(fields)
    return Table.of(rows).csv() + "\n"


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
