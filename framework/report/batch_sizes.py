"""Series over batch size: cells of a run that differ only in drafter, verifier and batch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..cost.finished_cells import last_paying
from ..metrics.cell_metrics import counted_steps, paired_ratio
from ..runs.labels import group_title, verifier_title
from ..runs.marks import mark_of
from ..util.estimate import estimate_text
from ..util.table import Table
from .metrics_text import clock_text, speed_up_text

if TYPE_CHECKING:
    from ..cost.summary import Summary
    from ..metrics.cell_metrics import Metrics
    from ..runs.records import CellResult


@dataclass
class Pair:
    """A drafter and a verifier with their cells by batch size."""

    drafter: str
    verifier: str
    results: dict[int, CellResult] = field(default_factory=dict)

    @property
    def speed_ups(self) -> dict[int, float]:
        """Measured speed-ups by batch size; cells without one are skipped."""
        return {b: r.metrics.speed_up.value for b, r in self.results.items() if r.metrics and r.metrics.speed_up}

    @property
    def single_draft(self) -> bool:
        """True if the drafter drafts chains."""
        return next(iter(self.results.values())).config.drafter_traits.is_chain


@dataclass
class Series:
    """Finished cells of a run that differ only in drafter, verifier and batch size."""

    pairs: list[Pair] = field(default_factory=list)
    baselines: dict[int, CellResult] = field(default_factory=dict)

    @property
    def by_clock(self) -> bool:
        """True if tokens/s of every pair are by the clock, because their speed-ups are withheld."""
        measured = [r.metrics for pair in self.pairs for r in pair.results.values() if r.metrics]
        return bool(measured) and all(metrics.withheld for metrics in measured)

    def rates(self, results: Mapping[int, CellResult]) -> dict[int, float]:
        """Tokens/s by batch size: by the clock if `by_clock`, else those that are not."""
        metrics = {b: result.metrics for b, result in sorted(results.items())}
        wall = self.by_clock
        return {
            b: m.tokens_per_second_wall if wall else m.tokens_per_second
            for b, m in metrics.items()
            if m is not None and m.timed and (wall or not m.withheld)
        }


def all_series(results: Sequence[CellResult]) -> dict[str, Series]:
    """The series of a run by title."""
    cells = [result.config for result in results]
    series: dict[str, tuple[Series, dict[str, Pair]]] = {}
    for result in results:
        config = result.config
        if result.metrics is None:
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
    return {title: group for title, (group, _) in series.items()}


def batch_size_series(results: Sequence[CellResult]) -> dict[str, Series]:
    """The timed series of a run by title, except those with a single batch size."""
    timed = [result for result in results if result.metrics is not None and result.metrics.timed]
    return {title: series for title, series in all_series(timed).items() if len(series.baselines) > 1}


def by_batch_size(summary: Summary) -> list[Table]:
    """The table of speed-ups of each series."""
    tables: list[Table] = []
    if len({result.config.batch_size for result in summary.results}) < 2:
        return tables
    for title, series in batch_size_series(summary.results).items():
        batch_sizes = sorted(series.baselines)
        numeric = ("BE", "rows/tok", *(f"B = {b}" for b in batch_sizes), "pays up to")
        columns = ("drafter", "verifier", *((name, "right") for name in numeric))
        rows = []
        for pair in series.pairs:
            metrics = {b: result.metrics for b, result in pair.results.items() if result.metrics}
            first = metrics[min(metrics)]
            efficiency = f"{first.block_efficiency.value:.2f}" if first.block_efficiency else ""
            values = [_speed_up(metrics[b]) if b in metrics else "" for b in batch_sizes]
            last = _pays_up_to(pair, batch_sizes, last_paying(pair.results, series.baselines, summary.curves))
            numbers = efficiency, f"{first.target_rows_per_token:.2f}", *values, last
            rows.append([pair.drafter, pair.verifier, *numbers])
        tables.append(Table(columns, rows, title=f"speed-up by batch size, {title}"))
    return tables


def _speed_up(metrics: Metrics) -> str:
    return f"{metrics.speed_up.value:.2f}" if metrics.speed_up else speed_up_text(metrics)


def _pays_up_to(pair: Pair, batch_sizes: Sequence[int], last: int) -> str:
    """The last batch size at which a pair pays, 0 being none; unknown beyond it if larger ones have no interval."""
    metrics = {b: r.metrics for b, r in pair.results.items() if r.metrics}
    measured = {b for b, m in metrics.items() if m.speed_up and m.speed_up.low is not None}
    missing = [metrics.get(b) for b in batch_sizes if b not in measured and b > last]
    if missing:
        withheld, without = any(m and m.withheld for m in missing), any(m and m.speed_up for m in missing)
        reason = "withheld" if withheld else "no interval" if without else "not measured"
        return f"B ≥ {last}, then {reason}" if last else f"unknown ({reason})"
    relation = "≥" if last == max(measured, default=0) else "=" if last in measured else "~"
    return f"B {relation} {last}" if last else "none"


#: The best pairs by block efficiency, and the ratios of the best.
_GAIN_COLUMNS = ("B", "best multi-draft", "best single-draft", "BE ÷ BE [95 %]", ("speed-up ÷ speed-up", "right"))


def multi_over_single(summary: Summary) -> list[Table]:
    """The table of each series with certified multi-draft and single-draft pairs, with a row per batch size.

    The best pair has the greatest value among the certified pairs of its kind. The ratio of speed-ups is by the clock,
    and marked, unless all of these pairs have a speed-up.
    """
    tables = []
    comparable = {title: series for title, series in all_series(summary.results).items() if len(series.pairs) > 1}
    for title, series in comparable.items():
        rows = []
        for b in sorted({b for pair in series.pairs for b in pair.results}):
            measured = [(pair, pair.results[b]) for pair in series.pairs if b in pair.results]
            measured = [(pair, r) for pair, r in measured if mark_of(r).headline and r.metrics and not r.metrics.faults]
            kinds = [[cell for cell in measured if cell[0].single_draft == single] for single in (False, True)]
            if all(kinds):
                best = [max(cells, key=lambda cell: _efficiency(cell[1])) for cells in kinds]
                steps = [counted_steps(r.records, r.metrics.depth) for _, r in best if r.metrics]
                names = [f"{pair.drafter} × {pair.verifier}" for pair, _ in best]
                gain = estimate_text(paired_ratio(*steps))
                rows.append([b, *names, gain, _speed_up_ratio([[r for _, r in cells] for cells in kinds])])
        if rows:
            tables.append(Table(_GAIN_COLUMNS, rows, title=f"best multi-draft ÷ best single-draft, {title}"))
    return tables


def _efficiency(result: CellResult) -> float:
    efficiency = result.metrics.block_efficiency if result.metrics else None
    return efficiency.value if efficiency else 0.0


def _speed_up_ratio(kinds: Sequence[Sequence[CellResult]]) -> str:
    """Ratio of the greatest speed-ups of two lists of cells; by the clock if one of them is withheld."""
    metrics = [[result.metrics for result in cells if result.metrics] for cells in kinds]
    claimed = [[m.speed_up.value for m in cells if m.speed_up] for cells in metrics]
    if list(map(len, claimed)) == list(map(len, metrics)):
        return f"{max(claimed[0]) / max(claimed[1]):.2f}"
    wall = [[m.speed_up_wall for m in cells if m.speed_up_wall] for cells in metrics]
    return clock_text(max(wall[0]) / max(wall[1])) if all(wall) else ""
