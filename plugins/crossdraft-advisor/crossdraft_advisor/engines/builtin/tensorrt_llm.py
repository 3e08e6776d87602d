"""TensorRT-LLM: ``speculative_config`` in YAML.

https://nvidia.github.io/TensorRT-LLM: features/speculative-decoding; tensorrt_llm/llmapi/llm_args.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import yaml

from ..acceptance import Acceptance
from ..counter_definitions import DEFINITIONS
from ..engine import Engine, Schedule, Settings
from ..settings import (
    length_remarks,
    match_remarks,
    needs_method,
    needs_model,
    ngram_sizes,
    only_point_masses,
    synthetic_remarks,
)

#: Environment variable with the number of accepted draft tokens of every step.
_FORCED = "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS"


class TensorRtLlm(Engine):
    name = "tensorrt-llm"
    read_from = "TensorRT-LLM main, commit 000439672005"
    counters = DEFINITIONS["tensorrt-llm"]
    methods: ClassVar[Mapping[str, str]] = {
        "draft-model": "Draft_Target",
        "prompt-lookup": "NGram",
        "eagle3": "Eagle3",
        "mtp": "MTP",
        "dflash": "DFlash",
        "dspark": "DSpark",
    }

    def cannot(self, acceptance: Acceptance) -> str | None:
        reason = super().cannot(acceptance)
        if reason or acceptance.drafter != "prompt-lookup":  # use_rejection_sampling supports sampled drafts
            return reason
        return only_point_masses(acceptance, f"{self.name}'s {self.methods[acceptance.drafter]}")

    def scheduled(self, acceptance: Acceptance) -> bool:
        return True

    def export(self, schedule: Schedule) -> Settings:
        if not schedule.gamma:
            return Settings("", ("omit speculative_config from the YAML",))
        acceptance = schedule.acceptance
        method = needs_method(self, acceptance)
        config: dict[str, Any] = {"decoding_type": method, "max_draft_len": schedule.gamma}
        if method == "NGram":
            # By default, it also looks up the texts of other requests.
            config |= {"max_matching_ngram_size": ngram_sizes(acceptance)["max"], "is_public_pool": False}
        elif acceptance.model or method != "MTP":
            config["speculative_model"] = needs_model(self, acceptance)
        if schedule.sampled:
            config["use_rejection_sampling"] = True
        remarks = length_remarks(schedule)
        if len(schedule.ranges) > 1:
            # Keys are the upper ends of ranges; beyond the last there is no drafting.
            lengths = {batch_range.high: batch_range.gamma for batch_range in schedule.ranges}
            upper = "keys of draft_len_schedule are upper ends of ranges; in older releases they are lower ends"
            remarks = (*length_remarks(schedule, beyond=0), upper)
            first = schedule.ranges[0]
            if first.gamma < schedule.gamma:
                lengths[first.high] = schedule.gamma
                change = f"up to B = {first.high} it drafts with gamma {schedule.gamma} instead of {first.gamma}"
                remarks = (*remarks, f"{change}: draft_len_schedule must begin with its longest drafts")
            config["draft_len_schedule"] = lengths
        remarks = (*remarks, *match_remarks(acceptance, "TensorRT-LLM", shortest=True))
        if method == "DSpark":
            remarks = (*remarks, "it refuses another max_draft_len than the block size of the head")
        if method == "Draft_Target":
            remarks = (*remarks, "older releases accept DraftTarget instead of Draft_Target, and draft greedily")
        text = yaml.safe_dump({"speculative_config": config}, sort_keys=False).rstrip()
        return Settings(text, remarks)


class TensorRtLlmSynthetic(TensorRtLlm):
    """TensorRT-LLM with a forced number of accepted tokens, to time a draft length without the drafter's quality."""

    name = "tensorrt-llm-synthetic"

    def scheduled(self, acceptance: Acceptance) -> bool:
        return False  # one number for all draft lengths

    def export(self, schedule: Schedule) -> Settings:
        settings = super().export(schedule)
        if not schedule.gamma:
            return settings
        acceptance = schedule.acceptance
        # Accepted draft tokens: without the bonus token.
        text = f"# export {_FORCED}={sum(acceptance.marginal):.2f}\n{settings.text}"
        whole = f"with NGram, {_FORCED} must be an integer; others are ignored with a warning"
        return Settings(text, (*synthetic_remarks(acceptance), whole, *settings.remarks))
