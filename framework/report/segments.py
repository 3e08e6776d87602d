"""Acceptance by segment of the responses of a finished run, from its records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ..metrics.cell_metrics import SegmentMetrics, StepRecord, acceptance, block_efficiency, counted_steps, uncut_steps
from ..models.chat import encode
from ..models.segments import Segments
from ..models.tokenizer import load_tokenizer
from ..runs.labels import verifier_title
from ..util.estimate import spread
from ..util.table import Table
from .metrics_text import efficiency_text

if TYPE_CHECKING:
    from ..cost.load_run import FinishedRun
    from ..runs.records import CellResult


def with_segments(run: FinishedRun, requests: Sequence[str]) -> FinishedRun:
    """The run with metrics by segment of each cell that drafts; unchanged without requests.

    Raises:
        UsageError: an invalid request, see `Segments.parse`.
        ModelError: the tokenizer of the target cannot be loaded.
    """
    drafting = [r for r in run.summary.results if r.drafting]
    if not requests or not drafting:
        return run
    by_target: dict[str, tuple[Segments, list[int]]] = {}
    for target in dict.fromkeys(result.config.target for result in drafting):
        tokenizer = load_tokenizer(target)
        by_target[target] = Segments.parse(requests, tokenizer), encode(tokenizer.tokenizer, ["."])
    return replace(run, segments={r.config.hash: _metrics(r, *by_target[r.config.target]) for r in drafting})


def _metrics(result: CellResult, segments: Segments, prompt: Sequence[int]) -> dict[str, SegmentMetrics]:
    assert result.metrics is not None
    tokens: Counter[str] = Counter()
    members: dict[str, list[StepRecord]] = {name: [] for name in segments.names}
    steps = {key: list(rows) for key, rows in groupby(result.records, key=lambda r: (r.question_id, r.turn))}
    for response in result.responses:
        labels = segments.of(prompt, response["tokens"])
        tokens.update(labels)
        records = steps.get((str(response["question_id"]), response["turn"]), [])
        start = len(labels) - sum(record.emitted for record in records)  # the prefill's tokens belong to no step
        for record in records if start >= 0 else ():
            members[labels[start]].append(record)
            start += record.emitted
    depth = result.metrics.depth
    return {
        name: SegmentMetrics(
            tokens[name],
            len(records),
            block_efficiency(counted_steps(records, depth), depth),
            acceptance(records, depth, 1)[0] if records else None,
            all_cut=not uncut_steps(records, depth),
        )
        for name, records in members.items()
        if tokens[name]
    }


def columns_of(run: FinishedRun, result: CellResult) -> dict[str, Any]:
    """Columns of a cell in a pivot table."""
    row: dict[str, Any] = {}
    for name, metrics in run.segments.get(result.config.hash, {}).items():
        row[f"tokens_{name}"] = metrics.tokens
        for key, estimate in (("block_efficiency", metrics.block_efficiency), ("acceptance_1", metrics.first)):
            if estimate is not None:
                row |= spread(f"{key}_{name}", estimate)
    return row


def segment_tables(run: FinishedRun) -> list[Table]:
    """A table of each group of cells, with a row per pair and segment."""
    columns = ("drafter", "verifier", "segment", ("tokens", "right"), ("steps", "right"))
    columns += ("BE [95 %]", ("Pr(τ≥1) [95 %]", "left"))
    tables = []
    for title, results in run.summary.groups:
        rows = []
        for result in results:
            segments: Mapping[str, SegmentMetrics] = run.segments.get(result.config.hash, {})
            tokens, steps = (sum(getattr(m, key) for m in segments.values()) for key in ("tokens", "steps"))
            for name, metrics in segments.items():
                shares = [f"{100 * metrics.tokens / tokens:.0f} %", f"{100 * metrics.steps / max(steps, 1):.0f} %"]
                estimates = [efficiency_text(metrics), metrics.first]
                rows.append([result.config.drafter.title, verifier_title(result), name, *shares, *estimates])
        if rows:
            tables.append(Table(columns, rows, title=f"by segment of the responses, {title}"))
    return tables
