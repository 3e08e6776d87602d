"""Merged sequences and visits of a tree, against naive ones."""

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from random_trees import SEEDS, random_draft

from crossdraft.framework.contracts.draft import Draft
from crossdraft.framework.contracts.draft_kind import DETERMINISTIC
from crossdraft.verifiers._tree import Children
from crossdraft.verifiers.traversal import leaves_first


@settings(deadline=None, max_examples=30)
@given(data=st.data(), b=st.integers(1, 3), k=st.integers(1, 4), depth=st.integers(1, 4), vocab=st.integers(1, 3))
def test_equal_prefixes_are_one_node(data: st.DataObject, b: int, k: int, depth: int, vocab: int) -> None:
    cells = st.lists(st.integers(0, vocab - 1), min_size=b * k * depth, max_size=b * k * depth)
    tokens = torch.tensor(data.draw(cells)).view(b, k, depth)
    lengths = [data.draw(st.integers(0, depth)) for _ in range(b)]
    draft = Draft.iid(tokens, torch.tensor(lengths), torch.rand(b, 1 + (depth - 1) * k, vocab))
    if not any(lengths):
        assert draft.width == 0 and draft.q is None
        return
    widest = 0
    assert draft.q_index is not None and draft.sequences is not None
    for row in range(b):
        known: dict[tuple[int, ...], int] = {}
        through: dict[tuple[int, ...], int] = {}  # the first sequence with this prefix
        for level in range(lengths[row]):
            for j in range(k):
                prefix = tuple(tokens[row, j, : level + 1].tolist())
                through.setdefault(prefix, j)
                if prefix not in known:
                    node = known[prefix] = len(known)
                    assert draft.valid[row, node]
                    assert draft.tokens[row, node] == prefix[-1]
                    assert draft.parents[row, node] == (known[prefix[:-1]] if level else -1)
                    probs = 1 + (level - 1) * k + through[prefix[:-1]] if level else 0
                    assert draft.q_index[row, node] == probs
                assert draft.sequences[row, j, level] == known[prefix]
        assert draft.count[row] == len(known)
        assert (draft.sequences[row, :, lengths[row] :] == -1).all()
        widest = max(widest, len(known))
    assert draft.width == widest and draft.levels == depth


@settings(deadline=None, max_examples=20)
@given(seed=SEEDS, b=st.integers(1, 3), depth=st.integers(1, 3), vocab=st.integers(1, 5))
def test_later_children_of_merged_sequences_are_drawn_from_rest(seed: int, b: int, depth: int, vocab: int) -> None:
    """The q without the earlier siblings, renormalised; with copies every draw has the full distribution."""
    draft, p = random_draft("iid", seed - seed % 3 + 2, b, depth, vocab)
    assume(draft.width)
    distinct, copies = Children(draft), Children(draft, with_copies=True)
    assert draft.q is not None and draft.q_index is not None and draft.sequences is not None
    for row in range(b):
        for node in range(int(draft.count[row])):
            q = draft.q[row, draft.q_index[row, node]].clone()
            earlier_siblings = [j for j in range(node) if draft.parents[row, j] == draft.parents[row, node]]
            assert draft.earlier_siblings[row, node].nonzero().flatten().tolist() == earlier_siblings
            q[draft.tokens[row, earlier_siblings]] = 0
            torch.testing.assert_close(distinct.q(node, p[:, 0])[row], q / q.sum())
    k, levels = draft.sequences.shape[1:]
    assert len(copies) == k * levels
    for entry in range(len(copies)):
        level, j = divmod(entry, k)
        for row in range(b):
            node = int(draft.sequences[row, j, level])
            assert copies.valid[row, entry] == (node >= 0)
            if node >= 0:
                assert copies.node[row, entry] == node
                torch.testing.assert_close(copies.q(entry, p[:, 0])[row], draft.q[row, draft.q_index[row, node]])


@st.composite
def families(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    """Parents of the nodes of a batch of random trees, and how many nodes of each row count."""
    b, n = draw(st.integers(1, 4)), draw(st.integers(0, 9))
    parents = [[draw(st.integers(-1, i - 1)) for i in range(n)] for _ in range(b)]
    return parents, [draw(st.integers(0, n)) for _ in range(b)]


def as_draft(parents: list[list[int]], counts: list[int]) -> Draft:
    b, n = len(parents), len(parents[0])
    valid = torch.arange(n) < torch.tensor(counts)[:, None]
    family = torch.tensor(parents, dtype=torch.long).view(b, n)
    return Draft(torch.zeros_like(family), family, valid, kind=DETERMINISTIC)


@settings(deadline=None, max_examples=60)
@given(tree=families())
def test_visit_reports_node_after_its_children(tree: tuple[list[list[int]], list[int]]) -> None:
    parents, counts = tree
    visits = leaves_first(as_draft(parents, counts), None).tolist()
    for family, count, visit in zip(parents, counts, visits, strict=True):

        def below(node: int, family: list[int] = family[:count]) -> list[int]:
            children = [child for child, parent in enumerate(family) if parent == node]
            return [i for child in children for i in (*below(child, family), child)]

        assert visit[:count] == below(-1)
        assert sorted(visit) == list(range(len(family)))


@settings(deadline=None, max_examples=50)
@given(tree=families())
def test_children_with_last_sibling_first(tree: tuple[list[list[int]], list[int]]) -> None:
    """Siblings in reverse order, parents still before their children."""
    parents, counts = tree
    draft = as_draft(parents, counts)
    children = Children(draft, last_sibling_first=True)
    for row, (family, count) in enumerate(zip(parents, counts, strict=True)):
        if not draft.width:
            assert len(children) == 0
            continue
        order = children.node[row, : int(children.valid[row].sum())].tolist()
        assert sorted(order) == list(range(count))
        for place, node in enumerate(order):
            assert family[node] == -1 or family[node] in order[:place]
            last_sibling_first = [i for i in order if family[i] == family[node]]
            assert last_sibling_first == sorted(last_sibling_first, reverse=True)
