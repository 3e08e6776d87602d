"""Speeds and acceptance lengths by batch size and draft length, as people write them into a table."""

from __future__ import annotations

import csv
from collections.abc import Sequence

from ..acceptance import Acceptance
from ..engine_log import Source
from ..formats import AcceptanceFormat
from ..speeds import add_speed
from ..step_counts import StepCounts, acceptances_of

_COLUMNS = ("batch_size", "gamma", "tokens_per_s", "acceptance_length")


class SpeedTable(AcceptanceFormat):
    """CSV of speeds by batch size and draft length, and of acceptance lengths."""

    name = "speeds"
    definition = "tokens per step, bonus included, at each draft length"

    def read(self, source: Source, earlier: Source | None = None) -> list[Acceptance]:
        rows = _rows(source)
        lengths: dict[int, tuple[int, float]] = {0: (0, 1.0)}
        acceptances: list[Acceptance] = []
        for line, row in rows:
            with source.skipping():
                gamma = source.number(row.get("gamma", ""), line, "gamma", 1024)
                if not gamma.is_integer():
                    raise source.error(line, f"gamma is {gamma:g}, which is not a number of tokens")
                if gamma and (text := row.get("acceptance_length", "")):
                    length = source.number(text, line, "acceptance_length")
                    if not 1 <= length <= gamma + 1:
                        raise source.error(line, f"{length:g} tokens a step are not possible with {gamma:g} drafted")
                    if int(gamma) not in lengths:
                        lengths[int(gamma)] = line, length
                        item = StepCounts(None, length - 1, gamma=int(gamma), steps=1.0, line=line)
                        acceptances += acceptances_of([item], source, "rows", exact=False)
                if not (text := row.get("tokens_per_s", "")):
                    continue
                rate = source.number(text, line, "tokens_per_s")
                batch_size = source.number(row.get("batch_size", ""), line, "batch_size")
                own = row.get("acceptance_length", "")
                if int(gamma) not in lengths:
                    raise source.error(line, f"acceptance_length is missing for drafts of {gamma:g} tokens")
                length = float(own) if own and gamma else lengths[int(gamma)][1]
                add_speed(source, line, length, batch_size, rate, gamma, 1.0)
        return acceptances


def _rows(source: Source) -> Sequence[tuple[int, dict[str, str]]]:
    """The rows of a table with a column for the draft length and one for a speed or a length."""
    filled = ((number, line) for number, line in source.raw_lines() if line.strip() and not line.startswith("#"))
    first, text = next(filled, (0, ""))
    header = [cell.strip().lower() for cell in text.split(",")]
    if "gamma" not in header or not {"tokens_per_s", "acceptance_length"} & set(header):
        return []
    if unknown := set(header) - set(_COLUMNS):
        raise source.error(first, f"unknown column {sorted(unknown)[0]!r}; the columns are {', '.join(_COLUMNS)}")
    lines = list(filled)
    cells = csv.reader([line for _, line in lines])
    return [
        (n, dict(zip(header, map(str.strip, row), strict=False))) for (n, _), row in zip(lines, cells, strict=False)
    ]
