"""The tokenizer of a model without its weights: what turning texts into token ids takes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import plugins
from ..contracts.models import TRANSFORMERS
from ..errors import ModelError, first_line, quoted
from ..util.limits import MOST_WIDTH
from .resolve import resolve

#: Files that may name the ids that end a sequence.
_FILES = ("generation_config.json", "config.json")


@dataclass(frozen=True)
class TokenizerOf:
    """A model's tokenizer and the ids that end its sequences."""

    model: str
    tokenizer: Any
    eos_token_ids: tuple[int, ...]


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> TokenizerOf:
    """That of the model called ``name``, see `resolve`.

    ``trust_remote_code``: see `load_model`. Raises ModelError for one that is missing or damaged.
    """
    from transformers import AutoTokenizer

    found = resolve(name)
    if found.backend != TRANSFORMERS:  # its file may hold weights and tokenizer in one
        plain = {"dtype": "auto", "device": "auto", "attn_implementation": None, "share_with": None}
        loaded = plugins.get("backends", found.backend)().load(found, trust_remote_code=trust_remote_code, **plain)
        if loaded.tokenizer is None:
            raise ModelError(f"{name} has no tokenizer")
        return TokenizerOf(name, loaded.tokenizer, loaded.eos_token_ids)
    if trust_remote_code:
        check_code_is_here(name, found.path)
    options = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    try:
        tokenizer = AutoTokenizer.from_pretrained(found.path, **options)
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


def check_code_is_here(name: str, path: Path) -> None:
    """Raise ModelError for a model at ``path`` that asks for another repository's Python code, which nobody read."""
    if elsewhere := _code_elsewhere(path):
        raise ModelError(
            f"{name} asks for Python code of another repository, {elsewhere}, which trust_remote_code does not cover: "
            f"copy that code into {path} and take '{elsewhere}--' out of the auto_map there"
        )


def _code_elsewhere(path: Path) -> str | None:
    """The other repository whose Python code the model at ``path`` asks for (``org/name--module.Class``), if any."""
    for file in ("config.json", "tokenizer_config.json"):
        try:
            found = json.loads((path / file).read_text(encoding="utf-8"))["auto_map"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        references = found.values() if isinstance(found, dict) else [found]
        for reference in (r for entry in references for r in (entry if isinstance(entry, list) else [entry])):
            if isinstance(reference, str) and "--" in reference:
                return reference.partition("--")[0]
    return None
