"""Frequencies of drawn tokens compared with the reported q."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..contracts.draft import Draft, take_rows
from ..contracts.steps import StepEvent


class Counted:
    """Observed minus expected counts of drawn tokens over steps; an ``on_step`` callback.

    Tokens are counted by id and by the rank of their probability in an unequal q, because deviations of a q that is
    reported too sharp or too flat cancel in the sums by id.

    Attributes:
        drafts, unequal: number of drafts with a q, and of those with an unequal one.
    """

    def __init__(self) -> None:
        self.drafts = self.unequal = 0
        self._sums: dict[str, Tensor] = {}

    def __call__(self, event: StepEvent) -> None:
        if event.draft.q is None:
            return
        busy = torch.tensor([prompt is not None for prompt in event.prompts])[:, None]
        tokens, probs, valid = draws(event.draft.candidates)
        difference = (torch.zeros_like(probs).scatter_(2, tokens[..., None], 1.0) - probs).double()
        ranked = difference.gather(2, probs.argsort(2, descending=True))
        ranked = ranked * (probs.amax(2) - probs.masked_fill(probs <= 0, torch.inf).amin(2) > 1e-6)[..., None]
        both = torch.cat([difference, ranked], 2)
        for name, counts in (("kept", valid & busy), ("all", busy.expand_as(valid))):
            selected = both * counts[..., None]
            for key, terms in ((name, selected.sum(0)), (f"{name}2", selected.square().sum(0))):
                self._sums[key] = _add(self._sums[key], terms) if key in self._sums else terms
        self.drafts += int(busy.sum())
        self.unequal += int((ranked.abs().amax((1, 2)) > 0).sum())

    def deviation(self, name: Literal["kept", "all"]) -> float:
        """Largest deviation of a token in standard deviations, among valid or all drawn tokens."""
        # The variance is clamped, because few terms are not significant.
        return float((self._sums[name].abs() / self._sums[f"{name}2"].sqrt().clamp(min=5.0)).max())


def draws(draft: Draft) -> tuple[Tensor, Tensor, Tensor]:
    """Drawn tokens ``[B, E]``, their probabilities ``[B, E, V]``, and validity ``[B, E]``.

    E enumerates nodes; for i.i.d. sequences, which share nodes, the tokens of every sequence.
    """
    assert draft.q is not None
    q_index = torch.arange(draft.width).expand_as(draft.tokens) if draft.q_index is None else draft.q_index
    tokens, valid = draft.tokens, draft.valid
    sequences = draft.drawn_sequences()
    if sequences is not None:
        entry = sequences.transpose(1, 2).flatten(1)
        valid, entry = entry >= 0, entry.clamp(min=0)
        tokens, q_index = tokens.gather(1, entry), q_index.gather(1, entry)
    return tokens, take_rows(draft.q, q_index), valid


def _add(total: Tensor, other: Tensor) -> Tensor:
    """Sum of tables ``[N, V]`` with different N."""
    larger, smaller = (total, other) if len(total) >= len(other) else (other, total)
    out = larger.clone()
    out[: len(smaller)] += smaller
    return out
