"""Acceptance from counts of steps and accepted tokens of responses, windows or runs, each an independent piece."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from crossdraft.framework.util.limits import MOST_LEVELS

from .acceptance import Acceptance
from .counter_definitions import PREFILL_TOKENS
from .engine_log import Source
from .prometheus import short_drafts

#: Keys of a response's statistics by engine and version (vLLM and AIPerf, TensorRT-LLM, SGLang): number of steps;
#: numbers of steps that accepted 0, 1, .. tokens; accepted and drafted tokens; maximum draft length.
STEPS = ("num_spec_steps", "spec_verify_ct")
_HISTOGRAMS = ("acceptance_histogram", "spec_correct_drafts_histogram", "spec_accept_histogram")
_ACCEPTED = ("num_accepted_draft_tokens", "total_accepted_draft_tokens", "spec_num_correct_drafts")
_ACCEPTED += ("spec_accepted_drafts", "spec_accept_token_num")
_DRAFTED = ("num_draft_tokens", "total_draft_tokens", "spec_num_proposed_drafts", "spec_proposed_drafts")
_DRAFTED += ("spec_draft_token_num",)
_TOKENS = ("completion_tokens", "spec_completion_tokens", "completion_token_num")


@dataclass(frozen=True)
class StepCounts:
    """Steps of one piece.

    Attributes:
        steps: number of steps.
        accepted: number of accepted tokens.
        at_least: numbers of steps that accepted at least 1, 2, .. tokens; empty if unknown.
        drafted: number of drafted tokens; None if unknown.
        gamma: maximum draft length; 0 if unknown.
        name: id of the response, if it has one.
    """

    steps: float
    accepted: float
    at_least: tuple[float, ...] = ()
    drafted: float | None = None
    gamma: int = 0
    name: str = ""


def acceptances_of(counts: Iterable[StepCounts], source: str, pieces: str, **attributes: Any) -> list[Acceptance]:
    """One acceptance by draft length of those whose positions are known, and one of the others.

    Args:
        source, pieces: see `Acceptance`; the number of pieces is appended to the source.
    """
    groups: dict[tuple[bool, int], list[StepCounts]] = {}
    for item in counts:
        if item.steps > 0:
            gamma = max(item.gamma, len(item.at_least)) if item.at_least else item.gamma
            groups.setdefault((bool(item.at_least), gamma), []).append(item)
    acceptances = []
    for (by_position, gamma), group in groups.items():
        steps, drafted = sum(item.steps for item in group), [item.drafted for item in group]
        title = f"{source}, {len(group)} {pieces}" if len(group) > 1 and pieces != "windows of the log" else source
        common: dict[str, Any] = {"pieces": pieces, "names": tuple(item.name for item in group), **attributes}
        if None not in drafted:
            mean = sum(n or 0.0 for n in drafted) / steps
            gamma = gamma or math.ceil(mean)
            if mean < gamma * (1 - 1e-9):
                common["remarks"] = (*common.get("remarks", ()), short_drafts(mean, gamma))
        if by_position:
            rows = [(item.steps, *item.at_least, *[0.0] * (gamma - len(item.at_least))) for item in group]
            acceptances.append(Acceptance.from_rows(rows, title, **common))
        else:
            pairs = tuple((item.steps, item.accepted) for item in group)
            length = 1 + sum(accepted for _, accepted in pairs) / steps
            acceptances.append(Acceptance((), title, rows=pairs, length=length, draft_length=gamma or None, **common))
    return acceptances


def full_drafts(source: Source, line: int, accepted: float, drafted: float, name: str = "") -> StepCounts:
    """Counts without a number of steps, as if each had a draft of the length of ``source``. Raises UsageError."""
    if accepted > drafted:
        raise source.error(line, f"{accepted:g} accepted of {drafted:g} drafted tokens are inconsistent")
    if source.gamma is None:
        raise source.error(
            line,
            f"{accepted:g} of {drafted:g} drafted tokens were accepted, but neither the steps nor their draft length "
            "are recorded; give the draft length, --gamma of crossdraft advise",
        )
    return StepCounts(drafted / source.gamma, accepted, drafted=drafted, gamma=source.gamma, name=name)


def per_response(source: Source, keys: Sequence[str] = STEPS) -> list[Acceptance]:
    """Acceptance from the statistics of responses: every JSON object with the number of steps under one of ``keys``."""
    counts = []
    for key in keys:
        for line, fields in source.responses(key):
            with source.skipping():
                if (item := _counts(source, line, fields, key)) is not None:
                    counts.append(item)
    return acceptances_of(counts, source.name, "responses")


def _counts(source: Source, line: int, fields: Mapping[str, Any], key: str) -> StepCounts | None:
    """The counts of one response; None if it has no step with a draft. Raises UsageError if they are inconsistent."""
    steps = count(source, line, fields, key)
    if not steps:
        return None
    histogram = next((name for name in _HISTOGRAMS if fields.get(name) is not None), "")
    drafted = _optional(source, line, fields, _DRAFTED)
    gamma = int(_optional(source, line, fields, ("num_spec_tokens",)) or 0)
    shares = _histogram(source, line, fields, histogram) if histogram else []
    if any(fields.get(name) is not None for name in _ACCEPTED):
        accepted = count(source, line, fields, *_ACCEPTED)
    elif histogram:
        accepted = float(sum(i * c for i, c in enumerate(shares)))
    else:  # the first token is the prefill's
        usage = source.row(line).get("usage")
        tokens = fields if any(fields.get(name) is not None for name in _TOKENS) else usage
        accepted = count(source, line, tokens if isinstance(tokens, dict) else fields, *_TOKENS)
        accepted -= PREFILL_TOKENS + steps
    if accepted < 0 or (drafted is not None and accepted > drafted):
        raise source.error(
            line, f"{accepted:g} accepted tokens in {steps:g} steps ({key}) are inconsistent with the other counts"
        )
    name = source.row_id(line)
    if not histogram:
        return StepCounts(steps, accepted, (), None, gamma, name)
    if sum(shares) != steps or sum(i * c for i, c in enumerate(shares)) != accepted:
        raise source.error(line, f"{histogram} does not match {key} {steps:g} and {accepted:g} accepted tokens")
    longest = max((i for i, c in enumerate(shares) if c), default=0)
    if gamma:
        shares = shares[: max(gamma, longest) + 1]
    gamma = max(gamma, len(shares) - 1, int(-(-(drafted or 0) // steps)))
    if reason := MOST_LEVELS.violation(gamma):
        raise source.error(line, f"drafts of {gamma} tokens are too long; {reason}")
    at_least = tuple(float(sum(shares[i:])) for i in range(1, gamma + 1))
    return StepCounts(steps, accepted, at_least, drafted, gamma, name) if gamma else None


def _histogram(source: Source, line: int, fields: Mapping[str, Any], key: str) -> list[int]:
    """Numbers of steps that accepted 0, 1, .. tokens: a list, or an object of accepted tokens and steps."""
    shares = fields[key]
    if isinstance(shares, dict) and all(tau.isascii() and tau.isdigit() and len(tau) < 5 for tau in shares):
        by_tau = {int(tau): n for tau, n in shares.items()}
        shares = [by_tau.get(tau, 0) for tau in range(max(by_tau, default=0) + 1)]
    if not isinstance(shares, list) or not all(type(n) is int and n >= 0 for n in shares):
        raise source.error(line, f"{key} is not a list of counts")
    return shares


def count(source: Source, line: int, fields: Mapping[str, Any], *keys: str) -> float:
    """The count under the first of ``keys`` that is present. Raises UsageError."""
    key = next((key for key in keys if fields.get(key) is not None), keys[0])
    value = fields.get(key)
    if type(value) is not int or value < 0:
        raise source.error(line, f"{key} is {value!r:.40}, which is not a count")
    return float(value)


def _optional(source: Source, line: int, fields: Mapping[str, Any], keys: Sequence[str]) -> float | None:
    return count(source, line, fields, *keys) if any(fields.get(key) is not None for key in keys) else None
