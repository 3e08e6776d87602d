"""Logits processors: the output equals that of transformers with the same processors, for any drafter."""

from typing import Any

import pytest
import torch
from crossdraft_server.custom_generate import custom_generate
from tiny_models import save_model
from transformers.generation import logits_process as lp

from crossdraft import LoadedModel, generate, load_model
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.errors import ContractError, UsageError

PROMPTS = [[5, 6, 7, 5, 6], [9, 8], [11, 12, 13, 11, 12, 13, 11]]
#: Plain greedy decoding of the first row emits FIRST first, and END soon.
PAD, NEW, FIRST, END = 1, 14, 60, 21
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD, "eos_token_id": END}
#: What transformers makes processors of.
SETTINGS: list[dict[str, Any]] = [
    {"min_new_tokens": 9},
    {"min_length": 12},
    {"repetition_penalty": 1.6},
    {"no_repeat_ngram_size": 2},
    {"bad_words_ids": [[FIRST], [30, 43]]},
    {"sequence_bias": [[[8], 2.5], [[6, 7], -4.0]]},
    {"suppress_tokens": [FIRST, 30]},
    {"begin_suppress_tokens": [FIRST]},
    {"forced_eos_token_id": 8},
    {"forced_bos_token_id": 4},
    {"exponential_decay_length_penalty": (3, 1.8)},
    {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "suppress_tokens": [9], "min_new_tokens": 4},
    {"logits_processor": lp.LogitsProcessorList([lp.RepetitionPenaltyLogitsProcessor(2.0)]), "suppress_tokens": [9]},
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: Any) -> LoadedModel:
    return load_model(save_model(tmp_path_factory.mktemp("processed") / "target"), dtype="float32", device="cpu")


def padded(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    longest = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt in prompts])
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


@pytest.mark.parametrize("options", SETTINGS, ids=lambda options: "+".join(options))
def test_settings_of_transformers(target: LoadedModel, options: dict[str, Any]) -> None:
    common = {**padded(PROMPTS), **GREEDY, **options}
    expected = target.model.generate(**common)
    result = target.model.generate(**common, custom_generate=custom_generate, drafter="prompt-lookup")
    assert result.tolist() == expected.tolist()
    plain = target.model.generate(**padded(PROMPTS), **GREEDY)
    assert "forced_bos_token_id" in options or plain.tolist() != expected.tolist(), "this setting shows nothing here"


@pytest.mark.parametrize("drafter", ["none", "prompt-lookup", {"name": "draft-model-dynamic-tree", "nodes": 6}])
def test_processors_receive_path_of_each_node(target: LoadedModel, drafter: Any) -> None:
    """Log P of emitted tokens is that of the processed distribution after their prefix, for any drafter."""
    if isinstance(drafter, dict):
        drafter = {**drafter, "model": target.name}
    processors = [lp.RepetitionPenaltyLogitsProcessor(1.7), lp.NoRepeatNGramLogitsProcessor(2)]
    sampling = Sampling(temperature=0.8, top_k=20)
    distribution: dict[str, Any] = {"temperature": 0.8, "top_k": 20, "seed": 3, "ignore_eos": True}
    responses = generate(
        target, PROMPTS, drafter=drafter, logits_processor=processors, max_new_tokens=NEW, **distribution
    )
    assert drafter == "none" or any(item.nodes for response in responses for item in response.steps)
    for prompt, response in zip(PROMPTS, responses, strict=True):
        assert response.logprobs is not None
        for i, (token, logprob) in enumerate(zip(response.tokens, response.logprobs, strict=True)):
            ids = torch.tensor([prompt + response.tokens[:i]])
            with torch.inference_mode():
                logits = target.model(ids).logits[:, -1]
            for processor in processors:
                logits = processor(ids, logits)
            assert logprob == pytest.approx(float(sampling.probs(logits)[0, token].log()), abs=1e-4)


def test_processors_that_are_none_are_named(target: LoadedModel) -> None:
    calls: list[int] = []

    def remembering(ids: Any, logits: Any) -> Any:
        calls.append(1)
        return logits + len(calls) * torch.arange(logits.shape[1])

    def raising(ids: Any, logits: Any) -> Any:
        raise ValueError("no such grammar")

    for processor, sentence in [
        (remembering, "the logits processor remembering returned different logits for the same text"),
        (raising, "the logits processor raising raised ValueError: no such grammar"),
        (lambda ids, logits: logits[0], r"returned \(72,\); it must return logits of shape \(1, 72\)"),
        (lambda ids, logits: None, "returned NoneType; it must return logits"),
    ]:
        with pytest.raises(ContractError, match=sentence):
            generate(target, PROMPTS, logits_processor=[processor], max_new_tokens=4)
    for wrong in (raising, [3], "abc"):
        with pytest.raises(UsageError, match="must be a list of functions"):
            generate(target, PROMPTS, logits_processor=wrong)  # type: ignore[arg-type]
