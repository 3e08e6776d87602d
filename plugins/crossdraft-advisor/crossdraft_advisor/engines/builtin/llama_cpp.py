"""llama.cpp server: counters and log; ``--spec-type``, ``--model-draft``, ``--spec-draft-*``.

https://github.com/ggml-org/llama.cpp: docs/speculative.md, common/arg.cpp, tools/server.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import ClassVar

from ..acceptance import Acceptance
from ..counter_definitions import DEFINITIONS
from ..engine import Engine, Schedule, Settings
from ..engine_log import Source
from ..log_windows import Window, from_windows
from ..prometheus import spec_decode
from ..settings import length_remarks, needs_method, needs_model, ngram_sizes, only_point_masses, shell

_MARK = "draft acceptance = "
_LINE = re.compile(
    r"draft acceptance = \S+ \(\s*(\d+) accepted /\s*(\d+) generated\), mean (?:acceptance length|len) =\s*(\S+?)"
    r"(?:, acceptance rate per position = \(([^()]*)\))?\s*"
)
#: Later versions log the rates on a separate line.
_RATES = re.compile(r"acc per pos = \(([^()]*)\)\s*")


class LlamaCpp(Engine):
    name = "llama.cpp"
    read_from = "llama.cpp, commit 0c1e57098bba"
    counters = DEFINITIONS["llama.cpp"]
    methods: ClassVar[Mapping[str, str]] = {
        "draft-model": "draft-simple",
        "prompt-lookup": "ngram-simple",
        "ngram-simple": "ngram-simple",  # of plugins/crossdraft-llamacpp
        "eagle3": "draft-eagle3",
        "mtp": "draft-mtp",
    }

    def read(self, source: Source, earlier: Source | None = None) -> list[Acceptance]:
        acceptances = spec_decode(DEFINITIONS["llama.cpp"], source, earlier)
        if earlier is not None:
            return acceptances
        return acceptances + from_windows(_windows(source), source, "responses")

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


def _windows(source: Source) -> Iterator[Window]:
    for (number, line), (_, after) in pairwise([*source.lines(), (0, "")]):
        if _MARK not in line:
            continue
        match, rates = _LINE.fullmatch(line[line.index(_MARK) :]), _RATES.search(after)
        if match is None:
            raise source.error(number, "the draft acceptance line is truncated or of an unsupported version")
        text = match[4] if match[4] is not None else rates[1] if rates else None
        if text is None:
            raise source.error(number, "the rates per position are missing; log with -lv 4, or use /metrics")
        rates_by_position = tuple(source.number(rate, number, "an acceptance rate", 1.0) for rate in text.split(", "))
        mean = source.number(match[3], number, "the mean acceptance length")
        yield Window(number, float(match[1]), float(match[2]), rates_by_position, mean)
