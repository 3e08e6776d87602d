"""Prompt lookup: which continuation is copied."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdraft.drafters.retrieval.prompt_lookup import NgramIndex


def index(tokens, min_ngram=1, max_ngram=3):
    result = NgramIndex(min_ngram, max_ngram)
    result.extend(tokens)
    return result


@pytest.mark.parametrize(
    ("tokens", "match", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], "latest", [3, 4, 1]),
        ([7, 8, 1, 7, 9, 2, 7], "first", [8, 1, 7]),
        ([7, 8, 1, 7, 9, 2, 7], "latest", [9, 2, 7]),
        ([5, 1, 2, 6, 9, 2, 7, 1, 2], "latest", [6, 9, 2]),  # the longer n-gram wins over a later short one
        ([1, 2, 3], "latest", []),  # the suffix does not match itself
        ([4, 4], "latest", [4]),  # a continuation is cut at the end of the sequence
        ([3], "first", []),
    ],
)
def test_continuation(tokens, match, expected):
    assert index(tokens).lookup(match, 3) == expected


def test_output_is_looked_up_as_well_as_prompt():
    result = index([1, 2])
    result.extend([3, 9, 8, 3])
    assert result.lookup("latest", 2) == [9, 8]


def test_short_suffixes_can_be_forbidden():
    assert index([1, 2, 3, 1], min_ngram=2).lookup("latest", 3) == []


def naive(tokens, match, length, min_ngram, max_ngram):
    for n in range(max_ngram, min_ngram - 1, -1):
        ends = [i for i in range(n, len(tokens)) if tokens[i - n : i] == tokens[len(tokens) - n :]]
        if len(tokens) >= n and ends:
            start = ends[0] if match == "first" else ends[-1]
            return tokens[start : start + length]
    return []


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=30),
    st.sampled_from(["first", "latest"]),
    st.integers(0, 5),
    st.integers(1, 2),
    st.integers(2, 4),
)
def test_equals_search_through_whole_sequence(tokens, match, length, min_ngram, max_ngram):
    result = index(tokens, min_ngram, max_ngram).lookup(match, length)
    assert result == naive(tokens, match, length, min_ngram, max_ngram)
