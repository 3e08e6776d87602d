"""llama.cpp server: counters and log; ``--spec-type``, ``--model-draft``, ``--spec-draft-*``.

https://github.com/ggml-org/llama.cpp: docs/speculative.md, common/arg.cpp, tools/server.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar

from ...cost.step_cost import SpeedPoint
from ..acceptance import Acceptance, constant_rate
from ..counter_definitions import DEFINITIONS
from ..engine import Engine, Schedule, Settings, ngram_sizes, only_point_masses, shell
from ..engine_log import Source
from ..formats import AcceptanceFormat
from ..prometheus import spec_decode
from ..speeds import NO_DRAFT, OTHER_SIZE, add_speed
from ..step_counts import (
    FEW_IDLE,
    StepCounts,
    acceptances_of,
    count,
    each_run,
    from_mean,
    from_rates,
    full_drafts,
    steps_of,
)

_MARK = re.compile(r"draft acceptance(?: rate)? = ")
_LINE = re.compile(
    r"draft acceptance(?: rate)? = \S+ \(\s*(\d{1,15}) accepted /\s*(\d{1,15}) generated\)"
    r"(?:, mean (?:acceptance length|len) =\s*([^\s,]+))?"
    r"(?:, acceptance rate per position = \(([^()]*)\))?\s*$"
)
_RATES = re.compile(r"acc per pos = \(([^()]*)\)\s*")  # later versions log the rates on a separate line
#: Generated tokens of a request, logged before its draft acceptance.
_EVALUATED = re.compile(r"(?<!prompt )eval time =\s*(\d{1,12}(?:\.\d{1,9})?) ms /\s*(\d{1,15}) tokens")
_SLOT = re.compile(r"\bslot\b.{0,40}\bid +(\d{1,6}) ")
#: The begin and end of a request in a slot, and the start of a server that does not draft.
_BEGINS, _ENDS = "processing task", "stop processing"
_PLAIN = re.compile(r"no implementations specified for speculative decoding|speculative decoding context not init")
#: Counters of a drafter since the start of the server.
_STATISTICS = re.compile(r"statistics\s+([\w-]{1,40}): (#calls.*)")
_COUNTER = re.compile(r"#(gen drafts|acc drafts|gen tokens|acc tokens) =\s*(\d{1,15})\b")
#: Calls to begin a response, to draft, and after tokens were accepted.
_CALLS = re.compile(r"#calls\(b,g,a\) =\s*\d{1,15}\s+(\d{1,15})\b")
_POSITIONS = re.compile(r"#acc rate/pos = \(([^()]*)\)")
#: A prompt of ``mtp-bench``: its name, predicted, drafted and accepted tokens.
_PROMPT = re.compile(
    r"(\S+)\s+pred=\s*([\d,]{1,20})\s+draft=\s*([\d,]{1,20})\s+acc=\s*([\d,]{1,20})\b(?:.*?\btok/s=\s*(\d[\d.,]{0,20}))?"
)
#: A column of the table of ``speed_bench.py``: accepted over drafted tokens of each category.
_ACCEPT_RATE, _PREDICTED = "accept_rate", "avg_pred_t/s"
_EXAMPLE_KEYS = ("n_draft", "n_predict", "n_drafted", "n_accept")  # summary of llama.cpp's examples
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
            return Settings(shell({"--spec-type": "none"}))
        acceptance = schedule.acceptance
        method = self.method_of(acceptance)
        sizes = ngram_sizes(acceptance)
        if acceptance.drafter == "ngram-simple":
            sizes = dict.fromkeys(sizes, int(acceptance.options.get("n", 3)))
        looks_up, remarks = method == "ngram-simple", list(schedule.remarks())
        has_model = not looks_up and (acceptance.model or method != "draft-mtp")
        flags = {
            "--spec-type": method,
            # Its draft length is the size of the m-gram; the lookup n-gram has a fixed size.
            "--spec-ngram-simple-size-n": looks_up and sizes["max"],
            "--spec-ngram-simple-size-m": looks_up and schedule.gamma,
            "--model-draft": has_model and self.model_of(acceptance),
            "--spec-draft-n-max": schedule.gamma,
            "--spec-draft-p-min": not looks_up and "0",  # full-length drafts, as measured
        }
        if looks_up and sizes["min"] != sizes["max"]:
            remarks.append(
                f"it looks up suffixes of {sizes['max']} tokens only, not of {sizes['min']} to {sizes['max']}"
            )
        if looks_up and schedule.gamma < sizes["max"]:
            remarks.append(
                f"it drops drafts that are shorter than the looked-up suffix: with {schedule.gamma} tokens after "
                f"{sizes['max']} it never drafts; use max_ngram: {schedule.gamma} or less"
            )
        return Settings(shell(flags), tuple(remarks))


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
        if any(item.parts for item in statistics):  # the lines of requests are of all drafters
            return [*acceptances, *statistics]
        requests = _requests(source)
        others = (_timings, _examples, _prompts, _speed_bench)
        return [*acceptances, *(requests or statistics), *(item for read in others for item in read(source))]


def _requests(source: Source) -> list[Acceptance]:
    """Lines of finished requests, with rates by position, a mean length or neither."""
    windows, counts, evaluated, seconds = [], [], 0.0, 0.0
    slots, plain, speeds = _Slots(), [], []
    marks = ("eval time =", "draft acceptance", "acc per pos = ", "print_timing", _BEGINS, _ENDS)
    lines = [*source.lines(*marks), (0, "")]
    for (number, line), (_, after) in pairwise(lines):
        slots.add(line)
        if match := _EVALUATED.search(line):
            evaluated, seconds = float(match[2]), float(match[1]) / 1000
            plain.append((number, seconds, steps_of(evaluated, 0.0), slots.shared))
        if not (mark := _MARK.search(line)):
            continue
        with source.skipping():
            match, by_position = _LINE.match(line, mark.start()), _RATES.search(after)
            if match is None:
                raise source.error(number, "the draft acceptance line is truncated or of an unsupported version")
            accepted, drafted = float(match[1]), float(match[2])
            text = match[4] if match[4] is not None else by_position[1] if by_position else None
            mean = source.number(match[3], number, "the mean acceptance length") if match[3] else None
            steps = steps_of(evaluated, accepted) if evaluated > accepted else None
            evaluated = 0.0
            if steps and steps > 0:
                speeds.append((number, seconds, steps, slots.shared, drafted))
            if text is not None and mean is not None:
                rates = [source.number(rate, number, "an acceptance rate", 1.0) for rate in text.split(", ")]
                windows.append(from_rates(source, number, accepted, drafted, rates, mean=mean, steps=steps))
            elif mean is not None and mean > 1:
                counts.append(from_mean(accepted, drafted, mean, steps=steps, line=number))
            elif steps is not None:
                counts.append(StepCounts(None, accepted, drafted=drafted, steps=steps, line=number))
            else:
                counts.append(full_drafts(source, number, accepted, drafted))
    remark = "without rates by position; log with -lv 4, or use /metrics"
    acceptances = [
        *acceptances_of(windows, source, "responses"),
        *acceptances_of(counts, source, "responses", remarks=(remark,)),
    ]
    if not speeds and (_PLAIN.search(source.text) or not re.search("draft|speculative", source.text)):
        speeds = [(*item, 0.0) for item in plain]
    speeds = [(line, time, steps, shared or slots.concurrent, drafted) for line, time, steps, shared, drafted in speeds]
    _add_speeds(source, speeds, acceptances)
    return acceptances


def _add_speeds(
    source: Source, speeds: Sequence[tuple[int, float, float, bool, float]], acceptances: Sequence[Acceptance]
) -> None:
    """Add requests: line, seconds and number of steps, if other requests ran at the same time, and drafted tokens."""
    lengths = {item.gamma or item.draft_length for item in acceptances}
    length = lengths.pop() if len(lengths) == 1 else None
    for number, seconds, steps, shared, drafted in speeds:
        if steps > 0 and seconds > 0:
            flaw = OTHER_SIZE if shared else ""
            gamma = float(length or max(drafted / steps, 1.0)) if drafted else 0.0
            if drafted < (steps - 1) * gamma / (1 + FEW_IDLE):  # the last step of a response has no draft
                flaw = NO_DRAFT
            point = SpeedPoint(1.0, gamma, math.nan, seconds / steps, steps, source.place(number), flaw)
            source.timed.append(point)


class _Slots:
    """Slots of a server, and if their requests run at the same time."""

    def __init__(self) -> None:
        self.shared = False  # another request ran together with that of the last slot
        self._seen, self._active, self._together = set[str](), set[str](), set[str]()
        self._begins = False

    def add(self, line: str) -> None:
        """Take a line of the log."""
        if not (match := _SLOT.search(line)):
            return
        slot = match[1]
        self._seen.add(slot)
        if _BEGINS in line:
            self._begins = True
            self._active.add(slot)
            self._together.discard(slot)
            if len(self._active) > 1:
                self._together |= self._active
        elif _ENDS in line:
            self._active.discard(slot)
        self.shared = slot in self._together

    @property
    def concurrent(self) -> bool:
        """True if several slots were used at unknown times."""
        return not self._begins and len(self._seen) > 1


def _statistics(source: Source) -> list[Acceptance]:
    """The last counters of each drafter that drafted; those of an earlier start are added.

    Several drafters are one system: each drafts where those before it do not.
    """
    counters: dict[str, list[tuple[int, dict[str, float], str]]] = {}
    for number, line in source.lines("statistics "):
        if not (match := _STATISTICS.search(line)):
            continue
        with source.skipping():
            values = {key: source.number(text, number, f"#{key}") for key, text in _COUNTER.findall(match[2])}
            if not {"gen drafts", "gen tokens", "acc tokens"} <= values.keys():
                raise source.error(number, "the statistics line is truncated or of an unsupported version")
            if calls := _CALLS.search(match[2]):
                values["calls"] = float(calls[1])
            starts = counters.setdefault(match[1].replace("_", "-"), [])
            if starts and values["gen drafts"] >= starts[-1][1]["gen drafts"]:
                starts.pop()
            by_position = _POSITIONS.search(match[2])
            starts.append((number, values, by_position[1] if by_position else ""))
    # The first drafter is called in every step.
    calls = max((sum(values.get("calls", 0.0) for _, values, _ in starts) for starts in counters.values()), default=0)
    groups: dict[str, list[StepCounts]] = {}
    for name, starts in counters.items():
        drafter = LlamaCpp.ours(name) or LlamaCpp.ours(f"{name}-simple") or name
        for number, values, text in starts:
            with source.skipping():
                if values["gen drafts"]:
                    groups.setdefault(drafter, []).append(_of_drafter(source, number, values, text))
    drafts = sum(item.drafts or 0.0 for group in groups.values() for item in group)
    if len(groups) == 1 and calls >= drafts:
        ratio = calls / drafts
        groups = {name: [replace(c, steps=(c.drafts or 0.0) * ratio) for c in group] for name, group in groups.items()}
    parts = [
        replace(part, source=f"{part.source}, {name}")
        for name, group in groups.items()
        for part in acceptances_of(group, source, "runs", drafter=name)
    ]
    return [_system(source, parts, max(calls, drafts))] if len(groups) > 1 else parts


def _of_drafter(source: Source, number: int, values: Mapping[str, float], text: str) -> StepCounts:
    """Counts of one drafter since a start. Raises UsageError if they are inconsistent."""
    drafts, drafted, accepted = (values[key] for key in ("gen drafts", "gen tokens", "acc tokens"))
    item = StepCounts(drafts, accepted, drafted=drafted, line=number).checked(source, number)
    words = [word.strip() for word in text.split(",") if word.strip()]
    if words:
        rates = [source.number(word, number, "an acceptance rate", 1.0) for word in words]
        error = max(0.51 * 10.0 ** -len(word.partition(".")[2]) for word in words)
        return from_rates(source, number, accepted, drafted, rates, drafts=drafts, error=error)
    first, gamma = values.get("acc drafts"), math.ceil(drafted / drafts - 1e-9)
    if not first:
        return item
    if not first <= min(accepted, drafts) or accepted > first * gamma:
        raise source.error(number, f"{accepted:g} accepted tokens in {first:g} accepted drafts are inconsistent")
    # Exact for drafts of two tokens.
    rate = constant_rate(accepted / first - 1, gamma - 1) if gamma > 1 else 0.0
    return replace(item, at_least=tuple(first * rate**i for i in range(gamma)))


def _system(source: Source, parts: list[Acceptance], calls: float) -> Acceptance:
    """The acceptance of all drafters of one server, over all its steps."""
    names, widths = ", ".join(part.drafter for part in parts), {}
    drafts = accepted = 0.0
    known = [p if p.marginal else p.with_constant_rate(p.draft_length or 1) for p in parts]
    at_least = [0.0] * max(p.gamma for p in known)
    for part in known:
        steps = part.drafts or 0.0
        width = part.drafted_per_step
        widths[width] = widths.get(width, 0.0) + steps / calls
        drafts, accepted = drafts + steps, accepted + steps * sum(part.marginal)
        for i, rate in enumerate(part.marginal):
            at_least[i] += steps * rate
    if calls > drafts:
        widths[0.0] = 1 - drafts / calls
    item = StepCounts(drafts, accepted, tuple(at_least), steps=calls)
    remark = f"the server has several drafters, {names}, each of which drafts where those before it do not"
    lines = [int(part.source.partition(f"{source.name}:")[2].split(",")[0].split("-")[0]) for part in parts]
    (system,) = acceptances_of(
        [item],
        source,
        "runs",
        f"{source.name}:{min(lines)}-{max(lines)}",
        drafter=" + ".join(part.drafter for part in parts),
        widths=widths,
        parts=tuple(replace(part, remarks=(*part.remarks, remark)) for part in parts),
        refusal="its drafters draft in turn",
        remarks=(remark,),
    )
    return system


def _examples(source: Source) -> list[Acceptance]:
    """Summaries of ``llama-speculative`` and the like, whose steps emit one token more than accepted."""
    runs: list[tuple[int, dict[str, float]]] = []
    for number, line in source.lines(*_EXAMPLE_KEYS):
        if match := _EXAMPLE.search(line):
            if not runs or match[1] in runs[-1][1]:
                runs.append((number, {}))
            runs[-1][1][match[1]] = float(match[2])

    def counts(number: int, values: Mapping[str, float]) -> StepCounts:
        if len(values) < len(_EXAMPLE_KEYS):
            raise source.error(number, "the summary of a run is truncated")
        gamma, tokens, drafted, accepted = (values[key] for key in _EXAMPLE_KEYS)
        steps = steps_of(tokens, accepted, 0.0)
        item = StepCounts(None, accepted, drafted=drafted, gamma=int(gamma), steps=steps, line=number)
        return item.checked(source, number)

    return each_run(source, ((number, values) for number, values in runs if "n_drafted" in values), counts)


def _timings(source: Source) -> list[Acceptance]:
    """Timings of responses: all steps after the prefill, with and without a draft."""

    def counts(line: int, fields: dict[str, Any]) -> StepCounts | None:
        tokens, drafted, accepted = (
            count(source, line, fields, key) for key in ("predicted_n", "draft_n", "draft_n_accepted")
        )
        drafts = count(source, line, fields, "draft_rounds") if fields.get("draft_rounds") is not None else None
        steps = max(steps_of(tokens, accepted), drafts or 0.0)
        item = StepCounts(drafts, accepted, drafted=drafted, steps=steps, name=source.row_id(line))
        return item.checked(source, line) if drafted or accepted else None

    return acceptances_of(source.read(source.responses("draft_n_accepted"), counts), source, "responses")


def _prompts(source: Source) -> list[Acceptance]:
    """Lines of ``mtp-bench``, one for each prompt; a prompt that comes again begins another run."""
    runs: list[dict[str, StepCounts]] = [{}]
    seconds: list[list[float]] = [[]]
    for number, line in source.lines("pred="):
        if match := _PROMPT.search(line):
            with source.skipping():
                names = ("predicted", "drafted", "accepted")
                tokens, drafted, accepted = map(
                    lambda text, name: source.number(text, number, f"the {name} tokens"), match.groups()[1:4], names
                )
                steps = steps_of(tokens, accepted)
                item = StepCounts(None, accepted, drafted=drafted, steps=steps, name=match[1], line=number)
                item.checked(source, number)
                if match[1] in runs[-1]:
                    runs.append({})
                    seconds.append([])
                rate = source.number(match[5], number, "tok/s") if match[5] else 0.0
                seconds[-1].append(tokens / rate if rate else 0.0)
                runs[-1][match[1]] = item
    acceptances = []
    for run, times in zip(runs, seconds, strict=True):
        drafting = [item for item in run.values() if item.drafted]
        of_run = acceptances_of(drafting, source, "prompts")
        timed = zip(run.values(), times, strict=True)
        speeds = [(i.line, t, i.steps or 0.0, False, i.drafted or 0.0) for i, t in timed if i.drafted or not drafting]
        _add_speeds(source, speeds, of_run)
        acceptances += of_run
    return acceptances


def _speed_bench(source: Source) -> list[Acceptance]:
    """Tables of ``speed_bench.py``: the row of all categories, or else each."""
    rows: list[tuple[int, str, str, str]] = []
    header: list[str] = []
    for number, line in source.lines() if _ACCEPT_RATE in source.text else ():
        cells = line.replace("|", " ").split()
        if _ACCEPT_RATE in cells:
            header = cells
        elif header and len(cells) == len(header):
            rate = cells[header.index(_PREDICTED)] if _PREDICTED in header else ""
            rows.append((number, cells[0], cells[header.index(_ACCEPT_RATE)], rate))
    acceptances = []
    for number, _, text, per_second in [row for row in rows if row[1] == "overall"] or rows:
        if not text.strip("-:"):  # a rule
            continue
        with source.skipping():
            speed = source.number(per_second, number, f"the {_PREDICTED}") if per_second else 0.0
            if text == "n/a":  # nothing was drafted
                add_speed(source, number, 1.0, 1.0, speed, 0.0, 1.0)
                continue
            scale, digits = (100.0, text[:-1]) if text.endswith("%") else (1.0, text)
            rate = source.number(digits, number, f"the {_ACCEPT_RATE}", scale) / scale
            if source.gamma is None:
                raise source.error(
                    number,
                    f"{100 * rate:.1f} % of the drafted tokens were accepted, but the draft length is not recorded; "
                    f"give it as '{{source: {source.name}, gamma: N}}'",
                )
            length = 1 + rate * source.gamma
            remark = "assumed: every draft has its full length, and one request is decoded at a time"
            add_speed(source, number, length, 1.0, speed, source.gamma, 1.0)
            acceptances.append(
                Acceptance(
                    (),
                    source.place(number),
                    length=length,
                    draft_length=source.gamma,
                    every_step=False,
                    remarks=(remark,),
                )
            )
    return acceptances
