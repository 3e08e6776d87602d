"""What ``crossdraft replay`` prints: tables, CSV, JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from ...contracts.sampling import Sampling
from ...metrics.intervals import Estimate
from ...replay.aggregate import MAX_GROUPS, Row, Tally, difference
from ...replay.replay import Candidate, ReplayResult
from ...report.table_utils import estimate_text, tabulated

#: One pair at one draft length: the candidate, rule, K and gamma.
Key = tuple[Candidate, str, int, int]


def keys(found: ReplayResult) -> Iterator[Key]:
    """All pairs and draft lengths."""
    for candidate in found.candidates:
        for rule, k in candidate.tallies:
            for gamma in candidate.gammas:
                yield candidate, rule, k, gamma


def differences(found: ReplayResult, key: Key) -> dict[str, tuple[str, Estimate | None]]:
    """Paired differences of block efficiency: from the first rule, the first drafter and the next shorter draft."""
    candidate, rule, k, gamma = key
    mine, pairs = candidate.tallies[rule, k], {}
    first = next(iter(candidate.tallies))
    if first != (rule, k):
        pairs["rule"] = (_rule(*first), difference(mine, gamma, candidate.tallies[first], gamma))
    other = found.candidates[0]
    if other is not candidate and (rule, k) in other.tallies and gamma in other.gammas:
        pairs["drafter"] = (other.title, difference(mine, gamma, other.tallies[rule, k], gamma))
    shorter = [g for g in candidate.gammas if g < gamma]
    if shorter:
        pairs["gamma"] = (str(max(shorter)), difference(mine, gamma, mine, max(shorter)))
    return pairs


def _rule(rule: str, k: int) -> str:
    return rule if k == 1 else f"{rule}, K = {k}"


# -- tables ------------------------------------------------------------------------------------------------------


def tables(found: ReplayResult, sampling: Sampling | None, assumed: Mapping[str, int]) -> str:
    """Everything for people: block efficiency, acceptance by position, categories, what was assumed."""
    law = f"temperature {sampling.temperature:g}" if sampling else "sampling not known"
    grouped = " or groups of them" if any(len(of) >= MAX_GROUPS for of in found.groups.by_category.values()) else ""
    head = f"{found.responses} responses, {found.tokens} tokens, {len(found.groups.category)} prompts{grouped}, {law}"
    parts = [head, _efficiency(found), _acceptance(found)]
    if len(found.groups.by_category) > 1:
        parts.append(_categories(found))
    notes = [
        "block efficiency: tokens per target call where a draft of gamma tokens had room [95 % over prompts]; the "
        "responses are given, so what is left is their own spread",
    ]
    if any("oracle" in candidate.title for candidate in found.candidates):
        notes.append("oracle: as many tokens drafted as will be accepted; a bound, no method")
    notes += [f"{count} responses {what}" for what, count in assumed.items()]
    return "\n\n".join([*parts, "\n".join(notes)])


def _efficiency(found: ReplayResult) -> str:
    columns = {"drafter": "left", "verifier": "left", "gamma": "right", "block efficiency": "left"}
    columns |= {"all steps": "right", "drafted a call": "right", "drafted a token": "right"}
    columns |= {"rows a token": "right"}
    columns |= {"less first rule": "left", "less first drafter": "left", "less shorter draft": "left"}
    rows = []
    for key in keys(found):
        candidate, rule, k, gamma = key
        tally = candidate.tallies[rule, k]
        row, apart = tally.row(gamma), differences(found, key)
        most = "≤ " if k > 1 else ""
        numbers = [f"{row.block_efficiency_all_steps:.2f}", f"{row.drafted_per_step:.2f}"]
        numbers.append(f"{row.drafted / row.tokens:.2f}")
        numbers.append(f"{most}{row.target_rows_per_token:.2f}")
        less = [estimate_text(apart[kind][1], "+") if kind in apart else "" for kind in ("rule", "drafter", "gamma")]
        rows.append([candidate.title, _rule(rule, k), str(gamma), estimate_text(row.block_efficiency), *numbers, *less])
    kept = [i for i in range(len(columns)) if i < 8 or any(row[i] for row in rows)]
    headers = list(columns)
    return tabulated(
        {headers[i]: columns[headers[i]] for i in kept}, [[row[i] for i in kept] for row in rows], "simple"
    )


def _acceptance(found: ReplayResult) -> str:
    rows, deepest = [], 0
    for candidate in found.candidates:
        for (rule, k), tally in candidate.tallies.items():
            row = tally.row(candidate.gammas[-1])
            deepest = max(deepest, row.gamma)
            for name, values in (("marginal", row.marginal), ("conditional", row.conditional)):
                rows.append([candidate.title, _rule(rule, k), name, *(f"{value:.3f}" for value in values)])
    columns = {"drafter": "left", "verifier": "left", "Pr(tau >= i)": "left"}
    columns |= {str(i): "right" for i in range(1, deepest + 1)}
    return tabulated(columns, [row + [""] * (len(columns) - len(row)) for row in rows], "simple")


def _categories(found: ReplayResult) -> str:
    names = list(found.groups.by_category)
    columns = {"drafter": "left", "verifier": "left", "gamma": "right"} | dict.fromkeys(names, "left")
    rows = []
    for candidate in found.candidates:
        gamma = candidate.gammas[-1]
        for (rule, k), tally in candidate.tallies.items():
            mine = [estimate_text(_in(tally, gamma, name)) for name in names]
            rows.append([candidate.title, _rule(rule, k), str(gamma), *mine])
    return tabulated(columns, rows, "simple")


def _in(tally: Tally, gamma: int, category: str) -> Estimate | None:
    return tally.row(gamma, category).block_efficiency if category in tally.categories else None


# -- for programs --------------------------------------------------------------------------------------------------


def as_json(found: ReplayResult, sampling: Sampling | None, assumed: Mapping[str, int]) -> str:
    """Everything, by category too, and all differences."""
    rows = []
    for key in keys(found):
        candidate, rule, k, gamma = key
        tally = candidate.tallies[rule, k]
        one = _named(key) | _numbers(tally.row(gamma))
        one["differences"] = {
            kind: {"from": other, "block_efficiency": asdict(value) if value else None}
            for kind, (other, value) in differences(found, key).items()
        }
        one["by_category"] = {name: _numbers(tally.row(gamma, name)) for name in tally.categories}
        rows.append(one)
    return json.dumps(
        {
            "responses": found.responses,
            "tokens": found.tokens,
            "prompts": len(found.groups.category),
            "sampling": sampling.model_dump() if sampling else None,
            "assumed": dict(assumed),
            "warnings": [found.log_p.warning] if found.log_p.warning else [],
            "rows": rows,
        },
        indent=2,
    )


def as_csv(found: ReplayResult) -> str:
    """A line for each drafter, rule, K, gamma and category; an empty category is all of them."""
    rows = []
    for key in keys(found):
        candidate, rule, k, gamma = key
        tally = candidate.tallies[rule, k]
        for category in ("", *tally.categories):
            numbers = _numbers(tally.row(gamma, category))
            spread = numbers.pop("block_efficiency") or {"value": None, "low": None, "high": None}
            kinds = {name: numbers.pop(f"acceptance_{name}") for name in ("marginal", "conditional")}
            one = _named(key) | {"category": category} | numbers
            one |= {f"block_efficiency{'' if end == 'value' else '_' + end}": value for end, value in spread.items()}
            one |= {f"{name}_{i}": value for name, values in kinds.items() for i, value in enumerate(values, 1)}
            rows.append(one)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _named(key: Key) -> dict[str, Any]:
    candidate, rule, k, gamma = key
    return {"drafter": candidate.title, "verifier": rule, "k": k, "gamma": gamma}


def _numbers(row: Row) -> dict[str, Any]:
    return {
        "tokens": row.tokens,
        "steps": row.steps,
        "block_efficiency": asdict(row.block_efficiency) if row.block_efficiency else None,
        "block_efficiency_all_steps": row.block_efficiency_all_steps,
        "drafted_per_step": row.drafted_per_step,
        "drafted_per_token": row.drafted / row.tokens,
        "target_rows_per_token": row.target_rows_per_token,
        "acceptance_marginal": row.marginal,
        "acceptance_conditional": row.conditional,
    }
