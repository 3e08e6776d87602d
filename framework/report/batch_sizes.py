"""Series over batch size: cells of a run that differ only in drafter, verifier and batch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .. import plugins
from ..cost.finished_cells import last_paying, speed_ups_of
from ..cost.prediction import pays_until
from ..runs.labels import group_title, verifier_title
from ..runs.marks import mark_of
from .table_utils import tabulated

if TYPE_CHECKING:
    from ..recipe.recipe import CellConfig
    from ..runs.records import CellResult
    from .summary import Summary


@dataclass
class Pair:
    """A drafter and a verifier with their cells by batch size."""

    drafter: str
    verifier: str
    results: dict[int, CellResult] = field(default_factory=dict)

    @property
    def speed_ups(self) -> dict[int, float]:
        return speed_ups_of(self.results)

    @property
    def single_draft(self) -> bool:
        """True if the drafter drafts chains."""
        return drafts_chains(next(iter(self.results.values())).config)


@dataclass
class Series:
    """Finished cells of a run that differ only in drafter, verifier and batch size."""

    pairs: list[Pair] = field(default_factory=list)
    baselines: dict[int, CellResult] = field(default_factory=dict)


def drafts_chains(config: CellConfig) -> bool:
    """True if the drafter of a cell drafts chains."""
    drafter = plugins.get("drafters", config.drafter.name)
    options = plugins.recorded_config("drafters", drafter, config.drafter.config)
    return plugins.traits_of("drafters", drafter, options, config.sampling).is_chain


def batch_size_series(results: Sequence[CellResult]) -> dict[str, Series]:
    """The series of a run by title, except those with a single batch size."""
    cells = [result.config for result in results]
    series: dict[str, tuple[Series, dict[str, Pair]]] = {}
    for result in results:
        config = result.config
        if result.metrics is None or not result.metrics.timed:
            continue
        title = group_title(config, cells, but="batch_size")
        group, pairs = series.setdefault(title, (Series(), {}))
        if config.is_baseline:
            group.baselines[config.batch_size] = result
            continue
        key = config.model_copy(update={"batch_size": 1}).hash
        if key not in pairs:
            pairs[key] = Pair(config.drafter.title, verifier_title(result))
            group.pairs.append(pairs[key])
        pairs[key].results[config.batch_size] = result
    return {title: group for title, (group, _) in series.items() if len(group.baselines) > 1}


def by_batch_size(summary: Summary, style: str) -> list[tuple[str, str]]:
    """Title and speed-up table of each series, with the gain of multi-draft over single-draft pairs."""
    tables = []
    for title, series in batch_size_series(summary.results).items():
        batch_sizes = sorted(series.baselines)
        columns = {"drafter": "left", "verifier": "left", "BE": "right", "rows/tok": "right"}
        columns |= {f"B = {b}": "right" for b in batch_sizes} | {"pays up to": "right"}
        rows, single, multi = [], {}, {}
        for pair in series.pairs:
            metrics = pair.results[min(pair.results)].metrics
            assert metrics is not None
            efficiency = metrics.block_efficiency
            numbers = f"{efficiency.value:.2f}" if efficiency else "", f"{metrics.target_rows_per_token:.2f}"
            last = last_paying(pair.results, series.baselines, summary.curves)
            rows.append([pair.drafter, pair.verifier, *numbers, *_ratios(pair.speed_ups, batch_sizes, last)])
            if not all(mark_of(result).headline for result in pair.results.values()):
                continue
            best = single if pair.single_draft else multi
            best |= {b: max(speed_up, best.get(b, 0.0)) for b, speed_up in pair.speed_ups.items()}
        if single and multi:
            gain = {b: multi[b] / single[b] for b in batch_sizes if b in single and b in multi}
            rows.append(["best multi-draft", "÷ best single", "", "", *_ratios(gain, batch_sizes, pays_until(gain))])
        tables.append((f"speed-up by batch size, {title}", tabulated(columns, rows, style)))
    return tables


def _ratios(ratios: Mapping[int, float], batch_sizes: Sequence[int], last: int) -> list[str]:
    """Cells of a row: a ratio per batch size, and the last batch size where it is at least 1 (0: none)."""
    relation = "≥" if last == max(ratios, default=0) else "=" if last in ratios else "~"
    up_to = f"B {relation} {last}" if last else "none"
    return [*(f"{ratios[b]:.2f}" if b in ratios else "" for b in batch_sizes), up_to]
