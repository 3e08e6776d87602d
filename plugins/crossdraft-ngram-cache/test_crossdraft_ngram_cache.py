"""The contract of a drafter, and its counts."""

from __future__ import annotations

from typing import Any

import pytest
from crossdraft_ngram_cache.drafter import NgramCache
from pydantic import ValidationError

from crossdraft.testing import DrafterContract


class TestNgramCache(DrafterContract):
    drafter = NgramCache
    remembers = True


def counted(*texts: list[int], **options: Any) -> NgramCache:
    """A cache that has seen these texts in one slot after another."""
    cache = NgramCache(NgramCache.Config(**options))
    for row, text in enumerate(texts):
        cache.start(row, text)
    return cache


def test_most_frequent_follower_of_longest_context() -> None:
    cache = counted([1, 2, 3], [1, 2, 3], [1, 2, 4], [9, 1, 2, 4, 5], max_ngram=3, min_share=0.5)
    assert cache.followers[1, 2] == {3: 2, 4: 2} and cache.followers[9, 1, 2] == {4: 1}
    assert cache.guess([1, 2], 5) == [3], "the first of two that were seen as often, and then nothing is known"
    assert cache.guess([9, 1, 2], 5) == [4, 5], "three tokens of context decide, not two"
    assert cache.guess([9, 1, 2], 1) == [4] and cache.guess([9, 1, 2], 0) == []
    assert cache.guess([], 5) == [] and cache.guess([7, 7], 5) == []


def test_thresholds_keep_guesses_back() -> None:
    texts = [[1, 2, 3], [1, 2, 3], [1, 2, 4]]
    assert counted(*texts, min_count=3).guess([1, 2], 4) == []
    assert counted(*texts, min_count=2).guess([1, 2], 4) == [3]
    assert counted(*texts, min_share=0.7).guess([1, 2], 4) == []
    assert counted(*texts, min_share=2 / 3).guess([1, 2], 4) == [3]


def test_oldest_context_is_forgotten_first() -> None:
    cache = counted([1, 2, 3], [4, 5, 6], [1, 2, 3], [7, 8, 9], size=2)
    assert list(cache.followers) == [(1, 2), (7, 8)] and cache.followers[1, 2] == {3: 2}
    cache.reset()
    assert not cache.followers


def test_sizes_that_cannot_be() -> None:
    with pytest.raises(ValidationError, match=r"min_ngram \(5\) must not exceed max_ngram \(4\)"):
        NgramCache.Config(min_ngram=5)
