"""Trees for a budget of nodes: Sequoia's against every tree there is, OPT-Tree's against a search without a budget."""

import math
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from crossdraft.drafters.autoregressive.sequoia import best_tree
from crossdraft.drafters.autoregressive.trees import TreeTemplate, grow_dynamic, max_expanded
from crossdraft.framework import plugins
from crossdraft.framework.contracts.draft_kind import CHAIN, DETERMINISTIC
from crossdraft.framework.contracts.sampling import Sampling

Tree = tuple["Tree", ...]  # its children, eldest first

# -- Sequoia ----------------------------------------------------------------------------------------------------


@cache
def trees(nodes: int) -> tuple[Tree, ...]:
    """All trees with that many nodes below the root: a first child, and the other children."""
    if not nodes:
        return ((),)
    return tuple(
        (child, *others) for below in range(nodes) for child in trees(below) for others in trees(nodes - 1 - below)
    )


def levels(tree: Tree) -> int:
    return max((1 + levels(child) for child in tree), default=0)


def siblings(tree: Tree) -> int:
    return max([len(tree), *map(siblings, tree)])


def accepted(tree: Tree, acceptance: list[Fraction]) -> Fraction:
    """Expected accepted tokens, by what happens at each node in turn: one of its children is accepted, or none."""
    return sum((acceptance[k] * (1 + accepted(child, acceptance)) for k, child in enumerate(tree)), Fraction(0))


def outcomes(tree: Tree, acceptance: list[Fraction]) -> Iterator[tuple[Fraction, int]]:
    """Every way a step can go: its probability, and how many tokens it accepts."""
    yield 1 - sum(acceptance[: len(tree)]), 0
    for k, child in enumerate(tree):
        for probability, tau in outcomes(child, acceptance):
            yield acceptance[k] * probability, tau + 1


def nested(paths: Any, above: tuple[int, ...] = ()) -> Tree:
    """The same tree, as children of children. The ranks of a node's children must be 0, 1, ..."""
    children = sorted(path for path in paths if len(path) == len(above) + 1 and path[:-1] == above)
    assert [path[-1] for path in children] == list(range(len(children)))
    return tuple(nested(paths, path) for path in children)


def vector(ranks: int) -> st.SearchStrategy[list[Fraction]]:
    """Acceptance vectors: falling, with a sum up to 1; ties are common."""
    numbers = st.lists(st.integers(1, 12), min_size=ranks, max_size=ranks).map(lambda result: sorted(result)[::-1])
    return st.tuples(numbers, st.integers(0, 6)).map(lambda x: [Fraction(n, sum(x[0]) + x[1]) for n in x[0]])


def test_enumeration_covers_all_trees() -> None:
    assert [len(set(trees(n))) for n in range(8)] == [1, 1, 2, 5, 14, 42, 132, 429]  # Catalan's numbers


@settings(deadline=None, max_examples=60)
@given(acceptance=st.integers(1, 4).flatmap(vector), nodes=st.integers(1, 7), depth=st.integers(1, 7))
def test_no_tree_of_as_many_nodes_accepts_more(acceptance: list[Fraction], nodes: int, depth: int) -> None:
    allowed = [tree for tree in trees(nodes) if levels(tree) <= depth and siblings(tree) <= len(acceptance)]
    ranks = tuple(map(float, acceptance))
    if not allowed:
        with pytest.raises(ValueError, match=f"depth {depth} and {len(acceptance)} siblings .* not {nodes}"):
            best_tree(ranks, nodes, depth)
        return
    paths, expected = best_tree(ranks, nodes, depth)
    result = nested(paths)
    assert result in allowed and len(paths) == nodes
    maximum = max(accepted(tree, acceptance) for tree in allowed)
    assert accepted(result, acceptance) == pytest.approx(maximum, abs=1e-12)  # of equals, floats may choose any
    ways = list(outcomes(result, acceptance))
    assert sum(probability for probability, _ in ways) == 1
    assert expected == pytest.approx(float(sum(probability * tau for probability, tau in ways)), abs=1e-12)


def programme(acceptance: tuple[float, ...], nodes: int, depth: int) -> float:
    """The paper's dynamic programme: the most below a node, with that many nodes and levels."""

    @cache
    def below(nodes: int, depth: int, rank: int) -> float:
        if not nodes:
            return 0.0
        if not depth or rank == len(acceptance):
            return -math.inf
        return max(  # ``own`` nodes below the child of this rank; its younger siblings have the others
            acceptance[rank] * (1 + below(own, depth - 1, 0)) + below(nodes - 1 - own, depth, rank + 1)
            for own in range(nodes)
        )

    return below(nodes, depth, 0)


@pytest.mark.parametrize("nodes, depth", [(1, 1), (4, 1), (16, 2), (24, 5), (40, 8), (40, 40)])
@pytest.mark.parametrize("acceptance", [[50, 20, 10, 5], [90, 5, 3, 2], [25, 25, 25, 25], [1, 1, 1, 1]])
def test_larger_trees_are_those_of_programme(acceptance: list[int], nodes: int, depth: int) -> None:
    ranks = tuple(n / 100 for n in acceptance)
    paths, expected = best_tree(ranks, nodes, depth)
    assert len(TreeTemplate.choices(paths, contiguous=True).ranks) <= depth and len(paths) == nodes
    assert expected == pytest.approx(programme(ranks, nodes, depth), abs=1e-12)


def test_certain_drafter_gets_chain() -> None:
    assert best_tree((1.0, 0.0), 5, 8) == (tuple((0,) * n for n in range(1, 6)), 5.0)


def test_its_traits_are_those_of_tree() -> None:
    tree = plugins.get("drafters", "draft-model-tree")
    config = tree.Config(model="m", growth="sequoia", nodes=4, depth=2, acceptance=[0.5, 0.3])
    same = tree.Config(model="m", choices=[[0], [1], [0, 0], [0, 1]])
    for temperature in (0.0, 1.0):
        result = tree.traits(config, Sampling(temperature=temperature))
        assert result == tree.traits(same, Sampling(temperature=temperature))
    chain = tree.Config(model="m", growth="sequoia", nodes=3, acceptance=[0.5])
    assert tree.traits(chain, Sampling()).kind is CHAIN


# -- OPT-Tree ---------------------------------------------------------------------------------------------------


class Prefixes:
    """A model with a different distribution after each prefix; records the fed tokens of each row."""

    def __init__(self, seed: int, b: int, vocab: int, depth: int, sharp: float):
        generator = torch.Generator().manual_seed(seed)
        self.logits = [
            {
                prefix: sharp * torch.randn(vocab, generator=generator)
                for n in range(depth + 1)
                for prefix in product(range(vocab), repeat=n)
            }
            for _ in range(b)
        ]
        self.fed: list[list[tuple[int, ...]]] = [[] for _ in range(b)]

    @property
    def root(self) -> Tensor:
        return torch.stack([row[()] for row in self.logits])

    def expand(self, tokens: Tensor, parents: Tensor) -> Tensor:
        new = [
            [(*(fed[above] if above >= 0 else ()), token) for token, above in zip(*pair, strict=True)]
            for fed, pair in zip(self.fed, zip(tokens.tolist(), parents.tolist(), strict=True), strict=True)
        ]
        for fed, prefixes in zip(self.fed, new, strict=True):
            fed += prefixes
        return torch.stack(
            [torch.stack([row[prefix] for prefix in prefixes]) for row, prefixes in zip(self.logits, new, strict=True)]
        )

    def worth(self, row: int, depth: int) -> dict[tuple[int, ...], float]:
        """The probability of every prefix of 1 to ``depth`` tokens."""
        results = {(): 1.0}
        for prefix, logits in self.logits[row].items():  # shorter ones first
            if len(prefix) < depth:
                probs = logits.double().softmax(-1).tolist()
                results |= {(*prefix, token): results[prefix] * q for token, q in enumerate(probs)}
        del results[()]
        return results


def most_probable(worth: dict[tuple[int, ...], float], nodes: int, depth: int) -> list[tuple[int, ...]]:
    return sorted((p for p in worth if len(p) <= depth), key=lambda prefix: -worth[prefix])[:nodes]


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    b=st.integers(1, 3),
    depth=st.integers(1, 4),
    vocab=st.integers(2, 4),
    nodes=st.integers(1, 12),
    sharp=st.sampled_from([0.5, 2.0, 5.0]),
    threshold=st.sampled_from([0.0, 0.1, 0.4]),
    data=st.data(),
)
def test_tree_is_most_probable_one(
    seed: int, b: int, depth: int, vocab: int, nodes: int, sharp: float, threshold: float, data: st.DataObject
) -> None:
    limit = [data.draw(st.integers(0, depth)) for _ in range(b)]
    lm = Prefixes(seed, b, vocab, depth, sharp)
    draft, place = grow_dynamic(depth, None, nodes, lm.root, lm.expand, torch.tensor(limit), threshold=threshold)
    assert draft.q is None and draft.kind is DETERMINISTIC and draft.width <= nodes
    assert len(lm.fed[0]) <= max_expanded(depth, nodes)
    for row in range(b):
        worth = lm.worth(row, depth)
        last, total = 0, 0.0
        for level in range(1, limit[row] + 1):  # a row ends with the first level that is not worth its pass
            last, before = level, total
            total = sum(worth[prefix] for prefix in most_probable(worth, nodes, level))
            if total - before < threshold:
                break
        prefixes: list[tuple[int, ...]] = []
        for node in range(draft.width):
            parent = int(draft.parents[row, node])
            prefixes.append((*(prefixes[parent] if parent >= 0 else ()), int(draft.tokens[row, node])))
        kept = [prefix for prefix, valid in zip(prefixes, draft.valid[row].tolist(), strict=True) if valid]
        assert len(set(kept)) == len(kept)
        assert set(kept) == set(most_probable(worth, nodes, last))
        for node, prefix in enumerate(kept):
            parent = int(place[row, node])
            assert parent == -1 or lm.fed[row][parent] == prefix
            assert parent >= 0 or not any(other[:-1] == prefix for other in kept)


def test_row_does_not_see_its_neighbours() -> None:
    """A stopped row does not get deeper while another continues."""
    certain, unsure = torch.tensor([9.0, 0.0, 0.0]), torch.zeros(3)
    root = torch.stack([certain, unsure])
    draft, _ = grow_dynamic(
        4,
        None,
        3,
        root,
        lambda tokens, _: root[:, None].expand(-1, tokens.shape[1], -1),
        torch.tensor([4, 4]),
        threshold=0.5,
    )
    assert draft.parents[0].tolist() == [-1, 0, 1] and draft.levels == 4
    assert draft.valid.all() and draft.parents[1].tolist() == [-1, -1, -1]  # the second level would add nothing


# -- configuration ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"growth": "sequoia", "nodes": 0}, "greater than or equal to 1"),
        ({"growth": "opt-tree", "nodes": 5000}, "less than or equal to 4096"),
        ({"growth": "opt-tree", "nodes": 4096, "depth": 4}, "12288 expanded nodes; the maximum is 4096"),
        ({"growth": "opt-tree", "threshold": 1.5}, "less than or equal to 1"),
        ({"growth": "eagle"}, "'sequoia' or 'opt-tree'"),
        ({"growth": "sequoia", "acceptance": [0.5, 1.5]}, "acceptance of sibling 2 is 1.5; write a probability"),
        ({"growth": "sequoia", "acceptance": [-0.1]}, "acceptance of sibling 1 is -0.1; write a probability"),
        ({"growth": "sequoia", "acceptance": [float("nan")]}, "should be a finite number"),
        ({"growth": "sequoia", "acceptance": [0.2, 0.3]}, "acceptance rises from 0.2 to 0.3 at sibling 2; a later"),
        ({"growth": "sequoia", "acceptance": [0.6, 0.5]}, "acceptance sums to 1.1; at most one child of a node"),
        ({"growth": "sequoia", "acceptance": [0, 0]}, "acceptance is 0 for all siblings"),
        ({"growth": "sequoia", "acceptance": []}, "acceptance is 0 for all siblings"),
        (
            {"growth": "sequoia", "acceptance": [0.001] * 257},
            "257 numbers of acceptance, one a sibling; the maximum is",
        ),
        (
            {"growth": "sequoia", "acceptance": [0.5, 0.2, 0], "nodes": 7, "depth": 2},
            "depth 2 and 2 siblings of acceptance above 0 give 6 nodes, not 7",
        ),
        (
            {"growth": "sequoia", "threshold": 0.1},
            "threshold belongs to growth: opt-tree, but the draft is growth: sequoia",
        ),
        (
            {"growth": "opt-tree", "acceptance": [0.5]},
            "acceptance belongs to growth: sequoia, but the draft is growth: opt",
        ),
        ({"growth": "opt-tree", "siblings": "greedy"}, "siblings belongs to a tree without growth or growth: sequoia"),
        (
            {"growth": "opt-tree", "siblings": "without-replacement"},
            "siblings belongs to a tree without growth or growth: sequoia",
        ),
        ({"growth": "opt-tree", "temperature": 1}, "temperature belongs to a tree without growth or growth: sequoia"),
        ({"growth": "sequoia", "branching": [2, 2]}, "branching belongs to a tree without growth, but"),
        (
            {"growth": "sequoia", "choices": [[0]]},
            "choices belongs to a tree without growth, but the draft is growth: seq",
        ),
        ({"branching": [3, 2], "choices": [[0]]}, "branching and choices both describe the tree"),
        ({"nodes": 8}, "nodes belongs to growth: sequoia or growth: opt-tree, but the draft is a tree without growth"),
    ],
)
def test_config_errors_are_sentences(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        plugins.get("drafters", "draft-model-tree").Config(model="m", **options)
