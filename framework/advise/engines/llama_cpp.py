"""llama.cpp's server: its counters and its log; ``--spec-type``, ``--model-draft``, ``--spec-draft-*``.

https://github.com/ggml-org/llama.cpp: docs/speculative.md, common/arg.cpp, tools/server.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import ClassVar

from ..acceptance import Acceptance
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
#: Later versions have the rates on a line of their own.
_RATES = re.compile(r"acc per pos = \(([^()]*)\)\s*")


class LlamaCpp(Engine):
    name = "llama.cpp"
    read_from = "llama.cpp b10991"
    methods: ClassVar[Mapping[str, str]] = {
        "draft-model": "draft-simple",
        "prompt-lookup": "ngram-simple",
        "eagle3": "draft-eagle3",
        "mtp": "draft-mtp",
    }

    def read(self, given: Source, before: Source | None = None) -> list[Acceptance]:
        found = spec_decode("llamacpp:", given, before)
        if before is not None:
            return found
        return found + from_windows(_windows(given), given, "responses")

    def cannot(self, acceptance: Acceptance) -> str | None:
        return super().cannot(acceptance) or only_point_masses(acceptance, self.name)

    def export(self, schedule: Schedule) -> Settings:
        if not schedule.gamma:
            return Settings(shell(["--spec-type", "none"]))
        found = schedule.acceptance
        method = needs_method(self, found)
        words = ["--spec-type", method]
        if method == "ngram-simple":
            # Its draft length is that of the m-gram; the lookup has one size, not a range.
            words += ["--spec-ngram-simple-size-n", str(ngram_sizes(found)["max"])]
            words += ["--spec-ngram-simple-size-m", str(schedule.gamma)]
        elif found.model or method != "draft-mtp":
            words += ["--model-draft", needs_model(self, found)]
        words += ["--spec-draft-n-max", str(schedule.gamma)]
        if method != "ngram-simple":
            words += ["--spec-draft-p-min", "0"]  # drafts of full length, as they were measured
        remarks = list(length_remarks(schedule))
        sizes = ngram_sizes(found)
        if method == "ngram-simple" and sizes["min"] != sizes["max"]:
            remarks.append(
                f"it looks up suffixes of {sizes['max']} tokens alone, not of {sizes['min']} to {sizes['max']}"
            )
        if method == "ngram-simple" and schedule.gamma < sizes["max"]:
            remarks.append(
                f"it drops drafts that are shorter than the suffix looked up: of {schedule.gamma} tokens behind "
                f"{sizes['max']} it never drafts; take max_ngram: {schedule.gamma} or less"
            )
        return Settings(shell(words), tuple(remarks))


def _windows(given: Source) -> Iterator[Window]:
    for (number, line), (_, after) in pairwise([*given.lines(), (0, "")]):
        if _MARK not in line:
            continue
        found, rates = _LINE.fullmatch(line[line.index(_MARK) :]), _RATES.search(after)
        if found is None:
            raise given.error(number, "the line of draft acceptance is cut off or of another version")
        text = found[4] if found[4] is not None else rates[1] if rates else None
        if text is None:
            raise given.error(number, "the rates per position are missing; log them with -lv 4, or give its /metrics")
        each = tuple(given.number(rate, number, "an acceptance rate", 1.0) for rate in text.split(", "))
        mean = given.number(found[3], number, "the mean acceptance length")
        yield Window(number, float(found[1]), float(found[2]), each, mean)
