"""A random Llama whose byte-level tokenizer can spell any text, for constraints, and a schema of short JSON texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_models import CHAT, save_model
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

TEXTS = ['{"name": "Tom", "age": 3, "kind": "cat"}', '{"name": "Ann", "age": 41, "kind": "dog"}', "yes", "no"]
#: A chat template whose generation prompt opens a thinking segment, and which calls tools.
THINKING = CHAT + "<think>{# </think> <tool_call> </tool_call> #}"
WIDTH = 320
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,4}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}

#: Objects or arrays without an end: llguidance fails after the first character.
ENDLESS: dict[str, Any] = {
    "anyOf": [{"$ref": "#/$defs/a"}, {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1}],
    "$defs": {"a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/a"}}, "required": ["b"]}},
}


def is_valid(text: str) -> bool:
    """True if ``text`` is JSON of `SCHEMA`."""
    value = json.loads(text)
    name, age = value["name"], value["age"]
    return (
        value.keys() == {"name", "age", "kind"}
        and value["kind"] in ("cat", "dog")
        and type(age) is int
        and 0 <= age <= 99
        and name.istitle()
        and name.isascii()
        and name.isalpha()
        and 2 <= len(name) <= 5
    )


def make_text_tokenizer(all_bytes: bool = True) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer; without ``all_bytes`` it spells only the characters of `TEXTS`."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet() if all_bytes else []
    special = ["<unk>", "<s>", "</s>"]
    tokenizer.train_from_iterator(
        TEXTS * 4,
        BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = CHAT
    return fast


def save_text_model(directory: Path, seed: int = 0, all_bytes: bool = True, chat: str = CHAT) -> str:
    """A random Llama with that tokenizer; the name to load it by. Its logits are wider than the vocabulary."""
    save_model(directory, seed=seed, width=WIDTH, context=1024)
    tokenizer = make_text_tokenizer(all_bytes)
    tokenizer.chat_template = chat
    tokenizer.save_pretrained(directory)
    return str(directory)
