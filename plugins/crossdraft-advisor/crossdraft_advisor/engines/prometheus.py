"""Counters of a Prometheus scrape, by exact name, with line numbers.

vLLM and llama.cpp have the same four counters with different prefixes::

    <prefix>spec_decode_num_{drafts,draft_tokens,accepted_tokens}_total
    <prefix>spec_decode_num_accepted_tokens_per_pos_total{position="0"}

The last counts drafts whose token at that position was accepted, so its rates are marginal. Whether steps without a
draft and tokens past the end of a response count is part of the engine's `CounterDefinition`; if it counts generated
tokens and finished requests, too, the number of both follows. llama.cpp writes numbers of 10^6 and more, except those
by position, with six digits (``1.23457e+06``).

Ray and OpenTelemetry write ``ray_vllm_spec_decode_...`` and leave ``_total`` out; see `exported_series` for counters
in JSON and CSV.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from crossdraft.framework.errors import first_line, printable
from crossdraft.framework.util.limits import MOST_NAME

from .acceptance import Acceptance
from .counter_definitions import PREFILL_TOKENS, CounterDefinition
from .engine_log import Source
from .exported_series import canonical, exported_series

#: Share of steps without a draft that is explained by requests in flight.
_FEW_IDLE = 0.02
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
#: A number of events that is not cut off, as Python's client writes it.
_COMPLETE = re.compile(r"\s\d+\.0$")
#: A value that may be rounded to six digits.
_ROUNDED = re.compile(r"\s\d(\.\d{1,5})?e\+\d+(\s|$)")
#: Rounding error of the number of drafts, relative to it, that is worth a remark.
_COARSE = 0.001
#: A series: its name and labels, sorted.
Key = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True)
class Sample:
    """The value of a series, its line number, and its largest rounding error."""

    value: float
    line: int
    rounding: float = 0.0


def samples(source: Source, names: Collection[str]) -> dict[Key, Sample]:
    """The series with exactly one of ``names``, as any exporter writes it (a counter's ``_created`` is another name).

    A gauge that is not a number is skipped.

    Raises:
        UsageError: a truncated line, a duplicate series, a counter that is not a number, infinite or negative.
    """
    from prometheus_client.parser import text_string_to_metric_families

    known, series = {canonical(name): name for name in names if name}, dict[Key, Sample]()
    for number, line in (*source.raw_lines(), *exported_series(source, [name for name in names if name])):
        name = _NAME.match(line)
        if name is None or (exact := known.get(canonical(name[0]))) is None:
            continue
        try:
            ((sample,),) = [family.samples for family in text_string_to_metric_families(line)]
        except Exception as error:  # of its parser: ValueError, IndexError
            raise source.error(
                number, f"the line is not valid in a Prometheus scrape ({first_line(error)}); repeat the scrape"
            ) from None
        if math.isnan(sample.value) and not exact.endswith("_total"):
            source.skip(number, f"{exact} is not a number: nothing has been measured")
            continue
        if not 0 <= sample.value < math.inf:
            raise source.error(number, f"{exact} is {sample.value:g}, which is not a count")
        key = exact, tuple(sorted(sample.labels.items()))
        if key in series:
            raise source.error(
                number,
                f"{exact} is a duplicate of line {series[key].line}; the file has several scrapes: give the last one, "
                "and the first as --since",
            )
        series[key] = Sample(sample.value, number, 5e-6 * sample.value if _ROUNDED.search(line) else 0.0)
        if not _COMPLETE.search(line) and source.text.endswith(line):  # without a newline
            raise source.error(number, "the scrape is truncated in this line; repeat it")
    return series


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
    zero = Sample(0.0, 0)
    return {
        key: Sample(s.value - (old := earlier.get(key, zero)).value, s.line, s.rounding + old.rounding)
        for key, s in later.items()
    }


def by_model(
    source: Source, names: Collection[str], earlier: Source | None, labels: Mapping[str, str]
) -> dict[str, dict[str, dict[int, Sample]]]:
    """Sums over engines and ranks: model, counter, position.

    Args:
        earlier: an earlier scrape of the same server, to subtract.
        labels: the label of a counter that has the position; those of others are summed at position 0.

    Raises:
        UsageError: a damaged scrape.
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

    Args:
        earlier: an earlier scrape of the same server, to subtract.

    Raises:
        UsageError: a damaged scrape.
    """
    stem = f"{definition.prefix}spec_decode_num_"
    drafts_name, tokens_name, accepted_name, position_name = (
        f"{stem}{suffix}_total" for suffix in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
    )
    names = {drafts_name, tokens_name, accepted_name, position_name}
    totals = {definition.generated, definition.finished} - {""}
    models = by_model(source, names | totals, earlier, {position_name: "position"})
    if not any(counters.keys() & names for counters in models.values()):
        return []
    acceptances, counter_names = [], (drafts_name, tokens_name, accepted_name, position_name)
    for model, counters in models.items():
        if counters.keys() & names:
            with source.skipping():
                acceptances.append(_acceptance(model, counters, source, definition, *counter_names))
    return acceptances


def drafted_tokens(definition: CounterDefinition, source: Source) -> Sample | None:
    """Drafted tokens of all models and engines; None without that counter. Raises UsageError, see `samples`."""
    series = list(samples(source, {f"{definition.prefix}spec_decode_num_draft_tokens_total"}).values())
    if not series:
        return None
    return Sample(sum(s.value for s in series), series[-1].line, sum(s.rounding for s in series))


def _acceptance(
    model: str,
    counters: dict[str, dict[int, Sample]],
    source: Source,
    definition: CounterDefinition,
    drafts_name: str,
    tokens_name: str,
    accepted_name: str,
    position_name: str,
) -> Acceptance:
    missing = [name for name in (drafts_name, accepted_name) if name not in counters]
    if missing:
        raise source.error(source.count, f"the scrape has no {missing[0]}; is it truncated?")
    drafts, accepted = counters[drafts_name][0], counters[accepted_name][0]
    if not drafts.value:
        raise source.error(drafts.line, "no drafts were counted; send requests to the server first")
    title = title_of(source, model)
    positions = counters.get(position_name, {})
    if not positions:
        length = 1 + accepted.value / drafts.value
        return Acceptance((), title, drafts=drafts.value, rows=((drafts.value, accepted.value),), length=length)
    for i in range(len(positions)):
        if i not in positions:
            raise source.error(source.count, f"{position_name} has no position {i}; is the scrape truncated?")
        limit = positions[i - 1].value if i else drafts.value + drafts.rounding
        if positions[i].value > limit:
            raise source.error(
                positions[i].line,
                f"{position_name} at position {i} is {positions[i].value:g}, more than {limit:g} before it",
            )
    total = sum(sample.value for sample in positions.values())
    if abs(total - accepted.value) > accepted.rounding:
        raise source.error(
            accepted.line,
            f"{accepted_name} is {accepted.value:g}, but its positions sum to {total:g}; repeat the scrape",
        )
    counted = max(drafts.value, positions[0].value)  # less by rounding only
    steps, remarks = _steps(counted, total, counters, definition)
    row = (steps, *(positions[i].value for i in range(len(positions))))
    drafted = counters.get(tokens_name, {}).get(0)
    if drafted and drafted.value + drafted.rounding < (drafts.value - drafts.rounding) * len(positions):
        remarks = (*remarks, short_drafts(drafted.value / drafts.value, len(positions)))
    if drafts.rounding > _COARSE * drafts.value:
        remarks = (
            *remarks,
            f"the number of drafts, {drafts.value:.0f}, is rounded by up to {drafts.rounding:.0f}; leave more time "
            "between the scrapes",
        )
    return Acceptance.from_rows([row], title, idle=1 - counted / steps, remarks=remarks)


def _steps(
    drafts: float, accepted: float, counters: dict[str, dict[int, Sample]], definition: CounterDefinition
) -> tuple[float, tuple[str, ...]]:
    """All steps after the prefill, with and without a draft, and remarks on the difference to the counted drafts."""
    if not (definition.generated in counters and definition.finished in counters):
        return drafts, ()
    generated, finished = counters[definition.generated][0].value, counters[definition.finished][0].value
    # Each step emits its accepted tokens and one more; a response ends within its last step.
    idle = generated - PREFILL_TOKENS * finished - accepted - drafts
    if idle > _FEW_IDLE * drafts:
        return drafts + idle, (f"{idle:.0f} of {drafts + idle:.0f} steps had no draft",)
    if idle < 0:
        return drafts, (f"about {-idle:.0f} of {accepted:.0f} accepted tokens lie past the end of a response",)
    return drafts, ()


def short_drafts(mean: float, gamma: int) -> str:
    """The remark on drafts shorter than the longest."""
    return f"drafts have {mean:.2f} of {gamma} tokens on average; missing tokens count as rejected"
