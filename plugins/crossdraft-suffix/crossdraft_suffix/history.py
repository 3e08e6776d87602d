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
#: A context's hash is a polynomial in its tokens modulo 2^64, the last token first, with this base; its bucket are the
#: highest bits of the hash times another odd number (Knuth's multiplicative hashing).
_BASE, _MIX, _ALL = 0xC2B2AE3D27D4EB4F, 0x9E3779B97F4A7C15, 2**64 - 1
#: So many tokens or fewer are linked one by one: NumPy begins to be faster behind.
_FEW = 16
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
        self._head = np.zeros(len(self._sizes) << self._bits, dtype=np.int32)
        # Indexed one by one, a view of the memory is several times faster than the array.
        self._links, self._heads = self._back.data, self._head.data
        self._tail: list[int] = []
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
        for start in range(0, len(new), self.capacity):
            piece = new[start : start + self.capacity]
            if self.total + len(piece) > _LAST:
                self.clear()
            (self._add_few if len(piece) <= _FEW else self._add)([int(token) for token in piece])

    def _add_few(self, new: list[int]) -> None:
        capacity, bits, tail = self.capacity, self._bits, self._tail
        for token in new:
            slot = self.total % capacity
            # A place is linked under the tokens in front of it, of which its own is none.
            for i, bucket in enumerate(_buckets(tail, len(self._sizes), bits)):
                self._links[i * capacity + slot] = self._heads[bucket]
                self._heads[bucket] = self.total
            self._tokens[slot] = token
            tail = self._tail = [*tail, token][-SIZES[-1] :]
            self.total += 1

    def _add(self, new: list[int]) -> None:
        """The same of many tokens, all at once."""
        n, joined = len(new), np.array([*self._tail, *new], dtype=np.int64)
        places = np.arange(self.total, self.total + n)
        self._tokens[places % self.capacity] = new
        buckets, linked, chains = [], [], []
        for i, hashes in enumerate(_hashes(joined[:-1], len(self._sizes))):
            known = min(len(hashes), n)
            if known:
                bucket = hashes[-known:] * np.uint64(_MIX) >> np.uint64(64 - self._bits)
                buckets.append(bucket.astype(np.int64) + (i << self._bits))
                linked.append(places[-known:])
                chains.append(places[-known:] % self.capacity + i * self.capacity)
        self._link(np.concatenate(buckets), np.concatenate(linked), np.concatenate(chains))
        self._tail = joined[-SIZES[-1] :].tolist()
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

    def chains(self, tail: Sequence[int]) -> list[Chain]:
        """The chains of the contexts that ``tail``, the end of a text, ends with, that of the longest first."""
        found, most = [], min(len(tail), self.depth)
        for i, bucket in reversed(list(enumerate(_buckets(tail, len(self._sizes), self._bits)))):
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
        lengths = np.where(same.all(1), chain.most, same.argmin(1))  # up to the first that differs
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
        place, oldest = self._heads[chain.bucket], max(1, self.total - capacity)
        while place >= oldest and len(found) < self.occurrences:
            found.append(place)
            place = links[start + place % capacity]
        return np.array(found, dtype=np.int64)


def _buckets(tail: Sequence[int], sizes: int, bits: int) -> list[int]:
    """The buckets of the last 1, 2, 4, .. tokens of ``tail``, as far as it has as many."""
    found, value, power = [], 0, 1
    for n, token in enumerate(reversed(tail[-SIZES[sizes - 1] :]), 1):
        value = (value + (token + 2) * power) & _ALL
        power = power * _BASE & _ALL
        if n == SIZES[len(found)]:
            found.append(((value * _MIX & _ALL) >> (64 - bits)) + (len(found) << bits))
    return found


def _hashes(tokens: np.ndarray, sizes: int) -> Iterator[np.ndarray]:
    """For contexts of 1, 2, 4, .. tokens: uint64, the hash of each one that ends in ``tokens``, in order."""
    hashes = (tokens + 2).astype(np.uint64)
    yield hashes
    for size in SIZES[: sizes - 1]:
        step = np.uint64(pow(_BASE, size, _ALL + 1))
        hashes = hashes[size:] + step * hashes[:-size] if len(hashes) > size else hashes[:0]
        yield hashes
