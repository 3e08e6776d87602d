"""Reading a finished run back from its directory."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from .. import plugins
from ..contracts.errors import UsageError
from ..cost.curve import CostCurve
from ..runs.recipe import CellConfig, PromptSpec, read_recipe
from ..runs.run_directory import FORMAT, RunDirectory
from .summary import Summary


@dataclass(frozen=True)
class FinishedRun:
    """A run as its directory tells it.

    Attributes:
        summary: the recipe and the finished cells, in the recipe's order, and the curves that were kept with them.
        environment: versions and machine, as `crossdraft env` tells them.
        remarks: lines of its summary about what has no numbers: pairs skipped, cells failed, notes.
    """

    summary: Summary
    environment: dict[str, Any]
    remarks: list[str]

    @property
    def name(self) -> str:
        return self.summary.recipe.name


def read_run(directory: Path) -> FinishedRun:
    """Read the records of a run.

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
        rows = list(csv.DictReader((directory / "summary.csv").read_text(encoding="utf-8").splitlines()))
        remarks = (directory / "summary.md").read_text(encoding="utf-8").splitlines()
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
    kept = [line for line in remarks if line.startswith(_REMARKS)]
    try:
        curves = [CostCurve.from_json(curve) for curve in run.read_json("cost_curves.json").get("curves", [])]
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"cost_curves.json of the run {directory} is damaged; run its recipe again") from None
    return FinishedRun(Summary(recipe, directory, results, curves=curves), run.read_json("environment.json"), kept)


#: What a run says in its summary beyond the numbers, and its cells do not know.
_REMARKS = ("- skipped: ", "- failed: ", "- note: ", "- interrupted: ")


def portable(prompts: PromptSpec) -> PromptSpec:
    """The same, but of a file on this machine only its name."""
    if prompts.source.startswith("hf:") or prompts.source in plugins.entries("prompts"):
        return prompts
    return prompts.model_copy(update={"name" if prompts.name else "path": Path(prompts.source).name})
