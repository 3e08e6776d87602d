"""vLLM: log lines, counters and per-request metrics; ``--speculative-config``.

https://docs.vllm.ai: features/speculative_decoding; vllm/v1/spec_decode/metrics.py, vllm/config/speculative.py.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from ..acceptance import WINDOWS, Acceptance
from ..counter_definitions import DEFINITIONS, PREFILL_TOKENS
from ..engine import Engine, Schedule, Settings, match_remarks, ngram_sizes, only_point_masses, shell
from ..engine_log import Source
from ..formats import AcceptanceFormat
from ..prometheus import ACCEPTED, DRAFTED, DRAFTS, REQUESTS, TOKENS, spec_decode, totals_by_model
from ..speeds import NO_DRAFT, Drafting, add_scraped, add_speed, flaw_of
from ..step_counts import StepCounts, acceptances_of, all_steps, from_rates, full_drafts, steps_of

#: Methods that model runner V1 serves on every platform; they draft greedily, and block verification is ignored.
_V1_METHODS = ("medusa",)
_MARK, _FIRST = "SpecDecoding metrics: ", "Speculative metrics: "
_MARKS = (_FIRST, "generation throughput: ", '"POST /')  # texts of the other lines that are read
#: Required fields of a log line; the last one shows that it is not truncated.
_FIELDS = {
    "mean": re.compile(r"Mean acceptance length: (\S+?),"),
    "accepted": re.compile(r"(?<!Avg )Accepted: (\S+) tokens"),
    "drafted": re.compile(r"Drafted: (\S+) tokens"),
    "rates": re.compile(r"Per-position acceptance rate: ([^\s,\"\\]+(?:,\s*[^A-Z\s,\"\\]+)*)"),
    "end": re.compile(r"raft acceptance rate: (\S+?)%"),
}


_AVERAGE_ERROR = 0.0501  # rounding error of the average rate in per cent, which has one decimal
#: A window of the first versions of V1 (0.8).
_WITHOUT_RATES = re.compile(
    r"(?:SpecDecoding metrics: Draft acceptance rate: [\d.]+%, Accepted:|"
    r"Speculative metrics: Draft acceptance rate: [\d.]+, Number of accepted tokens:) (\d{1,15})(?: tokens)?, "
    r"(?:Drafted|Number of draft tokens): (\d{1,15})(?: tokens)?,?\s*$"
)
_IDLE = re.compile(r"Drafted: 0 tokens")  # a window without drafts, whose rates are not numbers
#: The throughput of an engine, on the line before that of its drafts, and one of them by the second.
_GENERATED = re.compile(
    r"(?:Engine (\d{1,6}): |(\d{1,6}) Engines Aggregated: )?(?:Avg prompt throughput: (\d{1,12}(?:\.\d{1,9})?) "
    r"tokens/s, )?Avg generation throughput: (\d{1,12}(?:\.\d{1,9})?) tokens/s"
)
_RUNNING = re.compile(r"Running: (\d{1,9}) reqs")
#: The settings of a server that drafts.
_DRAFTS = re.compile(r"speculative_config[\"']?[=:](?!\s*(?:None|null))")
_DRAFTED_PER_SECOND = re.compile(r"Drafted throughput: (\S+) tokens/s")
#: The time of day, the usual seconds between two lines of statistics, and a finished request.
_CLOCK = re.compile(r"\b([01]\d|2[0-3]):([0-5]\d):([0-5]\d)\b")
_INTERVAL = 10.0
_REQUEST = re.compile(r'"POST /\S*(?:completions|responses|messages|generate) HTTP/[\d.]+" 200')


class Vllm(Engine):
    name = "vllm"
    verifiers: ClassVar[tuple[str, ...]] = (*Engine.verifiers, "block")
    read_from = "vLLM main, commit 002e77c1f0ef"
    counters = DEFINITIONS["vllm"]
    methods: ClassVar[Mapping[str, str]] = {
        "draft-model": "draft_model",
        "prompt-lookup": "ngram",
        "eagle": "eagle",
        "eagle3": "eagle3",
        "medusa": "medusa",
        "mtp": "mtp",
        "dflash": "dflash",
        "dspark": "dspark",
    }

    def cannot(self, acceptance: Acceptance) -> str | None:
        reason = super().cannot(acceptance)
        if reason is None and self.methods.get(acceptance.drafter) in _V1_METHODS:
            reason = only_point_masses(acceptance, f"vLLM's {acceptance.drafter}")
        return reason

    def scheduled(self, acceptance: Acceptance) -> bool:
        return True

    def export(self, schedule: Schedule) -> Settings:
        if not schedule.gamma:
            return Settings("", ("start the server without --speculative-config",))
        remarks = list(schedule.remarks())
        if len(schedule.ranges) > 1:
            remarks.append("vLLM ignores the schedule with --data-parallel-size above 1")
        config = self._config(schedule)
        if config.get("rejection_sample_method") == "block":
            remarks.append(
                "on CPUs, and with VLLM_USE_V2_MODEL_RUNNER=0, vLLM verifies token by token with greedy drafts "
                "instead, without a warning; --export vllm-cpu predicts that"
            )
        remarks += match_remarks(schedule.acceptance, "vLLM")
        return Settings(shell({"--speculative-config": json.dumps(config)}), tuple(remarks))

    def _config(self, schedule: Schedule) -> dict[str, Any]:
        acceptance = schedule.acceptance
        method = self.method_of(acceptance)
        lengths = [[r.low, r.high, r.gamma] for r in schedule.ranges]
        config = {
            "method": method,
            "model": acceptance.model * (method == "mtp") if method in ("ngram", "mtp") else self.model_of(acceptance),
            "num_speculative_tokens": schedule.gamma,
            "num_speculative_tokens_per_batch_size": len(lengths) > 1 and lengths,
            **({f"prompt_lookup_{end}": n for end, n in ngram_sizes(acceptance).items()} if method == "ngram" else {}),
            "rejection_sample_method": acceptance.block and "block",
            "draft_sample_method": schedule.sampled and "probabilistic",
        }
        return {key: value for key, value in config.items() if value}


class VllmCpu(Vllm):
    """vLLM on CPUs, whose model runner V1 ignores block verification and has no DSpark."""

    name = "vllm-cpu"

    def cannot(self, acceptance: Acceptance) -> str | None:
        reason = super().cannot(acceptance)
        if reason is None and acceptance.drafter == "dspark":
            reason = "its model runner V1 has no dspark"
        if reason is None and acceptance.block:
            reason = (
                "its model runner V1 verifies token by token and drafts greedily if block verification is requested"
            )
        return reason


class VllmSynthetic(Vllm):
    """vLLM with synthetic acceptance at the measured rates, to time a schedule without the drafter."""

    name = "vllm-synthetic"

    def export(self, schedule: Schedule) -> Settings:
        if not schedule.gamma:
            return super().export(schedule)
        config = self._config(schedule)
        config |= {
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": list(schedule.acceptance.marginal),
        }
        config.pop("draft_sample_method", None)
        remarks = (
            "the acceptance is synthetic: the output is not the target's",
            "synthetic_acceptance_rates simulate Pr(tau >= i) itself, so the spread, too, is as measured; "
            f"synthetic_acceptance_length {1 + sum(config['synthetic_acceptance_rates']):.2f} has the same mean, but "
            "accepts one of two numbers of tokens",
            "on CPUs, vLLM stops with an AssertionError at synthetic acceptance; use a GPU",
        )
        return Settings(shell({"--speculative-config": json.dumps(config)}), remarks)


class VllmFormat(AcceptanceFormat):
    """Counters of vLLM, in a scrape or in the lines of its log, and rates of a configuration."""

    name = "vllm"
    counters = DEFINITIONS["vllm"]
    subtracts = True

    def read(self, source: Source, earlier: Source | None = None) -> list[Acceptance]:
        acceptances = spec_decode(DEFINITIONS["vllm"], source, earlier)
        if earlier is not None:
            add_scraped("vllm", source, earlier, _drafting(source, earlier))
            return acceptances
        windows, counts, throughput = [], [], _Throughput()
        drafts = False
        for number, line in source.lines(_MARK, *_MARKS):
            drafts |= _MARK in line or _FIRST in line
            with source.skipping():
                if match := _WITHOUT_RATES.search(line):
                    counts.append(full_drafts(source, number, float(match[1]), float(match[2])))
                elif _MARK in line:
                    windows.append(_window(source, number, line, throughput))
                else:
                    throughput.add(number, line)
        if not drafts and not _DRAFTS.search(source.text):  # a server that does not draft
            for number, rows, per_second, flaw in throughput.lines:
                if rows:
                    add_speed(source, number, 1.0, rows, per_second, 0.0, per_second * _INTERVAL / rows, flaw=flaw)
        counts += _with_plain_steps([item for item in windows if item is not None])
        acceptances += acceptances_of(counts, source, WINDOWS)
        for line, config in source.objects("synthetic_acceptance_rates"):
            rates = source.rates(config, "synthetic_acceptance_rates", line)
            names: dict[str, Any] = {"drafter": Vllm.ours(config.get("method")), "model": str(config.get("model", ""))}
            acceptances.append(Acceptance(rates, source.place(line), **names))
        return acceptances


def _drafting(source: Source, earlier: Source) -> dict[str, Drafting]:
    """The steps of each model that drafts, between two scrapes."""
    drafting = {}
    for model, of_model in totals_by_model(DEFINITIONS["vllm"], source, earlier).items():
        names = (DRAFTS, DRAFTED, ACCEPTED, TOKENS, REQUESTS)
        drafts, drafted, accepted, tokens, requests = (
            of_model[name][0].value if name in of_model else 0.0 for name in names
        )
        if drafts:
            flaw = "" if all_steps(drafts, steps_of(tokens, accepted, requests)) == drafts else NO_DRAFT
            drafting[model] = Drafting(drafts, drafted / drafts or math.nan, flaw)
    return drafting


class _Throughput:
    """Generated tokens of an engine since its last line of drafts, from the lines with its throughput.

    An engine writes both lines at the same time. It leaves that of drafts out if it has nothing to report, so tokens
    are added until the next one.
    """

    def __init__(self) -> None:
        self._engine, self._requests = "", 0
        self.lines: list[tuple[int, float, float, str]] = []
        self._rows: dict[str, float] = {}
        self._last: dict[str, int | None] = {}
        self._rates: dict[str, list[tuple[float, float]]] = {}

    def add(self, number: int, line: str) -> None:
        """Take a line of the log."""
        if _REQUEST.search(line):
            self._requests += 1
        if not (match := _GENERATED.search(line)):
            return
        self._engine, now = match[1] or "", _clock(line)
        last = self._last.get(self._engine)
        passed = (now - last) % 86400 if now is not None and last is not None else _INTERVAL
        seconds = passed if passed > _INTERVAL + 1 or 1 < passed < _INTERVAL - 1 else _INTERVAL
        self._last[self._engine] = now
        self._rates.setdefault(self._engine, []).append((float(match[4]), seconds))
        if running := _RUNNING.search(line):
            rows, before = float(running[1]), self._rows.get(self._engine)
            self._rows[self._engine] = rows
            engines = float(match[2] or 1)
            flaw = flaw_of(float(match[3] or 0) > 0, rows, before)
            self.lines.append((number, rows / engines, float(match[4]) / engines, flaw))

    def tokens(self, line: str, seconds: float | None) -> float | None:
        """The tokens that steps generated until a line of drafts over ``seconds``; None if they are not logged."""
        rates, requests = self._rates.pop(self._engine, []), self._requests
        self._requests, now, last = 0, _clock(line), self._last.get(self._engine)
        if not rates or (now is not None and last is not None and (now - last) % 86400 > 2):
            return None
        if len(rates) == 1 and seconds is not None:
            rates = [(rates[0][0], seconds)]
        return sum(rate * passed for rate, passed in rates) - PREFILL_TOKENS * requests


def _clock(line: str) -> int | None:
    """Seconds since midnight by the first time of day in a line."""
    match = _CLOCK.search(line)
    return None if match is None else 3600 * int(match[1]) + 60 * int(match[2]) + int(match[3])


def _window(source: Source, number: int, line: str, throughput: _Throughput) -> StepCounts | None:
    """Parse a log line; None without drafts."""
    part = line.partition(_MARK)[2]
    if _IDLE.search(part):
        return None
    matches = {key: pattern.search(part) for key, pattern in _FIELDS.items()}
    if missing := [key for key, match in matches.items() if match is None]:
        raise source.error(
            number, f"the SpecDecoding metrics line has no {missing[0]}; it is truncated or of an unsupported version"
        )
    text = {key: match[1] for key, match in matches.items() if match}
    accepted, drafted = (source.number(text[key], number, f"the {key} tokens") for key in ("accepted", "drafted"))
    average = source.number(text["end"], number, "the average rate")
    if drafted and abs(average - 100 * accepted / drafted) > _AVERAGE_ERROR:
        raise source.error(
            number,
            f"{accepted:g} accepted and {drafted:g} drafted are inconsistent with the average rate {average:g} %",
        )
    rates = [source.number(rate.strip(), number, "an acceptance rate", 1.0) for rate in text["rates"].split(",")]
    mean = source.number(text["mean"], number, "the mean length")
    item = from_rates(source, number, accepted, drafted, rates, mean=mean)
    per_second = _DRAFTED_PER_SECOND.search(part)
    rate = source.number(per_second[1], number, "the drafted throughput") if per_second else 0.0
    tokens = throughput.tokens(line, drafted / rate if rate else None)
    if tokens is None:
        return item
    item, drafts = replace(item, steps=steps_of(tokens, accepted, 0.0)), item.drafts or 0.0
    if throughput.lines and drafts:
        line_of, rows, per_second, flaw = throughput.lines[-1]
        if all_steps(drafts, item.steps or 0.0) != drafts:
            flaw = NO_DRAFT
        steps = drafts / rows if rows else 0.0
        add_speed(source, line_of, 1 + accepted / drafts, rows, per_second, drafted / drafts, steps, flaw=flaw)
    return item


def _with_plain_steps(windows: list[StepCounts]) -> list[StepCounts]:
    """The windows with all their steps; those without a throughput have as many as the others for each draft."""
    known = [item for item in windows if item.steps is not None]
    drafts = sum(item.drafts or 0.0 for item in known)
    if not drafts:
        return windows
    total = sum(item.steps or 0.0 for item in known)
    if all_steps(drafts, total) == drafts:  # of which lines are cut at other times
        return [replace(item, steps=item.drafts) for item in windows]
    return [item if item in known else replace(item, steps=(item.drafts or 0.0) * total / drafts) for item in windows]
