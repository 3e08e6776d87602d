"""SGLang: its log line, its gauge, ``meta_info`` of responses; ``--speculative-*`` and the adaptive configuration.

https://docs.sglang.ai: advanced_features/speculative_decoding, advanced_features/adaptive_speculative_decoding;
sglang/srt/speculative/adaptive_spec_params.py.

Of its two figures only the length is read: the denominator of its rate differs between log, gauge and responses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import ClassVar

from ..acceptance import Acceptance
from ..engine import Engine, Schedule, Settings
from ..engine_log import Source
from ..histograms import per_request
from ..prometheus import samples
from ..settings import length_remarks, needs_method, needs_model, only_point_masses, shell

_GAUGE = "sglang:spec_accept_length"
_LINE = re.compile(r"Decode batch\b")
_LENGTH = re.compile(r"accept len: ([^,\s]*)(,?)")
_RUNNING = re.compile(r"#running-req: (\d{1,9}),")
#: Where adaptive steps work, and where drafts can be sampled and judged by rejection.
_EAGLE = ("EAGLE", "EAGLE3", "NEXTN")


class Sglang(Engine):
    name = "sglang"
    read_from = "SGLang main, commit 015c872628e3"
    methods: ClassVar[Mapping[str, str]] = {
        "draft-model": "STANDALONE",
        "prompt-lookup": "NGRAM",
        "eagle": "EAGLE",
        "eagle3": "EAGLE3",
        "mtp": "NEXTN",
    }

    def read(self, given: Source, before: Source | None = None) -> list[Acceptance]:
        if before is not None:
            return []  # a gauge is no counter
        responses = per_request(
            given,
            "spec_correct_drafts_histogram",
            "spec_verify_ct",
            "spec_num_correct_drafts",
            "spec_num_proposed_drafts",
        )
        return [*_log(given), *_gauge(given), *responses, *([] if responses else _lengths(given))]

    def cannot(self, acceptance: Acceptance) -> str | None:
        if reason := super().cannot(acceptance):
            return reason
        if acceptance.verifier == "block" and acceptance.temperature != 0 and not acceptance.point_mass:
            return "it has no block verification"
        if self.methods.get(acceptance.drafter, "EAGLE") not in _EAGLE:
            return only_point_masses(acceptance, f"{self.name}'s {self.methods[acceptance.drafter]}")
        return None

    def scheduled(self, acceptance: Acceptance) -> bool:
        return self.methods.get(acceptance.drafter) in _EAGLE

    def export(self, schedule: Schedule) -> Settings:
        if not schedule.gamma:
            return Settings("", ("start the server without --speculative-algorithm",))
        found = schedule.acceptance
        method = needs_method(self, found)
        words = ["--speculative-algorithm", method]
        if found.model or method not in ("NGRAM", "NEXTN"):
            words += ["--speculative-draft-model-path", needs_model(self, found)]
        if method == "NGRAM":
            # A chain: breadth 1. All nodes are verified together with the last committed token.
            words += [
                "--speculative-num-draft-tokens",
                str(schedule.gamma + 1),
                "--speculative-ngram-max-bfs-breadth",
                "1",
            ]
        else:
            words += ["--speculative-num-steps", str(schedule.gamma), "--speculative-eagle-topk", "1"]
            words += ["--speculative-num-draft-tokens", str(schedule.gamma + 1)]
        if schedule.sampled:
            words += ["--speculative-use-rejection-sampling"]
        text, remarks = shell(words), list(length_remarks(schedule))
        if len(schedule.ranges) > 1:
            adaptive = json.dumps({str(r.low): {"candidate_steps": [r.gamma]} for r in schedule.ranges})
            flags = shell(["--speculative-adaptive", "--speculative-adaptive-config", "adaptive.json"])
            text = f"{text} \\\n{flags}\n\n# adaptive.json\n{adaptive}"
            if any(r.gamma == 0 for r in schedule.ranges):
                remarks.append("candidate_steps [0] switches drafting off; older releases cannot, and refuse it")
        return Settings(text, tuple(remarks))


def _log(given: Source) -> list[Acceptance]:
    """The lines of decoding batches: windows of as many steps, so that one counts as often as sequences ran in it."""
    rows, first, last, idle = [], 0, 0, 0
    for number, line in given.lines():
        mark = _LINE.search(line)
        length = _LENGTH.search(line) if mark else None
        if length is None:
            continue
        running = _RUNNING.search(line)
        if not running or not length[2]:
            raise given.error(number, "the line of a decoding batch is cut off or of another version")
        mean, n = given.number(length[1], number, "the accept len", 4096), float(running[1])
        if not mean or not n:
            idle += 1
            continue
        if mean < 1:
            raise given.error(number, f"an accept len of {mean:g} leaves out the token that the target adds")
        rows.append((n, n * (mean - 1)))
        first, last = first or number, number
    if not rows:
        return []
    remarks = ["windows are weighted by their running requests"]
    if idle:
        remarks.append(f"windows in which nothing was drafted are left out: {idle}")
    return [_of_length(given, rows, f"{given.name}:{first}-{last}", "windows of the log", tuple(remarks))]


def _gauge(given: Source) -> list[Acceptance]:
    found = samples(given, {_GAUGE})
    lengths = []
    for sample in found.values():
        if sample.value < 1:
            raise given.error(sample.line, f"{_GAUGE} is {sample.value:g}: nothing was drafted yet")
        lengths.append(sample.value)
    if not lengths:
        return []
    remark = f"{_GAUGE} speaks of the last moments before the scrape alone; a log, or responses, say more"
    return [Acceptance((), given.name, length=sum(lengths) / len(lengths), remarks=(remark,))]


def _lengths(given: Source) -> list[Acceptance]:
    """Responses without a histogram: tokens over target calls."""
    rows = []
    for line, found in given.objects("spec_verify_ct"):
        steps, tokens = found["spec_verify_ct"], found.get("completion_tokens")
        if type(steps) is not int or type(tokens) is not int or not 0 <= steps <= tokens:
            raise given.error(line, f"{tokens!r:.30} tokens in {steps!r:.30} target calls (spec_verify_ct) cannot be")
        if steps:
            rows.append((float(steps), float(tokens - steps)))
    return [_of_length(given, rows, f"{given.name}, {len(rows)} responses", "responses")] if rows else []


def _of_length(
    given: Source, rows: list[tuple[float, float]], source: str, pieces: str, remarks: tuple[str, ...] = ()
) -> Acceptance:
    steps, accepted = (sum(column) for column in zip(*rows, strict=True))
    return Acceptance((), source, rows=tuple(rows), pieces=pieces, length=1 + accepted / steps, remarks=remarks)
