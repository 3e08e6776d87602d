"""Tables of costs: read from CSV or crossdraft's JSON, and written for the engines of a finished run.

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
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import mean, median

import numpy as np
from scipy import stats

from crossdraft import UsageError, first_line
from crossdraft.commands import CONFIG_BYTES, MOST_TOKENS, path_of, read_json, read_text
from crossdraft.framework.cost.curve import Point
from crossdraft.framework.util.limits import MOST_POINTS
from crossdraft.runs import CellResult, CostCurve

_COLUMNS = ["batch_size", "width", "context", "seconds"]


def read_cost_table(name: str) -> CostCurve:
    """Read a cost curve from CSV with the columns ``batch_size,width,context,seconds``, or from `CostCurve` JSON.

    Each CSV line is a forward pass over ``width`` new tokens in each of ``batch_size`` rows with ``context`` tokens;
    every combination occurs once.

    Raises UsageError: an invalid file, with the line.
    """
    path = path_of(name)
    if path.suffix == ".json":
        data = read_json(path, CONFIG_BYTES, subject="the cost curve")
        try:
            curve = CostCurve.from_json(data)
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path} is not a cost curve: {first_line(error)}") from None
    else:
        curve = _from_csv(path)
    if curve.implausible:
        raise UsageError(f"{path}: {curve.implausible}; measure on a quiet machine")
    return curve


def _from_csv(path: Path) -> CostCurve:
    reader = csv.reader(read_text(path, CONFIG_BYTES, subject="the cost table").splitlines())
    try:
        rows = [(reader.line_num, row) for row in reader]
    except csv.Error as error:
        raise UsageError(f"{path}:{reader.line_num}: not valid CSV: {first_line(error)}") from None
    header = [cell.strip() for cell in rows[0][1]] if rows else []
    if header != _COLUMNS:
        raise UsageError(f"{path}:1: a cost table must begin with the line {','.join(_COLUMNS)}")
    points: dict[tuple[int, int, int], Point] = {}
    for number, row in rows[1:]:
        place = f"{path}:{number}"
        if not row:
            continue
        if len(row) != len(_COLUMNS):
            raise UsageError(f"{place}: the line has {len(row)} values; {len(_COLUMNS)} are required")
        try:
            b, width, context = (int(cell) for cell in row[:3])
            seconds = float(row[3])
        except ValueError:
            raise UsageError(f"{place}: {','.join(row)[:60]} is not three integers and seconds") from None
        if not (0 < b <= MOST_TOKENS and 0 < width <= MOST_TOKENS and 0 <= context <= MOST_TOKENS):
            raise UsageError(f"{place}: batch size {b}, width {width} and context {context} are out of range")
        if not 0 < seconds < math.inf:
            raise UsageError(f"{place}: {row[3].strip()} seconds is not a positive time")
        if (b, width, context) in points:
            raise UsageError(f"{place}: this combination is a duplicate")
        points[b, width, context] = Point(b, width, context, seconds, seconds, seconds)
        if reason := MOST_POINTS.violation(len(points)):
            raise UsageError(f"{place}: too many points; {reason}")
    if not points:
        raise UsageError(f"{path} has no lines after the header")
    try:
        return CostCurve(path.stem, "", "", {"table": path.name}, tuple(points.values()), repeats=1)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None


LEAST_STEPS = 8  # minimum number of steps of a number of positions

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
    medians = {}
    for size, times in seconds.items():
        known = sorted(positions for positions, values in times.items() if len(values) >= LEAST_STEPS)
        if known:
            medians[size] = dict(zip(known, accumulate((median(times[p]) for p in known), max), strict=True))
    return medians


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
