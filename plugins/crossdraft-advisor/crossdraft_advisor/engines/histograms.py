"""Acceptance from per-response histograms of accepted tokens; each response is an independent piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from crossdraft.framework.util.limits import MOST_LEVELS

from .acceptance import Acceptance
from .engine_log import Source
from .prometheus import short_drafts


def per_request(
    source: Source, histogram: str, steps: str, accepted: Sequence[str], proposed: Sequence[str]
) -> list[Acceptance]:
    """Acceptance from every JSON object with the key ``histogram``, by gamma.

    Args:
        histogram: key of a list with the numbers of steps that accepted 0, 1, ... drafted tokens.
        steps: key of the number of steps.
        accepted, proposed: keys of the numbers of accepted and drafted tokens, by version; the first that is present is
            read.

    Raises:
        UsageError: an object with inconsistent numbers.
    """
    objects = list(source.objects(histogram))
    by_gamma: dict[int, list[tuple[float, ...]]] = {}
    names: dict[int, list[str]] = {}
    drafted: dict[int, float] = {}
    for line, fields in objects:
        counts, n = fields[histogram], _count(source, line, fields, steps)
        if not isinstance(counts, list) or not all(type(c) is int and c >= 0 for c in counts):
            raise source.error(line, f"{histogram} is not a list of counts")
        if not n:
            continue  # nothing was drafted
        tokens, total = _count(source, line, fields, *proposed), _count(source, line, fields, *accepted)
        if sum(counts) != n or sum(i * c for i, c in enumerate(counts)) != total:
            raise source.error(line, f"{histogram} does not match {steps} {n:g} and {total:g} accepted tokens")
        gamma = max(len(counts) - 1, int(-(-tokens // n)))
        if reason := MOST_LEVELS.violation(gamma):
            raise source.error(line, f"drafts of {gamma} tokens are too long; {reason}")
        counts = counts + [0] * (gamma + 1 - len(counts))
        by_gamma.setdefault(gamma, []).append((n, *(float(sum(counts[i:])) for i in range(1, gamma + 1))))
        names.setdefault(gamma, []).append(source.row_id(line))
        drafted[gamma] = drafted.get(gamma, 0.0) + tokens
    return [
        Acceptance.from_rows(
            rows,
            f"{source.name}, {len(rows)} responses",
            pieces="responses",
            names=tuple(names[gamma]),
            remarks=_remarks(rows, drafted[gamma], gamma),
        )
        for gamma, rows in by_gamma.items()
        if gamma
    ]


def _remarks(rows: list[tuple[float, ...]], drafted: float, gamma: int) -> tuple[str, ...]:
    mean = drafted / sum(row[0] for row in rows)
    return (short_drafts(mean, gamma),) if mean < gamma else ()


def _count(source: Source, line: int, fields: dict[str, Any], *keys: str) -> float:
    key = next((key for key in keys if key in fields), keys[0])
    value = fields.get(key)
    if type(value) is not int or value < 0:
        raise source.error(line, f"{key} is {value!r:.40}, which is not a count")
    return float(value)
