"""Finished cells with known acceptance and cost, and the directories of runs that hold them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cost_curves import curve

from crossdraft.framework.cost.summary import Summary
from crossdraft.framework.metrics.cell_metrics import Estimate, StepRecord, measure
from crossdraft.framework.metrics.pieces import Piece
from crossdraft.framework.recipe.recipe import CellConfig, Recipe
from crossdraft.framework.report.csv_rows import summary_csv
from crossdraft.framework.report.tables import summary_markdown
from crossdraft.framework.runs.records import CellResult
from crossdraft.framework.runs.run_directory import RunDirectory

SHA = {"m": "aa" * 32, "d": "bb" * 32, "e": "cc" * 32}
#: Accepted tokens of the steps of each of three prompts.
GOOD = ((3, 3, 1, 3), (3, 2, 3, 3), (3, 3, 3, 0))
POOR = ((0, 1, 0, 0), (1, 0, 0, 0), (0, 0, 2, 0))


def cell(
    taus: Sequence[Sequence[int]] | None,
    batch_size: int = 1,
    *,
    model: str = "d",
    verifier: str = "token",
    gamma: int = 3,
    drafter: str = "draft-model",
    finish_reason: str = "eos",
    K: int = 0,
    **sampling: Any,
) -> CellResult:
    """A cell whose steps all drafted ``gamma`` tokens and accepted ``taus``; None is plain decoding."""
    options: dict[str, Any] = {"name": drafter, "gamma": gamma} | (
        {"model": model} if drafter != "prompt-lookup" else {}
    )
    options |= {"K": K} if K else {}
    config = CellConfig.model_validate(
        {
            "target": "m",
            "batch_size": batch_size,
            "dtype": "float32",
            "drafter": options if taus else "none",
            "verifier": verifier,
            "sampling": {"temperature": 1.0} | sampling,
        }
    )
    steps = taus or ((0, 0, 0, 0),) * 3
    width = gamma * max(K, 1) if taus else 0
    records = [
        StepRecord(p, f"q{p}", "a", 0, i, tau, tau + 1, width, width, 99)
        for p, own in enumerate(steps)
        for i, tau in enumerate(own)
    ]
    tokens = sum(record.emitted for record in records)
    phases = {"prefill": 0.0, "draft": 1.0, "target": 4.0, "verify": 0.0, "rest": 0.0}
    pieces = [Piece(tokens, phases)]
    passes = gamma * len(records) if taus and drafter != "prompt-lookup" else 0
    metrics = measure(records, pieces, passes, gamma if taus else 0, gamma if taus else 0)
    metrics.speed_up = Estimate(tokens / 10) if taus else None
    responses = [
        {"prompt_tokens": 100, "question_id": f"q{p}", "turn": 0, "tokens": [], "finish_reason": finish_reason}
        for p in range(len(steps))
    ]
    models = {"m": {"sha256": SHA["m"]}} | ({model: {"sha256": SHA[model]}} if passes else {})
    provenance = {"models": models, "dtype": "float32", "device": "cpu (toy)", "torch": "2.0", "threads": 2}
    return CellResult(config, metrics, None, "", records, responses, pieces, provenance, "2026-03-01T12:00:00")


def curves(draft: float = 0.1) -> list[Any]:
    """The target: 10 s and 1 s a token of the batch beyond the eighth; draft models at a share of that."""

    def passes(b: float, width: float, context: float) -> float:
        return float(10 + max(b * width - 8, 0))

    grid = {"batch_sizes": (1, 2, 4, 8, 16, 32, 64), "widths": (1, 2, 3, 4, 5), "contexts": (100, 300)}
    target = curve(cost=passes, model="m", sha256=SHA["m"], **grid)
    others = [
        curve(cost=lambda b, w, c: draft * passes(b, w, c), model=name, sha256=SHA[name], **grid) for name in ("d", "e")
    ]
    return [target, *others]


def write_run(directory: Path, results: Sequence[CellResult], name: str = "made") -> Path:
    """The directory of a run with these cells."""
    recipe = Recipe.model_validate({"name": name, "target": "m", "drafters": ["draft-model"], "verifiers": ["token"]})
    path = directory / f"{name}-0123456789ab"
    run = RunDirectory(path)
    actual = Summary(recipe, path, list(results), curves=curves())
    run.write_json("recipe.json", recipe.model_dump(mode="json"))
    run.write_json("environment.json", {})
    run.write_text("summary.csv", summary_csv(actual))
    run.write_text("summary.md", summary_markdown(actual))
    run.write_json("cost_curves.json", {"curves": [item.to_json() for item in curves()]})
    for result in results:
        if result.metrics is not None:
            run.save(result)
    return path
