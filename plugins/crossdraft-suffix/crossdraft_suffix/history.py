"""A growing text in which the contexts of its end are found again, in a time that does not depend on its length.

Every place of the text is linked to the place before it where the same tokens stood in front, for contexts of 1, 2, 4
and 8 tokens: hash chains, as compressors of the LZ77 family keep them. A look-up follows a chain for a fixed number of
steps, so it sees the latest occurrences of a context, all of them if there are no more, and measures how far each one
matches. A new token is linked in constant time. The oldest tokens are overwritten by the newest ones once the text is
as long as it may be; chains end where they would lead there.

A suffix tree with counts answers the same question over all occurrences. Its nodes cost a hundred bytes and more for
each token; this takes 36 to 52, in NumPy arrays, and forgets without any work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

#: What stands between two texts: no token, so nothing matches across it, and nothing that follows it is drafted.
END = -1
#: Lengths of the contexts that chains are kept for. A match of any length is found by the longest that is no longer.
SIZES = (1, 2, 4, 8)
#: Odd numbers whose products mix all bits of the hashes of 64 bits (Knuth's multiplicative hashing).
_MIX = np.uint64(0x9E3779B97F4A7C15)
_STEPS = tuple(np.uint64(step) for step in (0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93))
#: Places are 32-bit integers.
_LAST = 2**31 - 1


@dataclass(frozen=True)
class Chain:
    """The places of one context, and of those with the same hash.

    Attributes:
        number: of its size among the sizes of contexts.
        bucket: its head.
        most: the longest match that it speaks of: chains of longer contexts begin there.
    """

    number: int
    bucket: int
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
        self._sizes = tuple(size for size in SIZES if size <= depth)
        self._bits = max(self.capacity - 1, 1).bit_length()
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        # Pages that were never written to take no memory, so a large capacity costs what is used of it.
        self._tokens = np.zeros(self.capacity, dtype=np.int32)
        self._back = np.zeros(len(self._sizes) * self.capacity, dtype=np.int32)
        self._links = memoryview(self._back)  # indexed one by one it is several times faster
        self._head = np.zeros(len(self._sizes) << self._bits, dtype=np.int32)
        self._tail = np.zeros(0, dtype=np.int32)
        #: Tokens that were ever added: the place of the next one.
        self.total = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays, once all of them are in use."""
        return self._tokens.nbytes + self._back.nbytes + self._head.nbytes

    def since(self, place: int) -> np.ndarray:
        """The tokens from a place on that is still there."""
        return self._tokens[np.arange(place, self.total) % self.capacity]

    def extend(self, new: Sequence[int] | np.ndarray) -> None:
        """Add tokens at the end."""
        tokens = np.asarray(new, dtype=np.int32)
        for start in range(0, len(tokens), self.capacity):
            self._add(tokens[start : start + self.capacity])

    def _add(self, new: np.ndarray) -> None:
        n = len(new)
        if self.total + n > _LAST:
            self.clear()
        places = np.arange(self.total, self.total + n)
        self._tokens[places % self.capacity] = new
        joined = np.concatenate([self._tail, new])
        # A place is linked under the tokens in front of it, of which its own is none.
        buckets, linked, chains = [], [], []
        for i, hashes in enumerate(_hashes(joined[:-1], len(self._sizes))):
            known = min(len(hashes), n)
            if known:
                buckets.append(self._bucket(hashes[-known:], i))
                linked.append(places[-known:])
                chains.append(places[-known:] % self.capacity + i * self.capacity)
        if buckets:
            self._link(np.concatenate(buckets), np.concatenate(linked), np.concatenate(chains))
        self._tail = joined[-SIZES[-1] :]
        self.total += n

    def _link(self, bucket: np.ndarray, place: np.ndarray, chain: np.ndarray) -> None:
        """Put places at the head of their chains, in order."""
        order = np.argsort(bucket, kind="stable")
        bucket, place = bucket[order], place[order]
        new = np.ones(len(bucket) + 1, dtype=bool)
        np.not_equal(bucket[1:], bucket[:-1], out=new[1:-1])
        self._back[chain[order]] = np.where(new[:-1], self._head[bucket], np.roll(place, 1))
        last = new[1:]
        self._head[bucket[last]] = place[last]

    def _bucket(self, hashes: np.ndarray, i: int) -> np.ndarray:
        return (hashes * _MIX >> np.uint64(64 - self._bits)).astype(np.int64) + (i << self._bits)

    def chains(self, tail: Sequence[int]) -> list[Chain]:
        """The chains of the contexts that ``tail``, the end of a text, ends with, that of the longest first."""
        hashes = _hashes(np.asarray(tail[-SIZES[-1] :], dtype=np.int32), len(self._sizes))
        found, most = [], min(len(tail), self.depth)
        known = [(i, int(self._bucket(one[-1:], i)[0])) for i, one in enumerate(hashes) if len(one)]
        for i, bucket in reversed(known):
            found.append(Chain(i, bucket, most))
            most = self._sizes[i] - 1
        return found

    def matches(self, chain: Chain, tail: Sequence[int], longest: int) -> tuple[list[int], np.ndarray]:
        """Where the contexts of a chain of ``tail`` occurred, the latest first.

        Args:
            longest: most tokens of a continuation.

        Returns:
            for each occurrence, how many tokens match, at most ``chain.most``; and int32 ``[n, longest]``: what
            followed, `END` where nothing does.
        """
        places = self._places(chain)
        recent = np.asarray(tail[: -chain.most - 1 : -1], dtype=np.int32)
        before = places[:, None] - np.arange(1, chain.most + 1)
        same = (self._tokens[self._slots(before)] == recent) & (before >= max(0, self.total - self.capacity))
        lengths = np.logical_and.accumulate(same, axis=1).sum(1)
        real = lengths >= self._sizes[chain.number]  # others have the same hash, no more
        after = places[real, None] + np.arange(longest)
        # Behind the end stands what is older than anything here, or nothing yet: both are no continuation.
        follows = self._tokens[self._slots(np.minimum(after, self.total - 1))]
        return lengths[real].tolist(), np.where(after < self.total, follows, END)

    def _slots(self, places: np.ndarray) -> np.ndarray:
        """Where the tokens of places are kept; places before the first are anywhere."""
        return np.maximum(places, 0) if self.total <= self.capacity else places % self.capacity

    def _places(self, chain: Chain) -> np.ndarray:
        """The latest places of a chain, the latest first."""
        found: list[int] = []
        start, capacity, links = chain.number * self.capacity, self.capacity, self._links
        place, oldest = int(self._head[chain.bucket]), max(1, self.total - capacity)
        while place >= oldest and len(found) < self.occurrences:
            found.append(place)
            place = links[start + place % capacity]
        return np.array(found, dtype=np.int64)


def _hashes(tokens: np.ndarray, sizes: int) -> Iterator[np.ndarray]:
    """For contexts of 1, 2, 4, .. tokens: uint64, the hash of each one that ends in ``tokens``, in order."""
    hashes = (tokens.astype(np.int64) + 2).astype(np.uint64) * _MIX
    yield hashes
    for size, step in zip(SIZES[: sizes - 1], _STEPS, strict=False):
        hashes = hashes[size:] * step + hashes[:-size] if len(hashes) > size else hashes[:0]
        yield hashes
