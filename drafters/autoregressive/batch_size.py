"""``batch-size``: a draft length for each number of running sequences.

Serving engines ship this as dynamic speculative decoding (vLLM's ``num_speculative_tokens_per_batch_size``). Once a
pass is compute-bound, every row costs time, so the best draft length falls with the number of sequences, down to
zero: X. Liu et al., "Optimizing Speculative Decoding for Serving Large Language Models Using
Goodput", 2024. ``crossdraft cost`` prints the best schedule for a cost curve and an acceptance rate.

The length is fixed before the first token is drawn, from the number of running sequences: given that, a step is a
static one, so decoding stays lossless. A sequence's sampled text depends on its neighbours; its distribution does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ...framework.contracts.drafter import StrategyConfig
from .draft_model import LengthPolicy


class BatchSizeLength(LengthPolicy):
    """Looks the length up by the number of running sequences."""

    fixed, adapts, remembers = False, True, True

    def __init__(self, gamma: int, batch_size: int, lengths: Sequence[tuple[int, int]]):
        super().__init__(gamma, batch_size)
        self._schedule = lengths

    def draft_lengths(self, limit: Sequence[int], rows: int) -> list[int]:
        length = next((length for first_size, length in reversed(self._schedule) if rows >= first_size), self.gamma)
        return [min(length, bound) for bound in limit]


class BatchSize(StrategyConfig):
    """A length for each number of running sequences; gamma below the first entry, and the maximum."""

    name: Literal["batch-size"] = "batch-size"
    lengths: tuple[tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=0)]], ...] = Field(
        description="ascending pairs: number of sequences, draft length from there on, e.g. [[1, 5], [8, 0]]"
    )

    @model_validator(mode="after")
    def _ascending(self) -> Any:
        sizes = [first for first, _ in self.lengths]
        if not sizes or sizes != sorted(set(sizes)):
            raise ValueError(
                f"lengths holds the numbers of sequences {sizes}, which do not ascend; sort the pairs, no duplicates"
            )
        return self

    def make(self, gamma: int, batch_size: int) -> LengthPolicy:
        longest = max(length for _, length in self.lengths)
        if longest > gamma:
            raise ValueError(f"lengths go up to {longest}, which is more than gamma ({gamma}); write at most gamma")
        return BatchSizeLength(gamma, batch_size, self.lengths)
