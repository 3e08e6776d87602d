"""Checkpoints are identified by their config and tensors before they are loaded, and read by nothing else."""

# ruff: noqa: E501 (a checkpoint on one line can be read)

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from crossdraft.framework.contracts.checkpoint_kinds import KINDS, identify, unknown_tensors
from crossdraft.framework.errors import CrossdraftError, ModelError
from crossdraft.framework.models.checkpoint import load_checkpoint
from crossdraft.framework.models.load import load_model
from crossdraft.framework.plugins import COMPANIONS, entries

LAYER = ["layers.0.self_attn.q_proj.weight", "layers.0.mlp.up_proj.weight"]
DRAFT_LAYER = [*LAYER, "layers.0.input_layernorm.weight", "norm.weight"]
MODEL = ["model.embed_tokens.weight", *(f"model.{name}" for name in DRAFT_LAYER), "lm_head.weight"]
SPARK = ["markov_head.markov_w1.weight", "markov_head.markov_w2.weight"]
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}

#: Config, tensors, noun, drafters: the published layouts of each kind.
CHECKPOINTS: dict[str, tuple[dict[str, Any], list[str], str, tuple[str, ...]]] = {
    "Llama": (LLAMA, MODEL, "a causal language model", ("draft-model",)),
    "GPT-2": ({"model_type": "gpt2"}, ["transformer.wte.weight", "transformer.h.0.attn.c_attn.weight", "transformer.ln_f.weight"], "a causal language model", ("draft-model",)),
    "EAGLE": (LLAMA, ["fc.weight", *LAYER], "EAGLE heads", ("eagle",)),
    "EAGLE for vLLM": ({"architectures": ["EAGLEModel"], "model_type": "eagle"}, [], "EAGLE heads", ("eagle",)),
    "HASS": ({"speculators_model_type": "eagle"}, ["fusion_fc.weight", "transformer.self_attn.q_proj.weight"], "EAGLE heads", ("eagle",)),
    "EAGLE-3": ({"architectures": ["LlamaForCausalLMEagle3"]}, ["fc.weight", "midlayer.hidden_norm.weight", "d2t"], "EAGLE-3 heads", ("eagle3",)),
    "EAGLE-3 of NeMo": (LLAMA, ["model.fc.weight", "model.layers.0.hidden_norm.weight"], "EAGLE-3 heads", ("eagle3",)),
    "EAGLE-3 by name": ({"architectures": ["Eagle3Speculator"]}, ["x"], "EAGLE-3 heads", ("eagle3",)),
    "EAGLE-3 with its tables": (LLAMA, ["fc.weight", "midlayer.hidden_norm.weight", "embed_tokens.weight", "norm.weight", "lm_head.weight"], "EAGLE-3 heads", ("eagle3",)),
    "P-EAGLE": ({"speculators_model_type": "peagle"}, ["fc.weight", "layers.0.hidden_norm.weight", "mask_hidden"], "P-EAGLE heads", ("p-eagle",)),
    "DFlash": ({"architectures": ["DFlashDraftModel"]}, ["fc.weight", "hidden_norm.weight", *DRAFT_LAYER], "DFlash heads", ("dflash",)),
    "DFlash as a model": ({**LLAMA, "model_type": "qwen3"}, [*MODEL, "model.fc.weight", "model.hidden_norm.weight"], "DFlash heads", ("dflash",)),
    "DFlash by name": ({"architectures": ["DFlashDraftModel"]}, MODEL, "DFlash heads", ("dflash",)),
    "DFlash of DeepSpec": ({"architectures": ["Qwen3DSparkModel"]}, ["fc.weight", "hidden_norm.weight"], "DFlash heads", ("dflash",)),
    "DFlash without a norm": ({"dflash_config": {"block_size": 4}}, ["fc.weight", *LAYER], "DFlash heads", ("dflash",)),
    "DSpark": ({"architectures": ["Qwen3DSparkModel"]}, ["fc.weight", "hidden_norm.weight", *SPARK], "DSpark heads", ("dspark",)),
    "DSpark by section": ({"dspark_config": {"markov_rank": 4}}, ["x"], "DSpark heads", ("dspark",)),
    "Medusa": ({"medusa_num_heads": 2}, ["0.0.linear.weight", "0.0.linear.bias", "0.1.weight"], "Medusa heads", ("medusa",)),
    "Medusa of vLLM": ({"model_type": "medusa"}, ["blocks.0.layers.0.weight", "lm_heads.0.weight"], "Medusa heads", ("medusa",)),
    "Medusa-2": (LLAMA, [*MODEL, "medusa_head.0.0.linear.weight"], "a causal language model", ("medusa", "draft-model")),
    "MLP speculator": ({"model_type": "mlp_speculator"}, ["speculator.emb.0.weight", "speculator.proj.0.weight"], "an MLP speculator", ("mlp-speculator",)),
    "MTP of DeepSeek": ({"architectures": ["DeepseekV3ForCausalLM"]}, [*MODEL, "model.layers.1.eh_proj.weight"], "a causal language model", ("mtp", "draft-model")),
    "MTP of Qwen": ({"architectures": ["Qwen3NextForCausalLM"]}, [*MODEL, "mtp.fc.weight", "mtp.layers.0.mlp.x"], "a causal language model", ("mtp", "draft-model")),
    "MTP in a VLM": ({"vision_config": {"depth": 2}}, ["language_model.model.layers.0.mlp.x", "mtp.fc.weight"], "a causal language model", ("mtp", "draft-model")),
    "MTP by itself": ({"model_type": "qwen3_next_mtp"}, ["mtp.fc.weight", "mtp.layers.0.mlp.x"], "a module of multi-token prediction (MTP)", ("mtp",)),
    "MTP of speculators": ({"speculators_model_type": "mtp"}, ["mtp_layers.0.input_proj.weight"], "a module of multi-token prediction (MTP)", ("mtp",)),
    "DeepSeek's MTP by itself": ({"model_type": "deepseek_mtp"}, ["model.layers.61.eh_proj.weight", "model.layers.61.enorm.weight", "model.embed_tokens.weight"], "a module of multi-token prediction (MTP)", ("mtp",)),
    "look-ahead embeddings": ({"look_ahead": 4}, ["embeddings"], "look-ahead embeddings", ("pass",)),
    "LoRA": ({}, ["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"], "a LoRA adapter", ()),
    "Gemma assistant": ({"model_type": "gemma4_assistant"}, MODEL, "a Gemma 4 assistant, whose layers attend to the keys and values of its target's last layers", ()),
    "Hydra": ({"hydra_num_heads": 4}, ["hydra_head.0.0.linear.weight"], "Hydra heads", ()),
    "BERT": ({"architectures": ["BertForMaskedLM"]}, ["bert.embeddings.word_embeddings.weight"], "an encoder or a classifier", ()),
    "reward model": ({"architectures": ["Qwen2ForSequenceClassification"]}, ["model.layers.0.x", "score.weight"], "an encoder or a classifier", ()),
    "VLM": ({"architectures": ["Qwen3VLForConditionalGeneration"], "vision_config": {"depth": 2}}, ["model.visual.x", "model.language_model.x"], "a model with images or audio", ()),
    "NVIDIA's Eagle VLM": ({"model_type": "eagle_2_5_vl", "vision_config": {"depth": 2}}, ["x"], "a model with images or audio", ()),
    "T5": ({"model_type": "t5", "is_encoder_decoder": True}, ["shared.weight"], "an encoder-decoder model", ()),
}  # fmt: skip
#: What the table must not name: heads that lack what shows them, and models with sections about heads.
UNKNOWN = {
    "EAGLE without fc": (LLAMA, LAYER),
    "nothing": ({}, []),
    "foreign names": (LLAMA, ["a.weight", "b.weight"]),
    "a section of heads in a target": ({**LLAMA, "eagle_config": {"a": 1}, "mtp_config": {"b": 1}}, ["a.weight"]),
    "values of wrong types": ({"architectures": 3, "model_type": [1], "speculators_model_type": {}}, ["a.weight"]),
}


@pytest.mark.parametrize("subject", CHECKPOINTS)
def test_kinds_are_identified(subject: str) -> None:
    config, tensors, noun, drafters = CHECKPOINTS[subject]
    identity = identify(config, tensors)
    assert identity is not None and (identity.kind.noun, identity.drafters) == (noun, drafters)


@pytest.mark.parametrize("subject", UNKNOWN)
def test_other_files_are_left_to_their_tensors(subject: str) -> None:
    assert identify(*UNKNOWN[subject]) is None


def test_every_row_is_tried_and_names_existing_drafters() -> None:
    tried = {noun for *_, noun, _ in CHECKPOINTS.values()}
    assert {kind.noun for kind in KINDS} - tried == {
        "a Muse Glimmer assistant, a DFlash head with an encoder and sliding layers",
        "a ReDrafter",
    }
    known = entries("drafters").keys() | {name for kind, name in COMPANIONS if kind == "drafters"}
    assert {drafter for kind in KINDS for drafter in kind.drafters} <= known


@pytest.mark.parametrize(
    "unused, tensors, expected",
    [
        (["model.layers.0.self_attn.rotary_emb.inv_freq", "h.0.attn.bias", "h.0.attn.masked_bias"], [], set()),
        (["model.layers.2.mlp.x", "model.layers.2.eh_proj.weight"], ["model.layers.2.eh_proj.weight"], set()),
        (["model.layers.2.mlp.x", "model.layers.3.x"], ["model.layers.2.eh_proj.weight"], {"model.layers.3.x"}),
        (["mtp.fc.weight", "model.mtp_layers.0.x", "medusa_head.0.0.linear.weight", "visual.x"], [], set()),
        (["fc.weight", "hidden_norm.weight"], [], {"fc.weight", "hidden_norm.weight"}),
        (["layers.0.k_scale", "layers.0.weight_scale_inv"], [], {"layers.0.weight_scale_inv"}),
    ],
)
def test_tensors_without_influence(unused: list[str], tensors: list[str], expected: set[str]) -> None:
    assert unknown_tensors(unused, tensors) == expected


@pytest.fixture
def copied(models: dict[str, str], tmp_path: Path) -> Any:
    """Make a copy of the target with other tensors and another config."""

    def copy(tensors: dict[str, torch.Tensor], without: tuple[str, ...] = (), **config: Any) -> str:
        directory = Path(shutil.copytree(models["target"], tmp_path / "copied"))
        kept = {k: t for k, t in load_file(directory / "model.safetensors").items() if not k.startswith(without)}
        save_file({**kept, **tensors}, directory / "model.safetensors", {"format": "pt"})
        file = directory / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), **config}), "utf-8")
        return str(directory)

    return copy


FC, NORM = {"fc.weight": torch.ones(16, 48)}, {"hidden_norm.weight": torch.ones(16)}
PREFIXED = {f"model.{name}": tensor for name, tensor in {**FC, **NORM}.items()}


@pytest.mark.parametrize(
    "tensors, config, sentence",
    [
        ({**FC, **NORM}, {}, r"its files are DFlash heads \(fc.weight, hidden_norm.weight\); use drafter 'dflash'"),
        (PREFIXED, {}, r"DFlash heads \(model.fc.weight, model.hidden_norm.weight\)"),
        ({}, {"architectures": ["DFlashDraftModel"]}, r"DFlash heads \(config.json: DFlashDraftModel\)"),
        ({**FC, "midlayer.hidden_norm.weight": torch.ones(16)}, {}, "EAGLE-3 heads .* use drafter 'eagle3'"),
        ({"x.lora_A.weight": torch.ones(2, 2)}, {}, r"a LoRA adapter \(x.lora_A.weight\); name it behind its base"),
        ({}, {"architectures": ["LlamaForSequenceClassification"]}, "an encoder or a classifier"),
        ({"unheard.weight": torch.ones(2)}, {}, "unexpected unheard.weight; correct config.json or the weights"),
        ({}, {"num_hidden_layers": 1}, "unexpected model.layers.1"),
        ({"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(1)}, {}, "unexpected .*weight_scale_inv"),
    ],
)
def test_checkpoint_of_another_kind_is_never_a_model(
    copied: Any, tensors: dict[str, torch.Tensor], config: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ModelError, match=sentence):
        load_model(copied(tensors, **config))


def test_harmless_tensors_load(copied: Any, models: dict[str, str]) -> None:
    harmless = {"mtp.fc.weight": torch.ones(2), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    path = copied(harmless)
    ids = torch.arange(5, 20)[None]
    with torch.no_grad():
        logits = [load_model(name, dtype="float32").model(ids).logits for name in (path, models["target"])]
    assert torch.equal(*logits)


def test_heads_are_read_by_their_drafter_only(tmp_path: Path) -> None:
    """Each kind with drafters, given to every other drafter of the table."""
    for subject, (config, tensors, noun, drafters) in CHECKPOINTS.items():
        directory = tmp_path / subject
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(config), "utf-8")
        save_file({name: torch.ones(1) for name in tensors or ["x"]}, directory / "model.safetensors")
        checkpoint = load_checkpoint(str(directory))
        for drafter in {drafter for kind in KINDS for drafter in kind.drafters}:
            if drafter in drafters:
                checkpoint.check_kind(drafter)
                continue
            with pytest.raises(CrossdraftError) as caught:
                checkpoint.check_kind(drafter)
            assert f"they are {noun}" in str(caught.value) and f"drafter '{drafter}' does not read" in str(caught.value)
            assert all(f"'{name}'" in str(caught.value).rpartition(";")[2] for name in drafters)
        checkpoint.check_kind("a drafter of a third party")


@pytest.mark.parametrize(
    "files, sentence",
    [
        (["adapter_config.json", "adapter_model.safetensors"], "it holds a LoRA adapter; .* BASE\\+"),
        (["config.json", "adapter_config.json", "model.safetensors"], "if its weights are merged .* remove adapter_"),
        (["model-Q4_K_M.gguf"], r"GGUF files; give the path of one of them, .*model-Q4_K_M\.gguf"),
        (["optimizer.pt", "scheduler.pt"], "state of a training run"),
        (["training_state.safetensors"], "state of a training run"),
        (["params.json", "consolidated.00.pth"], "the authors' own format"),
        (["model.onnx"], "ONNX"),
        (["tokenizer.json"], "a tokenizer without a model"),
        (["model.safetensors"], "download it again, with its config.json"),
        (["checkpoint-500/config.json"], r"give the directory of a model in it, such as .*checkpoint-500"),
        ([], "config.json is missing; check the path"),
    ],
)
def test_directories_that_are_not_models(files: list[str], sentence: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}", "utf-8")
    with pytest.raises(ModelError, match=sentence):
        load_model(str(tmp_path))
