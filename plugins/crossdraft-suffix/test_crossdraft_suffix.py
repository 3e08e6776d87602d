"""The contract of a drafter, matches in a text, and drafts from them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from crossdraft_suffix import compiled
from crossdraft_suffix.drafter import Suffix
from crossdraft_suffix.history import END, History
from crossdraft_suffix.speculation import Speculation, speculate
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from crossdraft import Draft, DraftContext, Sampling, Scores, Sequences, StepRng, Verdict
from crossdraft.testing import DrafterContract


class TestSuffix(DrafterContract):
    drafter = Suffix
    options = {"gamma": 3, "factor": 2}  # noqa: RUF012
    remembers = True


class TestSuffixTree(DrafterContract):
    drafter = Suffix
    options = {"gamma": 4, "factor": 3, "tree": True, "min_prob": 0}  # noqa: RUF012
    remembers = True


def history(*pieces: list[int], capacity: int = 1000, depth: int = 6, occurrences: int = 1000) -> History:
    result = History(capacity, depth, occurrences)
    for piece in pieces:
        result.extend(piece)
    return result


def matches(texts: History, tail: list[int], factor: float) -> list[tuple[list[int], np.ndarray]]:
    """Match length and continuation of each occurrence, per chain with matches."""
    results = [texts.matches(chain, tail, int(factor * chain.maximum)) for chain in texts.chains(tail)]
    return [item for item in results if item[0]]


def by_search(text: list[int], tail: list[int], depth: int, factor: float) -> dict[int, list[tuple[int, ...]]]:
    """For every length of a match: what followed, by comparing everywhere."""
    results: dict[int, list[tuple[int, ...]]] = {}
    for length in range(1, min(depth, len(tail)) + 1):
        budget = int(factor * length)
        for place in range(len(text) - 1, length - 1, -1):
            if text[place - length : place] == tail[len(tail) - length :]:
                follows = [*text[place:], *[END] * budget][:budget]
                results.setdefault(length, []).append(tuple(follows))
    return results


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=40)


@given(st.lists(TOKENS, min_size=1, max_size=4), TOKENS, st.integers(1, 20), st.sampled_from([0.5, 1.0, 2.5]))
def test_all_occurrences_are_found(pieces: list[list[int]], tail: list[int], depth: int, factor: float) -> None:
    """However the text was handed over. What stands in a chain for several lengths is there for each of them."""
    text = [token for piece in pieces for token in piece]
    expected = by_search(text, tail, depth, factor)
    results: dict[int, list[tuple[int, ...]]] = {}
    for lengths, follows in matches(history(*pieces, depth=depth), tail, factor):
        shortest = max(size for size in (1, 2, 4, 8) if size <= min(lengths))
        for length in range(shortest, max(lengths) + 1):
            rows = [row for row, n in zip(follows.tolist(), lengths, strict=True) if n >= length]
            assert length not in results, "each length is spoken of once"
            results[length] = [tuple(row[: int(factor * length)]) for row in rows]
    assert results == expected


@given(TOKENS, st.integers(1, 6), st.integers(1, 12))
def test_overwritten_tokens_do_not_match(text: list[int], depth: int, capacity: int) -> None:
    one = history(text[:7], text[7:], capacity=capacity, depth=depth)
    kept = history(text[-capacity:], depth=depth)
    for tail in (text[-3:], [0, 1], [2]):
        both = [[(lengths, follows.tolist()) for lengths, follows in matches(h, tail, 2.0)] for h in (one, kept)]
        assert both[0] == both[1]


def test_text_is_forgotten_before_places_run_out(monkeypatch: Any) -> None:
    monkeypatch.setattr("crossdraft_suffix.history._LAST", 20)
    result = history([1, 2, 3] * 6)
    assert matches(result, [1, 2], 1.0)
    result.extend([4, 5, 6, 4, 5])
    assert result.total == 5 and not matches(result, [1, 2], 1.0) and matches(result, [4, 5], 1.0)


def test_latest_occurrences_are_counted() -> None:
    text = [*[1, 2] * 5, *[1, 3] * 4, 1]
    follows = [matches(history(text, occurrences=n), [1], 1.0)[0][1] for n in (4, 6)]
    assert [row.ravel().tolist() for row in follows] == [[3] * 4, [3] * 4 + [2] * 2]


def draft(text: list[int], *, factor: float = 1.0, min_prob: float = 0.0, tree: bool = False) -> Speculation:
    return speculate([history(text)], text, factor, min_prob, tree)


def test_draft_is_as_long_as_its_match_allows() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3]
    assert draft(text) == Speculation([4, 5, 6], [-1, 0, 1], 3.0)
    assert draft(text, factor=0.7).tokens == [4, 5] and draft(text, factor=2).tokens == [4, 5, 6, 7, 8, 1]
    assert draft([1, 2, 3]).tokens == [], "the end of a text is no occurrence of itself"
    assert draft([7, 8, 7]).tokens == [8], "one token matches"


def test_most_frequent_continuation() -> None:
    text = [1, 5, 9, 1, 6, 9, 1, 6, 8, 1]
    one = draft(text, factor=2)
    assert one.tokens == [6, 8], "of two that were seen once each, the latest"
    assert one.score == pytest.approx(2 / 3 + 1 / 3)
    assert draft(text, factor=2, min_prob=0.5).tokens == [6] and draft(text, min_prob=0.7).tokens == []


def test_longest_match_is_not_always_best() -> None:
    text = [1, 2, 1, 2, 1, 2, 5, 1, 2, 7, 5, 1, 3, 5, 1, 4, 5, 1]
    by_match = [best_path(text, match, match) for match in (1, 2)]
    assert [item.score for item in by_match] == [pytest.approx(4 / 6), pytest.approx(1 / 3 + 1 / 3)]
    # [5, 1] was followed by three tokens once each, [1] mostly by 2.
    assert draft(text, min_prob=0.5).tokens == [2]


def best_path(text: list[int], match: int, budget: int) -> Speculation:
    """The chain of one match, from counts over the whole text."""
    tokens: list[int] = []
    score, probability = 0.0, 1.0
    while len(tokens) < budget:
        context = [*text[len(text) - match :], *tokens]
        ends = [i for i in range(len(context), len(text) + 1) if text[i - len(context) : i] == context]
        if not tokens:
            ends = [i for i in ends if i < len(text)]
        counts = Counter(text[i] for i in reversed(ends) if i < len(text))
        if not counts:
            break
        token, n = counts.most_common(1)[0]
        probability *= n / len(ends)
        score += probability
        tokens.append(token)
    return Speculation(tokens, list(range(-1, len(tokens) - 1)), score)


@given(st.lists(st.integers(0, 2), min_size=2, max_size=30), st.sampled_from([1.0, 2.0]))
def test_best_match_by_counting_everywhere(text: list[int], factor: float) -> None:
    options = [best_path(text, match, int(factor * match)) for match in range(min(6, len(text)), 0, -1)]
    best = max(options, key=lambda one: one.score)  # of equals the longest match, which comes first
    result = draft(text, factor=factor)
    assert result.score == pytest.approx(best.score)
    assert result.tokens == best.tokens or any(
        one.tokens == result.tokens and one.score == pytest.approx(best.score) for one in options
    )


def test_tree_takes_most_probable_nodes() -> None:
    text = [1, 5, 9, 1, 6, 9, 1, 6, 8, 1]
    result = draft(text, factor=4, tree=True)
    assert (result.tokens, result.parents) == ([6, 5, 8, 9], [-1, -1, 0, 0])
    assert result.score == pytest.approx(2 / 3 + 1 / 3 + 1 / 3 + 1 / 3)
    assert result.cut(9, 1) == Speculation([6, 5], [-1, -1], result.score)
    assert result.cut(1, 9).tokens == [6] and result.cut(9, 0).tokens == []


@given(st.lists(st.integers(0, 2), min_size=2, max_size=30), st.integers(0, 8), st.integers(0, 4))
def test_trees_are_trees(text: list[int], nodes: int, levels: int) -> None:
    result = draft(text, factor=3, tree=True).cut(nodes, levels)
    assert len(result.tokens) <= nodes
    assert all(parent < i for i, parent in enumerate(result.parents))
    assert all(len(path(result.parents, i)) <= levels for i in range(len(result.tokens)))
    assert len(set(zip(result.parents, result.tokens, strict=True))) == len(result.tokens), "siblings differ"


def path(parents: list[int], node: int) -> list[int]:
    """A node and its ancestors."""
    return [node, *path(parents, parents[node])] if parents[node] >= 0 else [node]


def test_own_text_has_priority() -> None:
    own, earlier = history([1, 2, 3, 1, 2]), history([1, 2, 4, END, 9, 1, 2, 5, 6, 7, END])
    tail = [9, 1, 2]
    assert speculate([own, earlier], tail[1:], 1.0, 0.0, False).tokens == [3, 1]
    assert speculate([own, earlier], tail, 1.0, 0.0, False).tokens == [5, 6, 7], "three tokens match there"
    assert speculate([earlier], [4, 9], 1.0, 0.0, False).tokens == [1], "nothing matches across two texts"


def of_steps(drafter: Suffix, prompt: list[int], response: list[int], depth: int) -> list[list[int]]:
    """Drafts of the drafter if every step commits one token; frees the slot."""
    sequences = Sequences([list(prompt)], torch.zeros(1, 200, dtype=torch.long), [depth], [0])
    drafter.start(0, prompt)
    results = []
    for token in response:
        rng: Any = StepRng
        one = drafter.propose(sequences, rng)
        results.append([*one.tokens[0].tolist(), *[-1] * (depth - one.width)])
        sequences.append(0, [token])
        scores: Any = Scores
        drafter.observe(sequences, one, Verdict(torch.zeros(1), torch.tensor([token])), [0], scores)
    drafter.free(0, "length")
    return results


@settings(deadline=None)  # the first draft along a text compiles
@given(st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=3), st.sampled_from([0, 15, 1000]))
@example([([0, 1], [i * i % 7 % 3 for i in range(150)]), ([2, 1], [i * i % 11 % 3 for i in range(150)])], 1000)
def test_recorded_texts_are_drafted_as_in_steps(texts: Any, memory: int) -> None:
    config = Suffix.Config(gamma=4, memory=memory, factor=2, occurrences=1000)
    drafter = Suffix(config, DraftContext(Sampling(), 1, 200, 4, torch.device("cpu")))
    for (prompt, response), drafts in zip(texts, Suffix.response_drafts(config, iter(texts), 4), strict=True):
        assert drafts.tolist() == of_steps(drafter, prompt, response, 4)


def test_outputs_are_remembered_and_prompts_are_not() -> None:
    def rerun(config: Any, finish_reason: str | None) -> list[int]:
        drafter = Suffix(config, DraftContext(Sampling(), 1, 50, 9, torch.device("cpu")))
        drafter.start(0, [1, 2, 3])
        sequences = Sequences([[1, 2, 3, 4, 5, 6]], torch.zeros(1, 50, dtype=torch.long), [4], [0])
        nothing: Any = None
        drafter.observe(sequences, Draft.empty(1), nothing, [0], nothing)
        drafter.free(0, finish_reason)
        drafter.start(0, [2, 4])
        fresh = Sequences([[2, 4]], torch.zeros(1, 50, dtype=torch.long), [4], [0])
        return drafter.propose(fresh, nothing).tokens[0].tolist()

    assert rerun(Suffix.Config(), "eos") == [5]
    assert rerun(Suffix.Config(memory=0), "eos") == []
    assert rerun(Suffix.Config(), None) == rerun(Suffix.Config(), "error") == []


def test_memory_respects_capacity() -> None:
    small, large = History(1000, 24, 64), History(10_000_000, 24, 64)
    assert small.nbytes <= 52 * 1000 and large.nbytes <= 52 * 10_000_000
    before = large.nbytes
    large.extend(np.arange(5000) % 7)
    assert large.nbytes == before


def test_options_that_cannot_be() -> None:
    wrong: Any = ({"factor": 0}, {"depth": 65}, {"memory": -1}, {"min_prob": 1.5})
    for options in wrong:
        with pytest.raises(ValidationError):
            Suffix.Config(**options)


def test_code_is_not_stored_where_others_can_write(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    own = compiled.compiled()(compiled.extend.py_func)
    tmp_path.chmod(0o777)
    compiled._is_own.cache_clear()
    foreign = compiled.compiled()(compiled.extend.py_func)
    assert own.stats.cache_path and not foreign.stats.cache_path and "NUMBA_CACHE_DIR" in caplog.text
