"""Pivot tables of finished cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UnknownNameError, UsageError
from ..metrics.cell_metrics import TIMES
from ..metrics.columns import quantity_of
from ..util.estimate import ENDS, Estimate
from ..util.table import Alignment, Table
from .csv_rows import row_of
from .metrics_text import clock_text, no_speed_up
from .segments import columns_of
from .selection import SETTINGS, SelectedCell, check_keys, options_of

#: Columns by the clock, by the column that they replace in a cell whose speed-up is withheld.
CLOCK = {"speed_up": "speed_up_wall", "tokens_per_second": "tokens_per_second_wall"}
#: Keys whose values are shown without the key.
_NAMES = ("run", "drafter", "verifier", "target", "dtype")


@dataclass(frozen=True)
class Pivot:
    """A pivot table.

    Attributes:
        rows, columns: keys of cells, see `selection`.
        values: columns of ``summary.csv``.
        cells: rows of ``summary.csv``, by the values of the row keys and of the column keys.
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[str, ...]
    cells: Mapping[tuple[str, ...], Mapping[tuple[str, ...], Mapping[str, Any]]]

    @property
    def column_values(self) -> list[tuple[str, ...]]:
        """The values of the column keys, in order of first appearance."""
        return list(dict.fromkeys(column for row in self.cells.values() for column in row))


def pivot(cells: Sequence[SelectedCell], rows: Sequence[str], columns: Sequence[str], values: Sequence[str]) -> Pivot:
    """Arrange cells by the values of their keys.

    Raises:
        UsageError: a key or value that no cell has, a duplicate key or value, or several cells in one place.
    """
    keys = (*rows, *columns)
    if not rows:
        raise UsageError("--rows is empty; give a key, for example --rows drafter")
    if duplicate := next((key for key in keys if keys.count(key) > 1), None):
        raise UsageError(f"{duplicate} occurs twice in --rows and --cols; give it once")
    check_keys(keys, cells)
    csv_rows = [
        (
            cell,
            row_of(cell.result, cell.run.summary) | columns_of(cell.run, cell.result),
        )
        for cell in cells
    ]
    _check_values(values, csv_rows)
    placed: dict[tuple[str, ...], dict[tuple[str, ...], tuple[SelectedCell, Mapping[str, Any]]]] = {}
    for cell, row in csv_rows:
        row_key, column = (tuple(cell.value(key, keys) for key in names) for names in (rows, columns))
        other, _ = placed.setdefault(row_key, {}).setdefault(column, (cell, row))
        if other is not cell:
            raise UsageError(_collision_message(other, cell, keys))
    table = {row_key: {column: row for column, (_, row) in line.items()} for row_key, line in placed.items()}
    return Pivot(tuple(rows), tuple(columns), tuple(values), table)


def rendered(pivot: Pivot, form: str, digits: int = 2, intervals: bool = True) -> str:
    """The table in one of the formats of `Table`; CSV and JSON have empty cells where a speed-up is withheld."""
    exact = form in ("csv", "json")
    columns: list[tuple[str, Alignment]] = [(key if exact else key.replace("_", " "), "left") for key in pivot.rows]
    places = [(column, value) for column in pivot.column_values for value in pivot.values]
    columns += [(_header(pivot, column, value), "right") for column, value in places]
    rows = [
        [*key, *(_cell(row.get(column, {}), value, exact, digits, intervals) for column, value in places)]
        for key, row in pivot.cells.items()
    ]
    return Table(columns, rows, digits=digits).render(form) + "\n"


def hidden_keys(table: Pivot, cells: Sequence[SelectedCell]) -> list[str]:
    """Settings in which the cells of a table differ and that are not among its keys."""
    keys = [key for key in ("run", *SETTINGS) if key not in (*table.rows, *table.columns)]
    return [key for key in keys if len({cell.value(key) for cell in cells}) > 1]


def withheld_note(table: Pivot) -> str:
    """A note on the cells of a table whose speed-up is withheld; empty without one."""
    rows = [row for line in table.cells.values() for row in line.values()]
    reasons = dict.fromkeys(str(row["withheld"]) for row in rows if row.get("withheld"))
    if not reasons or not CLOCK.keys() & set(table.values):
        return ""
    count = sum(bool(row.get("withheld")) for row in rows)
    return (
        f"the speed-up of {count} of {len(rows)} cells is withheld ({', '.join(reasons)}); ~: by the clock, other "
        "programs included (in CSV: --value speed_up_wall)"
    )


# -- pieces -----------------------------------------------------------------------------------------------------


def _check_values(values: Sequence[str], rows: Sequence[tuple[SelectedCell, Mapping[str, Any]]]) -> None:
    known, empty = dict[str, None](), set[str]()
    for _, row in rows:
        for key, value in row.items():
            if isinstance(value, int | float) and not isinstance(value, bool) and key not in SETTINGS:
                known[key] = None
            elif value is None or value == "":
                empty.add(key)
    if not values:
        raise UsageError("--value is empty; give a column, for example --value block_efficiency")
    for value in values:
        if value in known or (value in CLOCK and any(row.get("withheld") for _, row in rows)):
            continue
        quantity = quantity_of(value)
        if quantity is None or quantity.setting or (value != quantity.name and value not in empty):
            raise UnknownNameError.among("number of these cells", value, known)
        reason = no_speed_up([cell.result for cell, _ in rows])
        if not value.startswith("speed_up") and not (value in TIMES and reason.endswith("(--untimed)")):
            reason = "it was not measured"
        raise UsageError(f"these cells have no '{value}': {reason}. {quantity.meaning}")
    if len(set(values)) < len(values):
        raise UsageError("--value has a duplicate column; give it once")


def _collision_message(first: SelectedCell, second: SelectedCell, keys: Sequence[str]) -> str:
    """The error message for two cells in one place, with keys that separate them."""
    candidates = ("run", "drafter", "verifier", *SETTINGS, *sorted(options_of((first, second))))
    different = [k for k in candidates if k not in keys and first.value(k, keys) != second.value(k, keys)]
    if not different:
        return "the same cell is in the table twice; give each run once, or add run to --rows or --cols"
    key = different[0]
    return (
        f"several cells have the same place in the table; they differ in {' and '.join(different)}: add {key} to "
        f"--rows or --cols, or select with --where {key}={first.value(key, keys)}"
    )


def _header(table: Pivot, column: tuple[str, ...], value: str) -> str:
    names = [
        text if key in _NAMES else f"{key.replace('_', ' ')} {text}"
        for key, text in zip(table.columns, column, strict=True)
        if text
    ]
    if len(table.values) > 1 or not table.columns:
        quantity = quantity_of(value)
        names.append(quantity.title if quantity is not None and "<" not in quantity.name else value.replace("_", " "))
    return ", ".join(names) or "none"


def _cell(row: Mapping[str, Any], value: str, exact: bool, digits: int, intervals: bool) -> Any:
    if not exact and row.get("withheld") and value in CLOCK:
        wall = row.get(CLOCK[value])
        return clock_text(wall) if value == "speed_up" and not row.get(value) else f"~{wall:.{digits}f}"
    number = row.get(value)
    if number is None or number == "":
        return None
    low, high = (row.get(value + end) for end in ENDS)
    return Estimate(number, low, high) if intervals and low is not None and high is not None else number
