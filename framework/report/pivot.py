"""Numbers of finished cells as a table with rows and columns of one's choice, as Markdown, LaTeX or CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from ..errors import UnknownNameError, UsageError
from ..metrics.columns import ENDS, quantity_of
from .csv_rows import row_of
from .selection import SETTINGS, Chosen, check_keys
from .table_utils import tabulated

FORMATS = ("github", "latex", "csv")
#: Keys whose values speak for themselves.
_NAMES = ("run", "drafter", "verifier", "target", "dtype")


@dataclass(frozen=True)
class Pivot:
    """A table: what rows and columns are called, and what stands where they meet.

    Attributes:
        rows, columns: keys of cells, see `selection`.
        values: columns of ``summary.csv``.
        cells: by the values of the row keys and of the column keys, the row of ``summary.csv``.
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[str, ...]
    cells: Mapping[tuple[str, ...], Mapping[tuple[str, ...], Mapping[str, Any]]]

    @property
    def across(self) -> list[tuple[str, ...]]:
        """The values of the column keys, in order of first appearance."""
        return list(dict.fromkeys(place for row in self.cells.values() for place in row))


def pivot(chosen: Sequence[Chosen], rows: Sequence[str], columns: Sequence[str], values: Sequence[str]) -> Pivot:
    """Put cells where their keys say.

    Raises:
        UsageError: a key or a value that no cell has, one that is named twice, or several cells in one place; it says
            by which keys these differ.
    """
    keys = (*rows, *columns)
    if not rows:
        raise UsageError("--rows names no key; for instance --rows drafter")
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        raise UsageError(f"{twice} stands in --rows and --cols twice; name it once")
    check_keys(keys, chosen)
    found = [(cell, row_of(cell.result, cell.run.summary.predicted.get(cell.result.config.hash))) for cell in chosen]
    _check_values(values, [row for _, row in found])
    placed: dict[tuple[str, ...], dict[tuple[str, ...], tuple[Chosen, Mapping[str, Any]]]] = {}
    for cell, row in found:
        down, across = (tuple(cell.fact(key, keys) for key in some) for some in (rows, columns))
        other = placed.setdefault(down, {}).setdefault(across, (cell, row))
        if other[0] is not cell:
            raise UsageError(_crowded(other[0], cell, keys))
    cells = {down: {across: row for across, (_, row) in some.items()} for down, some in placed.items()}
    return Pivot(tuple(rows), tuple(columns), tuple(values), cells)


def rendered(table: Pivot, form: str, digits: int = 2, intervals: bool = True) -> str:
    """The table as ``github`` Markdown, as ``latex`` (booktabs, everything escaped) or as ``csv``.

    CSV has all digits, and the ends of intervals in columns of their own.
    """
    if form == "csv":
        return _csv(table, intervals)
    header = [key.replace("_", " ") for key in table.rows]
    header += [_header(table, place, value) for place in table.across for value in table.values]
    body = []
    for down, row in table.cells.items():
        line = list(down)
        for place in table.across:
            line += [_text(row.get(place, {}), value, digits, intervals) for value in table.values]
        body.append(line)
    aligned = ["left"] * len(table.rows) + ["right"] * (len(header) - len(table.rows))
    if form == "github":
        return tabulated(list(zip(header, aligned, strict=True)), body, "github") + "\n"
    text = tabulate(body, headers=header, tablefmt="latex_booktabs", disable_numparse=True, colalign=aligned)
    # A bracket that follows the end of a row would be taken for its argument.
    lines = [f"{{[}}{line.lstrip()[1:]}" if line.lstrip().startswith("[") else line for line in text.splitlines()]
    return "\n".join(["% \\usepackage{booktabs}", *lines]) + "\n"


def untold(table: Pivot, chosen: Sequence[Chosen]) -> list[str]:
    """The settings in which the cells of a table differ, and which neither its rows nor its columns tell."""
    keys = [key for key in ("run", *SETTINGS) if key not in (*table.rows, *table.columns)]
    return [key for key in keys if len({cell.fact(key) for cell in chosen}) > 1]


# -- pieces -----------------------------------------------------------------------------------------------------


def _check_values(values: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    known = dict.fromkeys(
        key
        for row in rows
        for key, value in row.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and key not in SETTINGS
    )
    if not values:
        raise UsageError("--value names nothing; for instance --value block_efficiency")
    for value in values:
        if value not in known:
            raise UnknownNameError.among("number of these cells", value, known)
    if len(set(values)) < len(values):
        raise UsageError("--value names a number twice; name it once")


def _crowded(one: Chosen, other: Chosen, keys: Sequence[str]) -> str:
    """Why two cells cannot stand in one place, and what would part them."""
    options = {
        key
        for cell in (one, other)
        for side in ("drafter", "verifier")
        for key in getattr(cell.result.config, side).config
    }
    candidates = ("run", "drafter", "verifier", *SETTINGS, *sorted(options))
    apart = [key for key in candidates if key not in keys and one.fact(key, keys) != other.fact(key, keys)]
    if not apart:
        return "the same cell is in the table twice; name each run once, or put run into --rows or --cols"
    key = apart[0]
    return (
        f"several cells fall into one place of the table; they differ in {' and '.join(apart)}: put {key} into --rows "
        f"or --cols, or choose with --where {key}={one.fact(key, keys)}"
    )


def _header(table: Pivot, place: tuple[str, ...], value: str) -> str:
    names = [
        found if key in _NAMES else f"{key.replace('_', ' ')} {found}"
        for key, found in zip(table.columns, place, strict=True)
        if found
    ]
    if len(table.values) > 1 or not table.columns:
        quantity = quantity_of(value)
        names.append(quantity.title if quantity is not None and "<" not in quantity.name else value.replace("_", " "))
    return ", ".join(names) or "none"


def _text(row: Mapping[str, Any], value: str, digits: int, intervals: bool) -> str:
    found = row.get(value)
    if found is None or found == "":
        return ""
    text = str(found) if isinstance(found, int) else f"{found:.{digits}f}"
    low, high = (row.get(value + end) for end in ENDS)
    if intervals and low is not None and high is not None:
        text += f" [{low:.{digits}f}, {high:.{digits}f}]"
    return text


def _csv(table: Pivot, intervals: bool) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    rows = [row for some in table.cells.values() for row in some.values()]
    parts = []
    for value in table.values:
        has = intervals and any(row.get(value + ENDS[0]) is not None for row in rows)
        parts += [(value, end) for end in ("", *ENDS)] if has else [(value, "")]
    names = [_header(table, place, value) + end.replace("_", " ") for place in table.across for value, end in parts]
    writer.writerow([*table.rows, *names])
    for down, row in table.cells.items():
        found = [row.get(place, {}).get(value + end) for place in table.across for value, end in parts]
        writer.writerow([*down, *("" if one is None else one for one in found)])
    return text.getvalue()
