"""All numbers of all cells as CSV."""

from __future__ import annotations

import json
from collections.abc import Container
from typing import TYPE_CHECKING, Any

from ..metrics.cell_metrics import ESTIMATES, SERVED, TIMES
from ..recipe.recipe import OWN_ENGINE
from ..runs.marks import mark_of
from ..util.estimate import ENDS, spread
from ..util.table import Table

if TYPE_CHECKING:
    from ..cost.summary import Summary
    from ..runs.records import CellResult

#: Suffixes of other columns of block efficiency and speed-up.
_TAKEN = (*ENDS, "_all_steps", "_expected", "_wall")


def summary_csv(summary: Summary) -> str:
    """A CSV row per cell; failed cells have their error."""
    return Table.of(row_of(result, summary) for result in summary.results).csv() + "\n"


def row_of(result: CellResult, summary: Summary | None = None) -> dict[str, Any]:
    """A cell's row of ``summary.csv``; columns are documented in `metrics.columns`.

    ``summary``: the summary of its run, for predictions and for columns of plug-ins.
    """
    config = result.config.model_dump(mode="json")
    row: dict[str, Any] = {"cell": result.config.hash}
    for kind in ("drafter", "verifier"):
        strategy = config.pop(kind)
        name, label = strategy.pop("name"), strategy.pop("label", "")
        row |= {kind: name, f"{kind}_label": label or name, f"{kind}_config": json.dumps(strategy)}
    engine = config.pop("engine") or {"name": OWN_ENGINE}
    row |= {"engine": engine.pop("name"), "engine_config": json.dumps(engine)}
    constraint = config.pop("constraint")
    row |= config.pop("sampling") | {"prompts": json.dumps(config.pop("prompts"))} | config
    row["constraint"] = "" if constraint is None else json.dumps(constraint)
    row["lossless"] = result.config.verifier_traits.lossless
    row["certificate"] = "" if result.config.is_baseline else str(mark_of(result))
    row["error"] = result.error or ""
    if result.metrics is None:
        return row
    for key, value in result.metrics.to_json().items():
        if (key in TIMES and not result.metrics.timed) or (key in SERVED and value is None):
            continue
        if key in ESTIMATES:
            row |= spread(key, getattr(result.metrics, key))
        elif key == "acceptance":
            row |= {f"acceptance_{i}": p for i, p in enumerate(value, 1)}
        elif key == "shares":
            row |= {f"{phase}_share": share for phase, share in value.items()}
        elif key == "by_category":
            for category, metrics in result.metrics.by_category.items():
                suffix = _suffix(category, value)
                row[f"prompts{suffix}"] = metrics.prompts
                row |= spread(f"block_efficiency{suffix}", metrics.block_efficiency)
                row |= spread(f"speed_up{suffix}", metrics.speed_up)
        else:
            row[key] = value
    if summary is None:
        return row
    if predicted := summary.predicted.get(result.config.hash):
        row |= {"predicted_tokens_per_second": predicted.tokens_per_second, "predicted_speed_up": predicted.speed_up}
    return row


def _suffix(category: str, categories: Container[str]) -> str:
    """Suffix of a category's columns: its name, with ``category_`` if these would be columns of something else."""
    end = next((end for end in ENDS if category.endswith(end) and category.removesuffix(end) in categories), "")
    return f"_category_{category}" if end or f"_{category}" in _TAKEN else f"_{category}"
