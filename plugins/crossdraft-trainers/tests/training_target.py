"""Tiny targets with a tied head, as `crossdraft train` takes them, texts that they write, and a chat model on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from crossdraft_trainers.contract import Text
from crossdraft_trainers.texts import split
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from crossdraft.framework.contracts.models import LoadedModel

#: Vocabulary of `peaked_target`.
VOCAB = 40


def tied_llama(layers: int = 3, vocab: int = 50) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def peaked_target(layers: int) -> LoadedModel:
    """A target whose distributions are peaked, so that training has an effect."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, initializer_range=0.3, max_position_embeddings=128,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LoadedModel(LlamaForCausalLM(config).eval(), None, "tiny", "made here", "ab" * 32, (1,), 128)  # type: ignore[arg-type]


def written_texts(target: LoadedModel) -> tuple[list[Text], list[Text]]:
    """Texts of unequal length that the target wrote, some with a prompt of one token; the last are held out."""
    torch.manual_seed(1)
    results = []
    for i in range(20):
        prompt = torch.randint(2, VOCAB, (1, 1 + i % 4))
        with torch.inference_mode():
            out: Any = target.model.generate(prompt, do_sample=True, max_new_tokens=10 + i % 5, eos_token_id=None)  # type: ignore[operator]
        ids = out[0].tolist()
        results.append(Text(ids[: 1 + i % 4], ids[1 + i % 4 :], "given"))
    return split(results, 0.2)


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
