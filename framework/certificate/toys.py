"""The exact models of the certificate: the built-in ones, and files of them."""

from __future__ import annotations

import json
import re
import reprlib
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ..errors import UsageError
from ..util.input_files import read_bytes
from ..util.limits import Limit
from .table_lm import Toy

#: A toy file is read whole: most bytes, and most probabilities in one of its tables.
LARGEST_FILE = Limit(16_000_000, "toys are small")
LARGEST_TABLE = 250_000
#: A probability as text, with few enough digits that it costs nothing to compute.
_NUMBER = re.compile(
    r"\s*[+-]?(\d{1,60}/\d{1,60}|(\d{1,60}(\.\d{0,60})?|\.\d{1,60})(e[+-]?\d{1,3})?)\s*", re.ASCII | re.IGNORECASE
)


def read_toys(path: Path) -> list[Toy]:
    """Toys from a JSON file: name -> ``{"model": {V, gamma, target_start, target_rows, draft_start, draft_rows}}``.

    Probabilities are numbers or fractions as strings; other keys are ignored. With ``target_tokens`` and
    ``draft_tokens``, lists of texts, the drafter has tokens of its own, and as many rows as these.

    Raises:
        UsageError: no such file, not JSON, or a model that is no pair of probability tables; says where.
    """
    content = read_bytes(path, LARGEST_FILE, what="toy file")
    try:
        entries = json.loads(content)
    except RecursionError:
        raise UsageError(f"toy file {path} is nested too deeply to be read") from None
    except ValueError as error:
        raise UsageError(f"toy file {path} is not JSON: {error}") from None
    if not isinstance(entries, dict) or not entries:
        raise UsageError(f'toy file {path} must hold an object: {{"name": {{"model": {{...}}}}}}')
    return [_toy(name, entry, f"toy file {path}") for name, entry in entries.items()]


def built_in_toys() -> list[Toy]:
    """T0 (the toy of Sun et al. 2024) and G1 to G4, which together expose every known mistake, and D6 for deep drafts.

    D6 has two tokens, and one of them is never drafted twice in a row: 21 chains of six tokens instead of 64.
    """
    return read_toys(Path(__file__).with_name("toys.json"))


def toys_of_two_vocabularies() -> list[Toy]:
    """W1 and W2, whose drafters have tokens of their own: W1 shares two of three, W2 all, and has another one."""
    return read_toys(Path(__file__).with_name("two_vocabularies.json"))


def _toy(name: str, entry: Any, file: str) -> Toy:
    if not name or not name.isprintable():
        raise UsageError(f"{file}: {name!a} is no name that could be printed")
    where = f"{file}: {name}"
    model = entry.get("model") if isinstance(entry, dict) else None
    if not isinstance(model, dict):
        raise UsageError(f'{where} has no "model" object')
    keys = ("V", "gamma", "target_start", "target_rows", "draft_start", "draft_rows")
    if missing := [key for key in keys if key not in model]:
        raise UsageError(f"{where}.model lacks {', '.join(missing)}")
    vocab, gamma = model["V"], model["gamma"]
    if not _is_integer(vocab, 1) or not _is_integer(gamma, 0):
        raise UsageError(f"{where}.model: V must be a positive integer and gamma a non-negative one")
    if (vocab + 1) * vocab > LARGEST_TABLE:
        raise UsageError(
            f"{where}.model: with V = {reprlib.repr(vocab)} a table has (V + 1) V entries, more than the "
            f"{LARGEST_TABLE:,} that are allowed"
        )

    words = _words(model, vocab, where)

    def table(kind: str) -> torch.Tensor:
        rows, vocab = model[f"{kind}_rows"], sizes[kind]
        if not isinstance(rows, list) or len(rows) != vocab:
            raise UsageError(f"{where}.model.{kind}_rows must have V = {vocab} rows")
        named = [(f"{kind}_rows[{i}]", row) for i, row in enumerate(rows)] + [(f"{kind}_start", model[f"{kind}_start"])]
        return torch.tensor([_law(row, vocab, f"{where}.model.{key}") for key, row in named], dtype=torch.float64)

    sizes = {"target": vocab, "draft": vocab if words is None else len(words[1])}
    return Toy(name, gamma, table("target"), table("draft"), words)


def _words(model: dict[str, Any], vocab: int, where: str) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """What tokens spell, of the target and of the drafter; None if the toy does not say."""
    keys = ("target_tokens", "draft_tokens")
    if not any(key in model for key in keys):
        return None
    found = []
    for key in keys:
        words = model.get(key)
        if not isinstance(words, list) or not words or not all(isinstance(word, str) and word for word in words):
            raise UsageError(f"{where}.model.{key} must be a list of texts, because the other one of {keys} is")
        if len(set(words)) != len(words) or (len(words) + 1) * len(words) > LARGEST_TABLE:
            raise UsageError(f"{where}.model.{key} must be texts that differ, and few")
        found.append(tuple(words))
    if len(found[0]) != vocab:
        raise UsageError(f"{where}.model.target_tokens must have V = {vocab} texts")
    return found[0], found[1]


def _is_integer(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _law(row: Any, vocab: int, where: str) -> list[float]:
    try:
        if not isinstance(row, list):
            raise TypeError
        exact = [_number(value) for value in row]
    except (TypeError, ValueError, OverflowError, ZeroDivisionError):
        raise UsageError(
            f'{where} must be a list of numbers or fractions such as "1/3", got {reprlib.repr(row)}'
        ) from None
    total = sum(exact, Fraction(0))
    if len(exact) != vocab or any(value < 0 for value in exact) or abs(total - 1) > Fraction(1, 10**9):
        raise UsageError(f"{where} must hold V = {vocab} probabilities that sum to 1, got {reprlib.repr(row)}")
    return [float(value / total) for value in exact]


@lru_cache(maxsize=1024, typed=True)
def _number(value: Any) -> Fraction:
    """A number or a fraction as text, exactly. Raises one of the errors of arithmetic for anything else."""
    if isinstance(value, str):
        if not _NUMBER.fullmatch(value):
            raise ValueError
        return Fraction(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError
    return Fraction(value)
