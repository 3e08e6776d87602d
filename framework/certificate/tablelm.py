"""A language model given by a table of exact probabilities, behind the same protocol as a real one.

Order-1 Markov: the law of the next token depends on the last one. Token id V stands for "nothing yet", so a
sequence starts with the prompt ``[V]``. Rows are float64, which is what makes certificates exact to 1e-12.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..contracts.drafter import DraftContext
from ..contracts.errors import ModelError, UsageError
from ..contracts.sampling import Sampling


@dataclass(frozen=True)
class Toy:
    """A small exact pair of models.

    Attributes:
        name: what tables call it.
        gamma: draft length.
        target, drafter: ``[V + 1, V]`` float64; row x is the law after token x, row V the law at the start.
    """

    name: str
    gamma: int
    target: Tensor
    drafter: Tensor

    @property
    def vocab_size(self) -> int:
        return self.target.shape[1]


class TableLM:
    """B slots of a table model; see :class:`~crossdraft.framework.contracts.lm.LM`.

    Args:
        table: ``[V + 1, V]``, the law after each token, as in `Toy`; or ``[V]``, one law after whatever is fed.
        fork: the table of what `fork` returns, whichever layers are asked for; ``None`` = it has no layers.
    """

    context_length: int | None = None
    hidden_layers: tuple[float, ...] = ()

    def __init__(self, table: Tensor, batch_size: int, fork: Tensor | None = None):
        self.batch_size, self.vocab_size = batch_size, table.shape[-1]
        self.device = table.device
        self.lengths = [0] * batch_size
        self.passes = 0
        self._logits, self._fork = table.log(), fork

    def begin(self, row: int, prompt: Sequence[int]) -> None:
        self.lengths[row] = len(prompt) - 1

    def grow(self, tokens: Tensor, parents: Tensor | None = None) -> tuple[Tensor, None]:
        self.passes += 1
        if self._logits.dim() == 1:
            return self._logits.expand(*tokens.shape, -1), None
        return self._logits[tokens], None

    def keep(self, counts: Sequence[int], path: Tensor | None = None) -> None:
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def retire(self, row: int) -> None:
        self.lengths[row] = 0

    def fork(self, layers: Sequence[int]) -> TableLM:
        if self._fork is None:
            raise ModelError("a table of probabilities has no layers, so none of them can be run alone")
        return TableLM(self._fork, self.batch_size)


class ToyContext(DraftContext):
    """What a drafter may ask for where the target is a toy: whatever it loads is the toy's drafter model.

    Args:
        target, drafter: tables, see `TableLM`.
        max_length: of the slots, in tokens.
    """

    def __init__(self, target: Tensor, drafter: Tensor, sampling: Sampling, batch_size: int, max_length: int = 256):
        self._drafter = drafter
        super().__init__(
            sampling=sampling,
            batch_size=batch_size,
            max_length=max_length,
            vocab_size=target.shape[-1],
            device=target.device,
            target=TableLM(target, batch_size, fork=drafter),
            target_name="toy",
        )

    def load_lm(self, name: str, *, room: int = 0, ids: Tensor | None = None, unknown: int = 0) -> TableLM:
        return TableLM(self._drafter, self.batch_size)


def read_toys(path: Path) -> list[Toy]:
    """Toys from a JSON file: name -> ``{"model": {V, gamma, target_start, target_rows, draft_start, draft_rows}}``.

    Probabilities are numbers or fractions as strings; other keys are ignored.

    Raises:
        UsageError: no such file, not JSON, or a model that is no pair of probability tables; says where.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read toy file {path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"toy file {path} is not JSON: {error}") from None
    if not isinstance(entries, dict) or not entries:
        raise UsageError(f'toy file {path} must hold an object: {{"name": {{"model": {{...}}}}}}')
    return [_toy(name, entry, f"toy file {path}: {name}") for name, entry in entries.items()]


def built_in_toys() -> list[Toy]:
    """T0 (the toy of Sun et al. 2024) and G1 to G4, which together expose every known mistake."""
    return read_toys(Path(__file__).with_name("toys.json"))


def _toy(name: str, entry: Any, where: str) -> Toy:
    model = entry.get("model") if isinstance(entry, dict) else None
    if not isinstance(model, dict):
        raise UsageError(f'{where} has no "model" object')
    keys = ("V", "gamma", "target_start", "target_rows", "draft_start", "draft_rows")
    if missing := [key for key in keys if key not in model]:
        raise UsageError(f"{where}.model lacks {', '.join(missing)}")
    vocab, gamma = model["V"], model["gamma"]
    if not isinstance(vocab, int) or vocab < 1 or not isinstance(gamma, int) or gamma < 0:
        raise UsageError(f"{where}.model: V must be a positive integer and gamma a non-negative one")

    def table(kind: str) -> Tensor:
        rows = model[f"{kind}_rows"]
        if not isinstance(rows, list) or len(rows) != vocab:
            raise UsageError(f"{where}.model.{kind}_rows must have V = {vocab} rows")
        named = [(f"{kind}_rows[{i}]", row) for i, row in enumerate(rows)] + [(f"{kind}_start", model[f"{kind}_start"])]
        return torch.tensor([_law(row, vocab, f"{where}.model.{key}") for key, row in named], dtype=torch.float64)

    return Toy(name, gamma, table("target"), table("draft"))


def _law(row: Any, vocab: int, where: str) -> list[float]:
    try:
        exact = [Fraction(value) if isinstance(value, str | int) else Fraction(float(value)) for value in row]
    except (TypeError, ValueError, ZeroDivisionError):
        raise UsageError(f'{where} must be a list of numbers or fractions such as "1/3", got {row!r}') from None
    total = sum(exact, Fraction(0))
    if len(exact) != vocab or any(value < 0 for value in exact) or abs(total - 1) > Fraction(1, 10**9):
        raise UsageError(f"{where} must hold V = {vocab} probabilities that sum to 1, got {row!r}")
    return [float(value / total) for value in exact]
