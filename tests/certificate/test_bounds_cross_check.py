"""The linear programs of `crossdraft.framework.certificate.bounds` against other ways to the same numbers."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from crossdraft.framework.certificate import bounds as module
from crossdraft.framework.certificate.bounds import (
    bounds,
    draft_distribution,
    target_prefix_probs,
    transport,
    transport_iid,
)
from crossdraft.framework.certificate.drafts import DRAFTS
from crossdraft.framework.certificate.table_lm import Toy


def by_subsets(sets: dict[frozenset, float], p: dict[Any, float]) -> float:
    """1 + min over all H of P(H) - Pr(S inside H)."""
    best = 0.0
    for size in range(len(p) + 1):
        for chosen in map(set, itertools.combinations(p, size)):
            inside = sum(mass for s, mass in sets.items() if s <= chosen)
            best = min(best, sum(p[x] for x in chosen) - inside)
    return 1 + best


def as_prefixes(sets: dict[frozenset, float], p: np.ndarray) -> tuple[dict, dict]:
    """Tokens as prefixes of one token."""
    return {frozenset((x,) for x in s): mass for s, mass in sets.items()}, {(x,): mass for x, mass in enumerate(p)}


def random_law(generator: np.random.Generator, vocab: int) -> np.ndarray:
    """From nearly flat to nearly one-hot, some tokens without mass."""
    probs = generator.dirichlet(np.full(vocab, 10 ** generator.uniform(-1, 1)))
    probs[generator.random(vocab) < 0.2] = 0
    return probs / probs.sum() if probs.sum() else np.eye(vocab)[0]


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_independent_drafts_against_all_subsets(k: int) -> None:
    generator = np.random.default_rng(k)
    for vocab in (1, 2, 3, 5) * 5:
        p, q = random_law(generator, vocab), random_law(generator, vocab)
        sets: dict[frozenset, float] = {}
        for draws in itertools.product(range(vocab), repeat=k):
            sets[frozenset(draws)] = sets.get(frozenset(draws), 0.0) + float(np.prod(q[list(draws)]))
        want = by_subsets(sets, dict(enumerate(p)))
        assert transport_iid(p, q, k) == pytest.approx(want, abs=1e-12)
        flow = transport(*as_prefixes(sets, p))
        assert flow == pytest.approx(want, abs=1e-9)


@pytest.mark.parametrize("kind", ["without-replacement", "any"])
def test_dependent_drafts_against_all_subsets(kind: str) -> None:
    generator = np.random.default_rng(7)
    for vocab in (2, 3, 5) * 5:
        p, q = random_law(generator, vocab), generator.dirichlet(np.ones(vocab))
        if kind == "any":
            subsets = [frozenset(s) for n in range(vocab) for s in itertools.combinations(range(vocab), n)]
            sets = dict(zip(subsets, generator.dirichlet(np.ones(len(subsets))), strict=True))
        else:
            sets = {
                frozenset(pair): q[pair[0]] * q[pair[1]] * (1 / (1 - q[pair[0]]) + 1 / (1 - q[pair[1]]))
                for pair in itertools.combinations(range(vocab), 2)
            }
        flow = transport(*as_prefixes(sets, p))
        assert flow == pytest.approx(by_subsets(sets, dict(enumerate(p))), abs=1e-9)


@pytest.mark.parametrize("toy", ["G1", "G3"])
@pytest.mark.parametrize("level", [1, 2])
def test_levels_of_independent_sequences_as_flow(toys: dict[str, Toy], toy: str, level: int) -> None:
    """The closed form over prefixes and the flow over the drafts that were enumerated are the same number."""
    drafts = draft_distribution(toys[toy], DRAFTS["iid-2"].build, toys[toy].gamma)
    joint = target_prefix_probs(toys[toy].target, drafts)
    want = module._transport(drafts, joint, level)
    drafts.sequences = None
    assert module._transport(drafts, joint, level) == pytest.approx(want, abs=1e-9)


def test_every_draft_is_enumerated(toys: dict[str, Toy]) -> None:
    toy = toys["G1"]
    drafts = draft_distribution(toy, DRAFTS["iid-2"].build, toy.gamma)
    q = toy.drafter.tolist()
    single = {(a, b): q[3][a] * q[a][b] for a in range(3) for b in range(3)}
    want: dict[frozenset, float] = {}
    for (item, mass), (other, mass_2) in itertools.product(single.items(), repeat=2):
        tree = frozenset([item, other, item[:1], other[:1]])
        want[tree] = want.get(tree, 0.0) + mass * mass_2
    assert drafts.trees == pytest.approx(want, abs=1e-15)
    assert drafts.sequences == 2 and not drafts.is_chain
    assert {x: mass for x, mass in drafts.single.items() if len(x) == 2} == pytest.approx(single, abs=1e-15)


def test_rounding_does_not_make_program_infeasible() -> None:
    """Masses from 1e-13 to 1 on both sides, which sum to 1 up to rounding."""
    generator = torch.Generator().manual_seed(0)
    distributions = [(3 * torch.randn(5, 4, generator=generator, dtype=torch.float64)).softmax(-1) for _ in range(2)]
    own = bounds(Toy("steep", 2, *distributions), DRAFTS["tree-wor-2-1"].build, 2)
    assert own.lp is not None and own.full_information is not None
    assert 0 < own.lp <= own.full_information + 1e-9
