"""What is done for every token of a text, compiled by Numba: linking contexts, finding them again, following them.

All of it stands in one file because Numba notices that compiled code is stale by the file that it was written in.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

#: What stands between two texts: no token, so nothing matches across it, and nothing that follows it is drafted.
END = -1
#: Lengths of the contexts that chains are kept for. A match of any length is found by the longest that is no longer.
SIZES = (1, 2, 4, 8)
#: A context's hash is a polynomial in its tokens modulo 2^64, the last token first, with this base; its bucket are high
#: bits, those from 2^32 on, of the hash times another odd number (Knuth's multiplicative hashing).
_BASE, _MIX = np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(0x9E3779B97F4A7C15)

Tokens = NDArray[np.int64]


class Links(NamedTuple):
    """The arrays of a `History`: capacity C, S sizes of contexts, 2^b buckets of each.

    Attributes:
        ring: int32 ``[C, 1 + S]``; at n % C the token of place n, and for each size the place before it in its chain.
            They stand side by side because both are read, and places are far apart.
        head: int32 ``[S, 2^b]``; the latest place of each chain, 0 = none.
        tail: int64 ``[8]``; the latest tokens, the last one first.
        total: int64 ``[1]``; the tokens that were ever added, the place of the next one.
    """

    ring: NDArray[np.int32]
    head: NDArray[np.int32]
    tail: Tokens
    total: Tokens

    @classmethod
    def empty(cls, capacity: int, sizes: int) -> Links:
        bits = max(capacity - 1, 1).bit_length()
        # Pages that were never written to take no memory, so a large capacity costs what is used of it.
        ring, head = np.zeros((capacity, 1 + sizes), dtype=np.int32), np.zeros((sizes, 1 << bits), dtype=np.int32)
        return cls(ring, head, np.zeros(SIZES[-1], dtype=np.int64), np.zeros(1, dtype=np.int64))


@njit(cache=True)
def extend(links: Links, new: Tokens) -> None:
    """Add tokens at the end."""
    capacity, sizes, buckets = len(links.ring), len(links.head), links.head.shape[1]
    tail = links.tail
    for token in new:
        place = links.total[0]
        slot = place % capacity
        # A place is linked under the tokens in front of it, of which its own is none.
        value, power, used = np.uint64(0), np.uint64(1), 0
        for i in range(sizes):
            if place < SIZES[i]:
                break
            while used < SIZES[i]:
                value += np.uint64(tail[used] + 2) * power
                power *= _BASE
                used += 1
            bucket = _bucket(value, buckets)
            links.ring[slot, 1 + i] = links.head[i, bucket]
            links.head[i, bucket] = place
        links.ring[slot, 0] = token
        for j in range(len(tail) - 1, 0, -1):
            tail[j] = tail[j - 1]
        tail[0] = token
        links.total[0] += 1


@njit(cache=True)
def _bucket(value: np.uint64, buckets: int) -> np.int64:
    """That of a hash, of a number of buckets that is a power of two."""
    return np.int64((value * _MIX) >> np.uint64(32)) & (buckets - 1)


@njit(cache=True)
def _slot(place: int | np.int64, lap: int, capacity: int) -> int | np.int64:
    """place % capacity of a place that is still there, where ``lap`` is the first place of the ring's last lap."""
    return place - lap if place >= lap else place - lap + capacity


@njit(cache=True)
def matches(
    links: Links, i: int, text: Tokens, end: int, most: int, occurrences: int, places: Tokens, lengths: Tokens
) -> int:
    """Where the context of size ``SIZES[i]`` that ``text[:end]`` ends with occurred, the latest first.

    Args:
        most: the longest match that is told apart.
        occurrences: latest places of the chain that are looked at.
        places, lengths: ``[occurrences]``, are filled: what followed begins at the place; so many tokens match.

    Returns:
        how many there are.
    """
    capacity, total = len(links.ring), links.total[0]
    lap = total - total % capacity
    value, power = np.uint64(0), np.uint64(1)
    for j in range(SIZES[i]):
        value += np.uint64(text[end - 1 - j] + 2) * power
        power *= _BASE
    place = np.int64(links.head[i, _bucket(value, links.head.shape[1])])
    oldest = max(0, total - capacity)
    found = 0
    for _ in range(occurrences):
        if place < max(1, oldest):
            break
        length = 0
        while (
            length < most
            and place - 1 - length >= oldest
            and links.ring[_slot(place - 1 - length, lap, capacity), 0] == text[end - 1 - length]
        ):
            length += 1
        if length >= SIZES[i]:  # others have the same hash, no more
            places[found], lengths[found] = place, length
            found += 1
        place = np.int64(links.ring[_slot(place, lap, capacity), 1 + i])
    return found


@njit(cache=True)
def _follow(
    links: Links, places: Tokens, alive: int, budget: int, min_prob: float, tokens: Tokens
) -> tuple[int, float]:
    """Always the most frequent next token, the latest of equals, while the path is probable enough.

    Args:
        places: where ``alive`` continuations begin; is written over.
        tokens: is filled with the draft.

    Returns:
        the length of the draft and its score, the sum of the probabilities of its tokens.
    """
    capacity, total = len(links.ring), links.total[0]
    lap = total - total % capacity
    score, probability, drafted = 0.0, 1.0, 0
    follows = np.empty(alive, dtype=np.int32)
    while drafted < budget:
        for a in range(alive):
            after = places[a] + drafted
            follows[a] = links.ring[_slot(after, lap, capacity), 0] if after < total else END
        best, most = END, 0
        for a in range(alive):
            if alive - a <= most:  # no token that comes first here can be more frequent
                break
            if follows[a] != END:
                count = 0
                for b in range(a, alive):
                    count += follows[b] == follows[a]
                if count > most:
                    best, most = follows[a], count
        if not most:
            break
        probability *= most / alive
        if alive > 1 and probability < min_prob:
            break
        kept = 0
        for a in range(alive):
            if follows[a] == best:
                places[kept] = places[a]
                kept += 1
        alive = kept
        tokens[drafted] = best
        drafted += 1
        score += probability
    return drafted, score


@njit(cache=True)
def chain(
    links: Links,
    text: Tokens,
    end: int,
    depth: int,
    occurrences: int,
    factor: float,
    min_prob: float,
    score: float,
    best: Tokens,
) -> tuple[int, float]:
    """The best chain of tokens after ``text[:end]`` that any match gives, if its score is more than ``score``.

    Args:
        depth: the longest match, in tokens.
        best: is filled with the chain.

    Returns:
        its length, 0 = there is none, and the best score.
    """
    places, lengths = np.empty(occurrences, dtype=np.int64), np.empty(occurrences, dtype=np.int64)
    starts, tokens = np.empty(occurrences, dtype=np.int64), np.empty(len(best), dtype=np.int64)
    most, drafted = min(end, depth), 0
    for i in range(len(links.head) - 1, -1, -1):
        if SIZES[i] > most:
            continue
        # No probability is more than 1, so a budget that is no more than the best score cannot win.
        if int(factor * most) <= score:
            break
        found = matches(links, i, text, end, most, occurrences, places, lengths)
        longest = most
        while longest > 0:
            at, alive = 0, 0
            for k in range(found):
                if lengths[k] <= longest:
                    at = max(at, lengths[k])
            budget = int(factor * at)
            if budget <= score:
                break
            for k in range(found):
                if lengths[k] >= at:
                    starts[alive] = places[k]
                    alive += 1
            n, its = _follow(links, starts, alive, budget, min_prob, tokens)
            if its > score:
                drafted, score = n, its
                best[:n] = tokens[:n]
            longest = at - 1
        most = SIZES[i] - 1
    return drafted, score


@njit(cache=True)
def along(
    own: Links,
    memory: Links,
    text: Tokens,
    start: int,
    depth: int,
    occurrences: int,
    factor: float,
    min_prob: float,
    drafts: NDArray[np.int64],
) -> None:
    """Fill ``drafts[t]`` with the chain after ``text[:start + t]``, of which ``own`` holds that of t = 0."""
    best = np.empty(int(factor * depth) + 1, dtype=np.int64)
    for t in range(len(drafts)):
        end = start + t
        n, score = chain(own, text, end, depth, occurrences, factor, min_prob, 0.0, best)
        m, score = chain(memory, text, end, depth, occurrences, factor, min_prob, score, best)
        n = min(m or n, drafts.shape[1])
        drafts[t, :n] = best[:n]
        extend(own, text[end : end + 1])
