"""What a run leaves on disk, and how it is found again.

    runs/<recipe>-<hash>/recipe.json, environment.json, summary.csv, summary.md
    runs/<recipe>-<hash>/cells/<hash>/config.json, rounds.parquet, responses.jsonl, metrics.json

A cell's directory is written aside and renamed when it is whole: what is there is complete.
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from .metrics import Chunk, Metrics, RoundRecord
from .recipe import CellConfig, Recipe


@dataclass
class Outcome:
    """A run that is over.

    Attributes:
        results: a result for every cell, finished or failed, in the recipe's order; those that an
            interruption kept from finishing are missing.
        skipped: why pairs of the cross product were left out.
        notes: what readers of the numbers should know.
    """

    recipe: Recipe
    directory: Path
    results: list[CellResult] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False

    @property
    def failed(self) -> list[CellResult]:
        return [result for result in self.results if result.error is not None]

    @property
    def exit_code(self) -> int:
        """130 if it was interrupted, 1 if a cell failed, else 0."""
        return 130 if self.interrupted else int(bool(self.failed))


logger = logging.getLogger(__name__)

#: Of a cell's files. 2: chunks keep their tail apart. 3: chunks have a category, metrics tell more of each.
FORMAT = 3

_ROUNDS = pa.schema(
    [
        ("cell", pa.string()),
        ("prompt", pa.int64()),
        ("question_id", pa.string()),
        ("category", pa.string()),
        ("turn", pa.int64()),
        ("round", pa.int64()),
        ("tau", pa.int64()),
        ("emitted", pa.int64()),
        ("nodes", pa.int64()),
        ("width", pa.int64()),
        ("survival", pa.float64()),
    ]
)


@dataclass
class CellResult:
    """What became of a cell: `metrics`, or the sentence in `error`.

    Attributes:
        provenance: what the numbers depend on beside the config: versions, device, prompts, model digests.
        measured: which measurement of the whole group it belongs to.
        reused: read from disk, not measured now.
    """

    config: CellConfig
    metrics: Metrics | None = None
    error: str | None = None
    records: list[RoundRecord] = field(default_factory=list)
    responses: list[dict[str, Any]] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    provenance: dict[str, Any] = field(default_factory=dict)
    measured: str = ""
    reused: bool = False

    def summary(self) -> dict[str, Any]:
        """What notifications tell about a cell."""
        metrics = self.metrics.to_json() if self.metrics else None
        return {"id": self.config.hash, "config": self.config.model_dump(mode="json"), "metrics": metrics}


class RunDirectory:
    """The directory of one run."""

    def __init__(self, path: Path):
        self.path = path

    def write_json(self, name: str, value: Any) -> None:
        self.write_text(name, _json(value))

    def write_text(self, name: str, text: str) -> None:
        """Write a file of the run, replacing it in one step."""
        self.path.mkdir(parents=True, exist_ok=True)
        aside = self.path / f".{name}.new"
        aside.write_text(text, encoding="utf-8")
        aside.replace(self.path / name)

    def read_json(self, name: str) -> dict[str, Any]:
        """A file of the run, empty if it is not there or damaged."""
        try:
            return json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

    def save(self, result: CellResult) -> None:
        """Write a finished cell, in place of an earlier one."""
        assert result.metrics is not None
        cells = self.path / "cells"
        cells.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=".", dir=cells))
        aside.chmod(0o755)  # mkdtemp makes it private
        try:
            head = {"format": FORMAT, "hash": result.config.hash, "measured": result.measured}
            head["provenance"] = result.provenance
            (aside / "config.json").write_text(
                _json(head | {"config": result.config.model_dump(mode="json")}), encoding="utf-8"
            )
            rows = [asdict(record) | {"cell": result.config.hash} for record in result.records]
            parquet.write_table(pa.Table.from_pylist(rows, schema=_ROUNDS), aside / "rounds.parquet")
            with (aside / "responses.jsonl").open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(r, ensure_ascii=False) + "\n" for r in result.responses)
            numbers = {
                "metrics": result.metrics.to_json(),
                "chunks": [asdict(chunk) for chunk in result.chunks],
            }
            (aside / "metrics.json").write_text(_json(numbers), encoding="utf-8")
            final = cells / result.config.hash
            shutil.rmtree(final, ignore_errors=True)
            aside.rename(final)
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def load(self, config: CellConfig) -> CellResult | None:
        """A cell that was measured before, or None if it is not there or cannot be read."""
        path = self.path / "cells" / config.hash
        try:
            head = json.loads((path / "config.json").read_text(encoding="utf-8"))
            if head.get("format") != FORMAT:
                raise ValueError(f"it has format {head.get('format', 1)}, this version reads {FORMAT}")
            numbers = json.loads((path / "metrics.json").read_text(encoding="utf-8"))
            rows = parquet.read_table(path / "rounds.parquet").drop_columns(["cell"]).to_pylist()
            lines = (path / "responses.jsonl").read_text(encoding="utf-8").split("\n")
            return CellResult(
                config=config,
                metrics=Metrics.from_json(numbers["metrics"]),
                records=[RoundRecord(**row) for row in rows],
                responses=[json.loads(line) for line in lines if line],
                chunks=[Chunk(**chunk) for chunk in numbers["chunks"]],
                provenance=head["provenance"],
                measured=head["measured"],
                reused=True,
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:  # another version's, or damaged
            logger.warning("crossdraft: %s cannot be read and is measured again: %s", path, error)
            return None


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
