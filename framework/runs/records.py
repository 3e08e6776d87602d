"""The results of a run, cell by cell."""

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
    """What became of a cell: `metrics`, or the sentence in `error`.

    Attributes:
        traceback: where the error was raised, for ``error.txt`` and ``--debug``.
        provenance: what the numbers depend on beside the config: versions, code, device, prompts, model digests.
        measured: which measurement of the whole group it belongs to.
        reused: read from disk, not measured now.
        planned: how many prompts the run has, where a time budget ended it before all of them were measured.
        budget: that time budget, as it was written.
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
        """Number of prompts behind its numbers."""
        return len({record.prompt for record in self.records})

    @property
    def cut(self) -> str:
        """Note on a time budget that ended the cell early; empty if all prompts were measured."""
        if self.planned is None:
            return ""
        return f"{self.prompts} of {self.planned} prompts (time budget {self.budget}); run again to go on"

    def summary(self) -> dict[str, Any]:
        """What notifications tell about a cell."""
        metrics = self.metrics.to_json() if self.metrics else None
        return {"id": self.config.hash, "config": self.config.model_dump(mode="json"), "metrics": metrics}


def cells_of(results: Iterable[CellResult]) -> list[CellPieces]:
    """The pieces of cells, and what tells their drafters and verifiers apart: name and options, not the label."""

    def named(strategy: Strategy) -> str:
        return json.dumps([strategy.name, strategy.config], sort_keys=True, default=str)

    return [CellPieces(named(r.config.drafter), named(r.config.verifier), r.pieces) for r in results]


@dataclass
class Outcome:
    """A run that is over.

    Attributes:
        results: a result for every cell, finished or failed, in the recipe's order; of a group that an interruption cut
            short, what its finished pieces come to, if there are any.
        skipped: why pairs of the cross product were left out.
        notes: what readers of the numbers should know.
        stopped: why the run could not go on, a sentence; empty if it could.
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
        """How it ended."""
        return "interrupted" if self.interrupted else "stopped" if self.stopped else "finished"

    @property
    def exit_code(self) -> int:
        """130 if it was interrupted, 1 if a cell failed or it could not go on, else 0."""
        return 130 if self.interrupted else int(bool(self.failed or self.stopped))
