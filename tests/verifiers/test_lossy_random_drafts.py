"""The lossy rules on random drafts: equal to the exact rules at the ends of their ranges, and sound in between."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lossy_reference import LOSSY, SEEDS, TREE_RULES, Judge, Recording, rule, shipped_rng, top_k, typical
from random_drafts import random_chains, random_laws
from torch import Tensor

from crossdraft.framework.contracts.draft import Draft, Verdict
from crossdraft.framework.contracts.draft_kind import DETERMINISTIC


def random_trees(seed: int, b: int, n: int, v: int, dtype: torch.dtype = torch.float32) -> tuple[Draft, Tensor]:
    """``b`` trees of up to ``n`` nodes; an invalid node may stand anywhere, what hangs below it is invalid too."""
    generator = torch.Generator().manual_seed(seed)
    parents = torch.zeros(b, n, dtype=torch.long)
    valid = torch.rand(b, n, generator=generator) < 0.9
    for i in range(n):
        parents[:, i] = torch.randint(-1, i, (b,), generator=generator) if i else -1
        above = parents[:, i].clamp(min=0)
        valid[:, i] &= (parents[:, i] < 0) | valid[torch.arange(b), above]
    tokens = torch.randint(v, (b, n), generator=generator)
    p = random_laws(b, n + 1, v, generator=generator, dtype=dtype)
    return Draft(tokens, parents, valid, kind=DETERMINISTIC), p


def path(parents: list[int], node: int) -> list[int]:
    return [] if node < 0 else [*path(parents, parents[node]), node]


sizes = dict(seed=SEEDS, b=st.integers(1, 5), n=st.integers(0, 7))


@settings(deadline=None, max_examples=40)
@given(v=st.integers(1, 40), **sizes)
def test_lenience_one_is_token_verification_bit_for_bit(seed: int, v: int, b: int, n: int) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        sampled, p = random_chains(seed, b, n, v, dtype)
        for draft in (sampled, Draft.chain(sampled.tokens, sampled.count)):
            ours, token = (
                verifier.verify(draft, p, shipped_rng(seed, range(b)))
                for verifier in (rule("lenient", lenience=1), rule("token"))
            )
            assert torch.equal(ours.length, token.length)
            assert torch.equal(ours.token, token.token)
            assert torch.equal(ours.survival, token.survival)


@settings(deadline=None, max_examples=60)
@given(v=st.integers(1, 30), lenience=st.floats(0.05, 1), **sizes)
def test_one_hot_distribution_is_point_mass(seed: int, v: int, lenience: float, b: int, n: int) -> None:
    sampled, p = random_chains(seed, b, n, v, torch.float64)
    one_hot = torch.zeros_like(p[:, :n]).scatter_(2, sampled.tokens[..., None], 1.0)
    verdicts = [
        rule("lenient", lenience=lenience).verify(
            Draft.chain(sampled.tokens, sampled.count, q), p, shipped_rng(seed, range(b))
        )
        for q in (one_hot, None)
    ]
    assert torch.equal(verdicts[0].length, verdicts[1].length)
    assert torch.equal(verdicts[0].token, verdicts[1].token)


def assert_same(ours: Verdict, greedy: Verdict) -> None:
    assert torch.equal(ours.length, greedy.length)
    assert torch.equal(ours.token, greedy.token)
    assert (ours.path is None) == (greedy.path is None)
    assert ours.path is None or torch.equal(ours.path, greedy.path)  # type: ignore[arg-type]


def distinct_siblings(draft: Draft) -> Draft:
    """The same tree without siblings that carry the same token: there the longest argmax path is unique."""
    twin = (draft.earlier_siblings & (draft.tokens[..., None] == draft.tokens[:, None])).any(2)
    draft.valid = draft.valid & ~(draft.ancestor_mask & twin[:, None]).any(2)
    return Draft(draft.tokens, draft.parents, draft.valid, kind=DETERMINISTIC)


@settings(deadline=None, max_examples=40)
@given(v=st.integers(1, 6), **sizes)
def test_temperature_zero_is_greedy(seed: int, v: int, b: int, n: int) -> None:
    """With a one-hot p nothing but the argmax passes, however lenient the rule."""
    for make, names in ((random_chains, LOSSY), (random_trees, TREE_RULES)):
        draft, p = make(seed, b, n, v)
        p = torch.zeros_like(p).scatter_(2, p.argmax(2, keepdim=True), 1.0)
        if not draft.is_chain:
            draft = distinct_siblings(draft)
        greedy = rule("greedy").verify(draft, p, Recording())
        lax = {"lenient": {"lenience": 0.01}, "top-k": {"tolerance": 1e9}, "bild": {"rollback": 1e9}}
        for name in names:
            for options in ({}, lax.get(name, {})):
                assert_same(rule(name, **options).verify(draft, p, shipped_rng(seed, range(b))), greedy)


@settings(deadline=None, max_examples=40)
@given(v=st.integers(1, 6), ties=st.booleans(), **sizes)
def test_strictest_settings_are_greedy(seed: int, v: int, ties: bool, b: int, n: int) -> None:
    strictest = {"k=1": rule("top-k", k=1, tolerance=1e9), "rollback=0": rule("bild", rollback=0)}
    if not ties:  # an equal of the argmax is not behind it
        strictest["tolerance=0"] = rule("top-k", tolerance=0)
    for make in (random_chains, random_trees):
        draft, p = make(seed, b, n, v, torch.float64)
        if ties:
            p = (p * 4).round().clamp(min=0) + 0.01
            p = p / p.sum(2, keepdim=True)
        if not draft.is_chain:
            draft = distinct_siblings(draft)
            strictest.pop("rollback=0")
        greedy = rule("greedy").verify(draft, p, Recording())
        for verifier in strictest.values():
            assert_same(verifier.verify(draft, p, Recording()), greedy)


#: Settings under which random drafts meet both outcomes often.
WALKED = [
    ("typical", {"epsilon": 0.2, "delta": 0.5}, typical(0.2, 0.5)),
    ("top-k", {"k": 2, "tolerance": 1.0}, top_k(2, 1.0)),
    ("top-k", {"k": 3, "tolerance": 1e9}, top_k(3, 1e9)),
]


@pytest.mark.parametrize("name, options, accept_rule", WALKED)
@pytest.mark.parametrize("make", [random_chains, random_trees])
@settings(deadline=None, max_examples=60)
@given(v=st.integers(1, 5), ties=st.booleans(), **sizes)
def test_deepest_path_by_hand(
    name: str,
    options: dict[str, Any],
    accept_rule: Judge,
    make: Callable,
    seed: int,
    v: int,
    ties: bool,
    b: int,
    n: int,
) -> None:
    draft, p = make(seed, b, n, v, torch.float64)
    if ties:
        p = (p * 6).round() + torch.eye(v, dtype=p.dtype)[0]  # some zero probabilities
        p = p / p.sum(2, keepdim=True)
    rng = Recording()
    verdict = rule(name, **options).verify(draft, p, rng)
    for row in range(b):
        parents, tokens, distributions = draft.parents[row].tolist(), draft.tokens[row].tolist(), p[row].tolist()
        reached = {-1: 0.0}  # node -> sum of ln P along its path
        for node in range(n):
            probs = distributions[parents[node] + 1]
            if draft.valid[row, node] and parents[node] in reached and accept_rule(probs, probs, tokens[node])[0]:
                reached[node] = reached[parents[node]] + math.log(probs[tokens[node]])
        tau = max(len(path(parents, node)) for node in reached)
        deepest = {node: total for node, total in reached.items() if len(path(parents, node)) == tau}
        assert verdict.length[row] == tau
        if verdict.path is None:
            node = tau - 1
        else:
            accepted = [i for i in verdict.path[row].tolist() if i >= 0]
            node = accepted[-1] if accepted else -1
            assert accepted == path(parents, node)
        assert deepest[node] == pytest.approx(max(deepest.values()), abs=1e-12)
        after = accept_rule(distributions[node + 1], distributions[node + 1], None)[1]
        if name == "typical":
            assert rng.weights[row].tolist() == pytest.approx(after, abs=1e-12)
        else:
            assert after[int(verdict.token[row])] == 1


def test_of_equal_paths_first_is_kept() -> None:
    """Two chains of two nodes: the second is more probable, or both are equally so."""
    draft = Draft(
        tokens=torch.tensor([[0, 1, 1, 0], [0, 1, 1, 0]]),
        parents=torch.tensor([[-1, -1, 0, 1]] * 2),
        valid=torch.ones(2, 4, dtype=torch.bool),
        kind=DETERMINISTIC,
    )
    p = torch.full((2, 5, 2), 0.5)
    p[0, 0] = torch.tensor([0.4, 0.6])
    for name in TREE_RULES:
        verdict = rule(name).verify(draft, p, Recording())
        assert verdict.path is not None
        assert verdict.path.tolist() == [[1, 3, -1, -1], [0, 2, -1, -1]]
        assert verdict.length.tolist() == [2, 2]


def cases() -> Iterator[tuple[str, Callable, bool]]:
    for name in LOSSY:
        yield name, random_chains, False
        yield name, random_chains, True
    for name in TREE_RULES:
        yield name, random_trees, True


@pytest.mark.parametrize("name, make, point_mass", list(cases()))
@settings(deadline=None, max_examples=20)
@given(v=st.integers(1, 30), **sizes)
def test_row_does_not_see_its_neighbours(
    name: str, make: Callable, point_mass: bool, seed: int, v: int, b: int, n: int
) -> None:
    """Neither the other rows nor the padding they need change a verdict, and p is left as it was."""
    draft, p = make(seed, b, n, v)
    if point_mass and draft.is_chain:
        draft = Draft.chain(draft.tokens, draft.count)
    before = p.clone()
    batched = rule(name).verify(draft, p, shipped_rng(seed, range(b)))
    assert torch.equal(p, before)
    for row in range(b):
        count = int((draft.valid[row] * torch.arange(1, n + 1)).max()) if n else 0
        separate = Draft(
            draft.tokens[row : row + 1, :count],
            draft.parents[row : row + 1, :count],
            draft.valid[row : row + 1, :count],
            None if draft.q is None else draft.q[row : row + 1, :count],
            kind=draft.kind,
        )
        verdict = rule(name).verify(separate, p[row : row + 1, : count + 1], shipped_rng(seed, [row]))
        assert verdict.length.item() == batched.length[row]
        assert verdict.token.item() == batched.token[row]
        if verdict.path is not None:
            assert batched.path is not None
            assert verdict.path[0].tolist() == batched.path[row, :count].tolist()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name, make, point_mass", list(cases()))
@settings(deadline=None, max_examples=8)
@given(v=st.integers(1, 60), **sizes)
def test_any_draft_gets_sound_verdict(
    dtype: torch.dtype, name: str, make: Callable, point_mass: bool, seed: int, v: int, b: int, n: int
) -> None:
    draft, p = make(seed, b, n, v, dtype)
    if point_mass and draft.is_chain:
        draft = Draft.chain(draft.tokens, draft.count)
    verdict = rule(name).verify(draft, p, shipped_rng(seed, range(b)))
    assert verdict.length.dtype == verdict.token.dtype == torch.long
    assert verdict.length.shape == verdict.token.shape == (b,)
    assert ((verdict.length >= 0) & (verdict.length <= draft.count)).all()
    last = verdict.length - 1 if verdict.path is None else verdict.path.amax(1) if n else verdict.length - 1
    follows = p[torch.arange(b), last + 1].gather(1, verdict.token[:, None])
    assert (follows > 0).all(), "a token was emitted that the target never says"
