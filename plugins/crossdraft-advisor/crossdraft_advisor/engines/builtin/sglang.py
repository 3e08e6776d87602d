"""SGLang: log lines, gauge and ``meta_info`` of responses; ``--speculative-*`` and the adaptive configuration.

https://docs.sglang.ai: advanced_features/speculative_decoding, advanced_features/adaptive_speculative_decoding;
sglang/srt/speculative/adaptive_spec_params.py.

The acceptance is that of the accept length: the denominator of the accept rate differs between log, gauge and
responses. In the log it is the number of drafted tokens in some versions, so both give the draft length where one
length fits every line.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from crossdraft import MOST_LEVELS
from crossdraft.runs import counted

from ..acceptance import WINDOWS, Acceptance
from ..counter_definitions import DEFINITIONS
from ..engine import Engine, Schedule, Settings, only_point_masses, shell, synthetic_remarks
from ..engine_log import Source
from ..formats import AcceptanceFormat
from ..prometheus import by_model, samples, title_of
from ..speeds import Drafting, add_scraped, add_speed, flaw_of
from ..step_counts import StepCounts, acceptances_of, steps_of

_GAUGE = "sglang:spec_accept_length"
#: Counters of finished requests: target calls, generated tokens, requests. Gauges: the longest path of a draft, and its
#: tokens with the one before it.
_CALLS, _GENERATED, _FINISHED = (
    f"sglang:{name}_total" for name in ("spec_verify_calls", "generation_tokens", "num_requests")
)
_STEPS, _NODES = "sglang:spec_num_steps", "sglang:spec_num_draft_tokens"
_RUNNING_NOW, _THROUGHPUT_NOW = "sglang:num_running_reqs", "sglang:gen_throughput"
#: The same in the arguments of the server, in its log and its /server_info.
_ARGUMENT = r"speculative_{}[\"']?\s*[=:]\s*(\d{{1,4}})\b"
_ARGUMENTS = tuple(re.compile(_ARGUMENT.format(name)) for name in ("num_steps", "num_draft_tokens"))
_LINE = re.compile(r"Decode batch\b")
_LENGTH = re.compile(r"accept len: ([^,\s]*)(,?)")
_PREFILL = re.compile(r"Prefill batch\b")
#: A rank, the throughput since its last line, the cached tokens of its requests, and the usual steps between lines.
_RANK = re.compile(r"\bDP\d+\b")
_THROUGHPUT = re.compile(r"gen throughput \(token/s\): (\d{1,12}(?:\.\d{1,9})?)(?=,?(?:\s|$))")
_TOKENS = re.compile(r"#(?:full )?token: (\d{1,15}),(?!\d)")
_STEPS_A_LINE = 40.0
_RATE = re.compile(r"accept rate: ([^,\s]*),")
_RUNNING = re.compile(r"#running-req: (\d{1,9}),(?!\d)")
#: Algorithms with adaptive steps, with rejection sampling of sampled drafts, and with block verification.
_EAGLE = ("EAGLE", "EAGLE3", "NEXTN")
_BLOCKS = ("DFLASH", "DSPARK")  # algorithms that draft a block in one step


class Sglang(Engine):
    name = "sglang"
    verifiers: ClassVar[tuple[str, ...]] = (*Engine.verifiers, "block")
    read_from = "SGLang main, commit 015c872628e3"
    counters = DEFINITIONS["sglang"]
    methods: ClassVar[Mapping[str, str]] = {
        "draft-model": "STANDALONE",
        "prompt-lookup": "NGRAM",
        "eagle": "EAGLE",
        "eagle3": "EAGLE3",
        "mtp": "NEXTN",
        "dflash": "DFLASH",
        "dspark": "DSPARK",
    }

    def cannot(self, acceptance: Acceptance) -> str | None:
        if reason := super().cannot(acceptance):
            return reason
        if (method := self.methods.get(acceptance.drafter, "EAGLE")) in _EAGLE:
            return None
        if acceptance.block:
            return f"its {method} has no block verification"
        if method in _BLOCKS and acceptance.temperature != 0 and acceptance.point_mass is False:
            return f"its {method} is exported with greedy drafts only"
        return only_point_masses(acceptance, f"{self.name}'s {method}")

    def scheduled(self, acceptance: Acceptance) -> bool:
        return self.methods.get(acceptance.drafter) in _EAGLE

    def export(self, schedule: Schedule) -> Settings:
        if not schedule.gamma:
            return Settings("", ("start the server without --speculative-algorithm",))
        acceptance = schedule.acceptance
        method = self.method_of(acceptance)
        has_model, steps = acceptance.model or method not in ("NGRAM", "NEXTN"), method not in ("NGRAM", *_BLOCKS)
        flags = {
            "--speculative-algorithm": method,
            "--speculative-draft-model-path": has_model and self.model_of(acceptance),
            "--speculative-ngram-max-bfs-breadth": method == "NGRAM" and 1,  # of a chain
            "--speculative-num-steps": steps and schedule.gamma,
            "--speculative-eagle-topk": steps and 1,
            "--speculative-num-draft-tokens": schedule.gamma + 1,  # with the last committed token
            "--speculative-use-rejection-sampling": schedule.sampled,
            "--speculative-use-block-verification": acceptance.block,
        }
        text, remarks = shell(flags), list(schedule.remarks())
        if acceptance.block:
            remarks.append("block verification needs CUDA or ROCm; older releases do not have it")
        if method == "NGRAM" and acceptance.options:
            remarks.append(
                "NGRAM looks up the texts of all requests; the acceptance was measured on each request's own"
            )
        if len(schedule.ranges) > 1:
            adaptive = json.dumps({str(r.low): {"candidate_steps": [r.gamma]} for r in schedule.ranges})
            text = shell({**flags, "--speculative-adaptive": True, "--speculative-adaptive-config": "adaptive.json"})
            text += f"\n\n# adaptive.json\n{adaptive}"
            if any(r.gamma == 0 for r in schedule.ranges):
                remarks.append("candidate_steps [0] switches drafting off; older releases reject it")
        return Settings(text, tuple(remarks))


class SglangSynthetic(Sglang):
    """SGLang with a simulated acceptance length, to time a draft length without the drafter's quality."""

    name = "sglang-synthetic"

    def scheduled(self, acceptance: Acceptance) -> bool:
        return False  # one length for all draft lengths

    def export(self, schedule: Schedule) -> Settings:
        settings = super().export(schedule)
        if not schedule.gamma:
            return settings
        acceptance = schedule.acceptance
        variables = [
            f"SGLANG_SIMULATE_ACC_LEN={1 + sum(acceptance.marginal):.2f}",
            "SGLANG_SIMULATE_ACC_METHOD=match-expected",
            "SGLANG_SIMULATE_ACC_TOKEN_MODE=real-draft-token",
        ]
        text = "\n".join([*(f"export {variable}" for variable in variables), "", settings.text])
        default = (
            "the default method, multinomial, rounds a normal variable of standard deviation 1 and misses the mean"
        )
        shared = "one length is drawn for all sequences of a step"
        return Settings(text, (*synthetic_remarks(acceptance), shared, default, *settings.remarks))


class SglangFormat(AcceptanceFormat):
    """Lines of SGLang's log, its counters and its gauge."""

    name = "sglang"
    counters = DEFINITIONS["sglang"]
    subtracts = True

    def read(self, source: Source, earlier: Source | None = None) -> list[Acceptance]:
        counters = _counters(source, earlier)
        if earlier is not None:
            return counters
        _add_gauges(source)
        return [*_log(source), *(counters or _gauge(source))]


def drafts_of(source: Source) -> dict[str, Any]:
    """Attributes of `Acceptance` about the drafts of a server, as far as they are in a scrape, a log or its info."""
    gauges = [max((s.value for s in samples(source, {name}).values()), default=0) for name in (_STEPS, _NODES)]
    matches = [pattern.search(source.text) for pattern in _ARGUMENTS]
    steps, nodes = (int(gauge or (match[1] if match else 0)) for gauge, match in zip(gauges, matches, strict=True))
    if not 0 < steps <= MOST_LEVELS:
        return {}
    if nodes <= steps + 1:
        return {"draft_length": steps}
    return {"draft_length": steps, "chain": False, "refusal": f"its drafts are trees of {counted(nodes - 1, 'token')}"}


def _counters(source: Source, earlier: Source | None) -> list[Acceptance]:
    """Counters of finished requests: each step emits its accepted tokens and one more; the first is the prefill's."""
    acceptances, drafting = [], dict[str, Drafting]()
    for model, of_model in by_model(source, (_CALLS, _GENERATED, _FINISHED), earlier, {}).items():
        if len(of_model) == 3:
            with source.skipping():
                steps, tokens, requests = (of_model[name][0].value for name in (_CALLS, _GENERATED, _FINISHED))
                accepted = steps_of(tokens, steps, requests)  # a step emits one token, and its accepted ones
                if not steps or accepted < 0:
                    raise source.error(
                        of_model[_CALLS][0].line, f"{tokens:g} tokens in {steps:g} target calls: nothing was drafted"
                    )
                drafts = drafts_of(source)
                item = StepCounts(None, accepted, gamma=drafts.pop("draft_length", 0), steps=steps)
                drafting[model] = Drafting(steps, item.gamma or source.gamma or math.nan)
                acceptances += acceptances_of([item], source, "prompts", title_of(source, model), **drafts)
    if earlier is not None:
        add_scraped("sglang", source, earlier, drafting)
    return acceptances


def _log(source: Source) -> list[Acceptance]:
    """Log lines of decoding batches, which cover equal numbers of steps and are weighted by running requests."""
    rows: list[tuple[int, float, float]] = []
    speeds: list[tuple[int, float, float, float, float, str]] = []
    lengths: set[int] | None = None
    idle, prefills, before = 0, set[str](), dict[str, float]()
    for number, line in source.lines("Decode batch", "Prefill batch"):
        rank = match[0] if (match := _RANK.search(line)) else ""
        if _PREFILL.search(line):
            prefills.add(rank)
        if not _LINE.search(line):
            continue
        length, running, per_second = (pattern.search(line) for pattern in (_LENGTH, _RUNNING, _THROUGHPUT))
        with source.skipping():
            if not length and not per_second:
                continue
            if not running or (length and not length[2]):
                raise source.error(number, "the decode batch line is truncated or of an unsupported version")
            mean = source.number(length[1], number, "the accept len", 4096) if length else 1.0
            n = float(running[1])
            if per_second and mean >= 1:
                tokens = float(match[1]) if (match := _TOKENS.search(line)) else math.nan
                flaw = flaw_of(rank in prefills, n, before.get(rank))
                speeds.append((number, mean if length else 0.0, n, float(per_second[1]), tokens, flaw))
            prefills.discard(rank)
            before[rank] = n
            if not length:
                continue
            if not mean or not n:
                idle += 1
                continue
            if mean < 1:
                raise source.error(number, f"an accept len of {mean:g} does not include the bonus token")
            rows.append((number, n, n * (mean - 1)))
            if rate := _RATE.search(line):
                share = source.number(rate[1], number, "the accept rate")  # of the drafted tokens, with two decimals
                low, high = (mean - 1.005) / (share + 0.005), (mean - 0.995) / max(share - 0.005, 1e-9)
                possible = set(range(max(math.ceil(low), 1), min(math.floor(high), MOST_LEVELS) + 1))
                lengths = possible if lengths is None else lengths & possible
    drafts = drafts_of(source) if rows else {}
    gamma = drafts.pop("draft_length", 0)
    if not gamma and lengths is not None and len(lengths) == 1:
        gamma = lengths.pop()
    for number, mean, n, per_second, tokens, flaw in speeds:
        if n:
            length = (gamma or source.gamma or math.nan) if mean else 0
            add_speed(source, number, mean or 1.0, n, per_second, length, _STEPS_A_LINE, context=tokens / n, flaw=flaw)
    if not rows:
        return []
    remarks = ["windows are weighted by their running requests"]
    if idle:
        remarks.append(f"windows without drafts are omitted: {idle}")
    counts = [StepCounts(None, accepted, gamma=gamma, steps=n, line=number) for number, n, accepted in rows]
    return acceptances_of(counts, source, WINDOWS, exact=False, remarks=tuple(remarks), **drafts)


def _add_gauges(source: Source) -> None:
    """Add the seconds of the steps before a scrape: its running requests x accept length / throughput, of each rank."""
    running, lengths = samples(source, {_RUNNING_NOW}), samples(source, {_GAUGE})
    for (_, labels), rate in samples(source, {_THROUGHPUT_NOW}).items():
        rows, length = (
            series[name, labels].value if (name, labels) in series else 0.0
            for name, series in ((_RUNNING_NOW, running), (_GAUGE, lengths))
        )
        gamma = drafts_of(source).get("draft_length", source.gamma or math.nan) if length else 0.0
        add_speed(source, rate.line, length or 1.0, rows, rate.value, gamma, _STEPS_A_LINE)


def _gauge(source: Source) -> list[Acceptance]:
    lengths = []
    for sample in samples(source, {_GAUGE}).values():
        if sample.value < 1:
            source.skip(sample.line, f"{_GAUGE} is {sample.value:g}: nothing has been drafted")
        else:
            lengths.append(sample.value)
    if not lengths:
        return []
    remarks = [f"{_GAUGE} covers only the time just before the scrape; prefer a log or responses"]
    if len(lengths) > 1:
        remarks.append(f"the mean of {len(lengths)} ranks, as if all took equally many steps")
    return [
        Acceptance((), source.name, length=sum(lengths) / len(lengths), remarks=tuple(remarks), **drafts_of(source))
    ]
