"""Results of benchmarks: ``vllm bench serve``, SGLang's, speculators', and those of Spec-Bench and EAGLE."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from crossdraft import MOST_LEVELS
from crossdraft.runs import counted

from ..acceptance import Acceptance
from ..counter_definitions import DEFINITIONS, PREFILL_TOKENS
from ..engine_log import Source
from ..formats import AcceptanceFormat
from ..speeds import NO_DRAFT, PREFILL, add_speed
from ..step_counts import StepCounts, acceptances_of, all_steps, count, each_run, from_rates, steps_of
from .sglang import drafts_of

#: Rounding errors of rates: of percentages and of numbers in JSON, and of shares with two decimals.
_RATE, _SHARE = 5.1e-4, 5.1e-3
_LABELS = {"Acceptance length": "length", "Drafts": "drafts", "Draft tokens": "drafted", "Accepted tokens": "accepted"}
_LABELS |= {  # of vLLM's example of offline speculation, whose rates are shares
    "mean acceptance length": "length",
    "num_drafts": "drafts",
    "num_draft_tokens": "drafted",
    "num_accepted_tokens": "accepted",
    "total_num_output_tokens": "tokens",
    "num_tokens_generated_without_sd": "plain",
}
_LABELS |= {
    "Total generated tokens": "tokens",
    "Successful requests": "requests",
    "Output token throughput (tok/s)": "rate",
    "Mean TPOT (ms)": "tpot",
    "Accept length": "accept",  # of SGLang
}
_KEYS = (
    ("drafts", "spec_decode_num_drafts"),
    ("drafted", "spec_decode_draft_tokens"),
    ("accepted", "spec_decode_accepted_tokens"),
    ("tokens", "total_output_tokens"),
    ("requests", "completed"),
)
_RATES = "spec_decode_per_position_acceptance_rates"
_SPEEDS = (
    ("rate", "output_throughput"),
    ("tpot", "mean_tpot_ms"),
    ("accept", "accept_length"),
    ("length", "spec_decode_acceptance_length"),
    *_KEYS,
)
_FIELD = re.compile(rf"\s*({'|'.join(map(re.escape, _LABELS))}):\s+(\S+)\s*$")
_POSITION = re.compile(r"\s*(?:Position|(acceptance at token)) (\d{1,4}):\s+(\S+)\s*$")
_MEAN = re.compile(r"^\s*(?:Accept length:|avg_spec_accept_length=)\s*(\S+?)\s*$")
_WEIGHTED = re.compile(r"Weighted (?:per-position )?acceptance rates:\s*(?:\[([^\]]*)\])?\s*$", re.IGNORECASE)
_BRACKETS = re.compile(r"\s*\[([^\]]*)\]\s*")
#: Keys of AIPerf's summary, and the rows of its CSV.
_AIPERF = (
    ("tpot", "inter_token_latency"),
    ("rate", "output_token_throughput"),
    ("requests", "request_count"),
    ("each", "output_sequence_length"),
    ("tokens", "total_output_tokens"),
    ("drafts", "total_spec_decode_steps"),
    ("accepted", "total_accepted_draft_tokens"),
    ("drafted", "total_draft_tokens"),
)
_AIPERF_ROWS = {key.replace("_", " ").title(): ours for ours, key in _AIPERF[:5]}
#: Means of drafted, accepted and output tokens of a request, and the number of requests, in trtllm-bench's report.
_TRTLLM = tuple(
    enumerate(
        re.compile(pattern + r"\s*(\S+)\s*$")
        for pattern in (
            r"\[DT\] AVERAGE\s*:",
            r"\[ADT\] AVERAGE\s*:",
            r"Average Output Length \(tokens\):",
            r"Number of requests:",
        )
    )
)


class VllmBench(AcceptanceFormat):
    """``vllm bench serve``: its table and its JSON, from the difference of the server's counters."""

    name = "vllm-bench"
    counters = DEFINITIONS["vllm"]

    def read(self, source: Source, earlier: Source | None = None) -> list[Acceptance]:
        acceptances: list[Acceptance] = []
        tables = _tables(source)
        for line, values, rates in (*tables, *_results(source)):
            with source.skipping():
                acceptances += _run(source, line, values, rates)
        for line, values, rates in tables:
            _add_speed(source, line, values, len(rates))
        for line, fields in source.objects("mean_tpot_ms"):
            with source.skipping():
                numbers = [(ours, key) for ours, key in _SPEEDS if type(fields.get(key)) in (int, float)]
                values = {ours: source.number(str(fields[key]), line, key) for ours, key in numbers}
                rates = fields.get(_RATES)
                _add_speed(source, line, values, len(rates) if isinstance(rates, list) else 0)
        return acceptances


def _add_speed(source: Source, line: int, values: Mapping[str, float], positions: int = 0) -> None:
    """Add the seconds of a step of a run: its time per token after the first, and its tokens a step.

    The mean number of running requests is tokens per second times seconds per token.

    ``positions``: number of positions of a draft; 0 if unknown.
    """
    seconds, rate, tokens = (values.get(key, 0.0) for key in ("tpot", "rate", "tokens"))
    drafts, gamma, flaw = values.get("drafts"), 0.0, ""
    if not seconds or not rate or not tokens or 0 < values.get("accept", 0.0) < 1:
        return
    rows = max(rate * seconds / 1000, 1.0)
    if drafts and "accepted" in values and values.get("drafted"):
        length, gamma = 1 + values["accepted"] / drafts, values["drafted"] / drafts
        steps = steps_of(tokens, values["accepted"], values.get("requests", 0.0))
        flaw = NO_DRAFT if all_steps(drafts, steps) != drafts else ""
    elif length := values.get("accept", 0.0) or values.get("length", 0.0):
        gamma = float(positions or drafts_of(source).get("draft_length", 0) or source.gamma or math.nan)
    else:
        length = 1.0
    flaw = flaw or (PREFILL if rows > 1.05 else "")  # those of other requests
    add_speed(source, line, length, rows, 1000 * rows / seconds, gamma, tokens / (length * rows), flaw=flaw)


def _tables(source: Source) -> list[tuple[int, dict[str, float], list[float]]]:
    """Line, values and rates by position of each table."""
    tables: list[tuple[int, dict[str, float], list[float]]] = []
    for number, line in source.lines(*_LABELS, "Position ", "acceptance at token "):
        with source.skipping():
            if match := _FIELD.search(line):
                name = _LABELS[match[1]]
                if not tables or name in tables[-1][1] or tables[-1][2]:
                    tables.append((number, {}, []))
                tables[-1][1][name] = source.number(match[2], number, match[1])
            elif match := _POSITION.search(line):
                whole = 1 if match[1] else 100
                position, rate = int(match[2]), source.number(match[3], number, f"position {match[2]}", whole) / whole
                if not tables or position < len(tables[-1][2]):
                    tables.append((number, {}, []))
                if position != len(tables[-1][2]):
                    raise source.error(number, f"position {len(tables[-1][2])} is missing before it")
                tables[-1][2].append(rate)
                tables[-1][1]["rounding"] = _SHARE if match[1] else _RATE
    return tables


def _results(source: Source) -> list[tuple[int, dict[str, float], list[float]]]:
    def result(line: int, fields: dict[str, Any]) -> tuple[int, dict[str, float], list[float]] | None:
        length = fields["spec_decode_acceptance_length"]
        if length is None or isinstance(length, dict):  # of AIPerf
            return None
        values = {ours: count(source, line, fields, key) for ours, key in _KEYS if fields.get(key) is not None}
        values["length"] = source.number(str(length), line, "the acceptance length")
        return line, values, list(source.rates(fields, _RATES, line)) if fields.get(_RATES) else []

    return source.read(source.objects("spec_decode_acceptance_length"), result)


def _run(source: Source, line: int, values: Mapping[str, float], rates: list[float]) -> list[Acceptance]:
    """The acceptance of one run. Raises UsageError if its numbers are inconsistent."""
    drafts, accepted, drafted = (values.get(key) for key in ("drafts", "accepted", "drafted"))
    length = values.get("length")
    if drafts is not None and not drafts:
        raise source.error(line, "nothing was drafted in this run")
    error, place = values.get("rounding", _RATE), source.place(line)
    if rates and length and abs(length - 1 - sum(rates)) > 0.006 + len(rates) * error:
        raise source.error(line, f"the rates sum to {sum(rates):.4f}, but the length is {length:g}")
    if drafts is None or accepted is None:
        known = Acceptance(tuple(rates), place, every_step=False) if rates else None
        return [known] if known else [Acceptance((), place, length=length, every_step=False)] if length else []
    item = StepCounts(drafts, accepted, drafted=drafted, line=line)
    if rates:
        item = from_rates(source, line, accepted, drafted, rates, drafts=drafts, error=error)
    if "plain" in values:
        item = replace(item, steps=drafts + values["plain"])
    elif "tokens" in values:
        steps = steps_of(values["tokens"], accepted, values.get("requests", 0.0))
        item = replace(item, steps=all_steps(drafts, steps))
    return acceptances_of([item], source, "runs")


class SglangBench(AcceptanceFormat):
    """SGLang's ``bench_serving``: its table and its JSONL, from the server's mean since its start."""

    name = "sglang-bench"
    definition = "tokens per step, bonus included, the mean since the start of the server"

    def read(self, source: Source, earlier: Source | None = None) -> list[Acceptance]:
        lines = source.lines("Accept length:", "avg_spec_accept_length=")
        lengths = [(number, match[1]) for number, line in lines if (match := _MEAN.match(line))]
        for key in ("accept_length", "avg_spec_accept_length"):
            for line, fields in source.objects(key):
                if type(fields[key]) in (int, float) and fields[key]:
                    lengths.append((line, str(fields[key])))

        def mean(line: int, text: str) -> Acceptance:
            length = source.number(text, line, "the accept length", MOST_LEVELS + 1)
            if length < 1:
                raise source.error(line, f"an accept length of {length:g} does not include the bonus token")
            return Acceptance((), source.place(line), length=length, **drafts_of(source))

        return source.read(lengths, mean)


class AiPerf(AcceptanceFormat):
    """``profile_export_aiperf.json``, and records of ``profile_export.jsonl`` that have metrics only."""

    name = "aiperf"
    definition = "steps with a draft, of all requests or of each"

    def read(self, source: Source, earlier: Source | None = None) -> list[Acceptance]:
        for line, fields in source.objects("inter_token_latency"):
            with source.skipping():
                means = {key: value.get("avg") for key, value in fields.items() if isinstance(value, dict)}
                unit = fields["inter_token_latency"].get("unit", "ms") if "inter_token_latency" in means else "ms"
                if means.get("inter_token_latency") is not None and unit != "ms":
                    raise source.error(line, "inter_token_latency is not in ms")
                keys = [(ours, key) for ours, key in _AIPERF if type(means.get(key)) in (int, float)]
                values = {ours: source.number(str(means[key]), line, key) for ours, key in keys}
                _add_speed(source, line, _with_tokens(values))  # of a run: a request has none
        _add_table(source)
        keys = ("total_spec_decode_steps", "total_accepted_draft_tokens", "total_draft_tokens")
        runs = ((source, *item, keys, "avg") for item in source.objects(keys[0]))
        acceptances = each_run(source, runs, _metrics)
        if '"num_spec_steps"' in source.text:  # the statistics of the response are read
            return acceptances
        keys = ("spec_decode_steps", "spec_decode_accepted_draft_tokens", "spec_decode_draft_tokens")
        records = ((source, 0, fields, keys, "value") for _, fields in source.objects(keys[0]))
        counts = source.read((record for record in records if "value" in (record[2][keys[0]] or ())), _metrics)
        return [*acceptances, *acceptances_of(counts, source, "responses")]


def _add_table(source: Source) -> None:
    """Add the speed of AIPerf's and GenAI-Perf's CSV, of which the last columns of a row are left out."""
    first = next((line for _, line in source.raw_lines() if line.strip()), "")
    if not first.startswith("Metric,"):
        return
    values, at = dict[str, float](), 0
    for number, line in source.raw_lines(*_AIPERF_ROWS):
        with source.skipping():
            name, mean, *_ = [*next(csv.reader([line])), ""]
            if ours := _AIPERF_ROWS.get(name.partition(" (")[0]):
                values[ours] = source.number(mean, number, name)
                at = number if ours == "tpot" else at
    if next(source.raw_lines("Spec Decode"), None):
        source.skip(at, "the drafts of the run are counted in profile_export_aiperf.json; give that file")
        return
    _add_speed(source, at, _with_tokens(values), 0)


def _with_tokens(values: dict[str, float]) -> dict[str, float]:
    """The values with all generated tokens, which follow from those of a request."""
    if "tokens" not in values and "each" in values:
        values["tokens"] = values["each"] * values.get("requests", 0.0)
    return values


def _metrics(source: Source, line: int, fields: Mapping[str, Any], keys: Sequence[str], key: str) -> StepCounts:
    """Steps, accepted and drafted tokens. Raises UsageError."""
    values = []
    for name in keys:
        metric = fields.get(name)
        value = metric.get(key) if isinstance(metric, dict) else None
        if type(value) not in (int, float):
            raise source.error(line, f"{name} has no {key}, which the acceptance follows from")
        values.append(source.number(str(value), line, name))
    steps, accepted, drafted = values
    return StepCounts(steps, accepted, drafted=drafted, line=line).checked(source, line)


class TrtllmBench(AcceptanceFormat):
    """``trtllm-bench``: the JSON of ``--report_json`` and the text of its report.

    Its means are over requests. It counts the prefill as a step with a draft.
    """

    name = "trtllm-bench"
    definition = "steps after the prefill, each as if it had a full draft"

    def read(self, source: Source, earlier: Source | None = None) -> list[Acceptance]:
        reports = []
        for line, fields in source.objects("decoding_stats"):
            stats, request = fields["decoding_stats"], fields.get("request_info")
            if isinstance(stats, dict) and isinstance(request, dict):
                means = [stats.get(f"num_{name}_tokens_percentiles") for name in ("draft", "accepted_draft")]
                values = [mean.get("average") if isinstance(mean, dict) else None for mean in means]
                values += [request.get(f"{name}") for name in ("avg_output_length", "num_requests")]
                reports.append((line, values))
        lines = source.lines("AVERAGE", "Average Output Length", "Number of requests:")
        matches = [(n, key, m[1]) for n, text in lines for key, p in _TRTLLM if (m := p.search(text))]
        printed = {key: (line, text) for line, key, text in matches}
        if len(printed) == len(_TRTLLM):
            reports.append((printed[0][0], [printed[key][1] for key, _ in _TRTLLM]))

        def counts(line: int, values: Sequence[Any]) -> StepCounts:
            numbers = (source.number(str(value), line, "a mean of the report") for value in values)
            drafted, accepted, tokens, requests = numbers
            steps = steps_of(tokens, accepted)
            if steps <= 0 or not drafted or not requests:
                raise source.error(line, "nothing was drafted in this run")
            gamma = max(round(drafted / (steps + PREFILL_TOKENS)), 1)
            return StepCounts(None, requests * accepted, gamma=gamma, steps=requests * steps, line=line)

        return each_run(source, reports, counts)


class Speculators(AcceptanceFormat):
    """``acceptance_analysis.txt`` of speculators, which averages the windows of vLLM's log."""

    name = "speculators"
    counters = DEFINITIONS["vllm"]

    def read(self, source: Source, earlier: Source | None = None) -> list[Acceptance]:
        acceptances, lines = [], dict[int, str]()
        for number, line in source.lines("acceptance rates:", "Acceptance rates:", "Acceptance Rates:"):
            if not (match := _WEIGHTED.search(line)):
                continue
            lines = lines or dict(source.lines())
            with source.skipping():
                # NumPy breaks long lists into lines.
                text = " ".join(lines.get(number + i, "") for i in range(1, 9)) if match[1] is None else f"[{match[1]}]"
                brackets = _BRACKETS.match(text)
                if brackets is None:
                    raise source.error(number, "the rates are missing; are the lines after it complete?")
                words = brackets[1].replace(",", " ").split()
                rates = [source.number(word, number, "an acceptance rate", 1.0) for word in words]
                acceptances.append(Acceptance(tuple(rates), source.place(number)))
        return acceptances


class SpecBench(AcceptanceFormat):
    """Answers of Spec-Bench and EAGLE: tokens of every step, or numbers of steps and tokens of every turn."""

    name = "spec-bench"
    definition = "tokens per step, bonus included, of all steps of a response"

    def read(self, source: Source, earlier: Source | None = None) -> list[Acceptance]:
        def steps(line: int, fields: dict[str, Any]) -> StepCounts:
            lengths = fields["accept_lengths"]
            if not isinstance(lengths, list) or not all(type(n) is int and n >= 0 for n in lengths):
                raise source.error(line, "accept_lengths is not a list of numbers of tokens")
            if reason := MOST_LEVELS.violation(max(lengths, default=0)):
                raise source.error(line, f"a step of {max(lengths)} tokens is too long; {reason}")
            taus = [max(n - 1, 0) for n in lengths]
            at_least = tuple(float(sum(tau >= i for tau in taus)) for i in range(1, max(taus, default=0) + 1))
            return StepCounts(len(taus), sum(taus), at_least, name=source.row_id(line), steps=len(taus))

        counts = source.read(source.objects("accept_lengths"), steps)
        if counts:
            longest = max(1, *(len(item.at_least) for item in counts))
            counts = [replace(item, at_least=item.at_least or (0.0,), gamma=longest) for item in counts]
            remark = f"the draft length is not recorded; no step accepted more than {counted(longest, 'token')}"
            reason = "its drafts may be trees, and their length is not recorded"
            return acceptances_of(counts, source, "responses", remarks=(remark,), refusal=reason)
        turns = ((source, *item, key) for key in ("decoding_steps", "idxs") for item in source.objects(key))
        return acceptances_of(source.read(turns, _turns), source, "responses")


def _turns(source: Source, line: int, fields: Mapping[str, Any], key: str) -> StepCounts | None:
    """Steps and tokens of all turns; EAGLE's ``idxs`` are the indices of the last steps."""
    steps, tokens = fields[key], fields.get("new_tokens")
    numbers = [steps, tokens]
    if not all(isinstance(n, list) and all(type(i) is int and i >= 0 for i in n) for n in numbers):
        raise source.error(line, f"{key} and new_tokens are not two lists of counts")
    assert isinstance(tokens, list)
    if len(steps) != len(tokens):
        raise source.error(line, f"{key} has {len(steps)} turns, new_tokens has {len(tokens)}")
    total = sum(steps) + (len(steps) if key == "idxs" else 0)
    if sum(tokens) < total:
        raise source.error(line, f"{sum(tokens)} tokens in {total} steps are inconsistent")
    return StepCounts(None, sum(tokens) - total, name=source.row_id(line), steps=total) if total else None


_COLUMNS = ("batch_size", "gamma", "tokens_per_s", "acceptance_length")


class SpeedTable(AcceptanceFormat):
    """CSV of speeds by batch size and draft length, and of acceptance lengths."""

    name = "speeds"
    definition = "tokens per step, bonus included, at each draft length"

    def read(self, source: Source, earlier: Source | None = None) -> list[Acceptance]:
        rows = _rows(source)
        lengths: dict[int, tuple[int, float]] = {0: (0, 1.0)}
        acceptances: list[Acceptance] = []
        for line, row in rows:
            with source.skipping():
                gamma = source.number(row.get("gamma", ""), line, "gamma", 1024)
                if not gamma.is_integer():
                    raise source.error(line, f"gamma is {gamma:g}, which is not a number of tokens")
                if gamma and (text := row.get("acceptance_length", "")):
                    length = source.number(text, line, "acceptance_length")
                    if not 1 <= length <= gamma + 1:
                        raise source.error(line, f"{length:g} tokens a step are not possible with {gamma:g} drafted")
                    if int(gamma) not in lengths:
                        lengths[int(gamma)] = line, length
                        item = StepCounts(None, length - 1, gamma=int(gamma), steps=1.0, line=line)
                        acceptances += acceptances_of([item], source, "rows", exact=False)
                if not (text := row.get("tokens_per_s", "")):
                    continue
                rate = source.number(text, line, "tokens_per_s")
                batch_size = source.number(row.get("batch_size", ""), line, "batch_size")
                own = row.get("acceptance_length", "")
                if int(gamma) not in lengths:
                    raise source.error(line, f"acceptance_length is missing for drafts of {gamma:g} tokens")
                length = float(own) if own and gamma else lengths[int(gamma)][1]
                add_speed(source, line, length, batch_size, rate, gamma, 1.0)
        return acceptances


def _rows(source: Source) -> Sequence[tuple[int, dict[str, str]]]:
    """The rows of a table with a column for the draft length and one for a speed or a length."""
    filled = ((number, line) for number, line in source.raw_lines() if line.strip() and not line.startswith("#"))
    first, text = next(filled, (0, ""))
    header = [cell.strip().lower() for cell in text.split(",")]
    if "gamma" not in header or not {"tokens_per_s", "acceptance_length"} & set(header):
        return []
    if unknown := set(header) - set(_COLUMNS):
        raise source.error(first, f"unknown column {sorted(unknown)[0]!r}; the columns are {', '.join(_COLUMNS)}")
    lines = list(filled)
    cells = csv.reader([line for _, line in lines])
    rows, known = [], dict[tuple[str, str], int]()
    for (n, _), values in zip(lines, cells, strict=False):
        row = dict(zip(header, map(str.strip, values), strict=False))
        if (line := known.setdefault((row.get("batch_size", ""), row.get("gamma", "")), n)) != n:
            raise source.error(n, f"the batch size and gamma are those of line {line}; give one row of them")
        rows.append((n, row))
    return rows
