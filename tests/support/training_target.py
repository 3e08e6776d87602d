"""A tiny target with a tied head, as `crossdraft train` takes it, and the same as a chat model on disk."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def tied_llama(layers: int = 3, vocab: int = 50) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def save_chat_model(path: Path) -> None:
    """A chat model of 40 words, and a file of questions in two categories, ``questions.jsonl``."""
    words = {word: i for i, word in enumerate(["<pad>", "</s>", "user", "bot", *(f"w{i}" for i in range(4, 40))])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>")
    fast.chat_template = (
        "{% for m in messages %}user {{ m.content }} {% endfor %}{% if add_generation_prompt %}bot {% endif %}"
    )
    fast.save_pretrained(path)
    model = tied_llama(vocab=40)
    model.config.eos_token_id = model.generation_config.eos_token_id = 1
    model.save_pretrained(path)
    rows = [{"question_id": i, "category": "ab"[i % 2], "turns": [f"w{4 + i} w9 w{30 - i}"]} for i in range(24)]
    (path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
