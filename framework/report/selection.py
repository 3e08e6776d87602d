"""Selection of cells: the values of their keys, and ``--where KEY=VALUE``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..cost.load_run import titles_of
from ..errors import UnknownNameError, UsageError, printable, quoted
from ..recipe.recipe import RUN_KEYS, SAMPLING_KEYS
from ..runs.labels import setting_of, verifier_title

if TYPE_CHECKING:
    from ..cost.load_run import FinishedRun
    from ..runs.records import CellResult

#: Keys of all cells; options of drafters and verifiers are further keys.
NAMES = ("run", "drafter", "verifier")
SETTINGS = (*RUN_KEYS, *SAMPLING_KEYS)


@dataclass(frozen=True)
class SelectedCell:
    """A finished cell with its run and the run's title."""

    title: str
    run: FinishedRun
    result: CellResult

    def value(self, key: str, separate: Sequence[str] = ()) -> str:
        """The value of a key as text; empty if the cell has no such option.

        ``separate``: keys that are shown separately and omitted from the titles of drafter and verifier.
        """
        config = self.result.config
        if key == "run":
            return self.title
        if key == "drafter":
            return _without(config.drafter.title, config.drafter.config, separate)
        if key == "verifier":
            return (
                "plain decoding"
                if config.is_baseline
                else _without(verifier_title(self.result), config.verifier.config, separate)
            )
        if key in SETTINGS:
            return shown(setting_of(config, key))
        options = config.verifier.config | config.drafter.config
        return shown(options[key]) if key in options else ""

    def matches(self, key: str, value: str) -> bool:
        """True if the cell has this value; drafters and verifiers match by name or title."""
        config = self.result.config
        names = {"drafter": config.drafter.name, "verifier": config.verifier.name}
        if key in names and not (key == "verifier" and config.is_baseline) and names[key] == value:
            return True
        if key == "verifier" and not config.is_baseline and config.verifier.title == value:
            return True  # with any mark
        own = self.value(key)
        return own == value or (_number(value) is not None and _number(own) == _number(value))


def finished_cells(runs: Sequence[FinishedRun], clauses: Sequence[str] = ()) -> list[SelectedCell]:
    """The finished cells that match all clauses ``KEY=VALUE`` or ``KEY=VALUE,VALUE`` of ``clauses``.

    Clauses on the drafter or verifier do not exclude plain decoding.

    Raises:
        UsageError: a malformed clause, or a key or value that no cell has.
    """
    titled = zip(titles_of(runs), runs, strict=True)
    cells = [SelectedCell(title, run, r) for title, run in titled for r in run.summary.results if r.metrics is not None]
    for clause in clauses:
        key, equals, text = clause.partition("=")
        if not equals or not key:
            raise UsageError(f"--where {quoted(clause)} is not KEY=VALUE; for example --where batch_size=1,8")
        check_keys([key], cells)
        values = [value.strip() for value in text.split(",")]
        for value in values:
            if not any(cell.matches(key, value) for cell in cells):
                known = ", ".join(list(dict.fromkeys(v for cell in cells if (v := cell.value(key))))[:12])
                raise UsageError(f"no cell has {key} {quoted(value)}; known values: {printable(known) or 'none'}")
        of_pair = key not in ("run", *SETTINGS)
        cells = [
            cell
            for cell in cells
            if (of_pair and cell.result.config.is_baseline) or any(cell.matches(key, value) for value in values)
        ]
    return cells


def filtered_runs(runs: Sequence[FinishedRun], clauses: Sequence[str]) -> list[FinishedRun]:
    """The runs with the cells that match ``clauses`` only, see `finished_cells`; runs without any are left out."""
    if not clauses:
        return list(runs)
    cells = finished_cells(runs, clauses)
    filtered = []
    for run in runs:
        if results := [cell.result for cell in cells if cell.run is run]:
            filtered.append(replace(run, summary=replace(run.summary, results=results)))
    return filtered


def check_keys(keys: Sequence[str], cells: Sequence[SelectedCell]) -> None:
    """Raise UsageError for a key that no cell has."""
    options = options_of(cells)
    for key in keys:
        if key not in (*NAMES, *SETTINGS) and key not in options:
            raise UnknownNameError.among("key of a cell", key, [*NAMES, *SETTINGS, *options])


def options_of(cells: Sequence[SelectedCell]) -> set[str]:
    """Names of the options of the drafters and verifiers of cells."""
    configs = [cell.result.config for cell in cells]
    return {key for config in configs for side in (config.drafter, config.verifier) for key in side.config}


def shown(value: Any) -> str:
    """A value of a recipe as text."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict) and "name" in value:
        return str(value["name"])
    return "" if value is None else str(value)


def _without(title: str, options: dict[str, Any], separate: Sequence[str]) -> str:
    """A title without options shown in other columns: ``draft-model gamma=4`` becomes ``draft-model``."""
    for key in separate:
        if key in options:
            title = title.replace(f" {key}={options[key]}", "")
    return title


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
