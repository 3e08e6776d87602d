"""Acceptance from counts of steps and accepted tokens of responses, windows or runs, each an independent piece.

Counts that a source does not have follow from those that it has, in one place each: steps from tokens (`steps_of`),
numbers from rounded rates (`from_rates`), the draft length from drafted tokens (`_draft_length`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from crossdraft import MOST_LEVELS
from crossdraft.runs import counted

from .acceptance import WINDOWS, Acceptance
from .counter_definitions import PREFILL_TOKENS
from .engine_log import DraftLengthError, Source

#: Keys of a response's statistics by engine and version (vLLM and AIPerf, TensorRT-LLM, SGLang): number of steps;
#: numbers of steps that accepted 0, 1, .. tokens; accepted and drafted tokens; maximum draft length.
STEPS = ("num_spec_steps", "spec_verify_ct")
_EVERY_STEP = ("spec_verify_ct",)
_HISTOGRAMS = ("acceptance_histogram", "spec_correct_drafts_histogram", "spec_accept_histogram")
_ACCEPTED = ("num_accepted_draft_tokens", "total_accepted_draft_tokens", "spec_num_correct_drafts")
_ACCEPTED += ("spec_accepted_drafts", "spec_accept_token_num")
_DRAFTED = ("num_draft_tokens", "total_draft_tokens", "spec_num_proposed_drafts", "spec_proposed_drafts")
_DRAFTED += ("spec_draft_token_num",)
_TOKENS = ("completion_tokens", "spec_completion_tokens", "completion_token_num")
RATE_ERROR, _LENGTH_ERROR = 0.0005, 0.0051  # rounding errors: rates have three decimals, lengths two
FEW_IDLE = 0.02  # share of steps without a draft that is explained by requests in flight


@dataclass(frozen=True)
class StepCounts:
    """Steps of one piece; ``drafts`` or ``steps`` is known."""

    drafts: float | None  # number of steps with a draft; None if unknown
    accepted: float  # number of accepted tokens
    at_least: tuple[float, ...] = ()  # numbers of steps that accepted at least 1, 2, .. tokens; empty if unknown
    drafted: float | None = None  # number of drafted tokens; None if unknown
    gamma: int = 0  # maximum draft length; 0 if unknown
    name: str = ""  # id of the response, if it has one
    steps: float | None = None  # number of steps after the prefill, with and without a draft; None if unknown
    line: int = 0  # its line in the source; 0 if it has several
    rounded: bool = False  # the number of drafts is computed from rounded rates

    @property
    def counted(self) -> float:
        """The steps of which the accepted tokens are known: all, or else those with a draft."""
        return max(self.steps or 0.0, self.drafts or 0.0)

    def checked(self, source: Source, line: int) -> StepCounts:
        """These counts. Raises UsageError if more tokens were accepted than drafted, or drafts have no steps."""
        drafted = math.inf if self.drafted is None else self.drafted
        if self.accepted > drafted or (drafted and self.steps is not None and self.steps < 1):
            raise source.error(line, f"{self.accepted:g} accepted of {drafted:g} drafted tokens are inconsistent")
        return self


def steps_of(tokens: float, accepted: float, responses: float = 1.0) -> float:
    """Steps after the prefill: each emits its accepted tokens and one more, and the prefill one token of a response."""
    return tokens - PREFILL_TOKENS * responses - accepted


def all_steps(drafts: float, steps: float) -> float:
    """``steps``, but ``drafts`` if requests in flight explain the difference."""
    return steps if steps > (1 + FEW_IDLE) * drafts else drafts


def acceptances_of(
    counts: Iterable[StepCounts], source: Source, pieces: str, title: str = "", *, exact: bool = True, **attributes: Any
) -> list[Acceptance]:
    """One acceptance by draft length of those whose positions are known, and one of the others.

    ``pieces``: see `Acceptance`; ``title``: the name of the source in messages, by default with the lines or the number
    of pieces; ``exact``: the steps are counted, not weights. Raises UsageError if the draft length of ``source``
    contradicts its counts.
    """
    groups: dict[tuple[bool, int], list[StepCounts]] = {}
    for item in counts:
        if item.counted > 0:
            gamma = max(item.gamma, len(item.at_least)) if item.at_least else item.gamma
            groups.setdefault((bool(item.at_least), gamma), []).append(item)
    acceptances = []
    for (by_position, gamma), group in groups.items():
        name, lines = source.name, [item.line for item in group if item.line]
        if lines:
            name += f":{lines[0]}" + (f"-{lines[-1]}" if lines[-1] > lines[0] else "")
        if len(group) > 1 and pieces != WINDOWS:
            name += f", {len(group)} {pieces}"
        place = title or name
        gamma, remarks = _draft_length(group, gamma, source, place)
        if gamma and all(item.drafts is None and item.drafted is not None for item in group):
            group = [replace(item, drafts=math.ceil((item.drafted or 0.0) / gamma - 1e-9)) for item in group]
        idle, more = _idle(group, pieces)
        rounded = ["the number of drafts is computed from rates with three decimals"]
        remarks = (*attributes.get("remarks", ()), *rounded * any(item.rounded for item in group), *remarks, *more)
        steps = sum(item.counted for item in group)
        common: dict[str, Any] = {"pieces": pieces, "names": tuple(item.name for item in group), "idle": idle / steps}
        common["every_step"] = all(item.steps is not None for item in group)
        if all(item.drafted is not None for item in group):
            common["drafted"] = sum(item.drafted or 0.0 for item in group)
        common |= {**attributes, "remarks": remarks}
        if by_position:
            rows = [(item.counted, *item.at_least, *[0.0] * (gamma - len(item.at_least))) for item in group]
            acceptances.append(Acceptance.from_rows(rows, place, **common))
            continue
        common |= {"rows": tuple((item.counted, item.accepted) for item in group), "draft_length": gamma or None}
        common |= {"length": 1 + sum(item.accepted for item in group) / steps, "drafts": steps if exact else None}
        acceptances.append(Acceptance((), place, **common))
    return acceptances


def each_run(source: Source, records: Iterable[tuple[Any, ...]], counts: Callable[..., StepCounts]) -> list[Acceptance]:
    """The acceptance of each of ``records`` by its ``counts``; one that raises UsageError is skipped."""
    runs = source.read(records, lambda *record: acceptances_of([counts(*record)], source, "runs"))
    return [acceptance for run in runs for acceptance in run]


def _idle(group: Sequence[StepCounts], pieces: str) -> tuple[float, list[str]]:
    """The number of steps without a draft, 0 if unknown, and a remark if they are many."""
    if any(item.steps is None or item.drafts is None for item in group):
        return 0.0, []
    steps, drafts = (sum(values) for values in zip(*((i.counted, i.drafts or 0.0) for i in group), strict=True))
    idle = steps - drafts
    if idle <= FEW_IDLE * drafts:
        return idle, []
    remark = f"{idle:.0f} of {steps:.0f} steps had no draft"
    if pieces == WINDOWS and len(group) > 1:
        lengths = [1 + item.accepted / item.counted for item in group]
        remark += f"; {min(lengths):.2f} to {max(lengths):.2f} tokens a step in the windows"
    return idle, [remark]


def _draft_length(group: list[StepCounts], gamma: int, source: Source, title: str) -> tuple[int, tuple[str, ...]]:
    """The maximum draft length, 0 if unknown, and remarks. Raises UsageError if that of ``source`` is not possible."""
    option, known = source.gamma or 0, gamma
    if option and gamma and option != gamma:
        raise DraftLengthError(
            f"{title} has drafts of {counted(gamma, 'token')}, not {option}; remove the given draft length"
        )
    gamma = gamma or option
    if not all(item.drafted is not None for item in group):
        return gamma, ()
    drafted, steps = sum(item.drafted or 0.0 for item in group), sum(item.drafts or item.counted for item in group)
    mean = drafted / steps
    if option and mean > gamma * (1 + 1e-6):
        raise DraftLengthError(
            f"{title} has {drafted:.0f} drafted tokens in {steps:.0f} steps, {mean:.2f} a step, so drafts have more "
            f"than {counted(gamma, 'token')}; give their actual length"
        )
    full = math.ceil(mean - 1e-9)
    if not known and all(_is_full(item, full) for item in group):
        if option and option != full and (len(group) > 1 or group[0].drafts is not None):
            raise DraftLengthError(
                f"{title} has {drafted:.0f} drafted tokens in {steps:.0f} steps, as drafts of "
                f"{counted(full, 'token')} have, not of {option}; remove the given draft length"
            )
        gamma = option or full
    if any(item.drafts is None for item in group):
        return gamma, ()  # missing tokens may be steps without a draft
    gamma = gamma or full
    remark = f"drafts have {mean:.2f} of {counted(gamma, 'token')} on average; missing tokens count as rejected"
    return gamma, (remark,) if mean < gamma * (1 - 1e-9) else ()


def _is_full(item: StepCounts, gamma: int) -> bool:
    """True if all drafts have ``gamma`` tokens, except the last ones of a response, which end with it."""
    missing = gamma * (item.drafts or item.counted) - (item.drafted or 0.0)
    return -1e-6 <= missing <= max(gamma * (gamma + 3) / 2, 0.005 * (item.drafted or 0.0)) * (gamma > 0)


def from_rates(
    source: Source,
    line: int,
    accepted: float,
    drafted: float | None,
    rates: Sequence[float],
    *,
    mean: float | None = None,
    drafts: float | None = None,
    error: float = RATE_ERROR,
    **more: Any,
) -> StepCounts:
    """Counts of a piece that are rounded to its rates by position; the accepted tokens sum to ``accepted``.

    ``mean``: length with the bonus token, with two decimals; ``error``: rounding error of a rate. By default full
    drafts are exact, and the number of others follows from the rates. Raises UsageError for inconsistent numbers.
    """
    gamma, values = len(rates), np.array(rates)
    low, high = np.maximum(values - error, 0.0), np.minimum(values + error, 1.0)
    lower, upper = low.sum(), high.sum()
    if mean is not None:
        lower, upper = max(lower, mean - 1 - _LENGTH_ERROR), min(upper, mean - 1 + _LENGTH_ERROR)
        if lower > upper:
            raise source.error(
                line, f"the mean length {mean:g} is not 1 + the sum of the rates, {1 + values.sum():.3f}"
            )
    number = float(math.ceil((drafted or 0.0) / gamma - 1e-9)) if drafts is None else drafts
    fewest, greatest = number * low, number * high
    if drafts is None:
        fewest, greatest = np.ceil(fewest - 1e-9), np.floor(greatest + 1e-9)
    rounded = False
    if not ((fewest <= greatest).all() and fewest.sum() <= accepted + 1e-9 and accepted <= greatest.sum() + 1e-9):
        if drafts is not None:
            raise source.error(
                line, f"the rates sum to {values.sum():.4f}, but {accepted / drafts:.4f} tokens a draft were accepted"
            )
        assert drafted is not None
        few = max(number, accepted / upper if accepted else 0.0)
        many = min(drafted, accepted / lower) if lower > 0 else drafted
        if accepted > drafted or few > many * (1 + 1e-9):
            raise source.error(
                line, f"{accepted:g} accepted and {drafted:g} drafted tokens are inconsistent with the rates"
            )
        number = min(max(accepted / (values.sum() or upper), few), many)
        fewest, greatest, rounded = number * low, number * high, True
    share = (accepted - fewest.sum()) / max((greatest - fewest).sum(), 1e-9)
    at_least = tuple((fewest + min(max(share, 0.0), 1.0) * (greatest - fewest)).tolist())
    return StepCounts(number, sum(at_least), at_least, drafted, line=line, rounded=rounded, **more)


def from_mean(accepted: float, drafted: float, mean: float, **more: Any) -> StepCounts:
    """Counts of a piece whose mean length has two decimals: with full drafts, if it is as if they were."""
    fewest, greatest = accepted / (mean - 0.995), accepted / max(mean - 1.005, 1e-9)
    gamma = math.floor(drafted / fewest + 1e-9)
    full = gamma > 0 and drafted / gamma <= greatest * (1 + 1e-9)
    return StepCounts(drafted / gamma if full else accepted / (mean - 1), accepted, drafted=drafted, **more)


def full_drafts(source: Source, line: int, accepted: float, drafted: float, name: str = "") -> StepCounts:
    """Counts without a number of steps, as if each had a draft of the length of ``source``. Raises UsageError."""
    counts = StepCounts(None, accepted, drafted=drafted, name=name, line=line).checked(source, line)
    if source.gamma is None:
        raise source.error(
            line,
            f"{accepted:g} of {drafted:g} drafted tokens were accepted, but neither the steps nor their draft length "
            f"are recorded; give the draft length N, as '{{source: {source.name}, gamma: N}}' or --gamma of crossdraft "
            "advise",
        )
    return replace(counts, drafts=drafted / source.gamma, gamma=source.gamma)


def per_response(source: Source, keys: Sequence[str] = STEPS) -> list[Acceptance]:
    """Acceptance from the statistics of responses: every JSON object with the number of steps under one of ``keys``."""
    counts = source.read(((source, *response, key) for key in keys for response in source.responses(key)), _counts)
    return acceptances_of(counts, source, "responses")


def _counts(source: Source, line: int, fields: Mapping[str, Any], key: str) -> StepCounts | None:
    """The counts of one response; None if it has no step with a draft. Raises UsageError if they are inconsistent."""
    steps = count(source, line, fields, key)
    if not steps:
        return None
    histogram = next((name for name in _HISTOGRAMS if fields.get(name) is not None), "")
    drafted = _optional(source, line, fields, _DRAFTED)
    gamma = int(_optional(source, line, fields, ("num_spec_tokens",)) or 0)
    shares = _histogram(source, line, fields, histogram) if histogram else []
    row = source.row(line)
    usage, choices = row.get("usage"), row.get("choices")
    items: list[Mapping[str, Any]] = [fields]
    if isinstance(usage, dict) and not (isinstance(choices, list) and len(choices) > 1):
        items.append(usage)
    tokens = next((item for item in items if any(item.get(k) is not None for k in _TOKENS)), {})
    if any(fields.get(name) is not None for name in _ACCEPTED):
        accepted = count(source, line, fields, *_ACCEPTED)
    elif histogram:
        accepted = float(sum(i * c for i, c in enumerate(shares)))
    else:
        accepted = steps_of(count(source, line, tokens or fields, *_TOKENS), steps)
    if accepted < 0 or (drafted is not None and accepted > drafted):
        raise source.error(
            line, f"{accepted:g} accepted tokens in {steps:g} steps ({key}) are inconsistent with the other counts"
        )
    every = steps if key in _EVERY_STEP else None
    if every is None and (generated := _optional(source, line, tokens, _TOKENS)):
        every = all_steps(steps, steps_of(generated, accepted))
    drafts, name = None if key in _EVERY_STEP else steps, source.row_id(line)
    if not histogram:
        return StepCounts(drafts, accepted, (), None, gamma, name, every)
    if sum(shares) != steps or sum(i * c for i, c in enumerate(shares)) != accepted:
        raise source.error(line, f"{histogram} does not match {key} {steps:g} and {accepted:g} accepted tokens")
    longest = max((i for i, c in enumerate(shares) if c), default=0)
    if gamma:
        shares = shares[: max(gamma, longest) + 1]
    gamma = max(gamma, len(shares) - 1, int(-(-(drafted or 0) // steps)))
    if reason := MOST_LEVELS.violation(gamma):
        raise source.error(line, f"drafts of {gamma} tokens are too long; {reason}")
    at_least = tuple(float(sum(shares[i:])) for i in range(1, gamma + 1))
    return StepCounts(drafts, accepted, at_least, drafted, gamma, name, every) if gamma else None


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
