"""Cost tables of an engine, from the arrival times of its steps in a finished run.

The time between two events of a response is that of one step of the engine at the concurrency of the cell. Engines pass
the positions of all rows without padding, so the width of a step is their number divided by the batch size. Steps of
the baseline and of drafters without a model give the passes of the target by width. The additional time of a step with
a draft model, divided by the drafted tokens of a row, is a pass of the draft model. The time to the first token of a
response at batch size 1 is that of its prefill. `crossdraft advise` and `crossdraft simulate` read the tables with
``--cost``, ``--draft-cost`` and ``--prefill-cost``. A table ``step-cost`` has whole steps with a draft model, by width,
as ``--cost`` without ``--draft-cost``.
"""

from __future__ import annotations

import csv
import io
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from statistics import mean, median
from typing import TYPE_CHECKING

import numpy as np
from scipy import stats

if TYPE_CHECKING:
    from crossdraft.framework.runs.records import CellResult

#: Minimum number of steps of a number of positions.
LEAST_STEPS = 8

#: Median seconds of a step by batch size and by positions of the batch.
_Steps = Mapping[int, Mapping[int, float]]


def cost_tables(results: Iterable[CellResult]) -> dict[str, str]:
    """Return tables by file name, for each engine and target of a run; empty without engines.

    A table has the columns ``batch_size,width,context,seconds``; seconds are medians, the context is the mean length of
    the sequences. Times are interpolated linearly between the measured numbers of positions, and extended past the last
    along the line from the first to the last. A number faster than a smaller one is given the smaller one's time.
    """
    engines: dict[tuple[str, str], list[CellResult]] = defaultdict(list)
    for result in results:
        if result.config.engine is not None and result.metrics is not None:
            engines[result.config.engine.title, result.config.target].append(result)
    tables: dict[str, str] = {}
    for (engine, target), cells in engines.items():
        suffix = f"{engine}" if len({name for _, name in engines}) == 1 else f"{engine}-{target}"
        context = round(mean(r["prompt_tokens"] + len(r["tokens"]) / 2 for cell in cells for r in cell.responses))
        plain = [cell for cell in cells if not cell.config.drafter.config.get("model")]
        target = _medians(plain)
        if target:
            widths = range(1, 1 + max(max(steps) // b for b, steps in target.items()))
            passes = {(b, w): _seconds(steps, b * w) for b, steps in target.items() for w in widths}
            tables[_file(f"cost-{suffix}")] = _csv(passes, context)
        if prefills := _prefills(plain):
            tables[_file(f"prefill-cost-{suffix}")] = _csv(prefills, 0)
        drafters: dict[str, list[CellResult]] = defaultdict(list)
        for cell in cells:
            if cell.config.drafter.config.get("model"):
                drafters[cell.config.drafter.name].append(cell)
        for name, drafting in drafters.items():
            medians = _medians(drafting)
            if passes := _draft_passes(medians, target):
                tables[_file(f"draft-cost-{suffix}-{name}")] = _csv(passes, context)
            if steps := _steps(medians, target):
                tables[_file(f"step-cost-{suffix}-{name}")] = _csv(steps, context)
            if prefills := _prefills(drafting):
                tables[_file(f"prefill-cost-{suffix}-{name}")] = _csv(prefills, 0)
    return tables


def _medians(cells: Sequence[CellResult]) -> _Steps:
    """Medians that do not fall with the number of positions; steps with fewer positions than rows are left out."""
    seconds: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for cell in cells:
        size = cell.config.batch_size
        for piece in cell.pieces:
            for _, _, _, *steps in piece.requests:
                for positions, microseconds in zip(steps[::2], steps[1::2], strict=True):
                    if microseconds and positions >= size:  # two steps may arrive together
                        seconds[size][positions].append(microseconds / 1e6)
    return {size: medians for size, by_positions in seconds.items() if (medians := _monotone(by_positions))}


def _monotone(seconds: Mapping[int, Sequence[float]]) -> dict[int, float]:
    known = sorted(positions for positions, values in seconds.items() if len(values) >= LEAST_STEPS)
    return dict(zip(known, accumulate((median(seconds[positions]) for positions in known), max), strict=True))


def _seconds(steps: Mapping[int, float], positions: float) -> float:
    """Seconds of a step over ``positions``."""
    known, seconds = list(steps), list(steps.values())
    excess = max(positions - known[-1], 0)
    slope = (seconds[-1] - seconds[0]) / (known[-1] - known[0]) if len(known) > 1 else 0.0
    return float(np.interp(positions, known, seconds)) + slope * excess


def _draft_passes(drafting: _Steps, target: _Steps) -> dict[tuple[int, int], float]:
    """Seconds of a pass of the draft model by batch size, at width 1."""
    passes: dict[tuple[int, int], float] = {}
    for size, steps in drafting.items():
        if size in target:
            values = [
                max(seconds - _seconds(target[size], positions), 1e-6) / (positions / size - 1)
                for positions, seconds in steps.items()
                if positions > size
            ]
            passes |= {(size, 1): median(values)} if values else {}
    return passes


def _steps(drafting: _Steps, target: _Steps) -> dict[tuple[int, int], float]:
    """Seconds of whole steps by batch size and width, of the widths known at all batch sizes; width 1 is plain."""
    steps: dict[int, dict[int, float]] = {}
    for size in drafting.keys() & {size for size, plain in target.items() if size in plain}:
        whole = {size: target[size][size]} | {n: s for n, s in drafting[size].items() if n > size and n % size == 0}
        steps[size] = {n // size: max(s, target[size][size]) for n, s in whole.items()}
    widths = set.intersection(*(set(by_width) for by_width in steps.values())) if steps else set()
    return {(size, w): seconds for size, by_width in steps.items() for w, seconds in by_width.items() if w in widths}


def _prefills(cells: Sequence[CellResult]) -> dict[tuple[int, int], float]:
    """Seconds of the prefill of the shortest and the longest prompt, on a line through all of them.

    The slope is the median of those between all pairs of prompts (Theil and Sen), which outliers do not move.
    """
    prompts, seconds = [], []
    for cell in cells:
        first = [row[1] / 1e6 for piece in cell.pieces for row in piece.requests]
        if cell.config.batch_size == 1 and len(first) == len(cell.responses):
            prompts += [response["prompt_tokens"] for response in cell.responses]
            seconds += first
    if len(prompts) < LEAST_STEPS:
        return {}
    if min(prompts) == max(prompts):
        return {(1, prompts[0]): median(seconds)}
    slope = stats.theilslopes(seconds, prompts)[0]
    intercept = median(y - slope * x for x, y in zip(prompts, seconds, strict=True))
    return {(1, n): max(float(intercept + slope * n), 1e-6) for n in (min(prompts), max(prompts))}


def _csv(seconds: dict[tuple[int, int], float], context: int) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["batch_size", "width", "context", "seconds"])
    writer.writerows([b, width, context, f"{value:.6f}"] for (b, width), value in sorted(seconds.items()))
    return text.getvalue()


def _file(name: str) -> str:
    return re.sub(r"[^\w.-]", "-", name) + ".csv"
