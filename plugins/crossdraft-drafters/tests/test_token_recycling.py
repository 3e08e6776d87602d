"""Token recycling: the tree, the candidates, and what a step teaches."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from crossdraft_drafters.token_recycling import PUBLISHED, TokenRecycling, best
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from crossdraft.framework.contracts.draft import DenseScores, Draft, Sequences, Verdict
from crossdraft.framework.contracts.draft_kind import CHAIN, DETERMINISTIC
from crossdraft.framework.contracts.drafter import DraftContext
from crossdraft.framework.contracts.sampling import Sampling

V = 200


def test_published_tree_and_its_beginnings() -> None:
    assert len(PUBLISHED) == 80
    assert Counter(map(len, PUBLISHED)) == {1: 8, 2: 21, 3: 25, 4: 15, 5: 8, 6: 3}
    assert {(7, 0), (5, 0, 0), (3, 0, 0, 0), (1, 0, 0, 0, 0), (0, 0, 0, 0, 0, 1)} <= set(PUBLISHED)
    for width in (1, 3, 8):
        for nodes in (1, 5, 32, 80):
            traits = TokenRecycling.traits(TokenRecycling.Config(nodes=nodes, width=width), Sampling())
            assert traits.nodes == min(nodes, sum(max(path) < width for path in PUBLISHED)) and traits.adapts
            assert traits.kind is (CHAIN if width == 1 or nodes == 1 else DETERMINISTIC)
    for options in ({"nodes": 81}, {"width": 9}, {"nodes": 0}):
        with pytest.raises(ValidationError):
            TokenRecycling.Config(**options)


@given(st.integers(1, 700), st.integers(1, 8), st.integers(0, 10**6), st.booleans())
def test_best_of_many(v: int, k: int, seed: int, sparse: bool) -> None:
    logits = torch.randn(3, v, generator=torch.Generator().manual_seed(seed))
    if sparse:
        logits[logits < 1] = -torch.inf
    result = best(logits, k)
    assert result.shape == (3, k)
    for row, ids in zip(logits, result, strict=True):
        order = row.sort(descending=True).indices[:k]
        expected = [int(i) for i in order if row[i] > -torch.inf]
        assert ids.tolist() == expected + [-1] * (k - len(expected))


class Steps:
    """A drafter, and a target that ranks ``follows[token]`` highest after a token, in that order."""

    def __init__(self, prompts: list[list[int]], **options: Any):
        b = len(prompts)
        context = DraftContext(Sampling(), b, 64, V, torch.device("cpu"))
        self.drafter = TokenRecycling(TokenRecycling.Config(**options), context)
        self.sequences = Sequences([[] for _ in prompts], torch.zeros(b, 64, dtype=torch.long), [6] * b, list(range(b)))
        for row, prompt in enumerate(prompts):
            self.sequences.append(row, prompt)
            self.drafter.start(row, prompt)

    def propose(self) -> Draft:
        rng: Any = None
        return self.drafter.propose(self.sequences, rng)

    def observe(self, draft: Draft, outputs: list[list[list[int]]], committed: list[int]) -> None:
        """``said[b][i]``: the best tokens after the root (0) and after node i - 1, the best first."""
        logits = torch.zeros(len(outputs), draft.width + 1, V) - 9
        for b, row in enumerate(outputs):
            for i, tokens in enumerate(row):
                for rank, token in enumerate(tokens):
                    logits[b, i, token] = 9.0 - rank
        for row, token in enumerate(committed):
            self.sequences.append(row, [token])
        verdict = Verdict(torch.zeros(len(outputs), dtype=torch.long), torch.tensor(committed))
        scores = DenseScores(logits.softmax(-1), logits)
        self.drafter.observe(self.sequences, draft, verdict, [0] * len(outputs), scores)

    def after(self, token: int) -> list[int]:
        assert self.drafter._candidates is not None
        return self.drafter._candidates[token].tolist()


def nodes(draft: Draft, row: int = 0) -> list[tuple[int, int]]:
    """Token and parent of every valid node."""
    columns = zip(draft.tokens[row].tolist(), draft.parents[row].tolist(), draft.valid[row].tolist(), strict=True)
    return [(token, parent) for token, parent, valid in columns if valid]


def test_highest_ranked_tokens_are_drafted() -> None:
    steps = Steps([[3, 5]], nodes=6, width=2)
    assert not steps.propose().valid.any(), "nothing is known yet"
    steps.observe(steps.propose(), [[[7, 8]]], [7])
    assert steps.after(5) == [7, 8] and steps.after(7) == [-1, -1]
    steps.observe(steps.propose(), [[[5, 9]]], [5])
    draft = steps.propose()
    # Ranks 0, 1, 0.0, 0.1, 1.0 and 0.0.0: after 5 come 7 and 8, after 7 come 5 and 9, of 8 nothing is known.
    assert nodes(draft) == [(7, -1), (8, -1), (5, 0), (9, 0), (7, 2)]
    assert draft.q is None and draft.kind is DETERMINISTIC and draft.levels == 3
    steps.sequences.limit[0] = 1
    assert nodes(steps.propose()) == [(7, -1), (8, -1)] and steps.propose().width == 2


def test_rejected_nodes_update_matrix_shallowest_wins() -> None:
    steps = Steps([[3, 5]], nodes=6, width=2)
    steps.observe(steps.propose(), [[[7, 8]]], [7])
    steps.observe(steps.propose(), [[[5, 9]]], [5])
    draft = steps.propose()  # root 5, nodes 7, 8, 5, 9, (1.0, unknown), 7
    outputs = [[10, 11], [12, 13], [14, 15], [16, 17], [18, 19], [20, 21], [22, 23]]
    steps.observe(draft, [outputs], [6])
    assert steps.after(5) == [10, 11], "the root, not the node two levels below it"
    assert steps.after(7) == [12, 13] and steps.after(8) == [14, 15] and steps.after(9) == [18, 19]
    assert steps.after(0) == [-1, -1], "what fills invalid nodes teaches nothing"
    assert steps.after(6) == [-1, -1]


def test_slots_share_memory_except_free_ones() -> None:
    steps = Steps([[5], [6], [4]], nodes=2, width=2)
    draft = steps.propose()
    steps.sequences.history[2] = []  # its numbers were wrong
    steps.observe(draft, [[[7, 8]], [[9, 10]], [[11, 12]]], [6, 5])
    result = steps.propose()
    assert nodes(result, 0) == [(9, -1), (10, -1)] and nodes(result, 1) == [(7, -1), (8, -1)]
    assert steps.after(4) == [-1, -1]
    steps.drafter.reset()
    assert not steps.propose().valid.any()


def test_cached_memory_is_kept_for_same_vocabulary() -> None:
    steps = Steps([[5]], nodes=2, width=2)
    steps.observe(steps.propose(), [[[7, 8]]], [7])
    for size, known in ((V, [7, 8]), (V + 1, [-1, -1])):
        steps.drafter.attach(DraftContext(Sampling(), 2, 64, size, torch.device("cpu")))
        assert steps.after(5) == known
