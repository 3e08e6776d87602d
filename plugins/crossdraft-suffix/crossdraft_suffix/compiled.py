"""The work per token, compiled by Numba: linking contexts, looking them up, following their continuations.

Everything is in one file because Numba invalidates its cache by the source file of a function.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from crossdraft import CrossdraftError, own_path

#: Separator of texts, not a token: matches and continuations end there.
END = -1
#: Lengths of the contexts with chains. A match is found by the longest context that is not longer.
SIZES = (1, 2, 4, 8)
#: A context's hash is a polynomial in its tokens modulo 2^64, the last token first, with this base; its bucket is the
#: bits from 2^32 on of the hash times another odd number (Knuth's multiplicative hashing).
_BASE, _MIX = np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(0x9E3779B97F4A7C15)
#: Positions of a text that are looked up in the memory together.
_PIECE = 64

Tokens = NDArray[np.int64]

logger = logging.getLogger(__name__)


def compiled(**options: Any) -> Callable[[Any], Any]:
    """Numba's ``njit``; code is stored only in a directory of this user's own, because loading it executes it."""

    def decorate(function: Any) -> Any:
        result = njit(cache=True, **options)(function)  # loads nothing before its first call
        return result if _is_own(Path(str(result.stats.cache_path))) else njit(**options)(function)

    return decorate


@cache
def _is_own(directory: Path) -> bool:
    try:
        for path in (directory, *directory.glob(f"{Path(__file__).stem}.*.nb?")):
            own_path(path, "NUMBA_CACHE_DIR")
    except CrossdraftError as error:
        logger.warning("crossdraft: suffix is compiled anew in every process, which takes seconds: %s", error)
        return False
    return True


class Links(NamedTuple):
    """The arrays of a `History`: capacity C, S sizes of contexts, 2^b buckets of each.

    Attributes:
        ring: int32 ``[C]``; at n % C the token of position n.
        before: int32 ``[S, C]``; at n % C, for each size, the previous position in the chain of n.
        head: int32 ``[S, 2^b]``; the latest position of each chain, 0 = none.
        tail: int64 ``[8]``; the latest tokens, the last one first.
        total: int64 ``[1]``; number of tokens added, the position of the next one.
    """

    ring: NDArray[np.int32]
    before: NDArray[np.int32]
    head: NDArray[np.int32]
    tail: Tokens
    total: Tokens

    @classmethod
    def empty(cls, capacity: int, sizes: int) -> Links:
        bits = max(capacity - 1, 1).bit_length()
        # Pages that were never written take no memory, so a large capacity is cheap.
        ring, before = np.zeros(capacity, dtype=np.int32), np.zeros((sizes, capacity), dtype=np.int32)
        head = np.zeros((sizes, 1 << bits), dtype=np.int32)
        return cls(ring, before, head, np.zeros(SIZES[-1], dtype=np.int64), np.zeros(1, dtype=np.int64))


@compiled()
def extend(links: Links, new: Tokens) -> None:
    ring, before, head, tail, total = links
    for token in new:
        _add(ring, before, head, tail, total, token)


@compiled(forceinline=True)
def _add(
    ring: NDArray[np.int32],
    before: NDArray[np.int32],
    head: NDArray[np.int32],
    tail: Tokens,
    total: Tokens,
    token: int,
) -> None:
    """Append one token to the arrays of `Links`."""
    place, buckets = total[0], head.shape[1]
    slot = place % len(ring)
    # A position is linked under the tokens before it.
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


@compiled()
def _bucket(value: np.uint64, buckets: int) -> np.int64:
    """Bucket of a hash; the number of buckets is a power of two."""
    return np.int64((value * _MIX) >> np.uint64(32)) & (buckets - 1)


@compiled()
def _slot(place: int | np.int64, lap: int, capacity: int) -> int | np.int64:
    """Place % capacity of a stored position; ``lap`` is the first position of the ring's current lap."""
    return place - lap if place >= lap else place - lap + capacity


@compiled(forceinline=True)
def _follow_chains(
    before: NDArray[np.int32],
    head: NDArray[np.int32],
    total: int,
    i: int,
    text: Tokens,
    ends: Tokens,
    active_count: int,
    now: Tokens,
    active: Tokens,
    places: NDArray[np.int64],
    counts: Tokens,
) -> None:
    """Follow the chains of the contexts of size ``SIZES[i]`` that end at ``ends[:active_count]``.

    Each step of a chain is a cache miss; interleaving several chains overlaps their loads.

    Args:
        now, active: ``[n]``, scratch arrays.
        places: ``[n, occurrences]``, output: the positions of each chain, the latest first.
        counts: ``[n]``, output: the number of positions of each chain.
    """
    capacity, buckets = before.shape[1], head.shape[1]
    lap, oldest = total - total % capacity, max(1, total - capacity)
    for a in range(active_count):
        value, power = np.uint64(0), np.uint64(1)
        for j in range(SIZES[i]):
            value += np.uint64(text[ends[a] - 1 - j] + 2) * power
            power *= _BASE
        now[a] = head[i, _bucket(value, buckets)]
        counts[a] = 0
        active[a] = a
    left = active_count
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


@compiled(forceinline=True)
def _matching(
    ring: NDArray[np.int32],
    total: int,
    i: int,
    text: Tokens,
    end: int,
    maximum: int,
    places: NDArray[np.int64],
    k: int,
    count: int,
    lengths: Tokens,
) -> int:
    """Keep the positions ``places[k, :count]`` of a chain that match the context of ``text[:end]``.

    Returns their number; ``lengths`` is filled with the numbers of matching tokens, at most ``maximum``.
    """
    capacity = len(ring)
    lap, oldest = total - total % capacity, max(0, total - capacity)
    result = 0
    for j in range(count):
        place = places[k, j]
        length, longest = 0, min(maximum, place - oldest)
        while length < longest and ring[_slot(place - 1 - length, lap, capacity)] == text[end - 1 - length]:
            length += 1
        if length >= SIZES[i]:  # others only have the same hash
            places[k, result], lengths[result] = place, length
            result += 1
    return result


@compiled()
def matches(
    links: Links, i: int, text: Tokens, end: int, maximum: int, occurrences: int, places: Tokens, lengths: Tokens
) -> int:
    """Find the occurrences of the context of size ``SIZES[i]`` at the end of ``text[:end]``, the latest first.

    Args:
        maximum: maximum length of a match.
        occurrences: maximum number of positions of the chain.
        places, lengths: ``[occurrences]``, output: the start of each continuation, and the length of the match.

    Returns:
        the number of occurrences.
    """
    ring, before, head, _, total = links
    work, many = np.empty((4, 1), dtype=np.int64), places[:occurrences].reshape(1, -1)
    ends, now, active, counts = work
    ends[0] = end
    _follow_chains(before, head, total[0], i, text, ends, 1, now, active, many, counts)
    return _matching(ring, total[0], i, text, end, maximum, many, 0, counts[0], lengths)


@compiled(forceinline=True)
def _best_path(
    ring: NDArray[np.int32],
    total: int,
    places: Tokens,
    alive: int,
    budget: int,
    min_prob: float,
    follows: Tokens,
    tokens: Tokens,
) -> tuple[int, float]:
    """Follow the most frequent next token, ties by the latest, until the path is too improbable.

    Args:
        places: starts of the ``alive`` continuations; overwritten, as is ``follows``.
        tokens: output, the draft.

    Returns:
        the length of the draft, and its score, the sum of the probabilities of its tokens.
    """
    capacity = len(ring)
    lap = total - total % capacity
    score, probability, drafted = 0.0, 1.0, 0
    while drafted < budget:
        for a in range(alive):
            after = places[a] + drafted
            follows[a] = ring[_slot(after, lap, capacity)] if after < total else END
        best, maximum = END, 0
        for a in range(alive):
            if alive - a <= maximum:  # no later token can be more frequent
                break
            if follows[a] != END:
                count = 0
                for b in range(a, alive):
                    count += follows[b] == follows[a]
                if count > maximum:
                    best, maximum = follows[a], count
        if not maximum:
            break
        probability *= maximum / alive
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


@compiled()
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
    """Find the best chains over all matches after ``text[:first]`` and after each of its next tokens.

    Args:
        step: number of positions that are looked up together.
        grow: append the token at each position after its look-up; requires ``step`` 1.
        depth: maximum length of a match, in tokens.
        scores: ``[n]``; chains with a higher score are kept, and replace it.
        best: ``[n, ..]``, output: these chains.
        drafted: ``[n]``, output: their lengths, 0 = none.
    """
    ring, before, head, tail, total = links
    # Allocate once and inline the helpers: reference counting of arrays would dominate.
    places = np.empty((step, occurrences), dtype=np.int64)
    ends, now, active, counts, asking, maximum = np.empty((6, step), dtype=np.int64)
    lengths, starts, follows = np.empty((3, occurrences), dtype=np.int64)
    tokens = np.empty(best.shape[1], dtype=np.int64)
    for t in range(0, len(scores), step):
        n = min(step, len(scores) - t)
        for a in range(n):
            maximum[a], drafted[t + a] = min(first + t + a, depth), 0
        for i in range(len(head) - 1, -1, -1):
            active_count = 0
            for a in range(n):
                # Probabilities are at most 1, so a budget up to the best score cannot win.
                if SIZES[i] <= maximum[a] and int(factor * maximum[a]) > scores[t + a]:
                    asking[active_count], ends[active_count] = t + a, first + t + a
                    active_count += 1
            _follow_chains(before, head, total[0], i, text, ends, active_count, now, active, places, counts)
            for k in range(active_count):
                a = asking[k]
                longest = int(maximum[a - t])
                maximum[a - t] = SIZES[i] - 1
                result = _matching(ring, total[0], i, text, ends[k], longest, places, k, counts[k], lengths)
                if not result:
                    continue
                while longest > 0:
                    at, alive = 0, 0
                    for j in range(result):
                        if lengths[j] <= longest:
                            at = max(at, lengths[j])
                    budget = int(factor * at)
                    if budget <= scores[a]:
                        break
                    for j in range(result):
                        if lengths[j] >= at:
                            starts[alive] = places[k, j]
                            alive += 1
                    length, score = _best_path(ring, total[0], starts, alive, budget, min_prob, follows, tokens)
                    if score > scores[a]:
                        drafted[a], scores[a] = length, score
                        for j in range(length):
                            best[a, j] = tokens[j]
                    longest = at - 1
        if grow:
            _add(ring, before, head, tail, total, text[first + t])


@compiled()
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
    """Find the best chain after ``text[:end]`` over all matches, if its score exceeds ``score``.

    Args:
        depth: maximum length of a match, in tokens.
        best: output, the chain.

    Returns:
        its length, 0 = none, and the best score.
    """
    scores, drafted, many = np.full(1, score), np.empty(1, dtype=np.int64), best.reshape(1, -1)
    _chains(links, text, end, 1, False, depth, occurrences, factor, min_prob, scores, many, drafted)
    return drafted[0], scores[0]


@compiled()
def replay_drafts(
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
    """Fill ``drafts[t]`` with the chain after ``text[:start + t]``; ``own`` holds ``text[:start]`` at first.

    The own text grows by one token per position; the memory is constant, so several positions are looked up together.
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
