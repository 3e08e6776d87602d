"""Properties of every registered verifier on every shape of draft it accepts.

Nothing here knows the list of verifiers: a rule that is registered is tested, by what its traits promise.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import (
    LOSSLESS,
    PAIRS,
    RULES,
    SEEDS,
    accepted,
    random_draft,
    shipped_rng,
    single_row,
    sizes,
    tokens_of,
)
from torch import Tensor
from verifier_traits import traits_of

from crossdraft.framework.contracts.draft import Draft


@pytest.mark.parametrize("name, shape", PAIRS)
@settings(deadline=None, max_examples=8)
@given(
    seed=SEEDS,
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    soft=st.booleans(),
    **sizes,
)
def test_verdict_is_valid_path_and_token(
    name: str, shape: str, seed: int, dtype: torch.dtype, soft: bool, b: int, depth: int, vocab: int
) -> None:
    draft, p = random_draft(shape, seed, b, depth, vocab, dtype, equal=0.3 if soft else 1.0)
    before = p.clone(), None if draft.q is None else draft.q.clone()
    verdict = RULES[name]().verify(draft, p, shipped_rng(seed, range(b)))
    assert torch.equal(p, before[0]), "p was written to"
    assert draft.q is None or torch.equal(draft.q, before[1]), "q was written to"
    assert verdict.length.dtype == verdict.token.dtype == torch.long
    for row in range(b):
        at = -1
        for node in accepted(draft, verdict, row):
            if traits_of(RULES[name]).lossless:
                assert p[row, at + 1, draft.tokens[row, node]] > 0, "accepted a token that the target never says"
            at = node
        token = int(verdict.token[row])
        assert 0 <= token < vocab
        assert p[row, at + 1, token] > 0, "emitted a token that the target never says"


@pytest.mark.parametrize("name, shape", PAIRS)
@settings(deadline=None, max_examples=8)
@given(seed=SEEDS, **sizes)
def test_row_does_not_see_its_neighbours(name: str, shape: str, seed: int, b: int, depth: int, vocab: int) -> None:
    """Also catches random numbers whose index depends on how wide the batch is."""
    draft, p = random_draft(shape, seed, b, depth, vocab)
    batched = tokens_of(draft, RULES[name]().verify(draft, p, shipped_rng(seed, range(b))))
    for row in range(b):
        one, probs = single_row(draft, p, row)
        verdict = RULES[name]().verify(one, probs, shipped_rng(seed, [row]))
        assert tokens_of(one, verdict) == [batched[row]]


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if traits_of(rule).stateful])
@settings(deadline=None, max_examples=8)
@given(seed=SEEDS, b=st.integers(2, 4), depth=st.integers(2, 5), vocab=st.integers(2, 8))
def test_row_keeps_its_own_state(name: str, seed: int, b: int, depth: int, vocab: int) -> None:
    batch, single = RULES[name](), [RULES[name]() for _ in range(b)]
    for row in range(b):
        batch.start(row)
        single[row].start(0)
    for position in range(4):
        draft, p = random_draft("chain", seed + position, b, depth, vocab)
        verdict = batch.verify(draft, p, shipped_rng(seed, range(b), position))
        batched = tokens_of(draft, verdict)
        batch.observe(verdict.length.tolist(), draft.count.tolist())
        for row in range(b):
            one, probs = single_row(draft, p, row)
            if one.q is None:  # an empty draft: the distribution after its last token is still requested
                assert draft.q is not None
                one.q = draft.q[row : row + 1]
            verdict = single[row].verify(one, probs, shipped_rng(seed, [row], position))
            assert tokens_of(one, verdict) == [batched[row]]
            single[row].observe(verdict.length.tolist(), one.count.tolist())
            assert (single[row].snapshot(0) is None) == (batch.snapshot(row) is None)


@pytest.mark.parametrize("name, shape", [pair for pair in LOSSLESS if pair[0] != "greedy"])
@settings(deadline=None, max_examples=8)
@given(seed=SEEDS, **sizes)
def test_at_temperature_zero_every_lossless_rule_is_greedy(
    name: str, shape: str, seed: int, b: int, depth: int, vocab: int
) -> None:
    draft, p = random_draft(shape, seed, b, depth, min(vocab, 4))
    p = torch.zeros_like(p).scatter_(2, p.argmax(2, keepdim=True), 1.0)
    ours, greedy = (RULES[rule]().verify(draft, p, shipped_rng(seed, range(b))) for rule in (name, "greedy"))
    assert tokens_of(draft, ours) == tokens_of(draft, greedy)


#: Rules and shapes that accept the whole draft where both models agree. A top-k draft is not a sample, a greedy
#: draft neither; sample-match does not look at q; the best of several sequences is not a sample either.
AGREE = [
    (name, shape)
    for name, shape in LOSSLESS
    if shape in ("chain", "iid", "pair", "without-replacement")
    and (name in ("token", "block", "greedy-block", "specinfer", "traversal", "spectr") or shape == "chain")
    and name not in ("greedy", "sample-match")
]


class Stubborn:
    """Coins that reject whatever is not certain, up to rounding."""

    def __init__(self, rng: Any, uniform: float):
        self.rng, self.uniform = rng, uniform

    def accept(self, h: Tensor, purpose: str = "accept", index: int = 0) -> Tensor:
        return h > self.uniform

    def draw(self, weights: Tensor, purpose: str = "residual", index: int = 0) -> Tensor:
        return self.rng.draw(weights, purpose, index)


@pytest.mark.parametrize("name, shape", AGREE)
@settings(deadline=None, max_examples=8)
@given(seed=SEEDS, b=st.integers(1, 4), depth=st.integers(1, 4), vocab=st.integers(1, 200))
def test_equal_distributions_accept_everything(
    name: str, shape: str, seed: int, b: int, depth: int, vocab: int
) -> None:
    draft, p = random_draft(shape, seed, b, depth, vocab, torch.float32, equal=1.0)
    verdict = RULES[name]().verify(draft, p, Stubborn(shipped_rng(seed, range(b)), 1 - 1e-5))
    deepest = torch.where(draft.valid, draft.depth, 0).amax(1) if draft.width else draft.count
    assert verdict.length.tolist() == deepest.tolist()


@pytest.mark.parametrize("name, shape", [pair for pair in LOSSLESS if pair[1] in ("point-mass", "top-k")])
@settings(deadline=None, max_examples=8)
@given(seed=SEEDS, b=st.integers(1, 4), depth=st.integers(1, 4), vocab=st.integers(1, 12))
def test_one_hot_distribution_is_point_mass(name: str, shape: str, seed: int, b: int, depth: int, vocab: int) -> None:
    draft, p = random_draft(shape, seed, b, depth, vocab)
    one_hot = torch.zeros_like(p[:, : draft.width]).scatter_(2, draft.tokens[..., None], 1.0)
    spelt_out = Draft(draft.tokens, draft.parents, draft.valid, one_hot, kind=draft.kind, levels=draft.levels)
    verdicts = [RULES[name]().verify(d, p, shipped_rng(seed, range(b))) for d in (draft, spelt_out)]
    assert tokens_of(draft, verdicts[0]) == tokens_of(spelt_out, verdicts[1])
