"""A run and what follows from it: predictions from cost curves, and charts."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cached_property

from ..cost.curve import CostCurve
from ..cost.finished_cells import predictions
from ..cost.prediction import Prediction
from ..runs.records import Outcome


@dataclass
class Summary(Outcome):
    """An `Outcome` with what its tables show beside what was measured.

    Attributes:
        curves: measured costs of its models on its device, to predict from.
        charts: names of image files in the directory.
    """

    curves: list[CostCurve] = field(default_factory=list)
    charts: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, outcome: Outcome, curves: list[CostCurve]) -> Summary:
        return cls(**{f.name: getattr(outcome, f.name) for f in fields(Outcome)}, curves=curves)

    @cached_property
    def predicted(self) -> dict[str, Prediction]:
        """By the hash of the cell, for those whose models have a cost curve on this machine; of finished runs."""
        return predictions(self.results, self.curves)
