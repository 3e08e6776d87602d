"""Prompt lookup along recorded texts: all of a text's drafts at once, by sorting its n-grams.

The current suffix at token e is the n-gram that ends there; what it was followed by earlier is found among the equal
n-grams, which a stable sort puts side by side in the order of their places. Many texts are sorted together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

#: Tokens that are sorted together; more would leave the processor's cache.
BATCH = 32_768


def drafts_along(
    texts: Iterable[tuple[Sequence[int], Sequence[int]]], depth: int, sizes: Sequence[int], first: bool
) -> Iterator[np.ndarray]:
    """See `Drafter.drafts_along`. ``sizes``: lengths of the n-grams, the longest first; ``first``: copy what followed
    the first earlier occurrence, else the latest."""
    batch: list[tuple[Sequence[int], Sequence[int]]] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text[0]) + len(text[1])
        if size >= BATCH:
            yield from _of_batch(batch, depth, sizes, first)
            batch, size = [], 0
    if batch:
        yield from _of_batch(batch, depth, sizes, first)


def _of_batch(
    texts: list[tuple[Sequence[int], Sequence[int]]], depth: int, sizes: Sequence[int], first: bool
) -> Iterator[np.ndarray]:
    lengths = np.array([(len(prompt), len(response)) for prompt, response in texts])
    tokens = np.concatenate([np.asarray(part, dtype=np.int64) for text in texts for part in text])
    starts = np.cumsum(lengths.sum(1)) - lengths.sum(1)
    text = np.repeat(np.arange(len(texts)), lengths.sum(1))
    place = np.arange(len(tokens)) - starts[text]
    found = _earlier(tokens, text, place, sizes, first)

    # A draft follows every token from the last of the prompt on, but the last of the response.
    asked = np.flatnonzero((place >= lengths[text, 0] - 1) & (place < lengths.sum(1)[text] - 1))
    copied = found[asked, None] + np.arange(depth)
    known = (found[asked, None] >= 0) & (copied <= asked[:, None])
    drafts = np.where(known, tokens[np.where(known, copied, 0)], -1)
    yield from np.split(drafts, np.cumsum(lengths[:-1, 1]))


def _earlier(tokens: np.ndarray, text: np.ndarray, place: np.ndarray, sizes: Sequence[int], first: bool) -> np.ndarray:
    """Where what followed an earlier occurrence of the longest known suffix begins, for every token; -1 without one."""
    n, most = len(tokens), int(tokens.max()) + 1
    found = np.full(n, -1)
    group = text  # equal n-grams of a text have the same number: those of no token
    for size in range(1, max(sizes) + 1):
        before = np.concatenate([[-1], group[:-1]]) if size > 1 else group
        whole = place >= size - 1
        key = np.where(whole, before * most + tokens, -1 - np.arange(n))  # what is no n-gram equals nothing
        order = np.argsort(key, kind="stable")
        new = np.concatenate([[True], np.diff(key[order]) != 0])
        group = np.empty(n, dtype=np.int64)
        group[order] = np.cumsum(new) - 1
        if size not in sizes:
            continue
        at = np.arange(n)
        other = np.maximum.accumulate(np.where(new, at, 0)) if first else at - 1
        earlier = np.full(n, -1)
        earlier[order] = np.where(new, -1, order[other])
        found = np.where(earlier >= 0, earlier + 1, found)  # of a longer suffix
    return found
