"""A growing text in which the contexts of its end are found again, in a time that does not depend on its length.

Every place of the text is linked to the place before it where the same tokens stood in front, for contexts of 1, 2, 4
and 8 tokens: hash chains, as compressors of the LZ77 family keep them. A look-up follows a chain for a fixed number of
steps, so it sees the latest occurrences of a context, all of them if there are no more, and measures how far each one
matches. A new token is linked in constant time. The oldest tokens are overwritten by the newest ones once the text is
as long as it may be; chains end where they would lead there.

A suffix tree with counts answers the same question over all occurrences. Its nodes cost a hundred bytes and more for
each token; this takes 36 to 52, in NumPy arrays, and forgets without any work. What is done token by token is
`compiled`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from . import compiled
from .compiled import END, SIZES, Links

#: Places are 32-bit integers.
_LAST = 2**31 - 1


@dataclass(frozen=True)
class Chain:
    """The places of one context, and of those with the same hash.

    Attributes:
        number: of its size among the sizes of contexts.
        most: the longest match that it speaks of: chains of longer contexts begin there.
    """

    number: int
    most: int


class History:
    """At most ``capacity`` tokens, the latest ones.

    Args:
        capacity: tokens kept.
        depth: longest match that is told apart, in tokens.
        occurrences: most occurrences of a context that are looked at.
    """

    def __init__(self, capacity: int, depth: int, occurrences: int):
        self.capacity, self.depth, self.occurrences = max(capacity, 1), depth, occurrences
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.links = Links.empty(self.capacity, sum(size <= self.depth for size in SIZES))

    @property
    def total(self) -> int:
        """Tokens that were ever added: the place of the next one."""
        return int(self.links.total[0])

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays, once all of them are in use."""
        return sum(array.nbytes for array in self.links[:3])

    def since(self, place: int) -> np.ndarray:
        """The tokens from a place on that is still there."""
        return self.links.ring[np.arange(place, self.total) % self.capacity]

    def extend(self, new: Sequence[int] | np.ndarray) -> None:
        """Add tokens at the end."""
        tokens = np.asarray(new, dtype=np.int64)
        for start in range(0, len(tokens), self.capacity):
            piece = tokens[start : start + self.capacity]
            if self.total + len(piece) > _LAST:
                self.clear()
            compiled.extend(self.links, piece)

    def chains(self, tail: Sequence[int]) -> list[Chain]:
        """The chains of the contexts that ``tail``, the end of a text, ends with, that of the longest first."""
        found, most = [], min(len(tail), self.depth)
        for i in reversed(range(len(self.links.head))):
            if SIZES[i] <= most:
                found.append(Chain(i, most))
                most = SIZES[i] - 1
        return found

    def matches(self, chain: Chain, tail: Sequence[int], longest: int) -> tuple[list[int], np.ndarray]:
        """Where the contexts of a chain of ``tail`` occurred, the latest first.

        Args:
            longest: most tokens of a continuation.

        Returns:
            for each occurrence, how many tokens match, at most ``chain.most``; and int32 ``[n, longest]``: what
            followed, `END` where nothing does.
        """
        places, lengths = np.empty((2, self.occurrences), dtype=np.int64)
        text = np.asarray(tail, dtype=np.int64)
        given = (self.links, chain.number, text, len(text), chain.most, self.occurrences, places, lengths)
        found = compiled.matches(*given)
        after = places[:found, None] + np.arange(longest)
        # Behind the end stands what is older than anything here, or nothing yet: both are no continuation.
        follows = np.where(after < self.total, self.links.ring[after % self.capacity], END)
        return lengths[:found].tolist(), follows
