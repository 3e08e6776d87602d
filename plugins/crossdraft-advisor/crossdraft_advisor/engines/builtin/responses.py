"""Statistics of responses and iterations, with the keys of vLLM, AIPerf, TensorRT-LLM and SGLang.

Rapid-MLX has counters of its server (https://github.com/raullenchai/Rapid-MLX: spec_decode/mtp/accept_counter.py,
routes/metrics.py). Attempts are drafted tokens. Older versions draft one in each verification; newer ones count the
verifications, and both kinds of tokens by their depth in the draft.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from ..acceptance import Acceptance
from ..counter_definitions import DEFINITIONS, PREFILL_TOKENS
from ..engine_log import Source
from ..formats import AcceptanceFormat
from ..prometheus import by_model, title_of
from ..step_counts import StepCounts, acceptances_of, count, full_drafts, per_response

#: Keys of `IterationStats`, as its JSON and as its Python binding: sequences with a draft, drafted, accepted tokens.
_ITERATION = (
    ("numRequestsWithDraftTokens", "numDraftTokens", "numAcceptedTokens"),
    ("num_requests_with_draft_tokens", "num_draft_tokens", "num_accepted_tokens"),
)

#: Drafted and accepted tokens in a scrape, by position or, in older versions, in total.
_POSITIONS = ("trtllm_spec_decode_drafted_tokens_total", "trtllm_spec_decode_accepted_tokens_total")
_LABEL = "token_position"
_TOTALS = ("trtllm_spec_decode_num_draft_tokens_total", "trtllm_spec_decode_num_accepted_tokens_total")
_TOKENS_PER_ITERATION = "avg_decoded_tokens_per_iter"
#: Counts of a finished request in SGLang's log, which has them as Python writes them.
_FINISHED = "'spec_verify_ct': "
_LOGGED = re.compile(r"'(spec_[a-z_]+|completion_tokens)': (\d{1,15}|\[[\d, ]*\])(?=[,}])")
#: Statistics of a response without its steps.
_UNCOUNTED = ("total_draft_tokens", "total_accepted_draft_tokens")


class ResponseStatistics(AcceptanceFormat):
    """Steps of each response: of vLLM and AIPerf, which copies vLLM's, and of TensorRT-LLM."""

    name = "response-statistics"
    definition = "steps of each response with a draft, by the number of accepted tokens"
    keys: ClassVar[tuple[str, ...]] = ("num_spec_steps",)

    def read(self, source: Source, earlier: Source | None = None) -> list[Acceptance]:
        def older_counts(line: int, fields: dict[str, Any]) -> StepCounts | None:
            """Counts of older versions of TensorRT-LLM; AIPerf has objects under the key."""
            if "num_spec_steps" in fields or isinstance(fields["total_draft_tokens"], dict):
                return None
            drafted, accepted = (count(source, line, fields, key) for key in _UNCOUNTED)
            return full_drafts(source, line, accepted, drafted, source.row_id(line))

        acceptances = per_response(source, self.keys)
        counts = source.read(source.responses("total_draft_tokens"), older_counts)
        return [*acceptances, *acceptances_of(counts, source, "responses")]


class TensorRtLlmResponses(AcceptanceFormat):
    """Responses of TensorRT-LLM with the mean of tokens per iteration only, the prefill's iteration included."""

    name = "tensorrt-llm-responses"
    counters = DEFINITIONS["tensorrt-llm"]
    definition = "iterations after the prefill, with and without a draft"

    def read(self, source: Source, earlier: Source | None = None) -> list[Acceptance]:
        if '"total_draft_tokens"' in source.text:  # its own counts are read
            return []

        def counted(line: int, fields: dict[str, Any]) -> StepCounts | None:
            row = source.row(line)
            choices, usage = row.get("choices"), row.get("usage")
            if fields[_TOKENS_PER_ITERATION] is None or not isinstance(usage, dict):
                return None
            if not isinstance(choices, list) or len(choices) != 1:
                raise source.error(line, "the tokens of several choices are counted together; request one")
            mean = source.number(str(fields[_TOKENS_PER_ITERATION]), line, _TOKENS_PER_ITERATION)
            tokens = count(source, line, usage, "completion_tokens")
            steps = (round(tokens / mean) if mean >= 1 else 0) - PREFILL_TOKENS
            accepted = tokens - steps - PREFILL_TOKENS
            return StepCounts(None, accepted, name=source.row_id(line), steps=steps) if steps > 0 else None

        counts = source.read(source.responses(_TOKENS_PER_ITERATION), counted)
        if counts and not any(item.accepted for item in counts):
            source.skip(source.count, "every iteration emitted one token: nothing was accepted, or nothing drafted")
            return []
        return acceptances_of(counts, source, "responses")


class SglangResponses(ResponseStatistics):
    """``meta_info`` of SGLang's responses, whose target calls include those without a draft, also in its log."""

    name = "sglang-responses"
    counters = DEFINITIONS["sglang"]
    definition = ""
    keys = ("spec_verify_ct",)

    def read(self, source: Source, earlier: Source | None = None) -> list[Acceptance]:
        return per_response(_with_logged(source), self.keys)


def _with_logged(source: Source) -> Source:
    """A source with the responses of a log of requests (``--log-requests``) as JSON, each in its line."""
    if _FINISHED not in source.text:
        return source
    lines = [
        json.dumps({key: json.loads(value) for key, value in _LOGGED.findall(line)}) if _FINISHED in line else ""
        for _, line in source.raw_lines()
    ]
    return replace(source, text="\n".join(lines), series={})


class TensorRtLlmCounters(AcceptanceFormat):
    """Counters of TensorRT-LLM in a scrape: of each position, or of all in older versions."""

    name = "tensorrt-llm-counters"
    counters = DEFINITIONS["tensorrt-llm"]
    subtracts = True

    def read(self, source: Source, earlier: Source | None = None) -> list[Acceptance]:
        acceptances: list[Acceptance] = []
        for model, of_model in by_model(
            source, (*_POSITIONS, *_TOTALS), earlier, dict.fromkeys(_POSITIONS, _LABEL)
        ).items():
            drafted, accepted = (of_model.get(name, {}) for name in _POSITIONS)
            with source.skipping():
                if drafted:
                    steps = drafted[0].value if 0 in drafted else 0.0
                    values = tuple(accepted[i].value if i in accepted else 0.0 for i in range(max(drafted) + 1))
                    total = sum(sample.value for sample in drafted.values())
                    if not steps or max(accepted, default=0) > max(drafted) or any(v > steps for v in values):
                        raise source.error(source.count, f"{_POSITIONS[0]} does not match {_POSITIONS[1]}")
                    item = StepCounts(steps, sum(values), values, total)
                elif all(name in of_model for name in _TOTALS):
                    sample, other = (of_model[name][0] for name in _TOTALS)
                    item = full_drafts(source, sample.line, other.value, sample.value)
                else:
                    continue
                acceptances += acceptances_of([item], source, "runs", title_of(source, model))
        return acceptances


class IterationStats(AcceptanceFormat):
    """Statistics of TensorRT-LLM's iterations, ``/metrics`` of its server or ``get_stats`` of its API."""

    name = "tensorrt-llm-iterations"
    counters = DEFINITIONS["tensorrt-llm"]

    def read(self, source: Source, earlier: Source | None = None) -> list[Acceptance]:
        def counts(line: int, fields: dict[str, Any], keys: Sequence[str]) -> StepCounts | None:
            steps, drafted, accepted = (count(source, line, fields, key) for key in keys)
            return StepCounts(steps, accepted, drafted=drafted).checked(source, line) if steps else None

        objects = ((*item, keys) for keys in _ITERATION for item in source.objects(keys[0]))
        return acceptances_of(source.read(objects, counts), source, "iterations")


_DRAFTED, _ACCEPTED, _STEPS, _DRAFTED_AT, _ACCEPTED_AT = (
    f"rapid_mlx_spec_decode_{name}_total"
    for name in ("attempts", "accepts", "verify_calls", "drafted_by_depth", "accepted_by_depth")
)


class RapidMlxCounters(AcceptanceFormat):
    """Counters of Rapid-MLX."""

    name = "rapid-mlx"
    definition = "steps with a draft"
    subtracts = True

    def read(self, source: Source, earlier: Source | None = None) -> list[Acceptance]:
        names, depth = (_DRAFTED, _ACCEPTED, _STEPS, _DRAFTED_AT, _ACCEPTED_AT), "depth"
        labels = {_DRAFTED_AT: depth, _ACCEPTED_AT: depth}
        counters = by_model(source, names, earlier, labels).get("", {})
        if not (_DRAFTED in counters and _ACCEPTED in counters):
            return []
        drafted, accepted = counters[_DRAFTED][0], counters[_ACCEPTED][0]
        if not drafted.value:
            raise source.error(drafted.line, "nothing was drafted; send requests to the server first")
        steps, tokens_at = counters.get(_STEPS, counters[_DRAFTED])[0], counters.get(_ACCEPTED_AT, {})
        if _STEPS not in counters:  # of an older version
            tokens_at = {1: accepted}
        at_least = tuple(tokens_at[i].value if i in tokens_at else 0.0 for i in range(1, max(tokens_at, default=0) + 1))
        if accepted.value > drafted.value or (at_least and sum(at_least) != accepted.value):
            raise source.error(
                accepted.line,
                f"{accepted.value:g} accepted of {drafted.value:g} tokens do not match {sum(at_least):g} by depth",
            )
        item = StepCounts(steps.value, accepted.value, at_least, drafted.value)
        return acceptances_of([item], source, "runs", source.name)
