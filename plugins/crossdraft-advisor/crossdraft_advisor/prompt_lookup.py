"""Prompt lookup for replay: all drafts of recorded texts at once, by sorting their n-grams.

The current suffix at token e is the n-gram that ends there; its earlier continuation is found among the equal n-grams,
which a stable sort makes adjacent, in the order of their positions. Texts are sorted in batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from crossdraft import Drafter
from crossdraft.drafters.retrieval.prompt_lookup import PromptLookup

#: Tokens per batch; larger batches exceed the CPU cache.
BATCH = 32_768


def response_drafts(
    cls: type[Drafter], config: Any, texts: Iterable[tuple[Sequence[int], Sequence[int]]], depth: int
) -> Iterable[np.ndarray] | None:
    """Drafts of recorded texts by the fast path of a drafter, see `Drafter.response_drafts`; None without one."""
    if cls is not PromptLookup:
        return cls.response_drafts(config, texts, depth)
    return _drafts(texts, depth, range(config.max_ngram, config.min_ngram - 1, -1), config.match == "first")


def _drafts(
    texts: Iterable[tuple[Sequence[int], Sequence[int]]], depth: int, sizes: Sequence[int], first: bool
) -> Iterator[np.ndarray]:
    """The drafts of each text in turn.

    Args:
        sizes: lengths of the n-grams, the longest first.
        first: copy the continuation of the first earlier occurrence, else of the latest.
    """
    batch: list[tuple[Sequence[int], Sequence[int]]] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text[0]) + len(text[1])
        if size >= BATCH:
            yield from _batch_drafts(batch, depth, sizes, first)
            batch, size = [], 0
    if batch:
        yield from _batch_drafts(batch, depth, sizes, first)


def _batch_drafts(
    texts: list[tuple[Sequence[int], Sequence[int]]], depth: int, sizes: Sequence[int], first: bool
) -> Iterator[np.ndarray]:
    lengths = np.array([(len(prompt), len(response)) for prompt, response in texts])
    tokens = np.concatenate([np.asarray(part, dtype=np.int64) for text in texts for part in text])
    starts = np.cumsum(lengths.sum(1)) - lengths.sum(1)
    text = np.repeat(np.arange(len(texts)), lengths.sum(1))
    position = np.arange(len(tokens)) - starts[text]
    continuation = _continuations(tokens, text, position, sizes, first)

    # One draft after every token from the last of the prompt to the last but one of the response.
    roots = np.flatnonzero((position >= lengths[text, 0] - 1) & (position < lengths.sum(1)[text] - 1))
    source = continuation[roots, None] + np.arange(depth)
    exists = (continuation[roots, None] >= 0) & (source <= roots[:, None])
    drafts = np.where(exists, tokens[np.where(exists, source, 0)], -1)
    yield from np.split(drafts, np.cumsum(lengths[:-1, 1]))


def _continuations(
    tokens: np.ndarray, text: np.ndarray, position: np.ndarray, sizes: Sequence[int], first: bool
) -> np.ndarray:
    """For every token, the start of the continuation of the longest suffix that occurred before; -1 without one."""
    n, vocab = len(tokens), int(tokens.max()) + 1
    start = np.full(n, -1)
    group = text  # number of the n-gram that ends at each token, equal for equal n-grams of a text; here of size 0
    for size in range(1, max(sizes) + 1):
        prefix = np.concatenate([[-1], group[:-1]]) if size > 1 else group
        complete = position >= size - 1
        key = np.where(complete, prefix * vocab + tokens, -1 - np.arange(n))  # unique keys for incomplete n-grams
        order = np.argsort(key, kind="stable")
        new = np.concatenate([[True], np.diff(key[order]) != 0])
        group = np.empty(n, dtype=np.int64)
        group[order] = np.cumsum(new) - 1
        if size not in sizes:
            continue
        rank = np.arange(n)
        other = np.maximum.accumulate(np.where(new, rank, 0)) if first else rank - 1
        earlier = np.full(n, -1)
        earlier[order] = np.where(new, -1, order[other])
        start = np.where(earlier >= 0, earlier + 1, start)  # a longer suffix takes precedence
    return start
