"""Reading a finished run back from its directory."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from .. import plugins
from ..cost.curve import CostCurve
from ..errors import UsageError
from ..recipe.recipe import PromptSpec, read_recipe
from ..runs.record_schema import CurvesFile, Environment, ShardFile, read_checked
from ..runs.records import CellResult
from ..runs.run_directory import RunDirectory, read_cell, read_config
from ..runs.shards import FILE, FOLDER, merge_environments
from ..runs.state import FILE as STATE
from ..runs.state import state_of
from ..util.input_files import read_text
from ..util.limits import INDEX_BYTES
from .caveats import remarks_of
from .summary import Summary


@dataclass(frozen=True)
class FinishedRun:
    """A run as its directory tells it.

    Attributes:
        summary: the recipe and the finished cells, in the recipe's order, and the curves that were kept with them.
        environment: versions and machine, as `crossdraft env` tells them.
        remarks: lines of its summary about what has no numbers: pairs skipped, cells failed, notes.
        cells: of a shard, the hashes of all cells of the recipe, those of other shards included.
        partial: how far a run that is not finished has come, a sentence; empty for one that is.
    """

    summary: Summary
    environment: dict[str, Any]
    remarks: list[str]
    cells: tuple[str, ...] = ()
    partial: str = ""

    @property
    def name(self) -> str:
        return self.summary.recipe.name


def read_runs(directories: Sequence[Path], running: bool = False) -> list[FinishedRun]:
    """Read the records of runs, of which shards of the same recipe are one; see `read_run`.

    A directory of a run that has nothing but shards stands for all of them. A group that several shards measured is
    taken from the one that measured it last.

    Args:
        running: see `read_run`.

    Raises:
        UsageError: as `read_run` does.
    """
    every: list[Path] = []
    for directory in directories:
        shards = [] if (directory / "recipe.json").is_file() else sorted((directory / FOLDER).glob(f"*-of-*/{FILE}"))
        every += [shard.parent for shard in shards] or [directory]
    runs = [read_run(directory, timed=False, running=running) for directory in every]
    found: dict[Any, list[FinishedRun]] = {}
    for i, run in enumerate(runs):
        found.setdefault((run.name, run.cells) if run.cells else i, []).append(run)
    return [_merged(parts) if parts[0].cells else parts[0] for parts in found.values()]


def _merged(shards: Sequence[FinishedRun]) -> FinishedRun:
    """One run of the shards of a recipe, its groups in the recipe's order."""
    shards = sorted(shards, key=lambda shard: shard.summary.directory)
    first, groups = shards[0], dict[str, list[CellResult]]()
    for shard in shards:
        own: dict[str, list[CellResult]] = {}
        for result in shard.summary.results:
            own.setdefault(result.config.group, []).append(result)
        for key, results in own.items():
            if key not in groups or groups[key][0].measured < results[0].measured:
                groups[key] = results
    by_hash = {result.config.hash: result for results in groups.values() for result in results}
    results = [by_hash[cell] for cell in first.cells if cell in by_hash]
    remarks = list(dict.fromkeys(line for shard in shards for line in shard.remarks))
    if missing := len(first.cells) - len(results):
        why = "they failed, or belong to a shard that is not here"
        remarks.append(f"- note: {missing} of {len(first.cells)} cells have no numbers: {why}")
    environment = merge_environments([shard.environment for shard in shards])
    if environment.get("elsewhere"):
        remarks.append("- note: groups were measured on several machines; tok/s compare within a group alone")
    curves = [curve for shard in shards for curve in shard.summary.curves]
    distinct = list({json.dumps(curve.to_json(), sort_keys=True): curve for curve in curves}.values())
    run = first.summary.directory.parent.parent if len(shards) > 1 else first.summary.directory
    summary = Summary(first.summary.recipe, run, results, curves=distinct)
    partial = "; ".join(dict.fromkeys(shard.partial for shard in shards if shard.partial))
    return FinishedRun(summary, environment, remarks, first.cells, partial)


def read_run(directory: Path, timed: bool = True, running: bool = False) -> FinishedRun:
    """Read the records of a run, or of one shard.

    Args:
        timed: refuse records that hold no times.
        running: count the cells that are there, not those of its summary; so it is of a run that was interrupted.

    Raises:
        UsageError: there are none, a file is missing or damaged (names it, and the key), or another version wrote it.
    """
    if not (directory / "recipe.json").is_file():
        what = "has no recipe.json" if directory.is_dir() else "is no directory"
        raise UsageError(f"{directory} {what}; give the directory of a finished run, which crossdraft run named last")
    run = RunDirectory(directory)
    try:
        recipe = read_recipe(directory / "recipe.json")
    except UsageError:  # keys come and go
        for path in run.cell_paths():
            read_config(path)  # refuses another version's
        raise
    recipe = recipe.model_copy(update={"prompts": portable(recipe.prompts)})
    partial = _unfinished(directory)
    paths, remarks = _so_far(run, partial) if running or partial else _summed_up(run)
    results = [result for result in map(read_cell, paths) if result.error is None]
    if not results:
        raise UsageError(f"the run {directory} has no finished cell; run its recipe again")
    if timed and not all(result.metrics is None or result.metrics.timed for result in results):
        raise UsageError(f"the run {directory} was not timed (--untimed); run its recipe on a device of its own")
    try:
        curves = [
            CostCurve.from_json(curve)
            for curve in _optional(directory / "cost_curves.json", CurvesFile).get("curves", [])
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"cost_curves.json of the run {directory} is damaged; run its recipe again") from None
    summary, shard = Summary(recipe, directory, results, curves=curves), _optional(directory / FILE, ShardFile)
    told = {f"- {line}" for lines in remarks_of(summary) for line in lines}  # from the cells, again
    kept = [line for line in remarks if line.startswith(_REMARKS) and line not in told]
    environment = _optional(directory / "environment.json", Environment)
    return FinishedRun(summary, environment, kept, tuple(shard.get("cells", ())), partial)


def _optional(file: Path, schema: type[BaseModel]) -> dict[str, Any]:
    """A file of a run, which may be missing. Raises UsageError, naming file and key, if it is damaged."""
    return read_checked(file, schema) if os.path.lexists(file) else {}


def _unfinished(directory: Path) -> str:
    """Progress of a run that is not finished, a sentence; empty for a finished one."""
    if (directory / STATE).exists() or not (directory / "summary.csv").exists():
        now = state_of(directory)
        if now.state != "finished":
            run = RunDirectory(directory)
            whole = sum(path.parent.parent == directory for path in run.cell_paths())
            part = len(run.cell_paths()) - whole
            count = f"{whole} of {now.cells if now.cells is not None else 'an unknown number of'} cells so far"
            more = f", and {part} from a part of their prompts" if part else ""
            why = f" ({now.note})" if now.note else ""
            return f"{now.state}: {count}{more}{why}"
    return ""


def _rows(run: RunDirectory) -> list[dict[str, str]]:
    """The lines of ``summary.csv``. Raises UsageError if it is damaged."""
    try:
        rows = list(csv.DictReader(read_text(run.path / "summary.csv", INDEX_BYTES, surrogates=True).splitlines()))
    except csv.Error:
        rows = [{}]
    if not all(row.get("cell") and "error" in row for row in rows):
        raise UsageError(f"summary.csv of the run {run.path} is damaged; run its recipe again")
    return rows


def _remarks(run: RunDirectory) -> list[str]:
    return read_text(run.path / "summary.md", INDEX_BYTES, surrogates=True).splitlines()


def _summed_up(run: RunDirectory) -> tuple[list[Path], list[str]]:
    """The directories of the cells of a finished run, in the order of its summary, and the remarks there."""
    paths = []
    for cell in [row["cell"] for row in _rows(run) if not row["error"]]:
        path = run.cell_path(cell)
        if path is None:
            raise UsageError(f"cell {cell} of the run {run.path} is missing or damaged; run its recipe again")
        paths.append(path)
    return paths, _remarks(run)


def _so_far(run: RunDirectory, partial: str) -> tuple[list[Path], list[str]]:
    """The same of a run that is not finished: in the order of its summary, or as cells were measured, plain ones first.

    Of a cell that was measured whole, what an earlier interruption left is passed over.
    """
    summed_up = (run.path / "summary.csv").exists() and (run.path / "summary.md").exists()
    order = {row["cell"]: i for i, row in enumerate(_rows(run))} if summed_up else {}
    heads = {}
    for path in reversed(run.cell_paths()):  # those of groups that were cut short stand last
        head = read_config(path)[1]
        heads[head["hash"]] = head, path
    found = sorted(
        heads.values(),
        key=lambda one: (
            order.get(one[0]["hash"], len(order)),
            one[0]["measured"],
            not one[1].name.startswith("none_"),
            one[1].name,
        ),
    )
    remarks = [f"- failed: {head['hash']}: {head['error']}" for head, _ in found if head["error"]]
    if partial:
        remarks.append(f"- note: {partial}")
        if summed_up:
            remarks += [line for line in _remarks(run) if line.startswith(("- skipped: ", "- note: "))]
    return [path for head, path in found if not head["error"]], remarks


#: What a run says in its summary beyond the numbers, and its cells do not know.
_REMARKS = ("- skipped: ", "- failed: ", "- note: ", "- interrupted: ")


def portable(prompts: PromptSpec) -> PromptSpec:
    """The same, but of a file on this machine only its name."""
    if prompts.source.startswith("hf:") or prompts.source in plugins.entries("prompts"):
        return prompts
    return prompts.model_copy(update={"name" if prompts.name else "path": Path(prompts.source).name})
