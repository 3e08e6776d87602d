"""``batch-size``: a draft length for each number of sequences that are decoded side by side.

The rule that serving engines ship as dynamic speculative decoding (vLLM's ``num_speculative_tokens_per_batch_size``).
A pass over more rows costs more once it is bound by arithmetic, so the draft length that pays falls with the number
of sequences, down to none: X. Liu et al., "Optimizing Speculative Decoding for Serving Large Language Models Using
Goodput", 2024. ``crossdraft cost`` prints the schedule that its cost curves and an acceptance lead to.

The length is settled before the first token is drawn, by what else is decoded: given that, a step is a static one, so
losslessness stands. A sequence's sampled text then follows from its neighbours, too, though its law does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ...framework.contracts.drafter import StrategyConfig
from .length_policy import LengthPolicy


class BatchSizeLength(LengthPolicy):
    """As many tokens as a schedule says for the sequences there are."""

    fixed, adapts, remembers = False, True, True

    def __init__(self, gamma: int, batch_size: int, lengths: Sequence[tuple[int, int]]):
        super().__init__(gamma, batch_size)
        self._lengths = lengths

    def wanted(self, limit: Sequence[int], rows: int) -> list[int]:
        length = next((length for least, length in reversed(self._lengths) if rows >= least), self.gamma)
        return [min(length, most) for most in limit]


class BatchSize(StrategyConfig):
    """As many tokens as a schedule says for the number of sequences; gamma is the most, and what holds before it."""

    name: Literal["batch-size"] = "batch-size"
    lengths: tuple[tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=0)]], ...] = Field(
        description="ascending pairs: from so many sequences on, drafts of so many tokens, e.g. [[1, 5], [8, 0]]"
    )

    @model_validator(mode="after")
    def _ascending(self) -> Any:
        least = [first for first, _ in self.lengths]
        if not least or least != sorted(set(least)):
            raise ValueError(f"lengths must name numbers of sequences in ascending order, got {least}")
        return self

    def make(self, gamma: int, batch_size: int) -> LengthPolicy:
        longest = max(length for _, length in self.lengths)
        if longest > gamma:
            raise ValueError(f"lengths go up to {longest}, more than gamma ({gamma}), the most a draft may have")
        return BatchSizeLength(gamma, batch_size, self.lengths)
