"""Properties of the chain verifiers and the greedy walk on any draft: tables, invariants, naive re-implementations."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_drafts import random_chains
from torch import Tensor

from crossdraft.framework import plugins
from crossdraft.framework.certificate.table_lm import Toy
from crossdraft.framework.contracts.draft import Draft, Verdict
from crossdraft.framework.contracts.draft_kind import DETERMINISTIC
from crossdraft.framework.contracts.rng import CounterRng

RULES = ("token", "block")
SEEDS = st.integers(0, 2**31)


def rule(name: str) -> Any:
    return plugins.get("verifiers", name)()


def shipped_rng(seed: int, streams: range | list[int]) -> Any:
    return CounterRng(seed).for_step(list(streams), [0] * len(streams), torch.device("cpu"))


# -- h, p and residual of every draft of G1 and G2 ------------------------------------------------------


class Recording:
    """A scripted rng that records acceptance probabilities."""

    def __init__(self, accepted: list[bool]):
        self.accepted = accepted
        self.h = self.weights = torch.empty(0)

    def accept(self, h: Tensor, purpose: str = "accept", index: int = 0) -> Tensor:
        self.h = h
        return torch.tensor(self.accepted, dtype=torch.bool).expand_as(h)

    def draw(self, weights: Tensor, purpose: str = "residual", index: int = 0) -> Tensor:
        self.weights = weights.double() / weights.double().sum(-1, keepdim=True)
        return weights.argmax(-1)


@pytest.fixture(scope="module")
def every_draft(toys: dict[str, Toy], golden: dict) -> Callable:
    """``every_draft(toy)``: all drafts of a toy as one batch, the target's p, and their golden entries."""

    def make(name: str) -> tuple[Draft, Tensor, list[dict]]:
        toy, entries = toys[name], golden[name]["drafts"]
        tokens = torch.tensor([entry["draft"] for entry in entries])
        before = torch.cat([torch.full_like(tokens[:, :1], toy.vocab_size), tokens], 1)
        length = torch.full((len(entries),), toy.gamma)
        return Draft.chain(tokens, length, toy.drafter[before[:, :-1]]), toy.target[before], entries

    return make


def table(entries: list[dict], key: str) -> Tensor:
    return torch.tensor([[float(Fraction(x)) for x in entry[key]] for entry in entries], dtype=torch.float64)


@pytest.mark.parametrize("verifier", RULES)
@pytest.mark.parametrize("toy", ["G1", "G2"])
def test_acceptance_of_every_draft(every_draft: Callable, toy: str, verifier: str) -> None:
    draft, p, entries = every_draft(toy)
    rng = Recording([True] * draft.width)
    verdict = rule(verifier).verify(draft, p, rng)
    torch.testing.assert_close(rng.h, table(entries, f"h_{verifier}"), atol=1e-12, rtol=0)
    survival = table(entries, "p_block") if verifier == "block" else table(entries, "h_token").cumprod(1)
    torch.testing.assert_close(verdict.survival, survival, atol=1e-12, rtol=0)
    assert verdict.length.tolist() == [draft.width] * len(entries)
    torch.testing.assert_close(rng.weights, p[:, -1])  # everything accepted: the bonus follows the target


@pytest.mark.parametrize("toy", ["G1", "G2"])
def test_block_residual_of_every_draft(every_draft: Callable, toys: dict[str, Toy], toy: str) -> None:
    draft, p, entries = every_draft(toy)
    for tau in range(draft.width):
        rng = Recording([i == tau for i in range(1, draft.width + 1)])
        verdict = rule("block").verify(draft, p, rng)
        assert (verdict.length == tau).all()
        for row, entry in enumerate(entries):
            if entry["block_residuals"][tau] is not None:  # mass 0: this tau has probability 0
                want = [float(Fraction(x)) for x in entry["block_residuals"][tau]]
                assert rng.weights[row].tolist() == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("toy", ["G1", "G2"])
def test_token_residual_of_every_draft(every_draft: Callable, toy: str) -> None:
    draft, p, _ = every_draft(toy)
    assert draft.q is not None
    for tau in range(draft.width):
        rng = Recording([i != tau for i in range(draft.width)])  # later acceptances must not count
        verdict = rule("token").verify(draft, p, rng)
        assert (verdict.length == tau).all()
        want = (p[:, tau] - draft.q[:, tau]).clamp(min=0)
        torch.testing.assert_close(rng.weights, want / want.sum(1, keepdim=True))


# -- random chains --------------------------------------------------------------------------------------

sizes = dict(b=st.integers(1, 6), n=st.integers(0, 6))


def assert_sound(draft: Draft, p: Tensor, verdict: Verdict) -> None:
    assert ((verdict.length >= 0) & (verdict.length <= draft.count)).all()
    emitted = p[torch.arange(draft.batch_size), verdict.length].gather(1, verdict.token[:, None])
    assert (emitted > 0).all(), "a token was emitted that the target never says"
    assert verdict.survival is not None and verdict.survival.isfinite().all()
    assert ((verdict.survival >= 0) & (verdict.survival <= 1)).all()
    assert (verdict.survival[~draft.valid] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("verifier", RULES)
@settings(deadline=None, max_examples=40)
@given(seed=SEEDS, vocab=st.integers(1, 60), **sizes)
def test_any_draft_gets_sound_verdict(verifier: str, dtype: torch.dtype, seed: int, vocab: int, b: int, n: int) -> None:
    draft, p = random_chains(seed, b, n, vocab, dtype)
    assert_sound(draft, p, rule(verifier).verify(draft, p, shipped_rng(seed, range(b))))
    point_mass = Draft.chain(draft.tokens, draft.count)
    assert_sound(point_mass, p, rule(verifier).verify(point_mass, p, shipped_rng(seed, range(b))))


@pytest.mark.parametrize("verifier", RULES)
@settings(deadline=None, max_examples=40)
@given(seed=SEEDS, vocab=st.integers(1, 1000), **sizes)
def test_equal_distributions_accept_everything(verifier: str, seed: int, vocab: int, b: int, n: int) -> None:
    draft, p = random_chains(seed, b, n, vocab)
    assert draft.q is not None
    p[:, :n] = draft.q
    verdict = rule(verifier).verify(draft, p, shipped_rng(seed, range(b)))
    assert torch.equal(verdict.length, draft.count)


@settings(deadline=None, max_examples=60)
@given(seed=SEEDS, vocab=st.integers(1, 5), soft=st.booleans(), **sizes)
def test_at_temperature_zero_all_rules_are_greedy(seed: int, vocab: int, soft: bool, b: int, n: int) -> None:
    draft, p = random_chains(seed, b, n, vocab)
    p = torch.zeros_like(p).scatter_(2, p.argmax(2, keepdim=True), 1.0)
    if not soft:
        draft = Draft.chain(draft.tokens, draft.count)
    verdicts = [rule(name).verify(draft, p, shipped_rng(seed, range(b))) for name in (*RULES, "greedy")]
    for verdict in verdicts[:-1]:
        assert torch.equal(verdict.length, verdicts[-1].length)
        assert torch.equal(verdict.token, verdicts[-1].token)


@pytest.mark.parametrize("verifier", RULES)
@settings(deadline=None, max_examples=60)
@given(seed=SEEDS, vocab=st.integers(1, 30), **sizes)
def test_one_hot_distribution_is_point_mass(verifier: str, seed: int, vocab: int, b: int, n: int) -> None:
    """The closed forms for drafts without q agree with the general ones, on common random numbers."""
    sampled, p = random_chains(seed, b, n, vocab, torch.float64)
    one_hot = torch.zeros_like(p[:, :n]).scatter_(2, sampled.tokens[..., None], 1.0)
    drafts = [Draft.chain(sampled.tokens, sampled.count, q) for q in (one_hot, None)]
    spelt_out, closed = (rule(verifier).verify(draft, p, shipped_rng(seed, range(b))) for draft in drafts)
    assert torch.equal(spelt_out.length, closed.length)
    assert torch.equal(spelt_out.token, closed.token)
    torch.testing.assert_close(spelt_out.survival, closed.survival)


def test_one_hot_token_equals_block(every_draft: Callable) -> None:
    """With point masses the joint ratio never exceeds 1, and both rules accept alike in distribution."""
    draft, p, _ = every_draft("G2")
    draft = Draft.chain(draft.tokens, draft.count)
    verdicts = [rule(name).verify(draft, p, Recording([True] * draft.width)) for name in RULES]
    torch.testing.assert_close(verdicts[0].survival, verdicts[1].survival)


@pytest.mark.parametrize("point_mass", [False, True], ids=["sampled", "point-mass"])
@pytest.mark.parametrize("verifier", [*RULES, "greedy"])
@settings(deadline=None, max_examples=40)
@given(seed=SEEDS, vocab=st.integers(1, 30), **sizes)
def test_row_does_not_see_its_neighbours(
    verifier: str, point_mass: bool, seed: int, vocab: int, b: int, n: int
) -> None:
    draft, p = random_chains(seed, b, n, vocab)
    if point_mass:
        draft = Draft.chain(draft.tokens, draft.count)
    batched = rule(verifier).verify(draft, p, shipped_rng(seed, range(b)))
    for row, count in enumerate(draft.count.tolist()):
        q = None if draft.q is None else draft.q[row : row + 1, :count]
        separate = Draft.chain(draft.tokens[row : row + 1, :count], draft.count[row : row + 1], q)
        verdict = rule(verifier).verify(separate, p[row : row + 1, : count + 1], shipped_rng(seed, [row]))
        assert verdict.length.item() == batched.length[row]
        assert verdict.token.item() == batched.token[row]


@pytest.mark.parametrize("verifier", RULES)
def test_shared_distribution_table_is_indexed(verifier: str) -> None:
    """``q_index`` selects the row of ``q`` of each node; expanded rows give the same verdict."""
    draft, p = random_chains(3, 64, 4, 7)
    assert draft.q is not None
    order = torch.tensor([2, 0, 3, 1])
    tabled = Draft.chain(draft.tokens, draft.count, draft.q[:, order])
    tabled.q_index = order.argsort().expand(64, 4)
    verdicts = [rule(verifier).verify(d, p, shipped_rng(0, range(64))) for d in (draft, tabled)]
    assert torch.equal(verdicts[0].length, verdicts[1].length)
    assert torch.equal(verdicts[0].token, verdicts[1].token)


@pytest.mark.parametrize("verifier", [*RULES, "greedy"])
def test_empty_draft(verifier: str) -> None:
    _, p = random_chains(0, 5, 0, 9)
    if verifier == "greedy":
        p = torch.zeros_like(p).scatter_(2, p.argmax(2, keepdim=True), 1.0)
    rng = Recording([])
    verdict = rule(verifier).verify(Draft.empty(5), p, rng)
    assert verdict.length.tolist() == [0] * 5
    if verifier == "greedy":
        assert torch.equal(verdict.token, p[:, 0].argmax(1))
    else:
        torch.testing.assert_close(rng.weights.float(), p[:, 0])


# -- trees ----------------------------------------------------------------------------------------------


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """Parents and tokens of a batch of random trees of equal width, and how many nodes of each count."""
    b, n, vocab = draw(st.integers(1, 4)), draw(st.integers(0, 9)), draw(st.integers(1, 3))
    parents = [[draw(st.integers(-1, i - 1)) for i in range(n)] for _ in range(b)]
    tokens = [[draw(st.integers(0, vocab - 1)) for _ in range(n)] for _ in range(b)]
    return parents, tokens, [draw(st.integers(0, n)) for _ in range(b)]


def as_draft(parents: list[list[int]], tokens: list[list[int]], counts: list[int]) -> Draft:
    b, n = len(parents), len(parents[0])
    valid = torch.arange(n) < torch.tensor(counts)[:, None]
    tokens_, parents_ = (torch.tensor(rows, dtype=torch.long).view(b, n) for rows in (tokens, parents))
    return Draft(tokens_, parents_, valid, kind=DETERMINISTIC)


def path(parents: list[int], node: int) -> list[int]:
    """Nodes from the root's child down to ``node``."""
    return [] if node < 0 else [*path(parents, parents[node]), node]


@settings(deadline=None, max_examples=150)
@given(tree=trees(), data=st.data())
def test_tree_geometry(tree: tuple, data: st.DataObject) -> None:
    parents, tokens, counts = tree
    draft = as_draft(parents, tokens, counts)
    n = draft.width
    for row, family in enumerate(parents):
        for i in range(n):
            assert draft.ancestor_mask[row, i].nonzero().flatten().tolist() == path(family, i)
            assert draft.depth[row, i] == len(path(family, i))
    if n:
        node = torch.tensor([data.draw(st.integers(-1, n - 1)) for _ in parents])
        result = draft.path_to(node).tolist()
        for row, family in enumerate(parents):
            want = path(family, int(node[row]))
            assert result[row] == want + [-1] * (n - len(want))


@settings(deadline=None, max_examples=50)
@given(b=st.integers(1, 3), n=st.integers(0, 6), data=st.data())
def test_chain_is_tree(b: int, n: int, data: st.DataObject) -> None:
    counts = torch.tensor([data.draw(st.integers(0, n)) for _ in range(b)])
    chain = Draft.chain(torch.zeros(b, n, dtype=torch.long), counts)
    tree = Draft(chain.tokens, chain.parents, chain.valid, kind=DETERMINISTIC)
    assert torch.equal(chain.ancestor_mask, tree.ancestor_mask)
    assert torch.equal(chain.depth, tree.depth)
    assert chain.count.tolist() == counts.tolist()
    if n:
        last = counts - 1
        assert torch.equal(chain.path_to(last), tree.path_to(last))


@settings(deadline=None, max_examples=200)
@given(tree=trees(), seed=SEEDS)
def test_greedy_walks_tree(tree: tuple, seed: int) -> None:
    """The verdict follows the longest branch of argmax tokens; duplicated siblings are allowed."""
    parents, tokens, counts = tree
    draft = as_draft(parents, tokens, counts)
    vocab, n = 3, draft.width
    # The target's argmax is a function of the tokens before it, so that duplicated branches agree.
    favourite: dict[tuple[int, ...], int] = {}
    generator = torch.Generator().manual_seed(seed)

    def best(row: int, node: int) -> int:
        context = (row, *(tokens[row][i] for i in path(parents[row], node)))
        return favourite.setdefault(context, int(torch.randint(vocab, (), generator=generator)))

    p = torch.zeros(len(parents), n + 1, vocab)
    for row in range(len(parents)):
        for node in range(-1, n):
            p[row, node + 1, best(row, node)] = 1
    verdict = rule("greedy").verify(draft, p, Recording([]))
    for row in range(len(parents)):
        reached = [-1]
        for node in range(counts[row]):
            if parents[row][node] in reached and tokens[row][node] == best(row, parents[row][node]):
                reached.append(node)
        longest = max(reached, key=lambda node: len(path(parents[row], node)))
        tau = len(path(parents[row], longest))
        assert verdict.length[row] == tau
        assert verdict.token[row] == best(row, longest)
        if n:
            assert verdict.path is not None
            accepted = [i for i in verdict.path[row].tolist() if i >= 0]
            assert accepted == path(parents[row], accepted[-1] if accepted else -1)
            assert len(accepted) == tau and set(accepted) <= set(reached)
