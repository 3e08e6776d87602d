"""Responses that tell how many steps accepted 0, 1, 2, ... tokens: one response, one independent piece."""

from __future__ import annotations

from typing import Any

from ..util.limits import MOST_LEVELS
from .acceptance import Acceptance
from .engine_log import Source
from .prometheus import short_drafts


def per_request(
    given: Source, histogram: str, steps: str, accepted: str, proposed: str, **about: Any
) -> list[Acceptance]:
    """Acceptance from every JSON object with the four keys, by gamma.

    Args:
        histogram: key of a list, of steps that accepted 0, 1, ... drafted tokens.
        steps, accepted, proposed: keys of numbers: steps, accepted and drafted tokens.

    Raises:
        UsageError: with the line, for an object whose numbers contradict each other.
    """
    objects = list(given.objects(histogram))
    by_gamma: dict[int, list[tuple[float, ...]]] = {}
    drafted: dict[int, float] = {}
    for line, found in objects:
        counts, n = found[histogram], _count(given, line, found, steps)
        if not isinstance(counts, list) or not all(type(c) is int and c >= 0 for c in counts):
            raise given.error(line, f"{histogram} is no list of counts")
        if not n:
            continue  # the request ended before anything was drafted
        tokens, total = _count(given, line, found, proposed), _count(given, line, found, accepted)
        if sum(counts) != n or sum(i * c for i, c in enumerate(counts)) != total:
            raise given.error(line, f"{histogram} does not come to {steps} {n:g} and {accepted} {total:g}")
        gamma = max(len(counts) - 1, int(-(-tokens // n)))
        if reason := MOST_LEVELS.refusal(gamma):
            raise given.error(line, f"drafts of {gamma} tokens are too long; {reason}")
        counts = counts + [0] * (gamma + 1 - len(counts))
        by_gamma.setdefault(gamma, []).append((n, *(float(sum(counts[i:])) for i in range(1, gamma + 1))))
        drafted[gamma] = drafted.get(gamma, 0.0) + tokens
    return [
        Acceptance.from_rows(
            rows,
            f"{given.name}, {len(rows)} responses",
            pieces="responses",
            remarks=_remarks(rows, drafted[gamma], gamma),
            **about,
        )
        for gamma, rows in by_gamma.items()
        if gamma
    ]


def _remarks(rows: list[tuple[float, ...]], drafted: float, gamma: int) -> tuple[str, ...]:
    mean = drafted / sum(row[0] for row in rows)
    return (short_drafts(mean, gamma),) if mean < gamma else ()


def _count(given: Source, line: int, found: dict[str, Any], key: str) -> float:
    value = found.get(key)
    if type(value) is not int or value < 0:
        raise given.error(line, f"{key} is {value!r:.40}, which is no count")
    return float(value)
