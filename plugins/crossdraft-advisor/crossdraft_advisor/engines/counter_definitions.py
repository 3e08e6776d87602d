"""Definitions of the speculative-decoding counters of serving engines, beside those of crossdraft (docs/engines.md).

All engines sample the first token of a response in the prefill, so their first draft comes after it; a run of
crossdraft drafts from the last token of the prompt. They differ in the steps that count, in the length of drafts near
the maximum length, and in the tokens accepted past the end of a response.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

PREFILL_TOKENS = 1  # tokens of a response that the prefill emits


@dataclass(frozen=True)
class CounterDefinition:
    """Meaning of the counters of one engine."""

    engine: str  # as registered for `crossdraft advise`
    version: str  # the version that was measured, or that the source code was read of
    # counters of that version equal those computed by replay (tests/fixtures); otherwise the definition is read from
    # the source code
    measured: bool
    idle_steps: bool  # steps without a draft are counted, too
    # drafts are cut to the remaining tokens minus one, and the last token is decoded without a draft. Otherwise every
    # step drafts at full length.
    shortens: bool
    # ``all`` accepted tokens, including those past the end of a response; those ``before_last``, the last token of the
    # response; or ``until_end``, the same plus an end-of-sequence token that ends its draft
    accepted: Literal["all", "before_last", "until_end"]
    # length, rate, per_position: the engine's names of 1 + accepted / drafts, accepted / draft tokens, and accepted at
    # each position / drafts; empty if it does not report that number
    length: str
    rate: str
    per_position: str
    tokens_per_step: str = ""  # the engine's name of response tokens / steps, if it reports that number
    prefill_step: bool = False  # the prefill counts as a step in it
    # options with which a drafter of crossdraft drafts as the engine's does
    drafter_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # of its Prometheus counters ``<prefix>spec_decode_num_*_total``; empty if it has no such counters
    prefix: str = ""
    # generated, finished: its Prometheus counters of generated tokens and of finished requests, if it has both
    generated: str = ""
    finished: str = ""

    @property
    def stem(self) -> str:
        """The start of the names of its counters of drafts."""
        return f"{self.prefix}spec_decode_num_"

    @property
    def meaning(self) -> str:
        """The steps and the accepted tokens that are counted."""
        steps = "all steps after the prefill" if self.idle_steps else "steps with a draft"
        past = "counted" if self.accepted == "all" else "not counted"
        return f"{steps}; tokens accepted past the end of a response are {past}"


DEFINITIONS: dict[str, CounterDefinition] = {
    definition.engine: definition
    for definition in (
        CounterDefinition(
            "vllm",
            "0.32.0",
            measured=True,
            idle_steps=False,
            shortens=False,
            accepted="all",
            length="Mean acceptance length",
            rate="Avg Draft acceptance rate",
            per_position="Per-position acceptance rate",
            drafter_options={"prompt-lookup": {"match": "first"}},
            prefix="vllm:",
            generated="vllm:generation_tokens_total",
            finished="vllm:request_success_total",
        ),
        CounterDefinition(
            "sglang",
            "main, commit 015c872628e3",
            measured=False,
            idle_steps=True,
            shortens=False,
            accepted="all",
            length="accept len",
            rate="",  # log, gauge and responses divide by different numbers
            per_position="",
            tokens_per_step="spec_accept_length",
        ),
        CounterDefinition(
            "tensorrt-llm",
            "main, commit 000439672005",
            measured=False,
            idle_steps=False,
            shortens=False,
            accepted="before_last",
            length="acceptanceLength",
            rate="numAcceptedTokens / numDraftTokens",
            per_position="",
            tokens_per_step="avg_decoded_tokens_per_iter",
            prefill_step=True,
        ),
        CounterDefinition(
            "llama.cpp",
            "commit 0c1e57098bba",
            measured=True,
            idle_steps=False,
            shortens=True,
            accepted="until_end",
            length="mean len",
            rate="draft acceptance",
            per_position="acc per pos",
            prefix="llamacpp:",
        ),
    )
}
