"""The patches of vLLM's rejection sampler, on stand-ins with the shapes of vLLM 0.32."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from crossdraft_vllm import plugin
from crossdraft_vllm.proposer import row_of
from crossdraft_vllm.settings import Settings, parse_settings

from crossdraft import UsageError, make_verifier


def metadata(temperature: list[float]) -> SimpleNamespace:
    values = torch.tensor(temperature)
    return SimpleNamespace(
        temperature=values, all_greedy=not values.any(), all_random=bool((values > 0).all()), generators={}
    )


def arguments(temperature: list[float]) -> dict[str, Any]:
    """A step recorded in vLLM 0.32: two rows, of two drafted tokens and one; the vocabulary has four tokens."""
    return {
        "draft_token_ids": torch.tensor([1, 2, 3], dtype=torch.int32),
        "num_draft_tokens": [2, 1],
        "max_spec_len": 2,
        "cu_num_draft_tokens": torch.tensor([2, 3], dtype=torch.int32),
        "draft_probs": None,
        "target_logits": torch.tensor([[0.0, 9, 0, 0], [0, 0, 9, 0], [0, 9, 0, 0]]),
        "bonus_token_ids": torch.tensor([[0], [0]], dtype=torch.int32),
        "sampling_metadata": metadata(temperature),
    }


def original(*args: Any) -> str:
    assert len(args) == len(plugin.PARAMETERS["rejection_sample"])
    return "original"


def test_greedy_in_a_greedy_batch():
    sample = plugin.rejection_sample_with(make_verifier("greedy"), original)
    output = sample(**arguments([0, 0]))
    assert output.tolist() == [[1, 2, 0], [1, -1, -1]]
    assert output.dtype == torch.int32


@pytest.mark.parametrize("verifier", ["block", "token"])
def test_batch_with_a_greedy_row(verifier):
    sample = plugin.rejection_sample_with(make_verifier(verifier), original)
    seen = set()
    for seed in range(200):
        torch.manual_seed(seed)
        step = arguments([0, 1])
        step["target_logits"][:2] /= 5  # its argmax stays
        step["target_logits"][2] = torch.tensor([0.0, 1, 0, 1])
        output = sample(**step).tolist()
        assert output[0] == [1, 2, 0]
        seen.add(tuple(output[1]))
    assert seen == {(3, 0, -1), (0, -1, -1), (1, -1, -1), (2, -1, -1)}


def test_batches_of_vllm_s_own_code(caplog):
    block = plugin.rejection_sample_with(make_verifier("block"), original)
    assert block(**arguments([0, 0])) == "original"
    assert block(**arguments([1, 1]), synthetic_mode=True) == "original"
    assert block(**arguments([1, 1])).shape == (2, 3)
    greedy = plugin.rejection_sample_with(make_verifier("greedy"), original)
    with caplog.at_level(logging.WARNING, logger=plugin.logger.name):
        assert [greedy(**arguments([0, 1])) for _ in range(3)] == ["original"] * 3
    assert len(caplog.records) == 1 and "needs temperature 0" in caplog.text


def test_expansion():
    x, ends = torch.tensor([0.0, 2.0, 3.0]), torch.tensor([2, 2, 5], dtype=torch.int32)
    assert plugin.expand_batch_to_tokens(x, ends, 5).tolist() == [0, 0, 3, 3, 3]
    assert plugin.expand_batch_to_tokens(x, ends, 5, 0, 1).tolist() == [1, 1, 3, 3, 3]
    top_k = plugin.expand_batch_to_tokens(x.int(), ends, 5)
    assert top_k.dtype == torch.int32 and top_k.tolist() == [0, 0, 3, 3, 3]


def make_sampler(expand: Any) -> SimpleNamespace:
    class RejectionSampler:
        def __init__(self, sampler, spec_config=None, device=None):
            self.created = (sampler, spec_config, device)

    def apply_sampling_constraints(logits, cu_num_draft_tokens, sampling_metadata):
        assert len(logits)
        return logits + 1

    return SimpleNamespace(
        RejectionSampler=RejectionSampler,
        apply_sampling_constraints=apply_sampling_constraints,
        expand_batch_to_tokens=expand,
        rejection_sample=original,
    )


def uninitialised(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
    return torch.full((num_tokens,), 1.25)


def test_defect_is_mended(caplog):
    sampler = make_sampler(uninitialised)
    plugin._patch(sampler, Settings())
    assert sampler.rejection_sample is original
    with caplog.at_level(logging.WARNING, logger=plugin.logger.name):
        result = sampler.RejectionSampler("sampler", None, torch.device("cpu"))
    assert result.created == ("sampler", None, torch.device("cpu"))
    assert sampler.expand_batch_to_tokens is plugin.expand_batch_to_tokens
    assert "returns wrong values on cpu" in caplog.text


def test_sound_engine_is_left_alone(caplog):
    def sound(*args: Any, **kwargs: Any):
        return plugin.expand_batch_to_tokens(*args, **kwargs)

    sampler = make_sampler(sound)
    plugin._patch(sampler, Settings())
    sampler.RejectionSampler("sampler")
    assert sampler.expand_batch_to_tokens is sound and not caplog.records


def test_step_without_drafts_is_not_constrained():
    sampler = make_sampler(uninitialised)
    plugin._patch(sampler, Settings())
    assert sampler.apply_sampling_constraints(torch.empty(0, 4), None, None).shape == (0, 4)
    assert sampler.apply_sampling_constraints(torch.zeros(1, 4), None, None).sum() == 4


def test_patches_are_applied_once():
    sampler = make_sampler(uninitialised)
    settings = parse_settings('{"verifier": "block"}')
    plugin._patch(sampler, settings)
    patched = sampler.rejection_sample
    plugin._patch(sampler, settings)
    assert sampler.rejection_sample is patched is not original


def test_drafter_needs_the_custom_class():
    sampler = make_sampler(uninitialised)
    plugin._patch(sampler, parse_settings('{"drafter": "prompt-lookup"}'))
    with pytest.raises(UsageError, match="the speculative method is 'ngram'"):
        sampler.RejectionSampler("sampler", SimpleNamespace(method="ngram"))
    sampler.RejectionSampler("sampler", SimpleNamespace(method="custom_class"))


def test_second_model_runner_is_refused(monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(UsageError, match="rejection sampler crossdraft does not replace"):
        plugin._require_first_runner()


@pytest.mark.parametrize(
    "output, params, limit, stop",
    [
        (3, {"max_tokens": 10}, 6, {7, 9}),
        (10, {"max_tokens": 10}, -1, {7, 9}),
        (3, {"max_tokens": None}, 20 - 8 - 1, {7, 9}),
        (3, {"max_tokens": 10, "ignore_eos": True}, 6, {9}),
        (3, {"max_tokens": 10, "min_tokens": 4}, 6, set()),
    ],
)
def test_row_of_a_request(output, params, limit, stop):
    """Fields of vLLM's CachedRequestState and SamplingParams; two of the tokens are new."""
    fields = {"min_tokens": 0, "ignore_eos": False, "eos_token_id": 7, "all_stop_token_ids": {9}} | params
    state = SimpleNamespace(req_id="r", num_prompt_tokens=5, sampling_params=SimpleNamespace(**fields))
    result = row_of(state, [0] * 32, 5 + output, [1, 2], 20)
    assert (result.request, result.length, result.prompt_len, result.limit, result.stop) == (
        "r",
        5 + output,
        5,
        limit,
        stop,
    )
