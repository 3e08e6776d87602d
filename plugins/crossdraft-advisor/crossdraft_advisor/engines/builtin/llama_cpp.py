"""llama.cpp server: counters and log; ``--spec-type``, ``--model-draft``, ``--spec-draft-*``.

https://github.com/ggml-org/llama.cpp: docs/speculative.md, common/arg.cpp, tools/server.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import ClassVar

from ..acceptance import Acceptance
from ..counter_definitions import DEFINITIONS, PREFILL_TOKENS
from ..engine import Engine, Schedule, Settings
from ..engine_log import Source
from ..formats import AcceptanceFormat
from ..log_windows import Window, from_windows
from ..prometheus import spec_decode
from ..settings import length_remarks, needs_method, needs_model, ngram_sizes, only_point_masses, shell
from ..step_counts import StepCounts, acceptances_of, count, full_drafts

_MARK = re.compile(r"draft acceptance(?: rate)? = ")
_LINE = re.compile(
    r"draft acceptance(?: rate)? = \S+ \(\s*(\d{1,15}) accepted /\s*(\d{1,15}) generated\)"
    r"(?:, mean (?:acceptance length|len) =\s*([^\s,]+))?"
    r"(?:, acceptance rate per position = \(([^()]*)\))?\s*$"
)
#: Later versions log the rates on a separate line.
_RATES = re.compile(r"acc per pos = \(([^()]*)\)\s*")
#: Generated tokens of a request, logged before its draft acceptance.
_EVALUATED = re.compile(r"(?<!prompt )eval time =\s*\S+ ms /\s*(\d{1,15}) tokens")
#: Counters of a drafter since the start of the server.
_STATISTICS = re.compile(r"statistics\s+([\w-]{1,40}): (#calls.*)")
_COUNTER = re.compile(r"#(gen drafts|gen tokens|acc tokens) =\s*(\d{1,15})\b")
_POSITIONS = re.compile(r"#acc rate/pos = \(([^()]*)\)")
#: Summary of llama.cpp's examples.
_EXAMPLE_KEYS = ("n_draft", "n_predict", "n_drafted", "n_accept")
_EXAMPLE = re.compile(rf"^(?:\S+ I )?\s*({'|'.join(_EXAMPLE_KEYS)})\s+= (\d{{1,15}})\s*$")


class LlamaCpp(Engine):
    name = "llama.cpp"
    read_from = "llama.cpp b10434"
    counters = DEFINITIONS["llama.cpp"]
    methods: ClassVar[Mapping[str, str]] = {
        "draft-model": "draft-simple",
        "prompt-lookup": "ngram-simple",
        "ngram-simple": "ngram-simple",  # of plugins/crossdraft-llamacpp
        "eagle3": "draft-eagle3",
        "mtp": "draft-mtp",
        "dflash": "draft-dflash",
        "dspark": "draft-dspark",
    }

    def cannot(self, acceptance: Acceptance) -> str | None:
        return super().cannot(acceptance) or only_point_masses(acceptance, self.name)

    def export(self, schedule: Schedule) -> Settings:
        if not schedule.gamma:
            return Settings(shell(["--spec-type", "none"]))
        acceptance = schedule.acceptance
        method = needs_method(self, acceptance)
        sizes = ngram_sizes(acceptance)
        if acceptance.drafter == "ngram-simple":
            sizes = dict.fromkeys(sizes, int(acceptance.options.get("n", 3)))
        arguments = ["--spec-type", method]
        if method == "ngram-simple":
            # Its draft length is the size of the m-gram; the lookup n-gram has a fixed size.
            arguments += ["--spec-ngram-simple-size-n", str(sizes["max"])]
            arguments += ["--spec-ngram-simple-size-m", str(schedule.gamma)]
        elif acceptance.model or method != "draft-mtp":
            arguments += ["--model-draft", needs_model(self, acceptance)]
        arguments += ["--spec-draft-n-max", str(schedule.gamma)]
        if method != "ngram-simple":
            arguments += ["--spec-draft-p-min", "0"]  # full-length drafts, as measured
        remarks = list(length_remarks(schedule))
        if method == "ngram-simple" and sizes["min"] != sizes["max"]:
            remarks.append(
                f"it looks up suffixes of {sizes['max']} tokens only, not of {sizes['min']} to {sizes['max']}"
            )
        if method == "ngram-simple" and schedule.gamma < sizes["max"]:
            remarks.append(
                f"it drops drafts that are shorter than the looked-up suffix: with {schedule.gamma} tokens after "
                f"{sizes['max']} it never drafts; use max_ngram: {schedule.gamma} or less"
            )
        return Settings(shell(arguments), tuple(remarks))


class LlamaCppFormat(AcceptanceFormat):
    """Counters of llama.cpp, lines of its log, and timings of its responses."""

    name = "llama.cpp"
    counters = DEFINITIONS["llama.cpp"]
    subtracts = True

    def read(self, source: Source, earlier: Source | None = None) -> list[Acceptance]:
        acceptances = spec_decode(DEFINITIONS["llama.cpp"], source, earlier)
        if earlier is not None:
            return acceptances
        statistics = _statistics(source)
        if len(statistics) > 1:  # the lines of requests are of all drafters
            return [*acceptances, *statistics]
        requests = _requests(source)
        return [*acceptances, *(requests or statistics), *_timings(source), *_examples(source)]


def _requests(source: Source) -> list[Acceptance]:
    """Lines of finished requests, with rates by position, a mean length or neither."""
    windows, counts, evaluated, first, last = [], [], 0.0, 0, 0
    lines = [*source.lines(), (0, "")]
    for (number, line), (_, after) in pairwise(lines):
        if match := _EVALUATED.search(line):
            evaluated = float(match[1])
        if not (mark := _MARK.search(line)):
            continue
        with source.skipping():
            match, by_position = _LINE.match(line, mark.start()), _RATES.search(after)
            if match is None:
                raise source.error(number, "the draft acceptance line is truncated or of an unsupported version")
            accepted, drafted = float(match[1]), float(match[2])
            text = match[4] if match[4] is not None else by_position[1] if by_position else None
            mean = source.number(match[3], number, "the mean acceptance length") if match[3] else None
            if text is not None and mean is not None:
                rates = tuple(source.number(rate, number, "an acceptance rate", 1.0) for rate in text.split(", "))
                windows.append(Window(number, accepted, drafted, rates, mean))
                continue
            if mean is not None and mean > 1:
                counts.append(_with_mean(accepted, drafted, mean))
            elif evaluated > accepted:  # a step emits its accepted tokens and one more; the first is the prefill's
                counts.append(StepCounts(evaluated - PREFILL_TOKENS - accepted, accepted))
            else:
                counts.append(full_drafts(source, number, accepted, drafted))
            first, last = first or number, number
    remark = "without rates by position; log with -lv 4, or use /metrics"
    place = f"{source.name}:{first}" + (f"-{last}" if last > first else "")
    return [
        *from_windows(windows, source, "responses"),
        *acceptances_of(counts, place, "responses", remarks=(remark,)),
    ]


def _with_mean(accepted: float, drafted: float, mean: float) -> StepCounts:
    """Counts of a request whose mean length has two decimals: with full drafts, if it is as if they were."""
    fewest, greatest = accepted / (mean - 0.995), accepted / max(mean - 1.005, 1e-9)
    gamma = math.floor(drafted / fewest + 1e-9)
    full = gamma > 0 and drafted / gamma <= greatest * (1 + 1e-9)
    return StepCounts(drafted / gamma if full else accepted / (mean - 1), accepted, drafted=drafted)


def _statistics(source: Source) -> list[Acceptance]:
    """The last counters of each drafter that drafted; those of an earlier start are added."""
    counters: dict[str, list[tuple[int, dict[str, float], str]]] = {}
    for number, line in source.lines():
        if not (match := _STATISTICS.search(line)):
            continue
        with source.skipping():
            values = {key: source.number(text, number, f"#{key}") for key, text in _COUNTER.findall(match[2])}
            if not {"gen drafts", "gen tokens", "acc tokens"} <= values.keys():
                raise source.error(number, "the statistics line is truncated or of an unsupported version")
            starts = counters.setdefault(match[1].replace("_", "-"), [])
            if starts and values["gen drafts"] >= starts[-1][1]["gen drafts"]:
                starts.pop()
            by_position = _POSITIONS.search(match[2])
            starts.append((number, values, by_position[1] if by_position else ""))
    acceptances: list[Acceptance] = []
    for name, starts in counters.items():
        counts, place = [], source.place(starts[-1][0])
        for number, values, text in starts:
            drafts, drafted, accepted = (values[key] for key in ("gen drafts", "gen tokens", "acc tokens"))
            with source.skipping():
                rates = [source.number(rate, number, "an acceptance rate", 1.0) for rate in text.split(", ") if rate]
                if accepted > drafted:
                    raise source.error(number, f"{accepted:g} accepted of {drafted:g} drafted tokens are inconsistent")
                scale = accepted / (drafts * sum(rates)) if sum(rates) and drafts else 1.0
                at_least = tuple(min(drafts * rate * scale, drafts) for rate in rates)
                counts.append(StepCounts(drafts, accepted, at_least, drafted))
        drafter = LlamaCpp.ours(name) or LlamaCpp.ours(f"{name}-simple") or name
        acceptances += acceptances_of(counts, f"{place}, {name}", "runs", drafter=drafter)
    if len(acceptances) > 1:
        names = ", ".join(acceptance.drafter for acceptance in acceptances)
        remark = f"the server has several drafters, {names}, each of which drafts where those before it do not"
        acceptances = [replace(acceptance, remarks=(*acceptance.remarks, remark)) for acceptance in acceptances]
    return acceptances


def _examples(source: Source) -> list[Acceptance]:
    """Summaries of ``llama-speculative`` and the like, whose steps emit one token more than accepted."""
    runs: list[tuple[int, dict[str, float]]] = []
    for number, line in source.lines():
        if match := _EXAMPLE.search(line):
            if not runs or match[1] in runs[-1][1]:
                runs.append((number, {}))
            runs[-1][1][match[1]] = float(match[2])
    acceptances: list[Acceptance] = []
    for number, values in runs:
        if "n_drafted" not in values:
            continue
        with source.skipping():
            if len(values) < len(_EXAMPLE_KEYS):
                raise source.error(number, "the summary of a run is truncated")
            gamma, tokens, drafted, accepted = (values[key] for key in _EXAMPLE_KEYS)
            if accepted > drafted or tokens <= accepted:
                raise source.error(number, f"{accepted:g} accepted of {drafted:g} drafted tokens are inconsistent")
            item = StepCounts(tokens - accepted, accepted, drafted=drafted, gamma=int(gamma))
            acceptances += acceptances_of([item], source.place(number), "runs")
    return acceptances


def _timings(source: Source) -> list[Acceptance]:
    """Timings of responses: all steps after the prefill, with and without a draft."""
    counts = []
    for line, fields in source.responses("draft_n_accepted"):
        with source.skipping():
            tokens, drafted, accepted = (
                count(source, line, fields, key) for key in ("predicted_n", "draft_n", "draft_n_accepted")
            )
            steps = tokens - PREFILL_TOKENS - accepted
            if accepted > drafted or (drafted and steps < 1):
                raise source.error(line, f"{accepted:g} accepted of {drafted:g} drafted tokens in {tokens:g} tokens")
            if drafted:
                counts.append(StepCounts(steps, accepted, name=source.row_id(line)))
    return acceptances_of(counts, source.name, "responses")
