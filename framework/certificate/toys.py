"""Exact models (toys) of the certificate, built in or from files."""

from __future__ import annotations

import re
import reprlib
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ..errors import UsageError
from ..util.input_files import read_json
from ..util.limits import Limit
from .table_lm import Toy

#: Maximum bytes of a toy file, and entries of one of its tables.
LARGEST_FILE = Limit(16_000_000, "toys are small")
LARGEST_TABLE = 250_000
#: A probability as text, with a limited number of digits.
_NUMBER = re.compile(
    r"\s*[+-]?(\d{1,60}/\d{1,60}|(\d{1,60}(\.\d{0,60})?|\.\d{1,60})(e[+-]?\d{1,3})?)\s*", re.ASCII | re.IGNORECASE
)


def read_toys(path: Path) -> list[Toy]:
    """Read toys from a JSON file.

    Each name maps to ``{"model": {V, gamma, target_start, target_rows, draft_start, draft_rows}}``. Probabilities are
    numbers or fractions as strings; other keys are ignored. ``target_tokens`` and ``draft_tokens``,
    lists of texts, define two vocabularies; the draft tables then have one row per draft token.

    Raises:
        UsageError: missing file, invalid JSON or invalid tables, with their position.
    """
    entries = read_json(path, LARGEST_FILE, subject="toy file")
    if not entries:
        raise UsageError(f'toy file {path} must hold toys: {{"name": {{"model": {{...}}}}}}')
    return [_toy(name, entry, f"toy file {path}") for name, entry in entries.items()]


def built_in_toys() -> list[Toy]:
    """T0 (Sun et al. 2024) and G1 to G4, which together expose every known verifier mistake, and D6 for deep drafts.

    D6 has two tokens, one of which is never drafted twice in a row: 21 chains of six tokens instead of 64.
    """
    return read_toys(Path(__file__).with_name("toys.json"))


def toys_of_two_vocabularies() -> list[Toy]:
    """W1 and W2, with two vocabularies: W1 shares two of three tokens, W2 all of them and has an additional one."""
    return read_toys(Path(__file__).with_name("two_vocabularies.json"))


def _toy(name: str, entry: Any, file: str) -> Toy:
    if not name or not name.isprintable():
        raise UsageError(f"{file}: the name {name!a} is empty or not printable; rename the toy")
    place = f"{file}: {name}"
    model = entry.get("model") if isinstance(entry, dict) else None
    if not isinstance(model, dict):
        raise UsageError(f'{place} has no "model" object')
    keys = ("V", "gamma", "target_start", "target_rows", "draft_start", "draft_rows")
    if missing := [key for key in keys if key not in model]:
        raise UsageError(f"{place}.model lacks {', '.join(missing)}")
    vocab, gamma = model["V"], model["gamma"]
    if not _is_integer(vocab, 1) or not _is_integer(gamma, 0):
        raise UsageError(f"{place}.model: V must be a positive integer and gamma a non-negative one")
    if (vocab + 1) * vocab > LARGEST_TABLE:
        raise UsageError(
            f"{place}.model: V = {reprlib.repr(vocab)} is too large: a table has (V + 1) V entries, at most "
            f"{LARGEST_TABLE:,} are allowed"
        )

    token_texts = _words(model, vocab, place)

    def table(kind: str) -> torch.Tensor:
        rows, vocab = model[f"{kind}_rows"], sizes[kind]
        if not isinstance(rows, list) or len(rows) != vocab:
            raise UsageError(f"{place}.model.{kind}_rows must have V = {vocab} rows")
        named = [(f"{kind}_rows[{i}]", row) for i, row in enumerate(rows)] + [(f"{kind}_start", model[f"{kind}_start"])]
        return torch.tensor([_probs(row, vocab, f"{place}.model.{key}") for key, row in named], dtype=torch.float64)

    sizes = {"target": vocab, "draft": vocab if token_texts is None else len(token_texts[1])}
    return Toy(name, gamma, table("target"), table("draft"), token_texts)


def _words(model: dict[str, Any], vocab: int, place: str) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Token texts of target and drafter; None without them."""
    keys = ("target_tokens", "draft_tokens")
    if not any(key in model for key in keys):
        return None
    token_lists = []
    for key in keys:
        token_texts = model.get(key)
        if (
            not isinstance(token_texts, list)
            or not token_texts
            or not all(isinstance(word, str) and word for word in token_texts)
        ):
            raise UsageError(f"{place}.model.{key} must be a list of texts; {' and '.join(keys)} go together")
        if len(set(token_texts)) != len(token_texts) or (len(token_texts) + 1) * len(token_texts) > LARGEST_TABLE:
            raise UsageError(
                f"{place}.model.{key} must be distinct texts, so few that (V + 1) V is at most {LARGEST_TABLE:,}"
            )
        token_lists.append(tuple(token_texts))
    if len(token_lists[0]) != vocab:
        raise UsageError(f"{place}.model.target_tokens must have V = {vocab} texts")
    return token_lists[0], token_lists[1]


def _is_integer(value: Any, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def _probs(row: Any, vocab: int, place: str) -> list[float]:
    try:
        if not isinstance(row, list):
            raise TypeError
        exact = [_number(value) for value in row]
    except (TypeError, ValueError, OverflowError, ZeroDivisionError):
        raise UsageError(
            f'{place} must be a list of numbers or fractions such as "1/3", got {reprlib.repr(row)}'
        ) from None
    total = sum(exact, Fraction(0))
    if len(exact) != vocab or any(value < 0 for value in exact) or abs(total - 1) > Fraction(1, 10**9):
        raise UsageError(f"{place} must hold V = {vocab} probabilities that sum to 1, got {reprlib.repr(row)}")
    return [float(value / total) for value in exact]


@lru_cache(maxsize=1024, typed=True)
def _number(value: Any) -> Fraction:
    """Exact value of a number, or of a fraction as text. Raises TypeError or an arithmetic error for anything else."""
    if isinstance(value, str):
        if not _NUMBER.fullmatch(value):
            raise ValueError
        return Fraction(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError
    return Fraction(value)
