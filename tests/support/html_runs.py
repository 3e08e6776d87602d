"""Synthetic runs of many cells for the HTML pages, determined by the seed."""

from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from piece_results import made_piece

from crossdraft.framework.bench.group_runner import compare_group
from crossdraft.framework.bench.matrix import expand
from crossdraft.framework.cost.load_run import FinishedRun
from crossdraft.framework.cost.summary import Summary
from crossdraft.framework.metrics.cell_metrics import StepRecord, measure
from crossdraft.framework.recipe.recipe import Recipe
from crossdraft.framework.report.csv_rows import summary_csv
from crossdraft.framework.report.tables import summary_markdown
from crossdraft.framework.runs.records import CellResult
from crossdraft.framework.runs.run_directory import RunDirectory

CATEGORIES = ("maths", "chat", "code")
RECIPE: dict[str, Any] = {
    "name": "forty-cells",
    "question": "which pair, and up to which batch size?",
    "target": "org/name",
    "drafters": [
        "prompt-lookup",
        {"name": "draft-model", "model": "org/small"},
        {"name": "draft-model-iid", "model": "org/small", "K": 2},
    ],
    "verifiers": ["token", "block", "spectr"],
    "matrix": {"gamma": [2, 4], "batch_size": [1, 4, 16, 32]},
    "exclude": [
        {"drafter": "draft-model-iid", "verifier": ["token", "block"]},
        {"drafter": ["prompt-lookup", "draft-model"], "verifier": "spectr"},
    ],
}
#: Two pairs of one group.
SMALL = {"name": "small", "drafters": [{"name": "prompt-lookup", "gamma": 3}], "verifiers": ["token", "block"]}
SMALL = RECIPE | SMALL | {"matrix": {}, "exclude": []}


def finished_run(directory: Path, recipe: dict[str, Any] | None = None, tokens: int = 128) -> FinishedRun:
    """A run whose cells are all finished: six prompts of three categories, a piece each."""
    request = Recipe.model_validate(recipe or RECIPE)
    results = deepcopy(_results(request.model_dump_json(), tokens))
    environment = {"versions": {"crossdraft": "0.1.0", "torch": "2.13.0"}, "python": "3.12.1"}
    return FinishedRun(Summary(request, directory, results), environment, ["- note: made up"])


@cache
def _results(recipe: str, tokens: int) -> list[CellResult]:
    """The results of a run, which many tests use and some change."""
    rng = np.random.default_rng(0)
    results = [_cell(config, rng, tokens) for config in expand(Recipe.model_validate_json(recipe)).cells]
    for key in {result.config.group for result in results}:
        compare_group([result for result in results if result.config.group == key])
    return results


def on_disk(run: FinishedRun) -> Path:
    """The directory of a run, with all that a command reads."""
    directory = RunDirectory(run.summary.directory)
    directory.write_json("recipe.json", run.summary.recipe.model_dump(mode="json"))
    directory.write_text("summary.csv", summary_csv(run.summary))
    directory.write_text("summary.md", summary_markdown(run.summary))
    for result in run.summary.results:
        directory.save(result)
    return directory.path


def _cell(config: Any, rng: Any, tokens: int) -> CellResult:
    gamma = config.drafter.config.get("gamma", 0)
    rate = {"token": 0.6, "block": 0.68, "spectr": 0.72}[config.verifier.name]
    copies = config.drafter.config.get("K", 1)
    records, pieces, responses = [], [], []
    for prompt in range(6):
        category, left, steps = CATEGORIES[prompt // 2], tokens, 0
        while left > 0:
            draft = min(gamma, left - 1)
            tau = int(np.argmin([*(rng.random(draft) < rate + 0.03 * (prompt // 2)), False]))
            width = copies * draft
            records.append(StepRecord(prompt, f"q{prompt}", category, 0, steps, tau, tau + 1, width, width, left - 1))
            left, steps = left - tau - 1, steps + 1
        step = 0.02 * (1 + 0.02 * config.batch_size * copies * gamma) * steps / config.batch_size
        draft = 0.004 * gamma * steps / config.batch_size
        noise = 1 + 0.03 * rng.standard_normal()
        phases = {"draft": draft * noise, "target": step * noise, "verify": 0.05 * step, "rest": 0.03 * step}
        pieces.append(made_piece(tokens, steps, f"{copies * gamma} 0", category=category, **phases))
        output = [int(token) for token in rng.integers(1, 50000, tokens)]
        text = " ".join(f"word{token}" for token in output)
        about = {"question_id": f"q{prompt}", "turn": 0, "category": category, "prompt_tokens": 40}
        responses.append(about | {"text": text, "tokens": output, "finish_reason": "length"})
    source = {"distribution": "crossdraft", "version": "0.1.0", "sha256": "0" * 64}
    provenance = {
        "device": "cpu (a processor)",
        "dtype": "float32",
        "verifier": source,
        "models": {"org/name": {"sha256": "ab" * 32}, "org/small": {"sha256": "cd" * 32}},
    }
    metrics = measure(records, pieces, gamma=gamma, depth=gamma)
    return CellResult(config, metrics, None, "", records, responses, pieces, provenance, "2026-03-01T12:00:00")
