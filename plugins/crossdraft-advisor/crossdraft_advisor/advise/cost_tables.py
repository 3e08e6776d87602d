"""Cost curves from CSV tables of other tools, or from crossdraft's JSON files."""

from __future__ import annotations

import csv
import math
from pathlib import Path

from crossdraft.framework.cost.curve import CostCurve, Point
from crossdraft.framework.errors import UsageError, first_line
from crossdraft.framework.util.input_files import path_of, read_json, read_text
from crossdraft.framework.util.limits import CONFIG_BYTES, MOST_POINTS, MOST_TOKENS

_COLUMNS = ["batch_size", "width", "context", "seconds"]


def read_cost_table(name: str) -> CostCurve:
    """Read a cost curve from CSV with the columns ``batch_size,width,context,seconds``, or from `CostCurve` JSON.

    Each CSV line is a forward pass over ``width`` new tokens in each of ``batch_size`` rows with ``context`` tokens;
    every combination occurs once.

    Raises:
        UsageError: an invalid file, with the line.
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
