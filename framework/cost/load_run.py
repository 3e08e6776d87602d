"""Load a run from its directory."""

from __future__ import annotations

import csv
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from .. import plugins
from ..errors import UsageError
from ..metrics.cell_metrics import SegmentMetrics
from ..recipe.recipe import PromptSpec, read_recipe
from ..runs.record_schema import CurvesFile, Environment, ShardFile, read_checked
from ..runs.records import CellResult
from ..runs.run_directory import RunDirectory, read_cell, read_cell_config
from ..runs.shards import FILE, FOLDER, merge_environments
from ..runs.state import FILE as STATE
from ..runs.state import latest, state_of
from ..util.input_files import read_text
from ..util.limits import INDEX_BYTES
from .curve import CostCurve
from .summary import Summary


@dataclass(frozen=True)
class FinishedRun:
    """A run loaded from its directory.

    Attributes:
        summary: the recipe, its finished cells in the recipe's order, and the stored cost curves.
        environment: versions and machine, as in `crossdraft list env`.
        remarks: lines of its summary that do not follow from its cells: skipped pairs, failed cells, notes.
        cells: for shards, the hashes of all cells of the recipe, including other shards.
        partial: the progress of an unfinished run; empty for a finished one.
        segments: metrics by hash of a cell and by segment of its responses; empty until `with_segments` adds them.
    """

    summary: Summary
    environment: dict[str, Any]
    remarks: list[str]
    cells: tuple[str, ...] = ()
    partial: str = ""
    segments: Mapping[str, Mapping[str, SegmentMetrics]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.summary.recipe.name


def read_runs(directories: Sequence[Path], running: bool = False) -> list[FinishedRun]:
    """Load runs, merging shards of the same recipe; see `read_run`. ``runs/latest`` is the run started last.

    A run directory with shards only means all of its shards. A group that several shards measured is taken from the one
    that measured it last.

    Args:
        running: see `read_run`.

    Raises:
        UsageError: see `read_run`.
    """
    paths: list[Path] = []
    for directory in map(latest, directories):
        shards = [] if (directory / "recipe.json").is_file() else sorted((directory / FOLDER).glob(f"*-of-*/{FILE}"))
        paths += [shard.parent for shard in shards] or [directory]
    runs = [read_run(directory, timed=False, running=running) for directory in paths]
    groups: dict[Any, list[FinishedRun]] = {}
    for i, run in enumerate(runs):
        groups.setdefault((run.name, run.cells) if run.cells else i, []).append(run)
    return [_merge(parts) if parts[0].cells else parts[0] for parts in groups.values()]


def _merge(shards: Sequence[FinishedRun]) -> FinishedRun:
    """Merge the shards of a recipe, with groups in the recipe's order."""
    shards = sorted(shards, key=lambda shard: shard.summary.directory)
    first, groups = shards[0], dict[str, list[CellResult]]()
    for shard in shards:
        for _, results in shard.summary.groups:
            key = results[0].config.group
            if key not in groups or groups[key][0].measured < results[0].measured:
                groups[key] = results
    by_hash = {result.config.hash: result for results in groups.values() for result in results}
    results = [by_hash[cell] for cell in first.cells if cell in by_hash]
    remarks = list(dict.fromkeys(line for shard in shards for line in shard.remarks))
    if missing := len(first.cells) - len(results):
        reason = "they failed or belong to a missing shard"
        remarks.append(f"- note: {missing} of {len(first.cells)} cells have no results: {reason}")
    environment = merge_environments([shard.environment for shard in shards])
    if environment.get("elsewhere"):
        remarks.append("- note: groups were measured on several machines; tok/s are comparable only within a group")
    curves = [curve for shard in shards for curve in shard.summary.curves]
    distinct = list({json.dumps(curve.to_json(), sort_keys=True): curve for curve in curves}.values())
    run = first.summary.directory.parent.parent if len(shards) > 1 else first.summary.directory
    summary = Summary(first.summary.recipe, run, results, curves=distinct)
    partial = "; ".join(dict.fromkeys(shard.partial for shard in shards if shard.partial))
    return FinishedRun(summary, environment, remarks, first.cells, partial)


def read_run(directory: Path, timed: bool = True, running: bool = False) -> FinishedRun:
    """Load a run or one of its shards.

    Args:
        timed: reject untimed records.
        running: load the finished cells on disk rather than those in the summary, as for an interrupted run.

    Raises:
        UsageError: no finished cells, a missing or damaged file, or a file of another version.
    """
    directory = latest(directory)
    if not (directory / "recipe.json").is_file():
        problem = "has no recipe.json" if directory.is_dir() else "is not a directory"
        raise UsageError(f"{directory} {problem}; give the directory of a finished run, which crossdraft run prints")
    run = RunDirectory(directory)
    try:
        recipe = read_recipe(directory / "recipe.json")
    except UsageError:  # possibly of another version
        for path in run.cell_paths():
            read_cell_config(path)  # raises if the version differs
        raise
    recipe = recipe.model_copy(update={"prompts": portable(recipe.prompts)})
    partial = _unfinished(directory)
    paths, remarks = _partial_cells(run, partial) if running or partial else _summary_cells(run)
    results = [result for result in map(read_cell, paths) if result.error is None]
    if not results:
        raise UsageError(f"the run {directory} has no finished cells; run its recipe again")
    if timed and not all(result.metrics is None or result.metrics.timed for result in results):
        raise UsageError(f"the run {directory} was not timed (--untimed); run its recipe on an exclusive device")
    try:
        curves = [
            CostCurve.from_json(curve)
            for curve in _optional(directory / "cost_curves.json", CurvesFile).get("curves", [])
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"cost_curves.json of the run {directory} is damaged; run its recipe again") from None
    summary, shard = Summary(recipe, directory, results, curves=curves), _optional(directory / FILE, ShardFile)
    stored = [line for line in remarks if line.startswith(_REMARKS)]
    environment = _optional(directory / "environment.json", Environment)
    return FinishedRun(summary, environment, stored, tuple(shard.get("cells", ())), partial)


def titles_of(runs: Sequence[FinishedRun]) -> list[str]:
    """Unique titles of runs: the name, else the directory name, else its path."""
    names, directories = (
        Counter(values) for values in ([r.name for r in runs], [r.summary.directory.name for r in runs])
    )
    titles = []
    for run in runs:
        directory = run.summary.directory
        fallback = directory.name if directories[directory.name] == 1 else str(directory)
        titles.append(run.name if names[run.name] == 1 else fallback)
    return titles


def _optional(file: Path, schema: type[BaseModel]) -> dict[str, Any]:
    """A file of a run, or {} if it is missing. Raises UsageError if it is damaged."""
    return read_checked(file, schema) if os.path.lexists(file) else {}


def _unfinished(directory: Path) -> str:
    """The progress of an unfinished run; empty for a finished one."""
    if (directory / STATE).exists() or not (directory / "summary.csv").exists():
        status = state_of(directory)
        if status.state != "finished":
            run = RunDirectory(directory)
            complete = sum(path.parent.parent == directory for path in run.cell_paths())
            incomplete = len(run.cell_paths()) - complete
            count = f"{complete} of {status.cells if status.cells is not None else 'an unknown number of'} cells so far"
            more = f", and {incomplete} on some of their prompts" if incomplete else ""
            note = f" ({status.note})" if status.note else ""
            return f"{status.state}: {count}{more}{note}"
    return ""


def _rows(run: RunDirectory) -> list[dict[str, str]]:
    """The rows of ``summary.csv``. Raises UsageError if it is damaged."""
    try:
        rows = list(csv.DictReader(read_text(run.path / "summary.csv", INDEX_BYTES, surrogates=True).splitlines()))
    except csv.Error:
        rows = [{}]
    if not all(row.get("cell") and "error" in row for row in rows):
        raise UsageError(f"summary.csv of the run {run.path} is damaged; run its recipe again")
    return rows


def _remarks(run: RunDirectory) -> list[str]:
    return read_text(run.path / "summary.md", INDEX_BYTES, surrogates=True).splitlines()


def _summary_cells(run: RunDirectory) -> tuple[list[Path], list[str]]:
    """Cell directories of a finished run, in the order of its summary, and the lines of its summary."""
    paths = []
    for cell in [row["cell"] for row in _rows(run) if not row["error"]]:
        path = run.cell_path(cell)
        if path is None:
            raise UsageError(f"cell {cell} of the run {run.path} is missing or damaged; run its recipe again")
        paths.append(path)
    return paths, _remarks(run)


def _partial_cells(run: RunDirectory, partial: str) -> tuple[list[Path], list[str]]:
    """Cell directories of an unfinished run, in the order of its summary or of measurement, and remarks.

    Incomplete results of an earlier interruption are skipped if the cell is complete.
    """
    has_summary = (run.path / "summary.csv").exists() and (run.path / "summary.md").exists()
    order = {row["cell"]: i for i, row in enumerate(_rows(run))} if has_summary else {}
    heads = {}
    for path in reversed(run.cell_paths()):  # incomplete groups come last
        head = read_cell_config(path)[1]
        heads[head["hash"]] = head, path
    cells = sorted(
        heads.values(),
        key=lambda item: (
            order.get(item[0]["hash"], len(order)),
            item[0]["measured"],
            not item[1].name.startswith("none_"),
            item[1].name,
        ),
    )
    remarks = [f"- failed: {head['hash']}: {head['error']}" for head, _ in cells if head["error"]]
    if partial:
        remarks.append(f"- note: {partial}")
        if has_summary:
            remarks += [line for line in _remarks(run) if line.startswith(("- skipped: ", "- note: "))]
    return [path for head, path in cells if not head["error"]], remarks


#: Prefixes of summary lines that do not follow from the cells.
_REMARKS = ("- skipped: ", "- failed: ", "- note: ", "- interrupted: ")


def portable(prompts: PromptSpec) -> PromptSpec:
    """The prompt specification with local paths reduced to the file name."""
    if prompts.source.startswith("hf:") or prompts.source in plugins.entries("prompts"):
        return prompts
    return prompts.model_copy(update={"name" if prompts.name else "path": Path(prompts.source).name})
