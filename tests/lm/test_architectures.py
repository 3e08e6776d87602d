"""Architectures that would be run wrongly are refused by name; the walk over all of them is in another module."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architecture_checks import disagreement
from architecture_variants import OWN, variants
from architecture_walk import MULTIMODAL, PAGE, TOLERANCE, TYPES, class_name
from oracle_trees import OracleTrees, drafter_class, verifier_class
from tiny_architectures import tiny, weighted

from crossdraft.framework.errors import ModelError
from crossdraft.framework.lm import architectures
from crossdraft.framework.lm.architectures import BY_TRIAL, EXACT, needs_trial
from crossdraft.framework.lm.transformers_lm import TransformersLM
from crossdraft.framework.models.load import load_model


def model_of(model_type: str, label: str = "", **changes: Any) -> Any:
    """A tiny model; skips where the installed transformers does not have it."""
    if model_type not in TYPES:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    config_class = transformers.CONFIG_MAPPING[model_type]
    own = OWN.get(model_type, {}).get(label)
    result = own if own is not None else {} if label == "" else variants(config_class)[label]
    return tiny(config_class, **result, **changes)


@pytest.mark.parametrize(
    "model_type, label",
    [
        ("llama", ""),
        ("llama", "rope yarn"),
        ("llama", "rope dynamic"),
        ("mixtral", "sliding"),
        ("gemma2", ""),
        ("gpt_oss", ""),
        ("deepseek_v3", ""),
        ("cohere2", ""),
        ("qwen3", "sliding"),
        ("llama4_text", ""),
        ("gemma3n_text", ""),
        ("gemma4_text", "shared keys"),
        ("gpt_neo", "global"),
        ("gpt_neo", "wide window"),
        ("phi3", "rope longrope, short texts"),
        ("falcon", ""),
        ("moshi", "wide window"),
        ("bert", ""),
    ],
)
def test_logits_match_model(model_type: str, label: str) -> None:
    assert disagreement(model_of(model_type, label)) < TOLERANCE


@pytest.mark.parametrize("model_type", ["big_bird", "doge", "megatron-bert", "rembert"])
def test_right_or_refused_by_version_of_transformers(model_type: str) -> None:
    """Older versions do not mask these causally, which only a trial detects."""
    assert class_name(model_type) in BY_TRIAL
    model = model_of(model_type, "all keys" if model_type == "doge" else "")
    try:
        assert disagreement(model) < TOLERANCE
    except ModelError as refusal:
        assert "failed a trial" in str(refusal)


@pytest.mark.parametrize(
    "model_type, label, sentence",
    [
        (
            "gpt_neo",
            "",
            "GPTNeoForCausalLM .* longest row of a batch: right up to 8 tokens, but slots reach 64 .*shorten",
        ),
        ("openai-gpt", "", "OpenAIGPTLMHeadModel takes no cache"),
        ("falcon", "alibi", "FalconForCausalLM uses alibi"),
        ("bloom", "", "BloomForCausalLM takes no position_ids"),
        ("mpt", "", "MptForCausalLM takes no position_ids"),
        ("doge", "", "DogeForCausalLM attends to the 8 keys that it ranks highest"),
        ("doge", "experts", "DogeForCausalLM with experts .* routes each token by its neighbours"),
        ("llama4_text", "tuned temperature", "Llama4ForCausalLM scales its attention from position 16 on"),
        ("moshi", "", "MoshiForCausalLM has a window of 8 tokens"),
        ("bert", "encoder", "BertLMHeadModel attends in both directions, .*; set is_decoder"),
        ("gemma3_text", "both directions", "Gemma3ForCausalLM attends in both directions"),
        ("roberta", "", "RobertaForCausalLM counts positions from its padding token's id"),
        ("xlnet", "", "XLNetLMHeadModel takes no cache"),
        ("bart", "", "BartForCausalLM takes no position_ids"),
        (
            "deepseek_v32",
            "",
            "DeepseekV32ForCausalLM (has layers of type .*: they select keys|attends to the 4 keys that its indexer)",
        ),
    ],
)
def test_refused_by_name(model_type: str, label: str, sentence: str) -> None:
    with pytest.raises(ModelError, match=f"^{sentence}"):
        TransformersLM(model_of(model_type, label), 2, 64)


def test_encoder_decoder_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    config = transformers.T5Config(vocab_size=31, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="its files are an encoder-decoder model"):
        load_model(str(tmp_path))


def test_recurrent_layers_need_a_recent_transformers(monkeypatch: Any) -> None:
    monkeypatch.setattr(architectures, "RECENT", False)
    with pytest.raises(
        ModelError, match=r"^Lfm2ForCausalLM has layers of type conv, .* from transformers 5\.23 on, but"
    ):
        TransformersLM(model_of("lfm2"), 2, 64)


def test_recurrent_layers_need_their_companion(monkeypatch: Any) -> None:
    monkeypatch.setattr(architectures, "RECENT", True)
    monkeypatch.setattr(architectures.plugins, "entries", lambda kind: {})
    sentence = (
        r"^Lfm2ForCausalLM has layers of type conv: .* in a clone of crossdraft: pip install plugins/crossdraft-layers$"
    )
    with pytest.raises(ModelError, match=sentence):
        TransformersLM(model_of("lfm2"), 2, 64)


@pytest.mark.parametrize("model_type", ["gemma3n_text", "gemma4_text"])
def test_dependent_layers_are_not_run_separately(model_type: str) -> None:
    lm = TransformersLM(model_of(model_type), 1, 16)
    with pytest.raises(ModelError, match="layers that depend on each other"):
        lm.fork([0])


def test_windows_of_different_length_are_refused() -> None:
    model = model_of("gemma2")
    model.config.sliding_window = None
    with pytest.raises(ModelError, match="has no single sliding_window"):
        TransformersLM(model, 2, 64)


def test_flash_attention_is_refused() -> None:
    model = model_of("llama")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ModelError, match=r"was loaded with flash attention, .* attn_implementation sdpa"):
        TransformersLM(model, 2, 64)


def test_dynamic_frequencies_never_change_within_context(decoder: Callable) -> None:
    """They would beyond it, where the loop ends a sequence."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    prompts = [[5], [7, 8, 9, 7, 8, 9, 7, 8, 11, 12, 13, 14, 15]]
    models = [model_of("llama", max_position_embeddings=20, rope_parameters=rope) for _ in range(2)]
    want = {}
    for prompt in prompts:
        text = list(prompt)
        while len(text) < 20:
            text.append(int(models[1](torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
        want[tuple(prompt)] = text[len(prompt) :]
    answers = {prompt: [*tokens, 1, 1, 1, 1] for prompt, tokens in want.items()}
    for drafter, options in (
        (OracleTrees, {"answers": answers}),
        (drafter_class("draft-model"), {"model": "same", "gamma": 4}),
    ):
        loop = decoder(
            models[0], drafter, options, verifier_class("greedy"), batch_size=2, drafting=models[0], max_new_tokens=64
        )
        for response in loop.run(prompts):
            assert response.finish_reason == "length"
            assert response.tokens == want[tuple(prompts[response.index])]


# -- unknown architectures --------------------------------------------------------------------


class OwnCode(transformers.LlamaForCausalLM):
    """A model that brought its own code, and is right."""

    passes = 0

    def forward(  # type: ignore[override]
        self,
        input_ids: Any,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        **more: Any,
    ) -> Any:
        self.passes += 1
        if past_key_values is not None and attention_mask is not None:
            attention_mask, position_ids = self.read(attention_mask, position_ids)
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            **more,
        )

    def read(self, mask: Any, positions: Any) -> tuple[Any, Any]:
        """A model class that misuses the masks and positions of the decoder."""
        return mask, positions


class IgnoresPositions(OwnCode):
    """Counts from the longest row, as if all had one length."""

    def read(self, mask: Any, positions: Any) -> tuple[Any, Any]:
        return mask, positions.amax(0, keepdim=True).expand_as(positions)


class IgnoresTrees(OwnCode):
    """Makes a mask by itself: a query sees every slot before its own."""

    def read(self, mask: Any, positions: Any) -> tuple[Any, Any]:
        width, reach = mask.shape[-2:]
        attended = torch.ones(width, reach, dtype=torch.bool).tril(reach - width)
        return torch.where(attended, 0.0, torch.finfo(mask.dtype).min).expand_as(mask), positions


class Crashes(OwnCode):
    """Wants a padding mask."""

    def read(self, mask: Any, positions: Any) -> tuple[Any, Any]:
        raise IndexError("too many dimensions\nwhere they were counted")


def unknown(kind: type[OwnCode]) -> Any:
    return weighted(kind(model_of("llama").config))


@pytest.mark.parametrize("kind", [IgnoresPositions, IgnoresTrees])
def test_trial_detects_ignored_inputs(kind: type[OwnCode]) -> None:
    with pytest.raises(ModelError, match=rf"^{kind.__name__} failed a trial: .* \d+% off"):
        TransformersLM(unknown(kind), 2, 64)


def test_error_of_failed_trial() -> None:
    with pytest.raises(
        ModelError, match=r"^Crashes failed a trial .* \(IndexError: too many dimensions\), so .* use another model$"
    ):
        TransformersLM(unknown(Crashes), 2, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unknown_model_that_is_right_has_one_trial(dtype: torch.dtype) -> None:
    model = unknown(OwnCode).to(dtype)
    TransformersLM(model, 1, 8)
    passes = model.passes
    assert 0 < passes <= 8
    TransformersLM(model, 2, 64)
    assert model.passes == passes
    assert disagreement(model) < TOLERANCE or dtype == torch.bfloat16


def test_known_models_have_no_trial(monkeypatch: Any) -> None:
    monkeypatch.setattr(architectures, "_tried", set())
    assert not needs_trial(model_of("llama"))
    assert not needs_trial(torch.nn.Linear(1, 1))  # heads are not whole models
    assert needs_trial(unknown(OwnCode))


# -- the page -------------------------------------------------------------------------------------------


def test_page_lists_classes_that_are_exact() -> None:
    if not architectures.RECENT:
        pytest.skip("the page is of a later transformers")
    exact = PAGE.read_text(encoding="utf-8").partition("## Exact\n")[2].partition("## ")[0]
    inside = {class_name(model_type) for model_type in MULTIMODAL}
    assert set(re.findall(r"`(\w+)`", exact)) - inside == (EXACT | BY_TRIAL) - inside


def test_page_lists_every_model_type() -> None:
    """True for the version that it was written for; older ones have fewer."""
    text = PAGE.read_text(encoding="utf-8")
    if f"({transformers.__version__}:" in text:
        for model_type in (*TYPES, *MULTIMODAL):
            assert f"`{class_name(model_type)}`" in text, model_type
