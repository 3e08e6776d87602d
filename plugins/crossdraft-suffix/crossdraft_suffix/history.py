"""A growing text with constant-time look-up of contexts.

Every position of the text is linked to the previous position after the same context, for contexts of 1, 2, 4 and 8
tokens: hash chains, as in LZ77 compressors. A look-up follows a chain for a fixed number of steps, which gives the
latest occurrences of a context, and measures the length of each match. Adding a token takes constant time. At full
capacity new tokens overwrite the oldest ones, and chains end there.

A suffix tree with counts covers all occurrences, but costs 100 bytes or more per token; this takes 36 to 52 bytes, in
NumPy arrays, and drops old tokens at no cost. The work per token is in `compiled`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from . import compiled
from .compiled import END, SIZES, Links

#: Positions are 32-bit integers.
_LAST = 2**31 - 1


@dataclass(frozen=True)
class Chain:
    """The positions of a context and of others with the same hash.

    Attributes:
        number: index of the context's size in `SIZES`.
        maximum: maximum length of a match in this chain; longer matches are in the chains of longer contexts.
    """

    number: int
    maximum: int


class History:
    """The latest ``capacity`` tokens of a text.

    Args:
        capacity: maximum number of tokens.
        depth: maximum length of a match, in tokens.
        occurrences: maximum number of occurrences of a context per look-up.
    """

    def __init__(self, capacity: int, depth: int, occurrences: int):
        self.capacity, self.depth, self.occurrences = max(capacity, 1), depth, occurrences
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.links = Links.empty(self.capacity, sum(size <= self.depth for size in SIZES))

    @property
    def total(self) -> int:
        """Number of tokens added so far: the position of the next one."""
        return int(self.links.total[0])

    @property
    def nbytes(self) -> int:
        """Size of the arrays at full capacity, in bytes."""
        return sum(array.nbytes for array in self.links[:3])

    def since(self, position: int) -> np.ndarray:
        """Tokens from ``position`` on, which must still be stored."""
        return self.links.ring[np.arange(position, self.total) % self.capacity]

    def extend(self, new: Sequence[int] | np.ndarray) -> None:
        """Append tokens."""
        tokens = np.asarray(new, dtype=np.int64)
        for start in range(0, len(tokens), self.capacity):
            piece = tokens[start : start + self.capacity]
            if self.total + len(piece) > _LAST:
                self.clear()
            compiled.extend(self.links, piece)

    def chains(self, tail: Sequence[int]) -> list[Chain]:
        """Chains of the contexts at the end of ``tail``, the longest first."""
        chains, maximum = [], min(len(tail), self.depth)
        for i in reversed(range(len(self.links.head))):
            if SIZES[i] <= maximum:
                chains.append(Chain(i, maximum))
                maximum = SIZES[i] - 1
        return chains

    def matches(self, chain: Chain, tail: Sequence[int], longest: int) -> tuple[list[int], np.ndarray]:
        """Find the occurrences of the context of a chain of ``tail``, the latest first.

        Args:
            longest: maximum length of a continuation.

        Returns:
            for each occurrence, the number of matching tokens, at most ``chain.most``; and int32 ``[n, longest]``: the
            continuations, filled with `END`.
        """
        positions, lengths = np.empty((2, self.occurrences), dtype=np.int64)
        text = np.asarray(tail, dtype=np.int64)
        arguments = (self.links, chain.number, text, len(text), chain.maximum, self.occurrences, positions, lengths)
        n = compiled.matches(*arguments)
        index = positions[:n, None] + np.arange(longest)
        # The ring holds old or no tokens beyond the end of the text.
        continuations = np.where(index < self.total, self.links.ring[index % self.capacity], END)
        return lengths[:n].tolist(), continuations
