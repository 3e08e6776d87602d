"""Output distributions of the lossy verifiers: exact values."""

import itertools
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lossy_reference import CHAINS, LOSSY, SEEDS, SETTINGS, TOYS, TREE_RULES, TREES, Judge, Recording, favourite, rule
from random_drafts import random_laws
from torch import Tensor

from crossdraft.framework.certificate.certify import certify
from crossdraft.framework.certificate.drafts import DRAFTS
from crossdraft.framework.certificate.table_lm import Toy
from crossdraft.framework.contracts.draft import Draft


def by_hand(toy: Toy, accept_rule: Judge, draft: str) -> tuple[float, float]:
    """E[tau] of one step on a chain and the TV of gamma + 1 tokens, by going through every draft and outcome."""
    v, gamma = toy.vocab_size, toy.gamma
    target, drafter = toy.target.tolist(), toy.drafter.tolist()
    if draft == "point-mass":
        drafter = [favourite(probs) for probs in drafter]
    outputs: dict[tuple[int, ...], float] = {}
    expected = 0.0
    for x in itertools.product(range(v), repeat=gamma):
        before = (v, *x)
        weight = math.prod(drafter[last][token] for last, token in itertools.pairwise(before))
        if not weight:
            continue
        for tau in range(gamma + 1):
            p, q = target[before[tau]], drafter[before[tau]]
            h, after = accept_rule(p, q, x[tau] if tau < gamma else None)
            for y, probability in enumerate(after):
                out = (*x[:tau], y)
                outputs[out] = outputs.get(out, 0.0) + weight * (1 - h) * probability
            expected += tau * weight * (1 - h)
            weight *= h
    tv = 0.0
    for full in itertools.product(range(v), repeat=gamma + 1):
        steps = [target[last][token] for last, token in itertools.pairwise((v, *full))]
        ours = sum(outputs.get(full[:n], 0.0) * math.prod(steps[n:]) for n in range(1, gamma + 2))
        tv += abs(ours - math.prod(steps)) / 2
    return expected, tv


@pytest.mark.parametrize("name, options, accept_rule", SETTINGS)
@pytest.mark.parametrize("draft", CHAINS)
@pytest.mark.parametrize("toy", TOYS)
def test_chains_by_hand(
    toys: dict[str, Toy], toy: str, draft: str, name: str, options: dict[str, Any], accept_rule: Judge
) -> None:
    expected, tv = by_hand(toys[toy], accept_rule, draft)
    certificate = certify(toys[toy], DRAFTS[draft].build, lambda: rule(name, **options), markov=True)
    assert certificate.expected_tau[0] == pytest.approx(expected, abs=1e-12)
    assert certificate.tv == pytest.approx(tv, abs=1e-12)


#: toy -> E[tau], distribution of the first token, TV over gamma + 1 tokens, all at l = 1/2 on a sampled chain.
LENIENCE: dict[str, tuple[str, list[str], str]] = {
    "T0": ("2", ["2/3", "1/3"], "1/3"),
    "G1": ("193/120", ["5/14", "13/42", "1/3"], "83/315"),
    "G2": ("199/90", ["1/2", "1/2"], "103/320"),
    "G3": ("7/8", ["1/2", "1/3", "1/6", "0"], "1/12"),
    "G4": ("189/80", ["1/2", "1/4", "1/4"], "733/2400"),
}


@pytest.mark.parametrize("toy", TOYS)
def test_lenience_of_one_half(toys: dict[str, Toy], toy: str) -> None:
    expected, first, tv = LENIENCE[toy]
    certificate = certify(toys[toy], DRAFTS["chain"].build, lambda: rule("lenient", lenience=0.5), markov=True)
    assert certificate.expected_tau[0] == pytest.approx(float(Fraction(expected)), abs=1e-12)
    assert certificate.tv == pytest.approx(float(Fraction(tv)), abs=1e-12)
    probs = law_of_one_token(toys[toy].target[-1], toys[toy].drafter[-1], 0.5)
    assert probs.tolist() == pytest.approx([float(Fraction(x)) for x in first], abs=1e-12)


def law_of_one_token(p: Tensor, q: Tensor, lenience: float) -> Tensor:
    """Distribution of the first token: every draft of one token is a row of one batch."""
    v = len(p)
    draft = Draft.chain(torch.arange(v)[:, None], torch.ones(v, dtype=torch.long), q.expand(v, 1, v))
    rng = Recording(accepts=False)
    rule("lenient", lenience=lenience).verify(draft, p.expand(v, 2, v), rng)
    return q * rng.h[:, 0] + (q * (1 - rng.h[:, 0])) @ rng.weights


@settings(deadline=None, max_examples=80)
@given(seed=SEEDS, v=st.integers(1, 12), lenience=st.floats(0.01, 1))
def test_no_token_becomes_much_more_probable(seed: int, v: int, lenience: float) -> None:
    """The promise of lenience: at most 1/l times the target's probability."""
    generator = torch.Generator().manual_seed(seed)
    p, q = random_laws(2, v, generator=generator, dtype=torch.float64)
    probs = law_of_one_token(p, q, lenience)
    assert probs.sum() == pytest.approx(1, abs=1e-12)
    assert (probs <= p / lenience + 1e-12).all()


def best_of(toy: Toy, accept_rule: Judge, k: int) -> float:
    """E[tau] of a rule that accepts for sure or not at all, on K i.i.d. sequences: that of the best one."""
    v, gamma = toy.vocab_size, toy.gamma
    target, drafter = toy.target.tolist(), toy.drafter.tolist()
    probs = [0.0] * (gamma + 1)
    for x in itertools.product(range(v), repeat=gamma):
        steps = list(itertools.pairwise((v, *x)))
        kept = [accept_rule(target[last], drafter[last], token)[0] for last, token in steps]
        tau = sum(itertools.accumulate(kept, lambda a, b: a * b))
        probs[round(tau)] += math.prod(drafter[last][token] for last, token in steps)
    at_most = list(itertools.accumulate(probs))
    return sum(1 - below**k for below in at_most[:-1])


@pytest.mark.parametrize("name, options, accept_rule", [s for s in SETTINGS if s[0] in TREE_RULES])
@pytest.mark.parametrize("draft, toy", [("iid-2", "T0"), ("iid-2", "G1"), ("iid-2", "G3"), ("iid-3", "G1")])
def test_sequences_by_hand(
    toys: dict[str, Toy], draft: str, toy: str, name: str, options: dict[str, Any], accept_rule: Judge
) -> None:
    certificate = certify(toys[toy], DRAFTS[draft].build, lambda: rule(name, **options), markov=True)
    assert certificate.expected_tau[0] == pytest.approx(best_of(toys[toy], accept_rule, int(draft[-1])), abs=1e-12)


@pytest.mark.parametrize("toy", ["T0", "G1", "G3"])
def test_certify_measures_loss(toys: dict[str, Toy], toy: str) -> None:
    for name, draft in [*itertools.product(LOSSY, CHAINS), *itertools.product(TREE_RULES, TREES)]:
        certificate = certify(
            toys[toy], DRAFTS[draft].build, lambda name=name: rule(name), steps=2, gamma=1, markov=True
        )
        assert 0.01 < certificate.tv < 1, (name, draft)  # finite and visible
        assert not certificate.lossless
        assert 0 <= certificate.expected_tau[0] <= 1 + 1e-12


@pytest.mark.parametrize("draft", [*CHAINS, "stop-early"])
@pytest.mark.parametrize("toy", TOYS)
def test_lenience_buys_tokens_with_truth(toys: dict[str, Toy], toy: str, draft: str) -> None:
    strict = certify(toys[toy], DRAFTS[draft].build, lambda: rule("token"), markov=True)
    scale = [
        certify(
            toys[toy], DRAFTS[draft].build, lambda lenience=lenience: rule("lenient", lenience=lenience), markov=True
        )
        for lenience in (1, 0.8, 0.4, 0.1)
    ]
    assert scale[0] == strict and strict.lossless
    for less, more in itertools.pairwise(scale):
        assert more.expected_tau[0] >= less.expected_tau[0] - 1e-12
        assert more.tv >= less.tv - 1e-12


@pytest.mark.parametrize("name", ["typical", "bild"])
@pytest.mark.parametrize("toy", TOYS)
def test_defaults_accept_more_than_token_verification(toys: dict[str, Toy], toy: str, name: str) -> None:
    """Every possible token of the toys is accepted, which no lossless verifier does."""
    strict = certify(toys[toy], DRAFTS["chain"].build, lambda: rule("token"), markov=True)
    assert certify(toys[toy], DRAFTS["chain"].build, lambda: rule(name), markov=True).expected_tau[0] >= (
        strict.expected_tau[0] - 1e-12
    )
