"""Counters of a Prometheus scrape, by exact name, with line numbers.

vLLM and llama.cpp have the same four counters with different prefixes::

    <prefix>spec_decode_num_{drafts,draft_tokens,accepted_tokens}_total
    <prefix>spec_decode_num_accepted_tokens_per_pos_total{position="0"}

The last counts drafts whose token at that position was accepted, so its rates are marginal. Whether steps without a
draft and tokens past the end of a response count is part of the engine's `CounterDefinition`; if it counts generated
tokens and finished requests, too, the number of both follows. llama.cpp writes numbers of 10^6 and more, except those
by position, with six digits (``1.23457e+06``).

Ray and OpenTelemetry write ``ray_vllm_spec_decode_...`` and leave ``_total`` out.

Outside of a scrape, series are read from:

- answers of Prometheus' API, at one time or over a range: ``{"metric": {..}, "value": [time, "1"]}``, or ``values``;
- AIPerf's ``server_metrics_export.json``: ``{"vllm:..": {"series": [{"labels": {..}, "stats": {"total": 1}}]}}``;
- values by name, as scripts store them: ``{"vllm:..": 1}``, by position ``{"vllm:.._per_pos": [2, 1]}``;
- CSV of Grafana: a column for each series, or a table with a column ``__name__``.

Of a counter over time the increase is counted, with a new start after each fall; of a gauge the last value.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from crossdraft import first_line, printable
from crossdraft.commands import MOST_NAME

from .acceptance import Acceptance
from .counter_definitions import CounterDefinition
from .engine_log import Source
from .step_counts import StepCounts, acceptances_of, all_steps, steps_of

#: Names of the counters, and of the same numbers of our own responses.
DRAFTS, DRAFTED, ACCEPTED, TOKENS, REQUESTS = "drafts", "drafted tokens", "accepted tokens", "tokens", "requests"
POSITIONS = "positions"  # accepted tokens by position
#: Ends of the names of an engine's counters.
_COUNTERS = {
    "drafts_total": DRAFTS,
    "draft_tokens_total": DRAFTED,
    "accepted_tokens_total": ACCEPTED,
    "accepted_tokens_per_pos_total": POSITIONS,
}
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_COMPLETE = re.compile(r"\s\d+\.0$")  # a number of events that is not cut off, as Python's client writes it
_ROUNDED = re.compile(r"\s\d(\.\d{1,5})?e\+\d+(\s|$)")  # a value that may be rounded to six digits
_COARSE = 0.001  # rounding error of the number of drafts, relative to it, that is worth a remark
Key = tuple[str, tuple[tuple[str, str], ...]]  # a series: its name and labels, sorted


@dataclass(frozen=True)
class Sample:
    """The value of a series, its line number, and its largest rounding error."""

    value: float
    line: int
    rounding: float = 0.0

    def since(self, earlier: Sample | None) -> Sample:
        old = earlier or Sample(0.0, 0)
        return Sample(self.value - old.value, self.line, self.rounding + old.rounding)


def samples(source: Source, names: Collection[str]) -> dict[Key, Sample]:
    """The series with exactly one of ``names``, as any exporter writes it (a counter's ``_created`` is another name).

    A gauge that is not a number is skipped.

    Raises UsageError: a truncated line, a duplicate series, a counter that is not a number, infinite or negative.
    """
    if unread := [name for name in names if name and name not in source.series]:
        source.series.update(_parsed(source, unread))
    return {key: sample for name in names if name for key, sample in source.series[name].items()}


def _parsed(source: Source, names: Sequence[str]) -> dict[str, dict[Key, Sample]]:
    """The series of each name. Raises UsageError, see `samples`."""
    # Parts of names that every exporter writes.
    stems = {canonical(name).partition("_")[2] or name for name in names}
    known, series = {canonical(name): name for name in names}, {name: dict[Key, Sample]() for name in names}
    lines = [
        (exact, number, line)
        for number, line in (*source.raw_lines(*stems), *exported_series(source, names))
        if (name := _NAME.match(line)) and (exact := known.get(canonical(name[0])))
    ]
    for exact, number, line in lines:
        sample = _sample(source, number, line)
        if math.isnan(sample.value) and not exact.endswith("_total"):
            source.skip(number, f"{exact} is not a number: nothing has been measured")
            continue
        if not 0 <= sample.value < math.inf:
            raise source.error(number, f"{exact} is {sample.value:g}, which is not a count")
        key = exact, tuple(sorted(sample.labels.items()))
        of_name = series[exact]
        if key in of_name:
            raise source.error(
                number,
                f"{exact} is a duplicate of line {of_name[key].line}; the file has several scrapes: give the last one, "
                "and the first as --since",
            )
        of_name[key] = Sample(sample.value, number, 5e-6 * sample.value if _ROUNDED.search(line) else 0.0)
        if not _COMPLETE.search(line) and source.text.endswith(line):  # without a newline
            raise source.error(number, "the scrape is truncated in this line; repeat it")
    return series


def _sample(source: Source, number: int, line: str) -> Any:
    from prometheus_client.parser import text_string_to_metric_families

    try:
        ((sample,),) = [family.samples for family in text_string_to_metric_families(line)]
        return sample
    except Exception as error:
        remedy = "repeat the scrape"
        if _NAME.fullmatch(line.rstrip()) or line.rstrip().endswith("}"):
            remedy += (
                "; on a page of Prometheus that was copied, the value is apart: save its answer instead, "
                "curl -G ADDRESS/api/v1/query --data-urlencode 'query={__name__=~\".*spec_decode.*\"}'"
            )
        message = f"the line is not valid in a Prometheus scrape ({first_line(error)}); {remedy}"
        raise source.error(number, message) from None


def since(
    later: dict[Key, Sample], earlier: dict[Key, Sample], source: Source, earlier_source: Source
) -> dict[Key, Sample]:
    """The difference of two scrapes. Raises UsageError if a counter was reset."""
    for key, sample in earlier.items():
        if key not in later or later[key].value < sample.value:
            line = later[key].line if key in later else source.count
            change = f"is {later[key].value:g}" if key in later else "is missing"
            raise source.error(
                line,
                f"{key[0]} {change}, was {sample.value:g} in {earlier_source.place(sample.line)}: the counter was "
                "reset; take the earlier scrape after the restart",
            )
    return {key: sample.since(earlier.get(key)) for key, sample in later.items()}


def by_model(
    source: Source, names: Collection[str], earlier: Source | None, labels: Mapping[str, str]
) -> dict[str, dict[str, dict[int, Sample]]]:
    """Sums over engines and ranks: model, counter, position.

    ``earlier``: an earlier scrape of the same server, to subtract; ``labels``: the label of a counter that has the
    position; those of others are summed at position 0. Raises UsageError: a damaged scrape.
    """
    series = samples(source, names)
    if earlier is not None and series:
        series = since(series, samples(earlier, names), source, earlier)
    models: dict[str, dict[str, dict[int, Sample]]] = {}
    for (name, pairs), sample in series.items():
        values, position = dict(pairs), 0
        if name in labels:
            text = values.get(labels[name], "")
            if not (text.isascii() and text.isdigit() and len(text) < 6):
                raise source.error(sample.line, f"{name} has the position {text!r}, which is not a number")
            position = int(text)
        of_model = models.setdefault(values.get("model_name", ""), {}).setdefault(name, {})
        total = of_model.get(position, Sample(0.0, 0))
        of_model[position] = Sample(total.value + sample.value, sample.line, total.rounding + sample.rounding)
    return models


def title_of(source: Source, model: str) -> str:
    """The name of a source, and of one of its models."""
    return source.name + (f", model {printable(model)[:MOST_NAME]}" if model else "")


def spec_decode(definition: CounterDefinition, source: Source, earlier: Source | None = None) -> list[Acceptance]:
    """Acceptance per model, summed over engines, from the four counters; empty if they are missing.

    A model whose counters are 0 or inconsistent is skipped.

    ``earlier``: an earlier scrape of the same server, to subtract. Raises UsageError: a damaged scrape.
    """
    acceptances: list[Acceptance] = []
    for model, counters in totals_by_model(definition, source, earlier).items():
        if counters.keys() - {TOKENS, REQUESTS}:
            with source.skipping():
                acceptances += _acceptances(model, counters, source, definition)
    return acceptances


def totals_by_model(
    definition: CounterDefinition, source: Source, earlier: Source | None = None
) -> dict[str, dict[str, dict[int, Sample]]]:
    """Counters of each model, summed over engines: by `DRAFTS` and the like, and by position. Raises UsageError."""
    names = {definition.stem + suffix: ours for suffix, ours in _COUNTERS.items()}
    names |= {definition.generated: TOKENS, definition.finished: REQUESTS}
    names.pop("", None)
    position = next(name for name, ours in names.items() if ours is POSITIONS)
    models = by_model(source, names, earlier, {position: "position"})
    return {model: {names[name]: counts for name, counts in of_model.items()} for model, of_model in models.items()}


def summed(models: Mapping[str, Mapping[str, Mapping[int, Sample]]], counter: str) -> Sample | None:
    """The sum of a counter over models; None if no model has it."""
    parts = [of_model[counter][0] for of_model in models.values() if counter in of_model]
    if not parts:
        return None
    return Sample(sum(s.value for s in parts), parts[-1].line, sum(s.rounding for s in parts))


def _acceptances(
    model: str, counters: dict[str, dict[int, Sample]], source: Source, definition: CounterDefinition
) -> list[Acceptance]:
    missing = [name for name in (DRAFTS, ACCEPTED) if name not in counters]
    if missing:
        name = next(name for name, ours in _COUNTERS.items() if ours == missing[0])
        raise source.error(source.count, f"the scrape has no {definition.stem}{name}; is it truncated?")
    drafts, accepted, drafted = counters[DRAFTS][0], counters[ACCEPTED][0], counters.get(DRAFTED, {}).get(0)
    if not drafts.value:
        raise source.error(drafts.line, "no drafts were counted; send requests to the server first")
    remarks: list[str] = []
    positions = counters.get(POSITIONS, {})
    total = _check_positions(positions, drafts, accepted, source, definition) if positions else accepted.value
    counted = max(drafts.value, positions[0].value) if positions else drafts.value  # less by rounding only
    steps = None
    if TOKENS in counters and REQUESTS in counters:
        # Each step emits its accepted tokens and one more; a response ends within its last step.
        steps = steps_of(counters[TOKENS][0].value, total, counters[REQUESTS][0].value)
        if steps < counted:
            remarks.append(f"about {counted - steps:.0f} of {total:.0f} accepted tokens lie past the end of a response")
        steps = all_steps(counted, steps)
    if drafts.rounding > _COARSE * drafts.value:
        remarks.append(
            f"the number of drafts, {drafts.value:.0f}, is rounded by up to {drafts.rounding:.0f}; leave more time "
            "between the scrapes"
        )
    at_least = tuple(positions[i].value for i in range(len(positions)))
    tokens = None if drafted is None else drafted.value
    if (
        drafted
        and positions
        and abs(drafted.value - len(positions) * drafts.value) <= drafted.rounding + (len(positions) * drafts.rounding)
    ):
        tokens = len(positions) * counted  # full drafts, within rounding
    item = StepCounts(counted, total, at_least, tokens, steps=steps)
    return acceptances_of([item], source, "prompts", title_of(source, model), remarks=tuple(remarks))


def _check_positions(
    positions: Mapping[int, Sample], drafts: Sample, accepted: Sample, source: Source, definition: CounterDefinition
) -> float:
    """The sum of the accepted tokens by position. Raises UsageError if they contradict the other counters."""
    name = definition.stem + next(name for name, ours in _COUNTERS.items() if ours is POSITIONS)
    for i in range(len(positions)):
        if i not in positions:
            raise source.error(source.count, f"{name} has no position {i}; is the scrape truncated?")
        limit = positions[i - 1].value if i else drafts.value + drafts.rounding
        if positions[i].value > limit:
            raise source.error(
                positions[i].line, f"{name} at position {i} is {positions[i].value:g}, more than {limit:g} before it"
            )
    total = sum(sample.value for sample in positions.values())
    if abs(total - accepted.value) > accepted.rounding:
        raise source.error(
            accepted.line,
            f"{definition.stem}accepted_tokens_total is {accepted.value:g}, but its positions sum to {total:g}; repeat "
            "the scrape",
        )
    return total


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
        column = next((cell for cell in header if cell.startswith("Value")), "")
        series: dict[tuple[str, str], list[tuple[int, str]]] = {}
        for number, row in zip(numbers, rows, strict=True):
            values = dict(zip(header, row, strict=False))
            labels = {key: text for key, text in values.items() if text and key not in ("Time", "__name__", column)}
            if values.get(column):
                series.setdefault((values.get("__name__", ""), _line("", labels, "")), []).append(
                    (number, values[column])
                )
        for (name, labels_text), cells in series.items():
            yield cells[-1][0], f"{name}{labels_text}{_last(source, cells, canonical(name) in counters)}"
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
