"""vLLM: its log line, its counters, its per-request metrics; ``--speculative-config``.

https://docs.vllm.ai: features/speculative_decoding; vllm/v1/spec_decode/metrics.py, vllm/config/speculative.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from ..acceptance import Acceptance
from ..engine import Engine, Schedule, Settings
from ..engine_log import Source
from ..histograms import per_request
from ..log_windows import Window, from_windows
from ..prometheus import spec_decode
from ..settings import length_remarks, needs_method, needs_model, ngram_sizes, shell

_MARK = "SpecDecoding metrics: "
#: What a line must hold; the last one says that it is whole.
_FIELDS = {
    "mean": re.compile(r"Mean acceptance length: (\S+?),"),
    "accepted": re.compile(r"(?<!Avg )Accepted: (\S+) tokens"),
    "drafted": re.compile(r"Drafted: (\S+) tokens"),
    "rates": re.compile(r"Per-position acceptance rate: ([^A-Z]*?),? ?(?=[A-Z]|$)"),
    "whole": re.compile(r"raft acceptance rate: (\S+?)%"),
}


class Vllm(Engine):
    name = "vllm"
    read_from = "vLLM main, commit 002e77c1f0ef"
    methods: ClassVar[Mapping[str, str]] = {
        "draft-model": "draft_model",
        "prompt-lookup": "ngram",
        "eagle": "eagle",
        "eagle3": "eagle3",
        "medusa": "medusa",
        "mtp": "mtp",
    }

    def read(self, given: Source, before: Source | None = None) -> list[Acceptance]:
        found = spec_decode("vllm:", given, before)
        if before is not None:
            return found
        found += from_windows((_window(given, n, line) for n, line in given.lines() if _MARK in line), given)
        found += per_request(
            given, "acceptance_histogram", "num_spec_steps", "num_accepted_draft_tokens", "num_draft_tokens"
        )
        return found + _synthetic(given)

    def cannot(self, acceptance: Acceptance) -> str | None:
        reason = super().cannot(acceptance)
        if reason is None and acceptance.verifier not in ("", "token", "block", "greedy", "sample-match"):
            reason = f"it verifies by token or by block, not by {acceptance.verifier}"
        return reason

    def scheduled(self, acceptance: Acceptance) -> bool:
        return True

    def export(self, schedule: Schedule) -> Settings:
        if not schedule.gamma:
            return Settings("", ("start the server without --speculative-config",))
        remarks = list(length_remarks(schedule))
        if len(schedule.ranges) > 1:
            remarks.append("vLLM ignores the schedule with --data-parallel-size above 1")
        return Settings(shell(["--speculative-config", json.dumps(self._config(schedule))]), tuple(remarks))

    def _config(self, schedule: Schedule) -> dict[str, Any]:
        found = schedule.acceptance
        method = needs_method(self, found)
        config: dict[str, Any] = {"method": method}
        if method not in ("ngram", "mtp"):
            config["model"] = needs_model(self, found)
        elif method == "mtp" and found.model:
            config["model"] = found.model
        config["num_speculative_tokens"] = schedule.gamma
        if len(schedule.ranges) > 1:
            lengths = [[found.low, found.high, found.gamma] for found in schedule.ranges]
            config["num_speculative_tokens_per_batch_size"] = lengths
        if method == "ngram":
            config |= {f"prompt_lookup_{end}": n for end, n in ngram_sizes(found).items()}
        if schedule.greedy:
            return config
        if found.verifier == "block":
            config["rejection_sample_method"] = "block"
        if schedule.sampled:
            config["draft_sample_method"] = "probabilistic"
        return config


class VllmSynthetic(Vllm):
    """vLLM that pretends to accept as was measured, whatever is drafted: to time a schedule without the drafter."""

    name = "vllm-synthetic"

    def read(self, given: Source, before: Source | None = None) -> list[Acceptance]:
        return []  # `Vllm` reads what this one writes

    def export(self, schedule: Schedule) -> Settings:
        if not schedule.gamma:
            return super().export(schedule)
        config = self._config(schedule)
        config |= {
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": list(schedule.acceptance.cut(schedule.gamma).marginal),
        }
        config.pop("draft_sample_method", None)
        remark = "what this server says is not what the target would say: the acceptance is synthetic"
        return Settings(shell(["--speculative-config", json.dumps(config)]), (remark,))


def _window(given: Source, number: int, line: str) -> Window:
    """The counts behind one log line: rates have three decimals, so the number of drafts follows from the tokens."""
    part = line.partition(_MARK)[2]
    found = {key: pattern.search(part) for key, pattern in _FIELDS.items()}
    if lacking := [key for key, match in found.items() if match is None]:
        what = "its end" if lacking == ["whole"] else f"its {lacking[0]}"
        raise given.error(number, f"the line of SpecDecoding metrics lacks {what}; it is cut off or of another version")
    text = {key: match[1] for key, match in found.items() if match}
    accepted, drafted = (given.number(text[key], number, f"the {key} tokens") for key in ("accepted", "drafted"))
    rates = [given.number(rate, number, "an acceptance rate", 1.0) for rate in text["rates"].split(", ")]
    return Window(number, accepted, drafted, tuple(rates), given.number(text["mean"], number, "the mean length"))


def _synthetic(given: Source) -> list[Acceptance]:
    """The vector of a ``--speculative-config`` that pretends one."""
    found = []
    for line, config in given.objects("synthetic_acceptance_rates"):
        rates = given.rates(config, "synthetic_acceptance_rates", line)
        about: dict[str, Any] = {"drafter": Vllm.ours(config.get("method")), "model": str(config.get("model", ""))}
        found.append(Acceptance(rates, given.place(line), **about))
    return found
