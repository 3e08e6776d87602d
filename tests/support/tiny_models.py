"""Directories with a random Llama of two layers and a word-level tokenizer, as `crossdraft.load_model` takes them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB = {"<unk>": 0, "<s>": 1, "</s>": 2, "user": 3, "assistant": 4, **{f"w{i}": i for i in range(5, 64)}}
CHAT = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}assistant"


def make_tokenizer(vocab: dict[str, int] = VOCAB, chat: bool = True) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    if chat:
        fast.chat_template = CHAT
    return fast


def save_model(
    directory: Path,
    seed: int = 0,
    width: int = 72,
    context: int = 96,
    vocab: dict[str, int] = VOCAB,
    nan: bool = False,
    layers: int = 2,
    hidden: int = 16,
    heads: tuple[int, int] = (2, 1),
) -> str:
    """A random Llama and its tokenizer; the name to load it by.

    Its logits are `width` and its states `hidden` wide; it has `heads` of queries, and of keys and values.
    """
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=width, hidden_size=hidden, intermediate_size=3 * hidden // 2, num_hidden_layers=layers,
            num_attention_heads=heads[0], num_key_value_heads=heads[1], initializer_range=0.3,
            tie_word_embeddings=False, max_position_embeddings=context, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip
    if nan:
        model.lm_head.weight.data[7] = torch.nan
    model.save_pretrained(directory)
    make_tokenizer(vocab).save_pretrained(directory)
    return str(directory)


def save_adapter(directory: Path, hidden: int = 16) -> Path:
    """A random LoRA adapter of `save_model`'s query projections, without peft."""
    directory.mkdir()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 2,
        "lora_alpha": 4,
        "target_modules": r".*layers\.0\..*q_proj",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    tensors = {name.format("A"): torch.randn(2, hidden), name.format("B"): torch.randn(hidden, 2)}
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def generated(model: Any, prompts: Iterable[Sequence[int]], count: int) -> list[list[int]]:
    """Output of transformers' own ``generate`` at temperature 0, at most ``count`` tokens each."""
    results = []
    for prompt in prompts:
        out = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=count)
        results.append(out[0, len(prompt) :].tolist())
    return results


@torch.inference_mode()
def argmax_text(model: Any, start: Sequence[int], count: int) -> list[int]:
    """``start`` and the ``count`` tokens that follow it at temperature 0, whatever they are: no token ends it."""
    tokens = list(start)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens
