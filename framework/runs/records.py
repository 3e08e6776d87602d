"""Results of the cells of a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..metrics.cell_metrics import Metrics, StepRecord
from ..metrics.component_times import CellPieces
from ..metrics.pieces import Piece
from ..recipe.recipe import CellConfig


@dataclass
class CellResult:
    """Result of a cell: `metrics`, or the message in `error`.

    Attributes:
        traceback: traceback of the error, for ``error.txt`` and ``--debug``.
        provenance: conditions besides the config: versions, code, device, prompts, model digests.
        measured: id of the measurement of the group; equal for cells measured together.
        reused: True if read from disk instead of measured.
        planned: number of prompts of the run, if a time budget ended it before all were measured.
        budget: that time budget, as written in the recipe.
    """

    config: CellConfig
    metrics: Metrics | None = None
    error: str | None = None
    traceback: str = ""
    records: list[StepRecord] = field(default_factory=list)
    responses: list[dict[str, Any]] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    provenance: dict[str, Any] = field(default_factory=dict)
    measured: str = ""
    reused: bool = False
    planned: int | None = None
    budget: str = ""

    @property
    def prompts(self) -> int:
        """Number of prompts measured."""
        return len({record.prompt for record in self.records})

    @property
    def drafting(self) -> Metrics | None:
        """Metrics of a finished cell that drafts; None for failed cells and plain decoding."""
        return None if self.config.is_baseline else self.metrics

    @property
    def cut(self) -> str:
        """Note on a time budget that ended the cell early, or empty."""
        if self.planned is None:
            return ""
        return f"{self.prompts} of {self.planned} prompts (time budget {self.budget}); rerun to resume"

    def summary(self) -> dict[str, Any]:
        """Description of a cell in plug-in notifications."""
        metrics = self.metrics.to_json() if self.metrics else None
        return {"id": self.config.hash, "config": self.config.model_dump(mode="json"), "metrics": metrics}


def cells_of(results: Iterable[CellResult]) -> list[CellPieces]:
    """Pieces of cells, with drafters and verifiers identified by name and options instead of their labels."""
    return [CellPieces(r.config.drafter.identity, r.config.verifier.identity, r.pieces) for r in results]
