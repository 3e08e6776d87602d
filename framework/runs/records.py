"""Results of the cells of a run."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..metrics.cell_metrics import Metrics, StepRecord
from ..metrics.component_times import CellPieces
from ..metrics.pieces import Piece
from ..recipe.recipe import CellConfig, Recipe, Strategy


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

    def identity(strategy: Strategy) -> str:
        return json.dumps([strategy.name, strategy.config], sort_keys=True, default=str)

    return [CellPieces(identity(r.config.drafter), identity(r.config.verifier), r.pieces) for r in results]


@dataclass
class Outcome:
    """Outcome of a run.

    Attributes:
        results: results of all cells, finished or failed, in the order of the recipe; partial results for a group that
            was interrupted.
        skipped: reasons why pairs of the cross product were left out.
        notes: notes for readers of the results.
        stopped: reason why the run could not continue, or empty.
    """

    recipe: Recipe
    directory: Path
    results: list[CellResult] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False
    stopped: str = ""

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
