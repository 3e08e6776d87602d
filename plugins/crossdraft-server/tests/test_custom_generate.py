"""Settings of transformers' ``generate``: each is honoured, harmless or refused."""

import copy
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from crossdraft_server import custom_generate as door
from crossdraft_server.custom_generate import custom_generate
from transformers import CompileConfig, DynamicCache, GenerationConfig, GenerationMixin, LlamaForCausalLM
from transformers.generation import logits_process as lp
from transformers.generation import stopping_criteria as sc
from transformers.generation.utils import GenerateDecoderOnlyOutput

from crossdraft.framework.errors import UsageError
from crossdraft.framework.util.cache_argument import cache_argument
from crossdraft.framework.util.foreign_keys import Key

CACHE = cache_argument(LlamaForCausalLM.forward)
IDS = torch.tensor([[9, 8, 7, 9, 8, 7, 9]])


@pytest.fixture(scope="module")
def plain(model: Any) -> torch.Tensor:
    return generate_ids(model, do_sample=True, top_k=7, seed=4)


def generate_ids(model: Any, ids: Any = IDS, **options: Any) -> Any:
    return model.generate(ids, custom_generate=custom_generate, **{"max_new_tokens": 3, **options})


def refused(model: Any, ids: Any = IDS, **options: Any) -> str:
    with pytest.raises(UsageError) as caught:
        generate_ids(model, ids, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- the table --------------------------------------------------------------------------------------------


def fields() -> list[str]:
    return [name for name in vars(GenerationConfig()) if not name.startswith("_")]


def names(table: dict[str, Key], effect: str) -> list[str]:
    return [name for name, setting in table.items() if setting.effect == effect]


REFUSED, HARMLESS = names(door.FIELDS, "refused"), names(door.FIELDS, "none")


def test_every_field_of_this_transformers_is_in_table() -> None:
    listed = {*fields(), *GenerationConfig().to_dict(), *GenerationConfig._get_default_generation_params()}
    unknown = {name for name in listed if not name.startswith("_")} - door.FIELDS.keys()
    assert not unknown, f"decide: honoured, harmless or refused? {sorted(unknown)}"


def test_every_argument_of_this_transformers_is_in_table() -> None:
    parameters = inspect.signature(GenerationMixin.generate).parameters.values()
    named = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
    assert named == door.ARGUMENTS.keys(), "decide: honoured or refused?"


def test_docs_list_every_field_and_argument() -> None:
    page = (Path(__file__).parents[3] / "docs" / "python.md").read_text(encoding="utf-8")
    honoured, rest = page.partition("**Honoured**")[2].split("**Rejected**")
    refused, harmless = rest.split("**Without effect")
    parts = {
        honoured: names(door.FIELDS, "read"),
        refused: [*REFUSED, *names(door.ARGUMENTS, "refused")],
        harmless: HARMLESS,
    }
    for part, listed in parts.items():
        assert set(listed) - set(re.findall(r"`(\w+)`", part)) == set()
        assert not (set(re.findall(r"`(\w+)`", part)) & {*fields()}) - set(listed) - {"top_p", "eos_token_id"}


#: A value with an effect for each rejected field for which 3 has none.
VALUES: dict[str, Any] = {
    "bad_words_ids": [[3]], "sequence_bias": [[[3], 1.0]], "suppress_tokens": [3], "begin_suppress_tokens": [3],
    "exponential_decay_length_penalty": (2, 1.5), "remove_invalid_values": True, "token_healing": True, "top_h": 0.4,
    "typical_p": 0.9, "epsilon_cutoff": 0.01, "eta_cutoff": 0.01, "repetition_penalty": 1.2, "guidance_scale": 1.5,
    "encoder_repetition_penalty": 1.2,
    "stop_strings": "a", "dola_layers": "high", "use_mtp": True, "is_assistant": True, "speculation_type": "dflash",
    "assistant_ensemble_weight": 0.5, "cache_implementation": "offloaded", "cache_config": {"nbits": 4},
    "output_attentions": True, "output_hidden_states": True, "output_scores": True, "output_logits": True,
    "constraints": [object()], "force_words_ids": [[3]], "watermarking_config": object(), "penalty_alpha": 0.6,
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_each_refused_field_is_refused_by_name_and_value(name: str) -> None:
    config, value = GenerationConfig(), VALUES.get(name, 3)
    config.update(**GenerationConfig._get_default_generation_params(), defaults_only=True)
    door.check_fields(config)  # defaults filled in by transformers have no effect
    for nothing in (None, *door.FIELDS[name].neutral):
        setattr(config, name, nothing)
        door.check_fields(config)
    setattr(config, name, value)
    with pytest.raises(UsageError, match=f"^custom_generate cannot honour {name}=.*; leave it out .*generation_config"):
        door.check_fields(config)


#: Those that transformers itself refuses before it calls us, or needs more for.
EARLIER = {"stop_strings", "token_healing", "constraints", "force_words_ids", "watermarking_config", "speculation_type"}


@pytest.mark.parametrize("name", [name for name in REFUSED if name not in EARLIER])
def test_each_refused_field_is_refused_through_transformers(model: Any, name: str) -> None:
    assert refused(model, do_sample=True, **{name: VALUES.get(name, 3)}).startswith(
        f"custom_generate cannot honour {name}="
    )


@pytest.mark.parametrize("name", sorted(EARLIER))
def test_settings_rejected_by_transformers_raise(model: Any, name: str) -> None:
    with pytest.raises((UsageError, ValueError, TypeError, AttributeError)):
        generate_ids(model, **{name: VALUES.get(name, 3)})


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_fields_change_no_token(model: Any, plain: torch.Tensor, name: str) -> None:
    values: dict[str, Any] = {"use_cache": False, "early_stopping": True, "renormalize_logits": True}
    values |= {"compile_config": CompileConfig(), "continuous_batching_config": object()}
    config = GenerationConfig(max_new_tokens=3, do_sample=True, top_k=7)
    setattr(config, name, values.get(name, 3))
    assert torch.equal(generate_ids(model, generation_config=config, seed=4), plain)


def test_field_that_later_transformers_adds_is_refused(model: Any, monkeypatch: Any) -> None:
    initial = GenerationConfig.__init__

    def init(self: Any, **options: Any) -> None:
        self.novelty = options.pop("novelty", 0.5)
        initial(self, **options)

    monkeypatch.setattr(GenerationConfig, "__init__", init)
    generate_ids(model)
    assert refused(model, novelty=0.7).startswith("custom_generate cannot honour novelty=0.7: this version")


def test_unknown_config_entries_are_ignored(model: Any) -> None:
    config = GenerationConfig(max_new_tokens=3, chat_format="chatml")
    assert torch.equal(generate_ids(model, generation_config=config), generate_ids(model))


def test_models_own_generation_config_counts(model: Any) -> None:
    own = copy.copy(model)
    own.generation_config = copy.deepcopy(model.generation_config)
    own.generation_config.typical_p = 0.3
    sentence = refused(own, do_sample=True)
    assert "typical_p=0.3" in sentence and "the model's own generation_config counts" in sentence
    assert torch.equal(generate_ids(own, typical_p=1.0), generate_ids(model))  # the call's value wins
    own.generation_config.typical_p = None
    own.generation_config.repetition_penalty = 1.3
    assert torch.equal(generate_ids(own), own.generate(IDS, max_new_tokens=3))
    own.generation_config.repetition_penalty = None
    own.generation_config.do_sample, own.generation_config.temperature = True, 0.01
    assert torch.equal(generate_ids(own), model.generate(IDS, max_new_tokens=3))


# -- arguments --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"logits_processor": lp.LogitsProcessorList([lp.TemperatureLogitsWarper(0.5)])}, "logits_processor="),
        ({"logits_processor": lp.LogitsProcessorList([lp.TopKLogitsWarper(5)]), "top_k": 5}, "logits_processor="),
        ({"stopping_criteria": sc.StoppingCriteriaList([sc.MaxTimeCriteria(1.0)])}, "stopping_criteria="),
        ({"prefix_allowed_tokens_fn": lambda i, ids: [3]}, "prefix_allowed_tokens_fn="),
        ({"synced_gpus": True}, "synced_gpus=True"),
        ({"negative_prompt_ids": IDS}, "negative_prompt_ids="),
        ({"negative_prompt_attention_mask": IDS}, "negative_prompt_attention_mask="),
        ({CACHE: DynamicCache()}, f"{CACHE}="),
        ({"position_ids": torch.arange(2, 9)[None]}, "position_ids=[[2, 3, 4, 5, 6, 7, ...]]: positions count"),
        ({"inputs_embeds": torch.zeros(1, 7, 32)}, "inputs_embeds="),
        ({"labels": IDS}, "labels="),
    ],
)
def test_arguments_that_are_refused(model: Any, options: dict[str, Any], sentence: str) -> None:
    assert f"custom_generate cannot honour {sentence}" in refused(model, do_sample=True, **options)


def test_assistant_is_refused(model: Any) -> None:
    assert "cannot honour assistant_model=<LlamaForCausalLM>" in refused(model, assistant_model=model)
    assert "cannot honour prompt_lookup_num_tokens=3" in refused(model, prompt_lookup_num_tokens=3)


def test_argument_that_later_transformers_adds_is_refused(model: Any) -> None:
    class Later(LlamaForCausalLM):
        def generate(self, inputs: Any, novelty: Any = None, custom_generate: Any = None, **kwargs: Any) -> Any:  # type: ignore
            assert custom_generate is not None
            return custom_generate(self, inputs, generation_config=GenerationConfig(max_length=9), **kwargs)

    later = Later(model.config)
    assert later.generate(IDS, custom_generate=custom_generate).shape == (1, 9)
    with pytest.raises(UsageError, match="novelty=3: this version of crossdraft does not support it"):
        later.generate(IDS, 3, custom_generate=custom_generate)


def test_processors_of_honoured_fields_are_not_user_processors() -> None:
    config = GenerationConfig(do_sample=True, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1)
    sampling = door.sampling_of(config)
    built = [
        lp.TemperatureLogitsWarper(0.7), lp.TopKLogitsWarper(5), lp.TopPLogitsWarper(0.9), lp.MinPLogitsWarper(0.1),
        lp.LogitNormalization(), lp.SuppressTokensLogitsProcessor([]),
    ]  # fmt: skip
    assert door._processors(built, sampling) == []
    first = lp.RepetitionPenaltyLogitsProcessor(1.2)
    assert door._processors([first, *built], sampling) == [first]
    for wrong in (built[::-1], [*built, lp.TopKLogitsWarper(5)], [lp.TemperatureLogitsWarper(0.6)], [*built, first]):
        with pytest.raises(UsageError, match="logits_processor="):
            door._processors(wrong, sampling)


def test_direct_call_is_refused(model: Any) -> None:
    with pytest.raises(UsageError, match="custom_generate was not called by transformers"):
        custom_generate(model, IDS, generation_config=GenerationConfig(max_new_tokens=3))


def test_drafter_with_model_is_rejected(model: Any) -> None:
    assert "crossdraft.generate" in refused(model, drafter={"name": "draft-model", "model": "x"})


# -- the distribution ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, value", [("top_p", 0.0), ("top_p", -0.5), ("temperature", 0.0)])
def test_sampling_parameters_out_of_range(name: str, value: float) -> None:
    config = GenerationConfig(do_sample=True)
    setattr(config, name, value)
    with pytest.raises(
        UsageError, match=f"cannot sample with {name}={value}; for greedy decoding pass do_sample=False"
    ):
        door.sampling_of(config)


def test_top_p_0_is_refused_and_above_1_is_off_as_in_transformers(model: Any) -> None:
    assert "top_p=0.0" in refused(model, do_sample=True, top_p=0.0)
    assert torch.equal(
        generate_ids(model, do_sample=True, top_p=1.5, seed=2), generate_ids(model, do_sample=True, seed=2)
    )
    assert torch.equal(
        generate_ids(model, do_sample=True, min_p=0.0, seed=2), generate_ids(model, do_sample=True, seed=2)
    )


def test_outputs_without_scores_are_dictionary(model: Any) -> None:
    result = generate_ids(model, return_dict_in_generate=True)
    assert isinstance(result, GenerateDecoderOnlyOutput) and list(result) == ["sequences"]
    assert torch.equal(result.sequences, generate_ids(model))
    assert "output_scores=True" in refused(model, return_dict_in_generate=True, output_scores=True)
