"""Which cells of finished runs are meant: what a cell is called by its keys, and ``--where KEY=VALUE``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import UnknownNameError, UsageError, printable, quoted
from ..recipe.recipe import RUN_KEYS, SAMPLING_KEYS
from ..runs.labels import verifier_title

if TYPE_CHECKING:
    from ..runs.records import CellResult
    from .load_run import FinishedRun

#: Keys that every cell has; the options of drafters and verifiers come on top.
NAMES = ("run", "drafter", "verifier")
SETTINGS = (*RUN_KEYS, *SAMPLING_KEYS)


@dataclass(frozen=True)
class Chosen:
    """A finished cell, the run that it is of, and that run's title among those given."""

    title: str
    run: FinishedRun
    result: CellResult

    def fact(self, key: str, told: Sequence[str] = ()) -> str:
        """The value of a key, as people write it; empty where the cell has no such option.

        ``told``: keys that are told apart from drafter and verifier, which then do not repeat them.
        """
        config = self.result.config
        if key == "run":
            return self.title
        if key == "drafter":
            return _without(config.drafter.title, config.drafter.config, told)
        if key == "verifier":
            return (
                "plain decoding"
                if config.is_baseline
                else _without(verifier_title(self.result), config.verifier.config, told)
            )
        if key in SETTINGS:
            return shown(getattr(config.sampling if key in SAMPLING_KEYS else config, key))
        options = config.verifier.config | config.drafter.config
        return shown(options[key]) if key in options else ""

    def is_called(self, key: str, value: str) -> bool:
        """Does it have this value? Drafters and verifiers may be called by name or title."""
        config = self.result.config
        names = {"drafter": config.drafter.name, "verifier": config.verifier.name}
        if key in names and not (key == "verifier" and config.is_baseline) and names[key] == value:
            return True
        if key == "verifier" and not config.is_baseline and config.verifier.title == value:
            return True  # whatever its mark
        return self.fact(key) == value or (_number(value) is not None and _number(self.fact(key)) == _number(value))


def finished_cells(runs: Sequence[tuple[str, FinishedRun]], where: Sequence[str] = ()) -> list[Chosen]:
    """The finished cells of runs that have all the values of ``where``, texts ``KEY=VALUE`` or ``KEY=VALUE,VALUE``.

    Plain decoding has neither drafter nor verifier to choose by: it stays wherever its settings fit.

    Raises:
        UsageError: a clause that is none, a key that no cell has, or a value that none has.
    """
    cells = [Chosen(title, run, r) for title, run in runs for r in run.summary.results if r.metrics is not None]
    for clause in where:
        key, equals, text = clause.partition("=")
        if not equals or not key:
            raise UsageError(f"--where {quoted(clause)} is no KEY=VALUE; for instance --where batch_size=1,8")
        check_keys([key], cells)
        wanted = [value.strip() for value in text.split(",")]
        for value in wanted:
            if not any(cell.is_called(key, value) for cell in cells):
                there = ", ".join(list(dict.fromkeys(f for cell in cells if (f := cell.fact(key))))[:12])
                raise UsageError(f"no cell has {key} {quoted(value)}; there are: {printable(there) or 'none'}")
        own = key not in ("run", *SETTINGS)  # the pair's
        cells = [
            cell
            for cell in cells
            if (own and cell.result.config.is_baseline) or any(cell.is_called(key, value) for value in wanted)
        ]
    return cells


def check_keys(keys: Sequence[str], cells: Sequence[Chosen]) -> None:
    """Raise UsageError for a key that no cell has."""
    options = {
        key
        for cell in cells
        for side in (cell.result.config.drafter, cell.result.config.verifier)
        for key in side.config
    }
    for key in keys:
        if key not in (*NAMES, *SETTINGS) and key not in options:
            raise UnknownNameError.among("key of a cell", key, [*NAMES, *SETTINGS, *options])


def shown(value: Any) -> str:
    """A value of a recipe, as people write it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict) and "name" in value:
        return str(value["name"])
    return "" if value is None else str(value)


def _without(title: str, options: dict[str, Any], told: Sequence[str]) -> str:
    """A title without options shown elsewhere: beside a column ``gamma``, ``draft-model gamma=4`` is draft-model."""
    for key in told:
        if key in options:
            title = title.replace(f" {key}={options[key]}", "")
    return title


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
