"""Engines and simulators whose settings are written, and whose logs are not read here.

TensorRT-LLM: ``speculative_config`` in YAML.
https://nvidia.github.io/TensorRT-LLM: features/speculative-decoding; tensorrt_llm/llmapi/llm_args.py.

transformers: arguments of ``generate`` for assisted decoding.
https://huggingface.co/docs/transformers: generation_strategies; transformers/generation/candidate_generator.py.

Simulators of serving: aiconfigurator's mean, the conditional rates of Dynamo's mocker, ATOM's forced length.
https://github.com/ai-dynamo/aiconfigurator: docs/cli_user_guide.md; https://github.com/ai-dynamo/dynamo:
lib/mocker/src/common/speculative.rs; https://github.com/ROCm/ATOM: docs/forced_acceptance_length.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import yaml

from ..acceptance import Acceptance
from ..counter_definitions import DEFINITIONS
from ..engine import Engine, Schedule, Settings, match_remarks, ngram_sizes, only_point_masses, shell, synthetic_remarks
from .vllm import Vllm

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
        method = self.method_of(acceptance)
        config: dict[str, Any] = {"decoding_type": method, "max_draft_len": schedule.gamma}
        if method == "NGram":
            # By default, it also looks up the texts of other requests.
            config |= {"max_matching_ngram_size": ngram_sizes(acceptance)["max"], "is_public_pool": False}
        elif acceptance.model or method != "MTP":
            config["speculative_model"] = self.model_of(acceptance)
        if schedule.sampled:
            config["use_rejection_sampling"] = True
        remarks = schedule.remarks()
        if len(schedule.ranges) > 1:
            # Keys are the upper ends of ranges; beyond the last there is no drafting.
            lengths = {batch_range.high: batch_range.gamma for batch_range in schedule.ranges}
            upper = "keys of draft_len_schedule are upper ends of ranges; in older releases they are lower ends"
            remarks = (*schedule.remarks(beyond=0), upper)
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


class Transformers(Engine):
    name = "transformers"
    read_from = "transformers 5.24.0"
    methods: ClassVar[Mapping[str, str]] = {
        "draft-model": "assistant_model",
        "prompt-lookup": "prompt_lookup_num_tokens",
    }
    most_sequences = 1

    def export(self, schedule: Schedule) -> Settings:
        if not schedule.gamma:
            return Settings("model.generate(**inputs)")
        acceptance = schedule.acceptance
        remarks = schedule.remarks()
        if self.method_of(acceptance) == "prompt_lookup_num_tokens":
            n = ngram_sizes(acceptance)["max"]
            text = f"model.generate(**inputs, prompt_lookup_num_tokens={schedule.gamma}, max_matching_ngram_size={n})"
            return Settings(text, (*remarks, *match_remarks(acceptance, self.name, shortest=True)))
        # The length is read from the assistant's generation_config, whose defaults change it in each step.
        text = (
            f"assistant = AutoModelForCausalLM.from_pretrained({self.model_of(acceptance)!r})\n"
            f"assistant.generation_config.num_assistant_tokens = {schedule.gamma}\n"
            'assistant.generation_config.num_assistant_tokens_schedule = "constant"\n'
            "assistant.generation_config.assistant_confidence_threshold = 0.0\n"
            "model.generate(**inputs, assistant_model=assistant)"
        )
        return Settings(text, remarks)


_MOST_DRAFTED = 5  # longest draft of Dynamo's mocker


class Aiconfigurator(Engine):
    """The mean number of accepted tokens, from which aiconfigurator computes the time per token."""

    name = "aiconfigurator"
    read_from = "aiconfigurator main, commit c8a2bb918611"
    methods: ClassVar[Mapping[str, str]] = Vllm.methods

    def cannot(self, acceptance: Acceptance) -> str | None:
        return None if acceptance.chain else "it does not support tree drafts"

    def export(self, schedule: Schedule) -> Settings:
        if not schedule.gamma:
            return Settings("", ("omit --nextn",))
        acceptance = schedule.acceptance
        # Accepted draft tokens: without the bonus token.
        accepted = f"{sum(acceptance.marginal):.3f}"
        text = shell({"--nextn": schedule.gamma, "--nextn-accepted": accepted})
        remarks = [
            "it divides the time of a step by the mean; the spread of accepted tokens does not count: dynamo-mocker "
            "simulates that",
            *schedule.remarks(),
        ]
        if acceptance.drafter not in ("", "mtp"):
            remarks.append(f"it prices the drafts as MTP layers of the target, not as {acceptance.drafter}")
        return Settings(text, tuple(remarks))


class DynamoMocker(Aiconfigurator):
    """Pr(tau >= i | tau >= i - 1), which the mocker draws independently in each step of each request."""

    name = "dynamo-mocker"
    read_from = "Dynamo main, commit fa0a9ec83480"

    def export(self, schedule: Schedule) -> Settings:
        if not schedule.gamma:
            return Settings("", ("omit --aic-nextn",))
        gamma = min(schedule.gamma, _MOST_DRAFTED)
        acceptance = schedule.acceptance.cut(gamma)
        rates = ",".join(f"{rate:.4f}" for rate in acceptance.conditional)
        text = shell({"--aic-nextn": gamma, "--aic-nextn-accept-rates": rates})
        shorter = f"it simulates drafts of at most {_MOST_DRAFTED} tokens; the advice is {schedule.gamma}"
        remarks = (
            *((shorter,) if gamma < schedule.gamma else ()),
            "the rates are conditional: of token i if all before it were accepted; their products are Pr(tau >= i), so "
            "mean and spread of a step are as measured",
            "all requests have the same rates; differences between prompts are not simulated",
            *schedule.remarks(),
        )
        return Settings(text, remarks)


class AtomSynthetic(Engine):
    """ATOM with a forced acceptance length, to time a draft length without the drafter's quality."""

    name = "atom-synthetic"
    read_from = "ATOM main, commit ffdf3bb5ddf8"
    methods: ClassVar[Mapping[str, str]] = {"eagle3": "eagle3", "mtp": "mtp", "dspark": "dspark"}

    def export(self, schedule: Schedule) -> Settings:
        if not schedule.gamma:
            return Settings("", ("start the server without --method",))
        acceptance = schedule.acceptance
        method = self.method_of(acceptance)
        flags = {
            "--method": method,
            "--num-speculative-tokens": schedule.gamma,
            "--draft-model": (acceptance.model or method == "eagle3") and self.model_of(acceptance),
            "--spec-decode-acceptance-length": f"{1 + sum(acceptance.marginal):.2f}",
        }
        return Settings(shell(flags), (*synthetic_remarks(acceptance), *schedule.remarks()))
