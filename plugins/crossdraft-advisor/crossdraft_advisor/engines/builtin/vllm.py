"""vLLM: log lines, counters and per-request metrics; ``--speculative-config``.

https://docs.vllm.ai: features/speculative_decoding; vllm/v1/spec_decode/metrics.py, vllm/config/speculative.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from ..acceptance import Acceptance
from ..counter_definitions import DEFINITIONS
from ..engine import Engine, Schedule, Settings
from ..engine_log import Source
from ..formats import AcceptanceFormat
from ..log_windows import Window, from_windows
from ..prometheus import spec_decode
from ..settings import (
    length_remarks,
    match_remarks,
    needs_method,
    needs_model,
    ngram_sizes,
    only_point_masses,
    shell,
)
from ..step_counts import StepCounts, acceptances_of, full_drafts

#: Methods that model runner V1 serves on every platform; they draft greedily, and block verification is ignored.
_V1_METHODS = ("medusa",)
_MARK = "SpecDecoding metrics: "
#: Required fields of a log line; the last one shows that it is not truncated.
_FIELDS = {
    "mean": re.compile(r"Mean acceptance length: (\S+?),"),
    "accepted": re.compile(r"(?<!Avg )Accepted: (\S+) tokens"),
    "drafted": re.compile(r"Drafted: (\S+) tokens"),
    "rates": re.compile(r"Per-position acceptance rate: ([^\s,\"\\]+(?:, [^A-Z\s,\"\\]+)*)"),
    "end": re.compile(r"raft acceptance rate: (\S+?)%"),
}


#: A window of the first versions of V1 (0.8).
_WITHOUT_RATES = re.compile(
    r"(?:SpecDecoding metrics: Draft acceptance rate: [\d.]+%, Accepted:|"
    r"Speculative metrics: Draft acceptance rate: [\d.]+, Number of accepted tokens:) (\d{1,15})(?: tokens)?, "
    r"(?:Drafted|Number of draft tokens): (\d{1,15})(?: tokens)?,?\s*$"
)
#: A window without drafts, whose rates are not numbers.
_IDLE = re.compile(r"Drafted: 0 tokens")
#: Counters since the start in the log of vLLM's first engine (V0, until 0.10).
_FIRST_VERSION = re.compile(
    r"Speculative metrics: .*Number of speculative tokens: (\d{1,4}), Number of accepted tokens: (\d{1,15}), "
    r"Number of draft tokens: (\d{1,15}), Number of emitted tokens: (\d{1,15})\b"
)


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
        remarks = list(length_remarks(schedule))
        if len(schedule.ranges) > 1:
            remarks.append("vLLM ignores the schedule with --data-parallel-size above 1")
        config = self._config(schedule)
        if config.get("rejection_sample_method") == "block":
            remarks.append(
                "on CPUs, and with VLLM_USE_V2_MODEL_RUNNER=0, vLLM verifies token by token with greedy drafts "
                "instead, without a warning; --export vllm-cpu predicts that"
            )
        remarks += match_remarks(schedule.acceptance, "vLLM")
        return Settings(shell(["--speculative-config", json.dumps(config)]), tuple(remarks))

    def _config(self, schedule: Schedule) -> dict[str, Any]:
        acceptance = schedule.acceptance
        method = needs_method(self, acceptance)
        config: dict[str, Any] = {"method": method}
        if method not in ("ngram", "mtp"):
            config["model"] = needs_model(self, acceptance)
        elif method == "mtp" and acceptance.model:
            config["model"] = acceptance.model
        config["num_speculative_tokens"] = schedule.gamma
        if len(schedule.ranges) > 1:
            lengths = [[r.low, r.high, r.gamma] for r in schedule.ranges]
            config["num_speculative_tokens_per_batch_size"] = lengths
        if method == "ngram":
            config |= {f"prompt_lookup_{end}": n for end, n in ngram_sizes(acceptance).items()}
        if schedule.greedy:
            return config
        if acceptance.block:
            config["rejection_sample_method"] = "block"
        if schedule.sampled:
            config["draft_sample_method"] = "probabilistic"
        return config


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
        return Settings(shell(["--speculative-config", json.dumps(config)]), remarks)


class VllmFormat(AcceptanceFormat):
    """Counters of vLLM, in a scrape or in the lines of its log, and rates of a configuration."""

    name = "vllm"
    counters = DEFINITIONS["vllm"]
    subtracts = True

    def read(self, source: Source, earlier: Source | None = None) -> list[Acceptance]:
        acceptances = spec_decode(DEFINITIONS["vllm"], source, earlier)
        if earlier is not None:
            return acceptances
        windows, counts = [], []
        for number, line in source.lines():
            with source.skipping():
                if match := _WITHOUT_RATES.search(line):
                    counts.append(full_drafts(source, number, float(match[1]), float(match[2])))
                elif _MARK in line:
                    windows.append(_window(source, number, line))
        acceptances += [*from_windows(windows, source), *acceptances_of(counts, source.name, "windows of the log")]
        return [*acceptances, *_first_version(source), *_synthetic(source)]


def _window(source: Source, number: int, line: str) -> Window:
    """Parse a log line."""
    part = line.partition(_MARK)[2]
    if _IDLE.search(part):
        return Window(number, 0.0, 0.0, (), 1.0)
    matches = {key: pattern.search(part) for key, pattern in _FIELDS.items()}
    if missing := [key for key, match in matches.items() if match is None]:
        raise source.error(
            number, f"the SpecDecoding metrics line has no {missing[0]}; it is truncated or of an unsupported version"
        )
    text = {key: match[1] for key, match in matches.items() if match}
    accepted, drafted = (source.number(text[key], number, f"the {key} tokens") for key in ("accepted", "drafted"))
    rates = [source.number(rate, number, "an acceptance rate", 1.0) for rate in text["rates"].split(", ")]
    return Window(number, accepted, drafted, tuple(rates), source.number(text["mean"], number, "the mean length"))


def _first_version(source: Source) -> list[Acceptance]:
    """The last counters of each start of vLLM's first engine.

    It counts a token as accepted after a rejected one, too, so the length is that of the emitted tokens.
    """
    counters: list[tuple[int, tuple[int, ...]]] = []
    for number, line in source.lines():
        if match := _FIRST_VERSION.search(line):
            values = tuple(map(int, match.groups()))
            if counters and values[2] >= counters[-1][1][2]:
                counters.pop()
            counters.append((number, values))
    acceptances = []
    for number, (gamma, _, drafted, emitted) in counters:
        with source.skipping():
            steps = drafted / gamma if gamma else 0.0
            if steps and not steps <= emitted <= (gamma + 1) * steps:
                raise source.error(number, f"{emitted} emitted tokens do not fit {drafted} drafted ones")
            remark = "lengths are those of emitted tokens; the counter of accepted ones has some after a rejection, too"
            counts = [StepCounts(steps, emitted - steps, drafted=drafted, gamma=gamma)]
            acceptances += acceptances_of(counts, source.place(number), "runs", remarks=(remark,))
    return acceptances


def _synthetic(source: Source) -> list[Acceptance]:
    """The acceptance rates of a ``--speculative-config`` with synthetic acceptance."""
    acceptances = []
    for line, config in source.objects("synthetic_acceptance_rates"):
        rates = source.rates(config, "synthetic_acceptance_rates", line)
        attributes: dict[str, Any] = {"drafter": Vllm.ours(config.get("method")), "model": str(config.get("model", ""))}
        acceptances.append(Acceptance(rates, source.place(line), **attributes))
    return acceptances
