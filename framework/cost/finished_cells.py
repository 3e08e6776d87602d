"""From a finished cell to what its speed depends on, and to what the curves say about it."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from ..errors import UsageError
from ..metrics.cell_metrics import StepRecord
from ..metrics.pieces import Piece
from ..models.threads import number_used
from ..runs.records import CellResult
from .curve import CostCurve, find_curve, stored_curves
from .prediction import CellStatistics, Prediction, pays_until, predict, stops_paying

logger = logging.getLogger(__name__)


class BatchStep(NamedTuple):
    """A step of the whole batch: rows in use, nodes of the widest, tokens of the longest, tokens emitted by all."""

    occupied: int
    nodes: int
    context: int
    emitted: int


def batch_steps(
    records: Sequence[StepRecord], prompt_tokens: Sequence[int], pieces: Sequence[Piece], batch_size: int
) -> list[BatchStep]:
    """The steps that the whole batch made, from those of its rows, which is what records hold.

    Rows take turns on the slots in a known order: prompts of a piece and turn in their order, a free slot to the
    next one. So the schedule can be made again.

    Args:
        records: of a cell, in the order they were made.
        prompt_tokens: of each response, in the same order.
    """
    sequences = [list(rows) for _, rows in groupby(records, key=lambda r: (r.prompt, r.turn))]
    steps: list[BatchStep] = []
    waiting = deque(zip(sequences, prompt_tokens, strict=True))
    for piece in pieces:
        left = piece.emitted + piece.tail_emitted
        runs: dict[int, deque[tuple[deque[StepRecord], int]]] = {}
        while left > 0 and waiting:
            rows, length = waiting.popleft()
            left -= sum(r.emitted for r in rows)
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


def statistics(result: CellResult) -> CellStatistics | None:
    """What a finished cell says about its pair; None for one that failed, or was not timed.

    Like its measured rate, from the steps in which all slots were in use, if there were any.
    """
    metrics, batch_size = result.metrics, result.config.batch_size
    if metrics is None or not metrics.timed:
        return None
    lengths = [response["prompt_tokens"] for response in result.responses]
    every = batch_steps(result.records, lengths, result.pieces, batch_size)
    steps = [r for r in every if r.occupied == batch_size] or every
    n, occupied = len(steps), sum(r.occupied for r in steps)
    phase = {name: metrics.shares.get(name, 0.0) * metrics.decode_seconds / n for name in ("draft", "verify", "rest")}
    nodes, passes = sum(r.nodes for r in steps) / n, metrics.drafter_passes / len(every)
    return CellStatistics(
        batch_size=batch_size,
        occupied=occupied / n,
        tokens_per_step=sum(r.emitted for r in steps) / occupied,
        widths={nodes: count / n for nodes, count in sorted(Counter(r.nodes for r in steps).items())},
        context=sum(r.context for r in steps) / n,
        passes=passes,
        draft_width=max(nodes / passes, 1.0) if passes else 1.0,
        draft_seconds=phase["draft"],
        other_seconds=phase["verify"] + phase["rest"],
        acceptance=tuple(metrics.acceptance),
    )


def curves_of(result: CellResult, curves: Iterable[CostCurve]) -> tuple[CostCurve | None, CostCurve | None]:
    """The curves of a cell's target and of its draft model, None where there is none.

    A drafter without a model, or with several, has no curve: its time is the one that was measured.
    """
    curves, provenance = list(curves), result.provenance
    used = dict(provenance.get("models", {}))
    same = {key: provenance.get(key) for key in ("device", "torch")}
    if str(same["device"]).startswith("cpu"):
        same["threads"] = number_used(provenance)

    def find(model: Mapping[str, Any] | None) -> CostCurve | None:
        return find_curve(curves, model["sha256"], provenance["dtype"], same) if model else None

    target = find(used.pop(result.config.target, None))
    drafts = len(used) == 1 and result.metrics is not None and result.metrics.drafter_passes > 0
    return target, find(next(iter(used.values()))) if drafts else None


def used_curves(results: Iterable[CellResult], curves: Iterable[CostCurve]) -> list[CostCurve]:
    """Those of ``curves`` that predictions for these cells read, in their order."""
    curves = list(curves)
    read = {id(curve) for result in results if result.error is None for curve in curves_of(result, curves)}
    return [curve for curve in curves if id(curve) in read]


def predicted(result: CellResult, curves: Iterable[CostCurve], baseline: CellResult | None = None) -> Prediction | None:
    """What the curves say about a finished cell, for a table to show beside what was measured.

    Args:
        curves: for instance `stored_curves()`; those of other models and devices do no harm.
        baseline: the cell of the same group that decodes plainly, for the speed-up.

    Returns:
        None for a failed cell and for a target without a curve for the device that the cell ran on.

    Raises:
        UsageError: the curve was measured for too few batch sizes or widths to say.
    """
    cell = statistics(result)
    target, drafter = curves_of(result, curves) if cell else (None, None)
    if cell is None or target is None:
        return None
    return predict(cell, target, drafter, statistics(baseline) if baseline else None)


def speed_ups_of(results: Mapping[int, CellResult]) -> dict[int, float]:
    """The measured speed-ups of a pair's cells by batch size, of those that have one."""
    return {b: r.metrics.speed_up.value for b, r in results.items() if r.metrics and r.metrics.speed_up}


def last_paying(
    results: Mapping[int, CellResult], baselines: Mapping[int, CellResult], curves: Iterable[CostCurve]
) -> int:
    """The greatest batch size at which a pair is still no slower than plain decoding; 0 if it is at none.

    That is the last measured one before `stops_paying`, or a greater one, below that at which it was measured not to
    pay, for which the curves predict that it pays.

    Args:
        results, baselines: of the pair and of plain decoding by batch size, with measured speed-ups.
    """
    speed_ups = speed_ups_of(results)
    last, stop = pays_until(speed_ups), stops_paying(list(speed_ups), list(speed_ups.values()))
    target, drafter = curves_of(results[last], curves) if last else (None, None)
    if stop is None or target is None or last not in baselines:
        return last
    cell, plain = statistics(results[last]), statistics(baselines[last])
    assert cell is not None and plain is not None  # they have a speed-up
    for b in range(last + 1, stop):
        try:
            found = predict(cell.at(b), target, drafter, plain.at(b))
        except UsageError:  # too small a curve, as `predictions` says
            break
        if found.speed_up < 1:
            break
        last = b
    return last


def predictions(results: Sequence[CellResult], curves: Iterable[CostCurve] | None = None) -> dict[str, Prediction]:
    """`predicted` for the cells of a run, each beside the baseline of its group, by the hash of the cell's config.

    Cells without a prediction are left out, those of too small a curve with a warning. ``curves``: `stored_curves()`
    by default.
    """
    curves = stored_curves() if curves is None else list(curves)
    baselines = {result.config.group: result for result in results if result.config.is_baseline}
    found = {}
    for result in results if curves else ():
        try:
            prediction = predicted(result, curves, baselines.get(result.config.group))
        except UsageError as error:
            logger.warning("crossdraft: %s", error)
            continue
        if prediction is not None:
            found[result.config.hash] = prediction
    return found
