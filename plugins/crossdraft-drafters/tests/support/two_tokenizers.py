"""Tiny Llamas with tokenizers that were trained here: byte-level BPE, SentencePiece's manner, words, single bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from tokenizers.normalizers import Prepend, Replace, Sequence
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXTS = [
    "the quick brown fox jumps over the lazy dog, and the dog sleeps on in the sun.",
    "three rivers of europe: the danube, the rhine and the volga. name three more rivers!",
    "das schöne grüne Mädchen, déjà vu, naïve café; 東京 and 北京 are cities.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))\n",
]
ROLES = {"bos_token": "<s>", "eos_token": "</s>"}


def byte_level(size: int, texts: list[str] = TEXTS, order: int = 1, **roles: str) -> Any:
    """Byte-level BPE with ``size`` tokens; ``order=-1`` numbers its single bytes the other way round."""
    special = list((ROLES | roles).values())
    tokenizer: Any = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    if order < 0:
        vocab = {token: id for id, token in enumerate([*special, *alphabet[::-1]])}
        tokenizer.model = BPE(vocab, [])
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **(ROLES | roles))


def metaspace() -> Any:
    """As Llama 2 has it: "▁" for a space, one before every text, and "<0x0A>" for bytes that are in no token."""
    trained: Any = Tokenizer(BPE())
    trained.normalizer = Sequence([Prepend("▁"), Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=120, show_progress=False)
    trained.train_from_iterator([text for text in TEXTS if text.isascii()], trainer)
    pieces = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    merges = [tuple(merge) for merge in json.loads(trained.to_str())["model"]["merges"]]
    vocab = {name: id for id, name in enumerate(dict.fromkeys(names))}
    tokenizer: Any = Tokenizer(BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = trained.normalizer
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **ROLES)


def save(directory: Path, tokenizer: Any, seed: int, context: int = 256, spare: int = 3) -> str:
    """A random Llama with this tokenizer and some ids that it does not know; the name to load it by."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer) + spare, hidden_size=24, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, initializer_range=0.4, tie_word_embeddings=False,
        max_position_embeddings=context, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


def renumbered(directory: Path, model: str, tokenizer: Any) -> str:
    """The same model, whose tokens have the ids that ``tokenizer`` gives them."""
    from transformers import AutoTokenizer

    twin: Any = LlamaForCausalLM.from_pretrained(model)
    old, new = AutoTokenizer.from_pretrained(model).get_vocab(), tokenizer.get_vocab()
    place = list(range(twin.config.vocab_size))
    for token, id in new.items():
        place[id] = old[token]
    with torch.no_grad():
        for weight in (twin.get_input_embeddings().weight, twin.get_output_embeddings().weight):
            weight.copy_(weight[place].clone())
    twin.config.eos_token_id, twin.config.bos_token_id = tokenizer.eos_token_id, tokenizer.bos_token_id
    twin.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)
