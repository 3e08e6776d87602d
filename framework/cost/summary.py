"""An outcome with derived data: predictions and charts."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from ..runs.labels import group_title
from ..runs.plugin_columns import plugin_columns
from ..runs.records import CellResult, Outcome
from .curve import CostCurve
from .finished_cells import predictions
from .prediction import Prediction


@dataclass
class Summary(Outcome):
    """An `Outcome` with predictions and charts.

    Attributes:
        curves: cost curves of its models on its device.
        charts: names of image files in the directory.
    """

    curves: list[CostCurve] = field(default_factory=list)
    charts: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, outcome: Outcome, curves: list[CostCurve]) -> Summary:
        return cls(**{f.name: getattr(outcome, f.name) for f in fields(Outcome)}, curves=curves)

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

    @cached_property
    def columns(self) -> dict[str, dict[str, Any]]:
        """Columns of plug-ins: values by cell hash, see `plugin_columns`."""
        return plugin_columns(self.results)
