"""Cost tables of an engine, from the arrival times of its steps in a finished run.

The time between two events of a response is that of one step of the engine at the concurrency of the cell. Steps of the
baseline and of drafters without a model give the passes of the target by width. The additional time of a step with a
draft model, divided by the drafted tokens, is a pass of the draft model. The time to the first token of a response at
batch size 1 is that of its prefill. `crossdraft advise` and `crossdraft simulate` read the tables with ``--cost``,
``--draft-cost`` and ``--prefill-cost``. A table ``step-cost`` has whole steps with a draft model, by width, as
``--cost`` without ``--draft-cost``.
"""

from __future__ import annotations

import csv
import io
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import mean, median
from typing import TYPE_CHECKING

from scipy import stats

if TYPE_CHECKING:
    from ..runs.records import CellResult

#: Minimum number of steps of a width.
LEAST_STEPS = 8


def cost_tables(results: Iterable[CellResult]) -> dict[str, str]:
    """Return tables by file name, for each engine and target of a run; empty without engines.

    A table has the columns ``batch_size,width,context,seconds``; seconds are medians, the context is the mean length of
    the sequences. A width that is not faster to pass than a smaller one is given the time of the smaller one.
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
        target_seconds = _monotone(_medians(plain))
        if target_seconds:
            tables[_file(f"cost-{suffix}")] = _csv(target_seconds, context)
        if prefills := _prefills(plain):
            tables[_file(f"prefill-cost-{suffix}")] = _csv(prefills, 0)
        drafters: dict[str, list[CellResult]] = defaultdict(list)
        for cell in cells:
            if cell.config.drafter.config.get("model"):
                drafters[cell.config.drafter.name].append(cell)
        for name, drafting in drafters.items():
            if passes := _draft_passes(_medians(drafting), target_seconds):
                tables[_file(f"draft-cost-{suffix}-{name}")] = _csv(passes, context)
            if steps := _steps(_medians(drafting), target_seconds):
                tables[_file(f"step-cost-{suffix}-{name}")] = _csv(steps, context)
            if prefills := _prefills(drafting):
                tables[_file(f"prefill-cost-{suffix}-{name}")] = _csv(prefills, 0)
    return tables


def _medians(cells: Sequence[CellResult]) -> dict[tuple[int, int], float]:
    """Median seconds of a step by batch size and width."""
    seconds: dict[tuple[int, int], list[float]] = defaultdict(list)
    for cell in cells:
        for piece in cell.pieces:
            for _, _, _, *steps in piece.requests:
                for nodes, microseconds in zip(steps[::2], steps[1::2], strict=True):
                    if microseconds:  # two steps may arrive together
                        seconds[cell.config.batch_size, nodes + 1].append(microseconds / 1e6)
    return {key: median(values) for key, values in seconds.items() if len(values) >= LEAST_STEPS}


def _monotone(seconds: dict[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    result: dict[tuple[int, int], float] = {}
    for batch_size, width in sorted(seconds):
        smaller = [value for (b, w), value in result.items() if b == batch_size and w < width]
        result[batch_size, width] = max([seconds[batch_size, width], *smaller])
    return result


def _draft_passes(
    drafting: dict[tuple[int, int], float], target: dict[tuple[int, int], float]
) -> dict[tuple[int, int], float]:
    """Seconds of a pass of the draft model by batch size, at width 1."""
    passes: dict[int, list[float]] = defaultdict(list)
    for (batch_size, width), seconds in drafting.items():
        known = {w: value for (b, w), value in target.items() if b == batch_size}
        if width > 1 and known:
            nearest = min(known, key=lambda w: abs(w - width))
            passes[batch_size].append(max(seconds - known[nearest], 1e-6) / (width - 1))
    return {(batch_size, 1): median(values) for batch_size, values in passes.items()}


def _steps(
    drafting: dict[tuple[int, int], float], target: dict[tuple[int, int], float]
) -> dict[tuple[int, int], float]:
    """Seconds of whole steps by batch size and width, of the widths known at all batch sizes; width 1 is plain."""
    plain = {key: seconds for key, seconds in target.items() if key[1] == 1}
    steps = _monotone({key: seconds for key, seconds in drafting.items() if key[1] > 1} | plain)
    sizes = {b for b, _ in drafting if (b, 1) in plain}
    widths = set.intersection(*({w for size, w in steps if size == b} for b in sizes)) if sizes else set()
    return {(b, w): seconds for (b, w), seconds in steps.items() if b in sizes and w in widths}


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
