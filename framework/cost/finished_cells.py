"""Predictions for finished cells, from their statistics and stored cost curves."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

from ..errors import UsageError
from ..metrics.cell_metrics import StepRecord
from ..metrics.pieces import Piece
from ..runs.records import CellResult
from .curve import CostCurve, Curve, find_curve, stored_curves
from .prediction import CellStatistics, Prediction, pays_until, predict, stops_paying

logger = logging.getLogger(__name__)


class BatchStep(NamedTuple):
    """A step of the batch: rows in use, nodes of the widest row, length of the longest row, tokens emitted."""

    occupied: int
    nodes: int
    context: int
    emitted: int


def batch_steps(
    records: Sequence[StepRecord], prompt_tokens: Sequence[int], pieces: Sequence[Piece], batch_size: int
) -> list[BatchStep]:
    """Reconstruct the steps of the batch from the steps of its sequences.

    The schedule is deterministic: the prompts of a piece and turn are assigned to free slots in order.

    Args:
        records: records of a cell, in the order of the measurement.
        prompt_tokens: prompt length of each response with records, in the same order.
    """
    sequences = [list(rows) for _, rows in groupby(records, key=lambda r: (r.prompt, r.turn))]
    steps: list[BatchStep] = []
    pending = deque(zip(sequences, prompt_tokens, strict=True))
    for piece in pieces:
        tokens = piece.emitted + piece.tail_emitted
        runs: dict[int, deque[tuple[deque[StepRecord], int]]] = {}
        while tokens > 0 and pending:
            rows, length = pending.popleft()
            tokens -= sum(r.emitted for r in rows)
            runs.setdefault(rows[0].turn, deque()).append((deque(rows), length))
        for queue in runs.values():
            steps += _replay(queue, batch_size)
    return steps


def _replay(queue: deque[tuple[deque[StepRecord], int]], batch_size: int) -> list[BatchStep]:
    steps: list[BatchStep] = []
    active: list[tuple[deque[StepRecord], int]] = []
    while queue or active:
        while queue and len(active) < batch_size:
            active.append(queue.popleft())
        longest, emitted = max(length for _, length in active), sum(rows[0].emitted for rows, _ in active)
        steps.append(BatchStep(len(active), active[0][0][0].width, longest, emitted))
        active = [(rows, length + rows.popleft().emitted) for rows, length in active]
        active = [(rows, length) for rows, length in active if rows]
    return steps


def statistics(result: CellResult, drafter: Curve | None = None) -> CellStatistics | None:
    """Statistics of a finished cell; None if it failed or was not timed.

    Only steps with all slots in use count, if there are any, as for the measured rate. The time of drafting beyond the
    passes of ``drafter``, the curve of the draft model, is other time: its sampling is not in the curve.

    Raises:
        UsageError: the curve has too few batch sizes or widths.
    """
    metrics, batch_size = result.metrics, result.config.batch_size
    if metrics is None or not metrics.timed:
        return None
    turns = {(record.question_id, record.turn) for record in result.records}  # an engine's prefill may end a response
    lengths = [r["prompt_tokens"] for r in result.responses if (str(r["question_id"]), r["turn"]) in turns]
    all_steps = batch_steps(result.records, lengths, result.pieces, batch_size)
    steps = [r for r in all_steps if r.occupied == batch_size] or all_steps
    n, occupied = len(steps), sum(r.occupied for r in steps)
    phase = {name: metrics.shares.get(name, 0.0) * metrics.decode_seconds / n for name in ("draft", "verify", "rest")}
    nodes, passes = sum(r.nodes for r in steps) / n, metrics.drafter_passes / len(all_steps)
    draft_width, context = max(nodes / passes, 1.0) if passes else 1.0, sum(r.context for r in steps) / n
    of_passes = phase["draft"] if drafter is None else passes * drafter.seconds(batch_size, draft_width, context)
    return CellStatistics(
        batch_size=batch_size,
        occupied=occupied / n,
        tokens_per_step=sum(r.emitted for r in steps) / occupied,
        widths={nodes: count / n for nodes, count in sorted(Counter(r.nodes for r in steps).items())},
        context=context,
        passes=passes,
        draft_width=draft_width,
        draft_seconds=phase["draft"],
        other_seconds=phase["verify"] + phase["rest"] + max(phase["draft"] - of_passes, 0.0),
        acceptance=tuple(metrics.acceptance),
    )


def curves_of(result: CellResult, curves: Iterable[CostCurve]) -> tuple[CostCurve | None, CostCurve | None]:
    """Find the curves of a cell's target and of its draft model, each None if missing.

    A drafter without a model or with several models has no curve; its measured time is used. Curves are of crossdraft's
    passes, so cells of an engine have none.
    """
    if result.config.engine is not None:
        return None, None
    curves, provenance = list(curves), result.provenance
    models = dict(provenance.get("models", {}))
    identity = {key: provenance.get(key) for key in ("device", "torch")}
    if str(identity["device"]).startswith("cpu"):
        identity["threads"] = provenance.get("threads")

    def find(model: Mapping[str, Any] | None) -> CostCurve | None:
        return find_curve(curves, model["sha256"], provenance["dtype"], identity) if model else None

    target = find(models.pop(result.config.target, None))
    drafts = len(models) == 1 and result.metrics is not None and result.metrics.drafter_passes > 0
    return target, find(next(iter(models.values()))) if drafts else None


def used_curves(results: Iterable[CellResult], curves: Iterable[CostCurve]) -> list[CostCurve]:
    """Return the ``curves`` that predictions for these cells use, in order."""
    curves = list(curves)
    cells = [result for result in results if result.error is None] if curves else []
    read = {id(curve) for result in cells for curve in curves_of(result, curves)}
    return [curve for curve in curves if id(curve) in read]


def predicted(result: CellResult, curves: Iterable[CostCurve], baseline: CellResult | None = None) -> Prediction | None:
    """Predict the speed of a finished cell from cost curves.

    Args:
        curves: for instance `stored_curves()`; curves of other models and devices are ignored.
        baseline: plain decoding of the same group: the speed-up is over its measured rate.

    Returns:
        None for a failed cell, or if the target has no curve for the device of the cell.

    Raises:
        UsageError: the curve has too few batch sizes or widths.
    """
    target, drafter = curves_of(result, curves)
    cell = statistics(result, drafter) if target else None
    if cell is None or target is None:
        return None
    prediction = predict(cell, target, drafter)
    if result.config.is_baseline:
        return replace(prediction, speed_up=1.0)
    if baseline is None or baseline.metrics is None:
        return prediction
    speed_up = prediction.tokens_per_second / baseline.metrics.tokens_per_second
    return replace(prediction, speed_up=min(speed_up, cell.tokens_per_step))


def last_paying(
    results: Mapping[int, CellResult], baselines: Mapping[int, CellResult], curves: Iterable[CostCurve]
) -> int:
    """Return the largest batch size at which a pair was shown to be faster than plain decoding, or 0.

    A speed-up counts by the lower end of its interval, so one without an interval does not. Starts from the largest
    measured batch size below `stops_paying`, and continues with predictions, widened alike, between it and
    `stops_paying`.

    Args:
        results, baselines: cells of the pair and of plain decoding by batch size, with measured speed-ups.
    """
    speed_ups = {b: r.metrics.speed_up for b, r in results.items() if r.metrics and r.metrics.speed_up}
    ends = {b: estimate.low or 0.0 for b, estimate in speed_ups.items()}
    last, stop = pays_until(ends), stops_paying(list(ends), list(ends.values()))
    target, drafter = curves_of(results[last], curves) if last else (None, None)
    if stop is None or target is None or last not in baselines:
        return last
    cell, plain = statistics(results[last], drafter), statistics(baselines[last])
    assert cell is not None and plain is not None  # they have a speed-up
    last_measured = last
    for b in range(last + 1, stop):
        try:
            prediction = predict(cell.at(b), target, drafter, plain.at(b))
        except UsageError:  # the curve is too small; `predictions` warns about it
            break
        if prediction.speed_up < speed_ups[last_measured].value / ends[last_measured]:
            break
        last = b
    return last


def predictions(results: Sequence[CellResult], curves: Iterable[CostCurve] | None = None) -> dict[str, Prediction]:
    """Predict the cells of a run, by cell hash; see `predicted`.

    Cells without a prediction are skipped, with a warning if their curve is too small.

    Args:
        curves: `stored_curves()` by default.
    """
    curves = stored_curves() if curves is None else list(curves)
    baselines = {result.config.group: result for result in results if result.config.is_baseline}
    by_hash = {}
    for result in results if curves else ():
        try:
            prediction = predicted(result, curves, baselines.get(result.config.group))
        except UsageError as error:
            logger.warning("crossdraft: %s", error)
            continue
        if prediction is not None:
            by_hash[result.config.hash] = prediction
    return by_hash
