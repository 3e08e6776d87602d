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
#: Places of a text that ask the memory at once.
_PIECE = 64

Tokens = NDArray[np.int64]


class Links(NamedTuple):
    """The arrays of a `History`: capacity C, S sizes of contexts, 2^b buckets of each.

    Attributes:
        ring: int32 ``[C]``; at n % C the token of place n.
        before: int32 ``[S, C]``; at n % C, for each size, the place before n in its chain.
        head: int32 ``[S, 2^b]``; the latest place of each chain, 0 = none.
        tail: int64 ``[8]``; the latest tokens, the last one first.
        total: int64 ``[1]``; the tokens that were ever added, the place of the next one.
    """

    ring: NDArray[np.int32]
    before: NDArray[np.int32]
    head: NDArray[np.int32]
    tail: Tokens
    total: Tokens

    @classmethod
    def empty(cls, capacity: int, sizes: int) -> Links:
        bits = max(capacity - 1, 1).bit_length()
        # Pages that were never written to take no memory, so a large capacity costs what is used of it.
        ring, before = np.zeros(capacity, dtype=np.int32), np.zeros((sizes, capacity), dtype=np.int32)
        head = np.zeros((sizes, 1 << bits), dtype=np.int32)
        return cls(ring, before, head, np.zeros(SIZES[-1], dtype=np.int64), np.zeros(1, dtype=np.int64))


@njit(cache=True)
def extend(links: Links, new: Tokens) -> None:
    """Add tokens at the end."""
    ring, before, head, tail, total = links
    for token in new:
        _add(ring, before, head, tail, total, token)


@njit(cache=True, forceinline=True)
def _add(
    ring: NDArray[np.int32],
    before: NDArray[np.int32],
    head: NDArray[np.int32],
    tail: Tokens,
    total: Tokens,
    token: int,
) -> None:
    """Add one token to the arrays of `Links`."""
    place, buckets = total[0], head.shape[1]
    slot = place % len(ring)
    # A place is linked under the tokens in front of it, of which its own is none.
    value, power, used = np.uint64(0), np.uint64(1), 0
    for i in range(len(head)):
        if place < SIZES[i]:
            break
        while used < SIZES[i]:
            value += np.uint64(tail[used] + 2) * power
            power *= _BASE
            used += 1
        bucket = _bucket(value, buckets)
        before[i, slot] = head[i, bucket]
        head[i, bucket] = place
    ring[slot] = token
    for j in range(len(tail) - 1, 0, -1):
        tail[j] = tail[j - 1]
    tail[0] = token
    total[0] = place + 1


@njit(cache=True)
def _bucket(value: np.uint64, buckets: int) -> np.int64:
    """That of a hash, of a number of buckets that is a power of two."""
    return np.int64((value * _MIX) >> np.uint64(32)) & (buckets - 1)


@njit(cache=True)
def _slot(place: int | np.int64, lap: int, capacity: int) -> int | np.int64:
    """place % capacity of a place that is still there, where ``lap`` is the first place of the ring's last lap."""
    return place - lap if place >= lap else place - lap + capacity


@njit(cache=True, forceinline=True)
def _together(
    before: NDArray[np.int32],
    head: NDArray[np.int32],
    total: int,
    i: int,
    text: Tokens,
    ends: Tokens,
    asked: int,
    now: Tokens,
    active: Tokens,
    places: NDArray[np.int64],
    counts: Tokens,
) -> None:
    """The chains of the contexts of size ``SIZES[i]`` that the text ends with at ``ends[:asked]``.

    A chain leads from one place that is in no cache to another. Step by step beside each other, the loads of several
    chains wait together.

    Args:
        now, active: ``[n]``, are written over.
        places: ``[n, occurrences]``, is filled with the places of each chain, the latest first.
        counts: ``[n]``, is filled with how many these are.
    """
    capacity, buckets = before.shape[1], head.shape[1]
    lap, oldest = total - total % capacity, max(1, total - capacity)
    for a in range(asked):
        value, power = np.uint64(0), np.uint64(1)
        for j in range(SIZES[i]):
            value += np.uint64(text[ends[a] - 1 - j] + 2) * power
            power *= _BASE
        now[a] = head[i, _bucket(value, buckets)]
        counts[a] = 0
        active[a] = a
    left = asked
    for step in range(places.shape[1]):
        kept = 0
        for k in range(left):
            a = active[k]
            place = int(now[a])
            if place >= oldest:
                places[a, step] = place
                counts[a] = step + 1
                now[a] = before[i, _slot(place, lap, capacity)]
                active[kept] = a
                kept += 1
        left = kept
        if not left:
            break


@njit(cache=True, forceinline=True)
def _matching(
    ring: NDArray[np.int32],
    total: int,
    i: int,
    text: Tokens,
    end: int,
    most: int,
    places: NDArray[np.int64],
    k: int,
    count: int,
    lengths: Tokens,
) -> int:
    """Keep of ``places[k, :count]``, those of a chain, those where the context of ``text[:end]`` stood, and fill
    ``lengths`` with how many tokens match, at most ``most``; how many places these are."""
    capacity = len(ring)
    lap, oldest = total - total % capacity, max(0, total - capacity)
    found = 0
    for j in range(count):
        place = places[k, j]
        length, longest = 0, min(most, place - oldest)
        while length < longest and ring[_slot(place - 1 - length, lap, capacity)] == text[end - 1 - length]:
            length += 1
        if length >= SIZES[i]:  # others have the same hash, no more
            places[k, found], lengths[found] = place, length
            found += 1
    return found


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
    ring, before, head, _, total = links
    work, many = np.empty((4, 1), dtype=np.int64), places[:occurrences].reshape(1, -1)
    ends, now, active, counts = work
    ends[0] = end
    _together(before, head, total[0], i, text, ends, 1, now, active, many, counts)
    return _matching(ring, total[0], i, text, end, most, many, 0, counts[0], lengths)


@njit(cache=True, forceinline=True)
def _follow(
    ring: NDArray[np.int32],
    total: int,
    places: Tokens,
    alive: int,
    budget: int,
    min_prob: float,
    follows: Tokens,
    tokens: Tokens,
) -> tuple[int, float]:
    """Always the most frequent next token, the latest of equals, while the path is probable enough.

    Args:
        places: where ``alive`` continuations begin; is written over, as ``follows`` is.
        tokens: is filled with the draft.

    Returns:
        the length of the draft and its score, the sum of the probabilities of its tokens.
    """
    capacity = len(ring)
    lap = total - total % capacity
    score, probability, drafted = 0.0, 1.0, 0
    while drafted < budget:
        for a in range(alive):
            after = places[a] + drafted
            follows[a] = ring[_slot(after, lap, capacity)] if after < total else END
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
def _chains(
    links: Links,
    text: Tokens,
    first: int,
    step: int,
    grow: bool,
    depth: int,
    occurrences: int,
    factor: float,
    min_prob: float,
    scores: NDArray[np.float64],
    best: NDArray[np.int64],
    drafted: Tokens,
) -> None:
    """The best chains of tokens that any match gives after ``text[:first]`` and after its next tokens.

    Args:
        step: places of the text that ask at once.
        grow: add the token at each place once it was asked for; with steps of 1.
        depth: the longest match, in tokens.
        scores: ``[n]``; a chain of a higher score than its own is kept, and its score written there.
        best: ``[n, ..]``, is filled with these chains.
        drafted: ``[n]``, is filled with their lengths, 0 where there is none.
    """
    ring, before, head, tail, total = links
    # Everything is allocated here, and helpers are inlined: what is counted for each array takes longer than they do.
    places = np.empty((step, occurrences), dtype=np.int64)
    ends, now, active, counts, asking, most = np.empty((6, step), dtype=np.int64)
    lengths, starts, follows = np.empty((3, occurrences), dtype=np.int64)
    tokens = np.empty(best.shape[1], dtype=np.int64)
    for t in range(0, len(scores), step):
        n = min(step, len(scores) - t)
        for a in range(n):
            most[a], drafted[t + a] = min(first + t + a, depth), 0
        for i in range(len(head) - 1, -1, -1):
            asked = 0
            for a in range(n):
                # No probability is more than 1, so a budget that is no more than the best score cannot win.
                if SIZES[i] <= most[a] and int(factor * most[a]) > scores[t + a]:
                    asking[asked], ends[asked] = t + a, first + t + a
                    asked += 1
            _together(before, head, total[0], i, text, ends, asked, now, active, places, counts)
            for k in range(asked):
                a = asking[k]
                longest = int(most[a - t])
                most[a - t] = SIZES[i] - 1
                found = _matching(ring, total[0], i, text, ends[k], longest, places, k, counts[k], lengths)
                if not found:
                    continue
                while longest > 0:
                    at, alive = 0, 0
                    for j in range(found):
                        if lengths[j] <= longest:
                            at = max(at, lengths[j])
                    budget = int(factor * at)
                    if budget <= scores[a]:
                        break
                    for j in range(found):
                        if lengths[j] >= at:
                            starts[alive] = places[k, j]
                            alive += 1
                    length, score = _follow(ring, total[0], starts, alive, budget, min_prob, follows, tokens)
                    if score > scores[a]:
                        drafted[a], scores[a] = length, score
                        for j in range(length):
                            best[a, j] = tokens[j]
                    longest = at - 1
        if grow:
            _add(ring, before, head, tail, total, text[first + t])


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
    scores, drafted, many = np.full(1, score), np.empty(1, dtype=np.int64), best.reshape(1, -1)
    _chains(links, text, end, 1, False, depth, occurrences, factor, min_prob, scores, many, drafted)
    return drafted[0], scores[0]


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
    """Fill ``drafts[t]`` with the chain after ``text[:start + t]``, of which ``own`` holds that of t = 0.

    The own text grows from token to token. The memory stays as it is, so that several places ask it at once.
    """
    best = np.empty((_PIECE, int(factor * depth) + 1), dtype=np.int64)
    for t in range(0, len(drafts), _PIECE):
        n = min(_PIECE, len(drafts) - t)
        scores, drafted = np.zeros(n), np.empty(n, dtype=np.int64)
        for links, step, grow in ((own, 1, True), (memory, _PIECE, False)):
            _chains(links, text, start + t, step, grow, depth, occurrences, factor, min_prob, scores, best, drafted)
            for a in range(n):
                if drafted[a]:
                    for j in range(drafts.shape[1]):
                        drafts[t + a, j] = best[a, j] if j < drafted[a] else END
