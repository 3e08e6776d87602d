"""Engine inputs, as their documentation and sources describe them: parsers that refuse everything else.

Each gives the draft length that the engine would use at a batch size.
"""

import argparse
import json
import shlex
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator


def words(text: str) -> list[str]:
    """As a shell splits them: lines that end with a backslash go on."""
    return shlex.split(text.replace("\\\n", ""))


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


# -- vLLM: vllm/config/speculative.py, vllm/v1/spec_decode/dynamic/utils.py ------------------------------------------


class VllmConfig(Strict):
    method: Literal["ngram", "medusa", "draft_model", "eagle", "eagle3", "mtp", "dflash", "dspark"]
    model: str | None = None
    num_speculative_tokens: int = Field(gt=0)
    num_speculative_tokens_per_batch_size: list[list[int]] | None = None
    prompt_lookup_min: int | None = Field(None, ge=1)
    prompt_lookup_max: int | None = Field(None, ge=1)
    rejection_sample_method: Literal["standard", "synthetic", "block"] = "standard"
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    synthetic_acceptance_rates: list[float] | None = None

    @model_validator(mode="after")
    def _together(self) -> Any:
        assert (self.prompt_lookup_max is not None) == (self.method == "ngram")
        assert self.model is not None or self.method in ("ngram", "mtp")
        rates = self.synthetic_acceptance_rates
        assert (rates is not None) == (self.rejection_sample_method == "synthetic")
        if rates is not None:
            assert len(rates) == self.num_speculative_tokens and all(0 <= r <= 1 for r in rates)
            assert rates == sorted(rates, reverse=True)
        end = 0
        for low, high, k in self.num_speculative_tokens_per_batch_size or []:
            assert low == end + 1 and high >= low and 0 <= k <= self.num_speculative_tokens
            end = high
        return self

    def gamma(self, batch_size: int) -> int:
        schedule = self.num_speculative_tokens_per_batch_size
        if not schedule:
            return self.num_speculative_tokens
        return next((k for low, high, k in schedule if low <= batch_size <= high), schedule[-1][2])


def vllm(text: str) -> VllmConfig:
    flag, value = shlex.split(text)
    assert flag == "--speculative-config"
    return VllmConfig.model_validate_json(value)


# -- SGLang: server arguments, adaptive_spec_params.py, adaptive_step_router.py --------------------------------------


class AdaptiveSlot(Strict):
    candidate_steps: list[int] = Field(min_length=1)


STEPS, BLOCKS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE"), ("DFLASH", "DSPARK")


class Sglang:
    def __init__(self, text: str):
        flags, _, config = text.partition("# adaptive.json\n")
        parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
        add = parser.add_argument
        add("--speculative-algorithm", choices=[*STEPS, *BLOCKS, "NGRAM"], required=True)
        add("--speculative-draft-model-path")
        for name in ("num-steps", "eagle-topk", "num-draft-tokens", "ngram-max-bfs-breadth"):
            add(f"--speculative-{name}", type=int)
        add("--speculative-use-rejection-sampling", action="store_true")
        add("--speculative-use-block-verification", action="store_true")
        add("--speculative-adaptive", action="store_true")
        add("--speculative-adaptive-config")
        self.given = inputs = parser.parse_args(words(flags))
        three = (inputs.speculative_num_steps, inputs.speculative_eagle_topk, inputs.speculative_num_draft_tokens)
        eagle = inputs.speculative_algorithm in ("EAGLE", "EAGLE3", "NEXTN")
        if inputs.speculative_algorithm == "NGRAM":
            assert three[:2] == (None, None) and three[2] and inputs.speculative_draft_model_path is None
        elif inputs.speculative_algorithm in BLOCKS:
            assert three[:2] == (None, None) and three[2] and inputs.speculative_draft_model_path
        else:
            assert all(three) and three[1] == 1 and three[2] == three[0] + 1
            assert inputs.speculative_draft_model_path or inputs.speculative_algorithm == "NEXTN"
        if not eagle:
            assert not (inputs.speculative_use_rejection_sampling or inputs.speculative_use_block_verification)
            assert not inputs.speculative_adaptive
        assert inputs.speculative_adaptive == bool(config) == bool(inputs.speculative_adaptive_config)
        slots = json.loads(config) if config else {}
        self.slots = {int(b): AdaptiveSlot.model_validate(slot).candidate_steps for b, slot in slots.items()}

    def gamma(self, batch_size: int) -> int:
        if not self.slots:
            return self.given.speculative_num_draft_tokens - 1
        (steps,) = self.slots[max(b for b in self.slots if b <= batch_size)]
        return steps


# -- TensorRT-LLM: tensorrt_llm/llmapi/llm_args.py -------------------------------------------------------------------


class TrtConfig(Strict):
    decoding_type: Literal["Draft_Target", "NGram", "Eagle3", "MTP", "DFlash", "DSpark"]
    max_draft_len: int = Field(gt=0)
    speculative_model: str | None = None
    max_matching_ngram_size: int | None = Field(None, gt=0)
    is_public_pool: bool = True
    use_rejection_sampling: bool = False
    draft_len_schedule: dict[int, int] | None = None

    @model_validator(mode="after")
    def _together(self) -> Any:
        assert (self.max_matching_ngram_size is not None) == (self.decoding_type == "NGram")
        assert (self.speculative_model is not None) or self.decoding_type in ("NGram", "MTP")
        assert not self.use_rejection_sampling or self.decoding_type != "NGram"
        if schedule := self.draft_len_schedule:
            assert min(schedule) >= 1 and min(schedule.values()) >= 0
            assert schedule[min(schedule)] == self.max_draft_len == max(schedule.values())
        return self

    def gamma(self, batch_size: int) -> int:
        if self.draft_len_schedule is None:
            return self.max_draft_len
        return next((k for b, k in sorted(self.draft_len_schedule.items()) if batch_size <= b), 0)


def trt(text: str) -> TrtConfig:
    result = yaml.safe_load(text)
    assert result.keys() == {"speculative_config"}
    return TrtConfig.model_validate(result["speculative_config"])


# -- llama.cpp: common/arg.cpp ---------------------------------------------------------------------------------------


class LlamaCpp:
    def __init__(self, text: str):
        parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
        drafters = ["draft-simple", "draft-eagle3", "draft-dflash", "draft-dspark"]
        types = ["none", *drafters, "draft-mtp", "ngram-simple"]
        parser.add_argument("--spec-type", choices=types, required=True)
        parser.add_argument("--model-draft")
        parser.add_argument("--spec-draft-p-min", type=float)
        for name in ("draft-n-max", "ngram-simple-size-n", "ngram-simple-size-m"):
            parser.add_argument(f"--spec-{name}", type=int)
        self.given = inputs = parser.parse_args(words(text))
        ngram = inputs.spec_type == "ngram-simple"
        assert (inputs.spec_ngram_simple_size_m is not None) == ngram == (inputs.spec_ngram_simple_size_n is not None)
        assert inputs.model_draft or inputs.spec_type not in drafters
        assert not ngram or not inputs.model_draft

    def gamma(self, batch_size: int) -> int:
        return self.given.spec_draft_n_max or 0
