"""The README of a run: what every file in its directory is, and what every column means."""

from __future__ import annotations

from collections.abc import Iterable

from tabulate import tabulate

from ..metrics.columns import QUANTITIES, RESPONSE_KEYS, STEP_COLUMNS
from ..recipe.recipe import Recipe

FILE = "README.md"
_FILES = {
    "README.md": "This file.",
    "recipe.json": "What was asked for, with every default: `crossdraft run recipe.json` asks for the same.",
    "state.json": "How far the run is: running, interrupted, stopped or finished; cells finished and failed; process "
    "and host. `crossdraft runs` reads it, and knows by the lock whether the process was killed.",
    "environment.json": "Versions, machine, device, and the SHA-256 of every model, of what was measured here.",
    "summary.md": "The tables of the run, with what was skipped, failed or should be known.",
    "summary.csv": "Every number of every cell, a line each; its columns are below.",
    "cost_curves.json": "The measured cost curves that predictions were made from; none where there were none.",
    "*.png": "Charts; `crossdraft plot` draws them as PDF and SVG, too.",
    "cells/DRAFTER_VERIFIER_T…_B…_HASH/": "A cell, named after its pair, temperature and batch size; HASH is what "
    "summary.csv calls it.",
    "  config.json": "The cell with all its options, when it was measured, and what its numbers depend on.",
    "  steps.parquet": "Every step of every sequence; its columns are below.",
    "  responses.jsonl": "What was said, a line for each turn; its keys are below.",
    "  metrics.json": "The cell's numbers, and the pieces of prompts that they come from.",
    "  error.txt": "Of a cell that failed, instead of the three: why, and where.",
    "groups/": "Finished pieces of the cells that are being measured; gone when their cells are whole.",
    ".lock, .owner.json": "Held while a process writes here, and which one that is.",
}


def readme(name: str, recipe: Recipe, cells: int, prompts: int) -> str:
    """The text for the run in the directory ``name``, of so many cells on so many prompts."""
    about = f"{cells} cells on {prompts} prompts of {_line(recipe.prompts.source)}, target {_line(recipe.target)}."
    files = [
        [f"`{file.strip()}`" if file == file.strip() else f"… `{file.strip()}`", what] for file, what in _FILES.items()
    ]
    asked = [[f"`{q.name}`", q.meaning] for q in QUANTITIES if q.setting]
    found = [[_columns(q.name, q.estimate), q.meaning] for q in QUANTITIES if not q.setting]
    parts = [
        f"# {name}",
        *([_line(recipe.question)] if recipe.question else []),
        f"A run of `crossdraft run`: {about}",
        "`crossdraft report`, `plot`, `table` and `compare` take this directory; `crossdraft run` with the same recipe "
        "goes on where it stopped.",
        "## Files",
        _table("file", files),
        "## Columns of summary.csv",
        "A line is a cell: a drafter and a verifier at one setting. What was asked for:",
        _table("column", asked),
        "What came out. An empty field is a number that there is none of. Intervals hold 95 %; there is none over "
        "fewer than three prompts (block efficiency) or pieces of prompts (speed-up).",
        _table("column", found),
        "## Columns of steps.parquet",
        _table("column", ([f"`{key}`", what] for key, what in STEP_COLUMNS.items())),
        "## Keys of responses.jsonl",
        _table("key", ([f"`{key}`", what] for key, what in RESPONSE_KEYS.items())),
    ]
    return "\n\n".join(parts) + "\n"


def _columns(name: str, estimate: bool) -> str:
    return f"`{name}`, `…_low`, `…_high`" if estimate else f"`{name}`"


def _table(what: str, rows: Iterable[list[str]]) -> str:
    return tabulate(list(rows), headers=[what, "meaning"], tablefmt="github")


def _line(text: str) -> str:
    """What somebody wrote, on one line."""
    return " ".join(text.split())
