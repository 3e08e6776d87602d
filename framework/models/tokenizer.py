"""The tokenizer of a model without its weights: what turning texts into token ids takes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ..contracts.errors import ModelError, first_line
from .resolve import resolve

#: Files that may name the ids that end a sequence.
_FILES = ("generation_config.json", "config.json")


@dataclass(frozen=True)
class TokenizerOf:
    """A model's tokenizer and the ids that end its sequences."""

    model: str
    tokenizer: Any
    eos_token_ids: frozenset[int]


def load_tokenizer(name: str) -> TokenizerOf:
    """That of the model called ``name``, see `resolve`. Raises ModelError for one that is missing or damaged."""
    from transformers import AutoTokenizer

    found = resolve(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(found.path, local_files_only=True)
    except Exception as error:  # whatever transformers and its backends raise about a bad directory
        raise ModelError(f"the tokenizer of {name} cannot be loaded: {first_line(error)}") from error
    holders = [{"eos_token_id": tokenizer.eos_token_id}]
    for file in _FILES:
        try:
            config = json.loads((found.path / file).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        nested = config.get("text_config") if isinstance(config, dict) else None
        holders += [holder for holder in (config, nested) if isinstance(holder, dict)]
    ids: set[int] = set()
    for holder in holders:
        eos = holder.get("eos_token_id")
        ids |= {one for one in (eos if isinstance(eos, list) else [eos]) if type(one) is int}
    return TokenizerOf(name, tokenizer, frozenset(ids))
