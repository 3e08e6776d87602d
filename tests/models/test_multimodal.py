"""Language models inside multimodal checkpoints are targets and draft models, with the multimodal class's output."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from companions import needs_recurrent_layers
from tiny_architectures import tiny_config, weighted
from tiny_models import argmax_text, make_tokenizer
from transformers import AutoModelForMultimodalLM

from crossdraft import generate
from crossdraft.framework.lm.transformers_lm import model_slots
from crossdraft.framework.models.load import load_model

TEXTS = [[5, 9, 11, 9, 5, 9, 11], [7, 8, 9]]
#: Families without and with a class of transformers for their language model.
FAMILIES = ["qwen3_vl", "qwen2_5_vl", "mistral3", "glm4v", "gemma3", "llava", "kimi_k25", "qwen2_audio", "mllama"]
RECURRENT = [
    pytest.param("qwen3_5", marks=needs_recurrent_layers),
    pytest.param("lfm2_vl", marks=needs_recurrent_layers),
]


def save(model_type: str, directory: Path) -> Any:
    """A tiny random model of the multimodal class, as its publisher saves it."""
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    torch.manual_seed(0)
    model = weighted(AutoModelForMultimodalLM.from_config(tiny_config(transformers.CONFIG_MAPPING[model_type])))
    model.generation_config.eos_token_id = 2
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return model


@torch.inference_mode()
def logits_of(model: Any, tokens: list[int]) -> torch.Tensor:
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.mark.parametrize("model_type", [*FAMILIES, *RECURRENT])
def test_probabilities_are_those_of_the_multimodal_class(model_type: str, tmp_path: Path) -> None:
    published = save(model_type, tmp_path)
    lm = model_slots(load_model(str(tmp_path), dtype="float32", device="cpu").model, len(TEXTS), 32)
    for row, text in enumerate(TEXTS):
        lm.start(row, text)
    draft = [13, 17, 5]
    logits, _ = lm.forward(torch.tensor([[text[-1], *draft] for text in TEXTS]))
    for row, text in enumerate(TEXTS):
        want = logits_of(published, text + draft)[len(text) - 1 :].softmax(-1)
        assert (logits[row].softmax(-1) - want).abs().sum(-1).max() / 2 < 1e-5


@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen2_5_vl", "mistral3", "glm4v"])
def test_target_and_draft_model(model_type: str, tmp_path: Path) -> None:
    published = save(model_type, tmp_path)
    target = load_model(str(tmp_path), dtype="float32", device="cpu")
    for drafter in ("prompt-lookup", {"name": "draft-model", "model": str(tmp_path), "gamma": 3}):
        for text, response in zip(
            TEXTS, generate(target, TEXTS, drafter=drafter, temperature=0, max_new_tokens=9), strict=True
        ):
            want = argmax_text(published, text, 9)[len(text) :]
            want = want[: want.index(2) + 1] if 2 in want else want
            assert response.tokens == want
