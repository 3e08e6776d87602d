"""Outcome of a run, with derived data: groups, predictions and columns of plug-ins."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from ..recipe.recipe import Recipe
from ..runs.labels import group_title
from ..runs.records import CellResult
from .curve import CostCurve
from .finished_cells import predictions
from .prediction import Prediction


@dataclass
class Summary:
    """Outcome of a run.

    Attributes:
        results: results of all cells, finished or failed, in the order of the recipe; partial results for a group that
            was interrupted.
        skipped: reasons why pairs of the cross product were left out.
        notes: notes for readers of the results.
        stopped: reason why the run could not continue, or empty.
        curves: cost curves of its models on its device.
        charts: names of image files in the directory.
    """

    recipe: Recipe
    directory: Path
    results: list[CellResult] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False
    stopped: str = ""
    curves: list[CostCurve] = field(default_factory=list)
    charts: list[str] = field(default_factory=list)

    @property
    def failed(self) -> list[CellResult]:
        return [result for result in self.results if result.error is not None]

    @property
    def state(self) -> Literal["interrupted", "stopped", "finished"]:
        """State at the end of the run."""
        return "interrupted" if self.interrupted else "stopped" if self.stopped else "finished"

    @property
    def exit_code(self) -> int:
        """130 if the run was interrupted, 1 if a cell failed or the run was stopped, else 0."""
        return 130 if self.interrupted else int(bool(self.failed or self.stopped))

    @property
    def groups(self) -> list[tuple[str, list[CellResult]]]:
        """Title and results of each group of cells."""
        cells = [result.config for result in self.results]
        groups: dict[str, list[CellResult]] = {}
        for result in self.results:
            groups.setdefault(result.config.group, []).append(result)
        return [(group_title(results[0].config, cells), results) for results in groups.values()]

    @cached_property
    def predicted(self) -> dict[str, Prediction]:
        """Predictions by cell hash, for finished cells whose models have a cost curve."""
        return predictions(self.results, self.curves)
