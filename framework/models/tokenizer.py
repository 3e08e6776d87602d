"""The tokenizer of a model without its weights: what turning texts into token ids takes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from .. import plugins
from ..contracts.errors import ModelError, first_line, quoted
from ..contracts.limits import MOST_WIDTH
from ..contracts.models import TRANSFORMERS
from .resolve import resolve

#: Files that may name the ids that end a sequence.
_FILES = ("generation_config.json", "config.json")


@dataclass(frozen=True)
class TokenizerOf:
    """A model's tokenizer and the ids that end its sequences."""

    model: str
    tokenizer: Any
    eos_token_ids: tuple[int, ...]


def load_tokenizer(name: str) -> TokenizerOf:
    """That of the model called ``name``, see `resolve`. Raises ModelError for one that is missing or damaged."""
    from transformers import AutoTokenizer

    found = resolve(name)
    if found.backend != TRANSFORMERS:  # its file may hold weights and tokenizer in one
        options = {"dtype": "auto", "device": "auto", "trust_remote_code": False, "attn_implementation": None}
        loaded = plugins.get("backends", found.backend)().load(found, **options, share_with=None)
        if loaded.tokenizer is None:
            raise ModelError(f"{name} has no tokenizer")
        return TokenizerOf(name, loaded.tokenizer, loaded.eos_token_ids)
    try:
        tokenizer = AutoTokenizer.from_pretrained(found.path, local_files_only=True)
    except Exception as error:  # whatever transformers and its backends raise about a bad directory
        raise ModelError(f"the tokenizer of {name} cannot be loaded: {first_line(error)}") from error
    ends = [tokenizer.eos_token_id]
    for file in _FILES:
        try:
            config = json.loads((found.path / file).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        nested = config.get("text_config") if isinstance(config, dict) else None
        ends += [holder.get("eos_token_id") for holder in (config, nested) if isinstance(holder, dict)]
    return TokenizerOf(name, tokenizer, eos_token_ids(name, *ends))


def eos_token_ids(name: str, *said: Any) -> tuple[int, ...]:
    """The ids that end a sequence, in order, of all that a model says: an id, several or None each.

    Raises ModelError for what is no token id.
    """
    found: set[int] = set()
    for ids in said:
        for one in ids if isinstance(ids, list | tuple) else [] if ids is None else [ids]:
            if type(one) is not int or not 0 <= one < MOST_WIDTH:
                raise ModelError(f"{name}: eos_token_id holds {quoted(one)}, which is no token id")
            found.add(one)
    return tuple(sorted(found))
