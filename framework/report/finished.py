"""Reading a finished run back from its directory."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from .. import plugins
from ..contracts.errors import UsageError
from ..cost.curve import CostCurve
from ..runs.recipe import CellConfig, PromptSpec, read_recipe
from ..runs.records import CellResult
from ..runs.run_directory import FORMAT, RunDirectory
from ..runs.shards import FILE, FOLDER, joined
from .remarks import remarks_of
from .summary import Summary


@dataclass(frozen=True)
class FinishedRun:
    """A run as its directory tells it.

    Attributes:
        summary: the recipe and the finished cells, in the recipe's order, and the curves that were kept with them.
        environment: versions and machine, as `crossdraft env` tells them.
        remarks: lines of its summary about what has no numbers: pairs skipped, cells failed, notes.
        cells: of a shard, the hashes of all cells of the recipe, those of other shards included.
    """

    summary: Summary
    environment: dict[str, Any]
    remarks: list[str]
    cells: tuple[str, ...] = ()

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
    environment = joined([shard.environment for shard in shards])
    if environment.get("elsewhere"):
        remarks.append("- note: groups were measured on several machines; tok/s compare within a group alone")
    curves = [curve for shard in shards for curve in shard.summary.curves]
    distinct = list({json.dumps(curve.to_json(), sort_keys=True): curve for curve in curves}.values())
    run = first.summary.directory.parent.parent if len(shards) > 1 else first.summary.directory
    summary = Summary(first.summary.recipe, run, results, curves=distinct)
    return FinishedRun(summary, environment, remarks, first.cells)


def read_run(directory: Path, timed: bool = True, running: bool = False) -> FinishedRun:
    """Read the records of a run, or of one shard.

    Args:
        timed: refuse records that hold no times.
        running: it may still go on, or have been cut off: what cells there are count, not its summary.

    Raises:
        UsageError: there are none, they are incomplete, or another version wrote them.
    """
    if not (directory / "recipe.json").is_file():
        what = "has no recipe.json" if directory.is_dir() else "is no directory"
        raise UsageError(f"{directory} {what}; give the directory of a finished run, which crossdraft run named last")
    try:
        recipe = read_recipe(directory / "recipe.json")
    except UsageError:  # keys come and go
        heads = (RunDirectory(file.parent).read_json(file.name) for file in directory.glob("cells/*/config.json"))
        if any(head.get("format") != FORMAT for head in heads):
            raise UsageError(f"the run {directory} was written by another version; run its recipe again") from None
        raise
    recipe = recipe.model_copy(update={"prompts": portable(recipe.prompts)})
    run, results = RunDirectory(directory), []
    try:
        rows, remarks = _so_far(directory) if running else _summed_up(directory)
    except (UnicodeDecodeError, csv.Error):
        raise UsageError(f"the summary of the run {directory} is damaged; run its recipe again") from None
    except OSError as error:
        missing = Path(str(error.filename)).name
        raise UsageError(f"the run {directory} was cut off before it wrote {missing}; run its recipe again") from None
    if not all(row.get("cell") and "error" in row for row in rows):
        raise UsageError(f"summary.csv of the run {directory} is damaged; run its recipe again")
    for cell in [row["cell"] for row in rows if not row["error"]]:
        path = run.cell_path(cell)
        head = RunDirectory(path).read_json("config.json") if path else {}
        if head and head.get("format") != FORMAT:
            raise UsageError(f"the run {directory} was written by another version; run its recipe again")
        try:
            result = run.load(CellConfig.model_validate(head["config"])) if head else None
        except (KeyError, TypeError, ValidationError):
            result = None
        if result is None:
            raise UsageError(f"cell {cell} of the run {directory} is missing or damaged; run its recipe again")
        results.append(result)
    if not results:
        raise UsageError(f"the run {directory} has no finished cell; run its recipe again")
    if timed and not all(result.metrics is None or result.metrics.timed for result in results):
        raise UsageError(f"the run {directory} was not timed (--untimed); run its recipe on a device of its own")
    try:
        curves = [CostCurve.from_json(curve) for curve in run.read_json("cost_curves.json").get("curves", [])]
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"cost_curves.json of the run {directory} is damaged; run its recipe again") from None
    summary, shard = Summary(recipe, directory, results, curves=curves), run.read_json(FILE)
    told = {f"- {line}" for lines in remarks_of(summary) for line in lines}  # from the cells, again
    kept = [line for line in remarks if line.startswith(_REMARKS) and line not in told]
    return FinishedRun(summary, run.read_json("environment.json"), kept, tuple(map(str, shard.get("cells", ()))))


def _summed_up(directory: Path) -> tuple[list[dict[str, str]], list[str]]:
    """Cells, each with its error, and lines of remarks, as the run's end wrote them."""
    rows = list(csv.DictReader((directory / "summary.csv").read_text(encoding="utf-8").splitlines()))
    return rows, (directory / "summary.md").read_text(encoding="utf-8").splitlines()


def _so_far(directory: Path) -> tuple[list[dict[str, str]], list[str]]:
    """The same of a run that goes on, in the order in which cells were measured, plain decoding first."""
    files = sorted(directory.glob("cells/[!.]*/config.json"), key=lambda file: not file.parent.name.startswith("none_"))
    heads = [RunDirectory(file.parent).read_json(file.name) for file in files]
    heads = sorted((head for head in heads if head), key=lambda head: str(head.get("measured")))
    rows = [{"cell": str(head.get("hash")), "error": str(head.get("error") or "")} for head in heads]
    state = RunDirectory(directory).read_json("state.json")
    remarks = [f"- failed: {row['cell']}: {row['error']}" for row in rows if row["error"]]
    if state.get("state") != "finished":
        remarks.append(
            f"- note: {state.get('state', 'not begun')}: {len(rows)} of {state.get('cells', '?')} cells so far"
        )
    return rows, remarks


#: What a run says in its summary beyond the numbers, and its cells do not know.
_REMARKS = ("- skipped: ", "- failed: ", "- note: ", "- interrupted: ")


def portable(prompts: PromptSpec) -> PromptSpec:
    """The same, but of a file on this machine only its name."""
    if prompts.source.startswith("hf:") or prompts.source in plugins.entries("prompts"):
        return prompts
    return prompts.model_copy(update={"name" if prompts.name else "path": Path(prompts.source).name})
