"""Loading of tokenizers and end-of-sequence ids without weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import plugins
from ..contracts.models import TRANSFORMERS, ResolvedModel
from ..errors import ModelError, first_line, quoted
from ..util.limits import MOST_WIDTH
from .resolve import resolve

#: Files with a tokenizer.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
#: Files with end-of-sequence ids.
_FILES = ("generation_config.json", "config.json")


@dataclass(frozen=True)
class TokenizerOf:
    """Tokenizer of a model and its end-of-sequence ids."""

    model: str
    tokenizer: Any
    eos_token_ids: tuple[int, ...]


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> TokenizerOf:
    """Load the tokenizer of the model ``name``, see `resolve`.

    ``trust_remote_code``: see `load_model`. Raises ModelError if it is missing or damaged.
    """
    from transformers import AutoTokenizer

    resolved = resolve(name)
    if resolved.backend != TRANSFORMERS:  # weights and tokenizer may be one file
        load_options = {"dtype": "auto", "device": "auto", "attn_implementation": None, "share_with": None}
        loaded = plugins.get("backends", resolved.backend)().load(
            resolved, trust_remote_code=trust_remote_code, **load_options
        )
        if loaded.tokenizer is None:
            raise ModelError(f"{name} does not have a tokenizer")
        return TokenizerOf(name, loaded.tokenizer, loaded.eos_token_ids)
    path = tokenizer_directory(resolved)
    if trust_remote_code:
        check_code_is_here(name, path)
    options = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
    except Exception as error:  # of transformers and its backends
        raise ModelError(f"the tokenizer of {name} cannot be loaded: {first_line(error)}") from error
    eos_settings = [tokenizer.eos_token_id]
    for file in _FILES:
        try:
            config = json.loads((resolved.path / file).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        nested = config.get("text_config") if isinstance(config, dict) else None
        eos_settings += [holder.get("eos_token_id") for holder in (config, nested) if isinstance(holder, dict)]
    return TokenizerOf(name, tokenizer, eos_token_ids(name, *eos_settings))


def tokenizer_directory(resolved: ResolvedModel) -> Path:
    """Directory of a model's tokenizer: that of its adapter if it has one of its own."""
    adapter = resolved.adapter
    own = adapter is not None and any((adapter / file).is_file() for file in TOKENIZER_FILES)
    return adapter if adapter is not None and own else resolved.path


def eos_token_ids(name: str, *settings: Any) -> tuple[int, ...]:
    """Sorted end-of-sequence ids from all settings of a model; each is an id, a list of ids or None.

    Raises ModelError for an invalid token id.
    """
    resolved: set[int] = set()
    for ids in settings:
        for token_id in ids if isinstance(ids, list | tuple) else [] if ids is None else [ids]:
            if type(token_id) is not int or not 0 <= token_id < MOST_WIDTH:
                raise ModelError(f"{name}: eos_token_id contains {quoted(token_id)}, which is not a valid token id")
            resolved.add(token_id)
    return tuple(sorted(resolved))


def decode_tokens(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """The text of each token, special ones included.

    A token that ends inside a character is empty, and the next one holds the character.

    Args:
        tokenizer: of transformers or tokenizers; another kind decodes token by token.
    """
    from tokenizers import Tokenizer
    from tokenizers.decoders import DecodeStream

    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not isinstance(backend, Tokenizer):
        return [str(tokenizer.decode([token])) for token in tokens]
    stream = DecodeStream(skip_special_tokens=False)
    return [stream.step(backend, token) or "" for token in tokens]


def check_code_is_here(name: str, path: Path) -> None:
    """Raise ModelError if the model at ``path`` requires Python code of another repository."""
    if repository := _external_code(path):
        raise ModelError(
            f"{name} requires Python code of another repository, {repository}, which trust_remote_code does not cover: "
            f"copy that code into {path} and remove '{repository}--' from its auto_map"
        )


def _external_code(path: Path) -> str | None:
    """Other repository whose Python code the model at ``path`` requires (``org/name--module.Class``), or None."""
    for file in ("config.json", "tokenizer_config.json"):
        try:
            resolved = json.loads((path / file).read_text(encoding="utf-8"))["auto_map"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        references = resolved.values() if isinstance(resolved, dict) else [resolved]
        for reference in (r for entry in references for r in (entry if isinstance(entry, list) else [entry])):
            if isinstance(reference, str) and "--" in reference:
                return reference.partition("--")[0]
    return None
