"""README of a run: descriptions of the files in its directory and of their columns."""

from __future__ import annotations

from collections.abc import Iterable

from ..metrics.columns import QUANTITIES, RESPONSE_KEYS, STEP_COLUMNS
from ..recipe.recipe import Recipe
from ..util.table import Table

FILE = "README.md"
_FILES = {
    "README.md": "This file.",
    "recipe.json": "The recipe with all defaults; `crossdraft run recipe.json` repeats the run.",
    "state.json": "State of the run (running, interrupted, stopped or finished), finished and failed cells, process, "
    "host. `crossdraft runs` reads it, and detects a killed process by the lock.",
    "environment.json": "Versions, machine, device, and the SHA-256 of every model, for the cells measured here.",
    "summary.md": "Tables of the run, with notes and with skipped and failed cells.",
    "summary.csv": "All metrics, one row per cell; its columns are below.",
    "cost_curves.json": "Measured cost curves behind the predictions; absent without predictions.",
    "cost-ENGINE.csv, draft-cost-ENGINE-DRAFTER.csv": "Seconds of a pass of the target and of a draft model in an "
    "engine, for `crossdraft advise --cost` and `--draft-cost`; only with an engine.",
    "step-cost-ENGINE-DRAFTER.csv, prefill-cost-ENGINE-DRAFTER.csv": "Seconds of whole steps and of prefills in an "
    "engine, for `crossdraft simulate --cost` and `--prefill-cost`; prefill-cost-ENGINE.csv is that of plain decoding.",
    "servers/": "Logs of the servers that were started for an engine.",
    "*.png": "Charts, if crossdraft-page is installed; `crossdraft report --format pdf` and `svg` draw them, too.",
    "cells/DRAFTER_VERIFIER_T…_B…_HASH/": "A cell, named by drafter, verifier, temperature, batch size and the hash in "
    "summary.csv.",
    "  config.json": "Config of the cell, time of the measurement, and its conditions.",
    "  steps.parquet": "Every step of every sequence; its columns are below.",
    "  responses.jsonl": "The responses, one line per turn; its keys are below.",
    "  metrics.json": "Metrics of the cell, and the pieces of prompts that they are computed from.",
    "  error.txt": "For a failed cell, instead of the previous three: the error and its traceback.",
    "groups/": "Finished pieces of cells under measurement; removed when the cells are complete.",
    ".lock, .owner.json": "Lock of the process that writes to this directory, and its identity.",
}


def readme(name: str, recipe: Recipe, cells: int, prompts: int) -> str:
    """Return the README of the run in the directory ``name``, with numbers of cells and prompts."""
    about = f"{cells} cells on {prompts} prompts of {_line(recipe.prompts.source)}, target {_line(recipe.target)}."
    files = [
        [f"`{file.strip()}`" if file == file.strip() else f"… `{file.strip()}`", description]
        for file, description in _FILES.items()
    ]
    settings = [[f"`{q.name}`", q.meaning] for q in QUANTITIES if q.setting]
    results = [[f"`{q.name}`" + ", `…_low`, `…_high`" * q.estimate, q.meaning] for q in QUANTITIES if not q.setting]
    parts = [
        f"# {name}",
        *([_line(recipe.question)] if recipe.question else []),
        f"Results of `crossdraft run`: {about}",
        "`crossdraft report` and `compare` accept this directory; `crossdraft run` with the same recipe resumes it.",
        "## Files",
        _table("file", files),
        "## Columns of summary.csv",
        "One row per cell: a drafter and a verifier at one setting. Settings:",
        _table("column", settings),
        "Results. An empty field is a missing value. Intervals cover 95 %; they need at least three prompts (block "
        "efficiency) or pieces of prompts (speed-up).",
        _table("column", results),
        "## Columns of steps.parquet",
        _table("column", ([f"`{key}`", description] for key, description in STEP_COLUMNS.items())),
        "## Keys of responses.jsonl",
        _table("key", ([f"`{key}`", description] for key, description in RESPONSE_KEYS.items())),
    ]
    return "\n\n".join(parts) + "\n"


def _table(header: str, rows: Iterable[list[str]]) -> str:
    return Table([header, "meaning"], list(rows)).markdown()


def _line(text: str) -> str:
    return " ".join(text.split())
