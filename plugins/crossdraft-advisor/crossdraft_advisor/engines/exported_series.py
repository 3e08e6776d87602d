"""Series of counters outside of a scrape, as lines of one.

- answers of Prometheus' API, at one time or over a range: ``{"metric": {..}, "value": [time, "1"]}``, or ``values``;
- AIPerf's ``server_metrics_export.json``: ``{"vllm:..": {"series": [{"labels": {..}, "stats": {"total": 1}}]}}``;
- values by name, as scripts store them: ``{"vllm:..": 1}``, by position ``{"vllm:.._per_pos": [2, 1]}``;
- CSV of Grafana: a column for each series, or a table with a column ``__name__``.

Of a counter over time the increase is counted, with a new start after each fall; of a gauge the last value.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from .engine_log import Source

_SUFFIX = "_total"


def canonical(name: str) -> str:
    """A name of which exporters write variants."""
    return name.removeprefix("ray_").replace(":", "_", 1).removesuffix(_SUFFIX)


def exported_series(source: Source, names: Collection[str]) -> Iterator[tuple[int, str]]:
    """Yield line numbers and lines of a scrape for the series with one of ``names``. Raises UsageError."""
    counters = {canonical(name) for name in names if name.endswith(_SUFFIX)}
    yield from _answers(source, counters)
    variants = [variant for name in names for variant in (name, name.removesuffix(_SUFFIX))]
    for name in dict.fromkeys(variants):
        for number, fields in source.objects(name):
            for labels, value in _values(fields[name]):
                yield number, _line(name, labels, value)
    yield from _table(source, names, counters)


def _answers(source: Source, counters: Collection[str]) -> Iterator[tuple[int, str]]:
    for number, fields in source.objects("metric"):
        labels, value = fields["metric"], fields.get("value")
        points = [value] if isinstance(value, list) else fields.get("values")
        if not isinstance(labels, dict) or not isinstance(points, list):
            continue
        texts = [point[1] for point in points if isinstance(point, list) and len(point) == 2]
        if texts:
            name = str(labels.get("__name__", ""))
            counted = canonical(name) in counters and value is None
            labels = {key: text for key, text in labels.items() if key != "__name__"}
            yield number, _line(name, labels, _increase(source, number, texts) if counted else texts[-1])


def _values(value: Any) -> Iterator[tuple[dict[str, Any], Any]]:
    """Labels and value of each series under the name of a metric."""
    if isinstance(value, dict) and isinstance(series := value.get("series"), list):
        for item in series:
            stats = item.get("stats") if isinstance(item, dict) else None
            if isinstance(stats, dict) and stats.get("total") is not None:
                url = {"endpoint": item["endpoint_url"]} if item.get("endpoint_url") else {}
                yield url | (item["labels"] if isinstance(item.get("labels"), dict) else {}), stats["total"]
    elif isinstance(value, list):
        yield from (({"position": str(i)}, number) for i, number in enumerate(value) if _is_number(number))
    elif _is_number(value):
        yield {}, value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _line(name: str, labels: Mapping[str, Any], value: Any) -> str:
    text = ",".join(f"{key}={json.dumps(str(label))}" for key, label in labels.items())
    return f"{name}{{{text}}} {value}"


def _increase(source: Source, line: int, texts: Sequence[Any]) -> float:
    """The increase of a counter over time. Raises UsageError."""
    total, last = 0.0, None
    for text in texts:
        value = source.number(str(text), line, "a value of the series")
        total += 0.0 if last is None else value - last if value >= last else value
        last = value
    return total


def _table(source: Source, names: Collection[str], counters: Collection[str]) -> Iterator[tuple[int, str]]:
    """Series in CSV, as Grafana exports them: a column each, or a row with ``__name__`` and labels."""
    filled = ((number, line) for number, line in source.raw_lines() if line.strip())
    first = next((item for item in filled if not item[1].startswith("sep=")), (0, ""))  # for Excel
    stems = ["__name__", *(name.removesuffix(_SUFFIX) for name in names)]
    if not any(stem in first[1] for stem in stems) or first[1].startswith(("{", "[", "#")):
        return
    try:
        (header,) = csv.reader([first[1]])
        if not any(cell.strip().lower().startswith("time") for cell in header):  # a scrape
            return
        lines = list(filled)
        rows = list(csv.reader([line for _, line in lines]))
    except csv.Error:
        return
    numbers = [number for number, _ in lines]
    if "__name__" in header:
        yield from _rows(source, header, rows, numbers, counters)
        return
    for i, cell in enumerate(header):
        if not any(stem in cell for stem in stems):
            continue
        name = _series(cell)
        cells = [(number, row[i].strip()) for number, row in zip(numbers, rows, strict=True) if i < len(row)]
        if cells := [(number, text) for number, text in cells if text]:
            yield cells[-1][0], f"{name} {_last(source, cells, canonical(name.partition('{')[0]) in counters)}"


def _last(source: Source, cells: Sequence[tuple[int, str]], counted: bool) -> float:
    """The increase of a counter, or the last value of a gauge. Raises UsageError if a value is formatted."""
    for number, text in cells:
        try:
            float(text)
        except ValueError:
            message = f"{text[:20]!r} is not a number; export the data without formatting (Grafana: Formatted data off)"
            raise source.error(number, message) from None
    if not counted or len(cells) == 1:
        return float(cells[-1][1])
    return _increase(source, cells[-1][0], [text for _, text in cells])


def _series(cell: str) -> str:
    """A series as a scrape names it; Grafana writes the name among the labels if there is no legend."""
    name, brace, labels = cell.partition("{")
    if name or not brace:
        return cell
    parts = labels.rstrip("}").split(", ")
    names = [part for part in parts if part.startswith("__name__=")]
    others = ",".join(part for part in parts if part not in names)
    return f"{names[0].partition('=')[2].strip(chr(34)) if names else ''}{{{others}}}"


def _rows(
    source: Source,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    numbers: Sequence[int],
    counters: Collection[str],
) -> Iterator[tuple[int, str]]:
    value = next((cell for cell in header if cell.startswith("Value")), "")
    series: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for number, row in zip(numbers, rows, strict=True):
        cells = dict(zip(header, row, strict=False))
        labels = {key: text for key, text in cells.items() if text and key not in ("Time", "__name__", value)}
        if cells.get(value):
            key = cells.get("__name__", ""), _line("", labels, "")
            series.setdefault(key, []).append((number, cells[value]))
    for (name, labels_text), values in series.items():
        yield values[-1][0], f"{name}{labels_text}{_last(source, values, canonical(name) in counters)}"
