"""Static trees: properties derived from the shape equal those computed from parents."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import shipped_rng

from crossdraft.framework.contracts.draft import Draft
from crossdraft.framework.contracts.draft_kind import DETERMINISTIC, WITHOUT_REPLACEMENT
from crossdraft.framework.util.static_trees import parents_of, problem, tree_constant, tree_families
from crossdraft.verifiers.traversal import Traversal, leaves_first, level_by_level, node_by_node

CPU = torch.device("cpu")


@st.composite
def shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], ...]:
    """Trees of one to three levels, some of whose nodes have no children."""
    levels, width = [], 1
    for _ in range(draw(st.integers(1, 3))):
        counts = draw(st.lists(st.integers(0, 3), min_size=width, max_size=width))
        counts[-1] = max(counts[-1], 1)
        levels.append(tuple(counts))
        width = sum(counts)
    return tuple(levels)


def drafted(shape: tuple[tuple[int, ...], ...], seed: int, point_mass: bool = False) -> tuple[Draft, torch.Tensor]:
    """Three rows of a tree of that shape, siblings drawn without replacement, some nodes invalid; and P."""
    generator = torch.Generator().manual_seed(seed)
    parents, b, vocab = parents_of(shape), 3, 7
    n = len(parents)
    distributions = torch.rand(b, n + 1, vocab, generator=generator, dtype=torch.float64).softmax(-1)
    tokens, q, used = torch.zeros(b, n, dtype=torch.long), torch.zeros(b, n, vocab, dtype=torch.float64), {}
    valid = torch.rand(b, n, generator=generator) < 0.9
    for node, parent in enumerate(parents):
        left = distributions[:, parent + 1].clone()
        for earlier_siblings in used.setdefault(parent, []):
            left.scatter_(1, tokens[:, earlier_siblings : earlier_siblings + 1], 0.0)
        q[:, node] = left / left.sum(1, keepdim=True)
        tokens[:, node] = torch.multinomial(q[:, node], 1, generator=generator).squeeze(1)
        used[parent].append(node)
        if parent >= 0:
            valid[:, node] &= valid[:, parent]
    draft = Draft(
        tokens,
        torch.tensor(parents).expand(b, n),
        valid,
        None if point_mass else q,
        kind=DETERMINISTIC if point_mass else WITHOUT_REPLACEMENT,
        levels=len(shape),
        children=shape,
    )
    p = torch.rand(b, n + 1, vocab, generator=generator, dtype=torch.float64) ** 3
    return draft, p / p.sum(-1, keepdim=True)


def test_by_hand() -> None:
    shape = ((2,), (1, 2), (0, 1, 0))
    assert tree_families(shape) == [[(-1, [0, 1])], [(0, [2]), (1, [3, 4])], [(3, [5])]]
    assert parents_of(shape) == [-1, -1, 0, 1, 1, 3]
    assert tree_constant(shape, "depth", CPU).tolist() == [0, 1, 1, 2, 2, 2, 3]
    assert tree_constant(shape, "fed", CPU).tolist() == [0, 1, 2, 3, 4, -1]
    assert tree_constant(shape, "leaves first", CPU).argsort().tolist() == [2, 0, 5, 3, 4, 1]
    assert tree_constant(shape, "paths", CPU)[6].tolist() == [1, 3, 5]
    assert tree_constant(shape, "paths", CPU)[0].tolist() == [-1, -1, -1]


@pytest.mark.parametrize(
    "children, reason",
    [
        (((2,), (1, 1, 1)), "names the children of 3 nodes on level 1, which has 2"),
        (((2,), (1, 2)), "has 5 nodes, but the draft 4"),
        (((2,), (3, -1)), "names the children of 2 nodes on level 1, which has 2"),
    ],
)
def test_error_of_invalid_shape(children: tuple, reason: str) -> None:
    assert problem(children, 4) == reason
    assert problem(((2,), (1, 1)), 4) is None


@settings(deadline=None, max_examples=30)
@given(shape=shapes(), seed=st.integers(0, 99), point_mass=st.booleans())
def test_level_by_level_is_node_by_node(shape: tuple, seed: int, point_mass: bool) -> None:
    """A static shape changes neither the ancestor mask of a draft nor a verdict."""
    draft, p = drafted(shape, seed, point_mass)
    unknown = replace(draft, children=None)
    for name in ("ancestor_mask", "depth", "earlier_siblings"):
        assert torch.equal(getattr(draft, name), getattr(unknown, name))
    for node in range(-1, draft.width):
        one = torch.full((3,), node)
        assert torch.equal(draft.depth_of(one), unknown.depth_of(one))
        assert torch.equal(draft.path_to(one), unknown.path_to(one)[:, : len(shape)])
    order, same = leaves_first(draft, shape), leaves_first(unknown, None)
    count = draft.count
    for row in range(3):
        assert torch.equal(order[row, : count[row]], same[row, : count[row]])
    shares, rests = level_by_level(draft, p, shape)
    others, repeat = node_by_node(unknown, p)
    torch.testing.assert_close(rests, repeat, atol=1e-12, rtol=0)
    assert shares.shape[1] <= others.shape[1]
    outputs, once_more = (Traversal().verify(one, p, shipped_rng(seed, range(3))) for one in (draft, unknown))
    assert torch.equal(outputs.length, once_more.length) and torch.equal(outputs.token, once_more.token)
