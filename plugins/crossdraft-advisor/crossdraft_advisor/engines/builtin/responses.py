"""Statistics of responses and iterations, with the keys of vLLM, AIPerf, TensorRT-LLM and SGLang."""

from __future__ import annotations

from typing import ClassVar

from ..acceptance import Acceptance
from ..counter_definitions import DEFINITIONS
from ..engine_log import Source
from ..formats import AcceptanceFormat
from ..step_counts import StepCounts, acceptances_of, count, per_response

#: Keys of `IterationStats`, as its JSON and as its Python binding: sequences with a draft, drafted, accepted tokens.
_ITERATION = (
    ("numRequestsWithDraftTokens", "numDraftTokens", "numAcceptedTokens"),
    ("num_requests_with_draft_tokens", "num_draft_tokens", "num_accepted_tokens"),
)


class ResponseStatistics(AcceptanceFormat):
    """Steps of each response: of vLLM and AIPerf, which copies vLLM's, and of TensorRT-LLM."""

    name = "response-statistics"
    definition = "steps of each response with a draft, by the number of accepted tokens"
    keys: ClassVar[tuple[str, ...]] = ("num_spec_steps",)

    def read(self, source: Source, earlier: Source | None = None) -> list[Acceptance]:
        return per_response(source, self.keys)


class SglangResponses(ResponseStatistics):
    """``meta_info`` of SGLang's responses, whose target calls include those without a draft."""

    name = "sglang-responses"
    counters = DEFINITIONS["sglang"]
    definition = ""
    keys = ("spec_verify_ct",)


class IterationStats(AcceptanceFormat):
    """Statistics of TensorRT-LLM's iterations, ``/metrics`` of its server or ``get_stats`` of its API."""

    name = "tensorrt-llm-iterations"
    counters = DEFINITIONS["tensorrt-llm"]

    def read(self, source: Source, earlier: Source | None = None) -> list[Acceptance]:
        counts = []
        for steps_key, drafted_key, accepted_key in _ITERATION:
            for line, fields in source.objects(steps_key):
                with source.skipping():
                    steps, drafted, accepted = (
                        count(source, line, fields, key) for key in (steps_key, drafted_key, accepted_key)
                    )
                    if accepted > drafted:
                        raise source.error(line, f"{accepted:g} accepted of {drafted:g} drafted tokens")
                    if steps:
                        counts.append((StepCounts(steps, accepted, drafted=drafted), drafted / steps))
        lengths = {length for _, length in counts}
        gamma = int(max(lengths)) if len(lengths) == 1 and max(lengths).is_integer() else 0
        counts = [StepCounts(c.steps, c.accepted, drafted=c.drafted, gamma=gamma) for c, _ in counts]
        return acceptances_of(counts, source.name, "iterations")
