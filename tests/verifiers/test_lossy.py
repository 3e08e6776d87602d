"""The lossy rules: what they accept, what they do to the target's law, and that they never hide it."""

import itertools
import json
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from random_drafts import random_chains, random_laws
from torch import Tensor

from crossdraft.framework import cli, plugins
from crossdraft.framework.bench.metrics import Chunk, RoundRecord, measure
from crossdraft.framework.bench.recipe import CellConfig, Recipe
from crossdraft.framework.bench.records import CellResult
from crossdraft.framework.bench.run import Outcome
from crossdraft.framework.certify import certify
from crossdraft.framework.certify_command import DRAFTS
from crossdraft.framework.draft import Draft, Verdict
from crossdraft.framework.report.tables import summary_markdown, terminal
from crossdraft.framework.rng import CounterRng
from crossdraft.framework.tablelm import Toy

TOYS = ("T0", "G1", "G2", "G3", "G4")
CHAINS = ("chain", "point-mass")
TREES = ("iid-2", "tree-wor-2-1", "tree-greedy-2-1", "tree-top-2-1")
CHAIN_RULES, TREE_RULES = ("lenient", "bild"), ("typical", "top-k")
LOSSY = CHAIN_RULES + TREE_RULES
SEEDS = st.integers(0, 2**31)


def rule(name: str, **options: Any) -> Any:
    found = plugins.get("verifiers", name)
    return found(found.Config(**options))


def shipped_rng(seed: int, streams: Any) -> Any:
    return CounterRng(seed).round(list(streams), [0] * len(streams), torch.device("cpu"))


class Recording:
    """A rng that accepts everything or nothing, and keeps the probabilities it was asked about."""

    def __init__(self, accepts: bool = True):
        self.accepts = accepts
        self.h = self.weights = torch.empty(0)

    def accept(self, h: Tensor, purpose: str = "accept", index: int = 0) -> Tensor:
        self.h = h
        return torch.full_like(h, self.accepts, dtype=torch.bool)

    def draw(self, weights: Tensor, purpose: str = "residual", index: int = 0) -> Tensor:
        self.weights = weights / weights.sum(-1, keepdim=True)
        return weights.argmax(-1)


# -- what the output becomes: exact values --------------------------------------------------------------
#
# A rule by hand: ``judge(P, Q, x)`` is the probability that x is accepted, and the law of what follows if it is not;
# x = None asks for the law after a draft that is kept whole.

Judge = Callable[[list[float], list[float], int | None], tuple[float, list[float]]]


def normalised(weights: list[float]) -> list[float]:
    return [w / sum(weights) for w in weights]


def favourite(law: list[float]) -> list[float]:
    best = law.index(max(law))
    return [float(y == best) for y in range(len(law))]


def lenient(lenience: float) -> Judge:
    def judge(p: list[float], q: list[float], x: int | None) -> tuple[float, list[float]]:
        if x is None:
            return 0.0, p
        left = [max(a - lenience * b, 0.0) for a, b in zip(p, q, strict=True)]
        return min(1.0, p[x] / (lenience * q[x])), normalised(left) if sum(left) else p

    return judge


def typical(epsilon: float, delta: float) -> Judge:
    def judge(p: list[float], q: list[float], x: int | None) -> tuple[float, list[float]]:
        entropy = -sum(a * math.log(a) for a in p if a)
        passes = [a > min(epsilon, delta * math.exp(-entropy)) for a in p]
        return float(x is not None and passes[x]), normalised([a * ok for a, ok in zip(p, passes, strict=True)])

    return judge


def top_k(k: int, tolerance: float) -> Judge:
    def judge(p: list[float], q: list[float], x: int | None) -> tuple[float, list[float]]:
        best = sorted(range(len(p)), key=lambda y: -p[y])[:k]  # stable: ties by lowest id
        ok = x is not None and x in best and p[x] > 0 and math.log(max(p) / p[x]) <= tolerance
        return float(ok), favourite(p)

    return judge


def bild(rollback: float) -> Judge:
    def judge(p: list[float], q: list[float], x: int | None) -> tuple[float, list[float]]:
        if x is None:
            return 0.0, favourite(p)
        return float(p.index(max(p)) == x or (p[x] > 0 and -math.log(p[x]) <= rollback)), favourite(p)

    return judge


SETTINGS: list[tuple[str, dict[str, Any], Judge]] = [
    ("lenient", {"lenience": 0.8}, lenient(0.8)),
    ("lenient", {"lenience": 0.1}, lenient(0.1)),
    ("typical", {}, typical(0.09, 0.3)),
    ("typical", {"epsilon": 0.3, "delta": 0.6}, typical(0.3, 0.6)),
    ("typical", {"epsilon": 1, "delta": 0.65}, typical(1, 0.65)),
    ("top-k", {}, top_k(3, 1.0)),
    ("top-k", {"k": 2, "tolerance": 1.5}, top_k(2, 1.5)),
    ("top-k", {"k": 2, "tolerance": math.inf}, top_k(2, math.inf)),
    ("bild", {}, bild(5.0)),
    ("bild", {"rollback": 1.25}, bild(1.25)),
]


def by_hand(toy: Toy, judge: Judge, draft: str) -> tuple[float, float]:
    """E[tau] of one round on a chain and the TV of gamma + 1 tokens, by going through every draft and outcome."""
    v, gamma = toy.vocab_size, toy.gamma
    target, drafter = toy.target.tolist(), toy.drafter.tolist()
    if draft == "point-mass":
        drafter = [favourite(law) for law in drafter]
    said: dict[tuple[int, ...], float] = {}
    expected = 0.0
    for x in itertools.product(range(v), repeat=gamma):
        before = (v, *x)
        weight = math.prod(drafter[last][token] for last, token in itertools.pairwise(before))
        if not weight:
            continue
        for tau in range(gamma + 1):
            p, q = target[before[tau]], drafter[before[tau]]
            h, after = judge(p, q, x[tau] if tau < gamma else None)
            for y, probability in enumerate(after):
                out = (*x[:tau], y)
                said[out] = said.get(out, 0.0) + weight * (1 - h) * probability
            expected += tau * weight * (1 - h)
            weight *= h
    tv = 0.0
    for full in itertools.product(range(v), repeat=gamma + 1):
        steps = [target[last][token] for last, token in itertools.pairwise((v, *full))]
        ours = sum(said.get(full[:n], 0.0) * math.prod(steps[n:]) for n in range(1, gamma + 2))
        tv += abs(ours - math.prod(steps)) / 2
    return expected, tv


@pytest.mark.parametrize("name, options, judge", SETTINGS)
@pytest.mark.parametrize("draft", CHAINS)
@pytest.mark.parametrize("toy", TOYS)
def test_chains_by_hand(
    toys: dict[str, Toy], toy: str, draft: str, name: str, options: dict[str, Any], judge: Judge
) -> None:
    expected, tv = by_hand(toys[toy], judge, draft)
    found = certify(toys[toy], DRAFTS[draft].build, lambda: rule(name, **options), markov=True)
    assert found.expected_tau[0] == pytest.approx(expected, abs=1e-12)
    assert found.tv == pytest.approx(tv, abs=1e-12)


#: toy -> E[tau], law of the first token, TV over gamma + 1 tokens, all at l = 1/2 on a sampled chain.
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
    found = certify(toys[toy], DRAFTS["chain"].build, lambda: rule("lenient", lenience=0.5), markov=True)
    assert found.expected_tau[0] == pytest.approx(float(Fraction(expected)), abs=1e-12)
    assert found.tv == pytest.approx(float(Fraction(tv)), abs=1e-12)
    law = law_of_one_token(toys[toy].target[-1], toys[toy].drafter[-1], 0.5)
    assert law.tolist() == pytest.approx([float(Fraction(x)) for x in first], abs=1e-12)


def law_of_one_token(p: Tensor, q: Tensor, lenience: float) -> Tensor:
    """What the first token follows: every draft of one token is a row of one batch."""
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
    law = law_of_one_token(p, q, lenience)
    assert law.sum() == pytest.approx(1, abs=1e-12)
    assert (law <= p / lenience + 1e-12).all()


def best_of(toy: Toy, judge: Judge, k: int) -> float:
    """E[tau] of a rule that accepts for sure or not at all, on K i.i.d. sequences: that of the best one."""
    v, gamma = toy.vocab_size, toy.gamma
    target, drafter = toy.target.tolist(), toy.drafter.tolist()
    law = [0.0] * (gamma + 1)
    for x in itertools.product(range(v), repeat=gamma):
        steps = list(itertools.pairwise((v, *x)))
        kept = [judge(target[last], drafter[last], token)[0] for last, token in steps]
        tau = sum(itertools.accumulate(kept, lambda a, b: a * b))
        law[round(tau)] += math.prod(drafter[last][token] for last, token in steps)
    at_most = list(itertools.accumulate(law))
    return sum(1 - below**k for below in at_most[:-1])


@pytest.mark.parametrize("name, options, judge", [s for s in SETTINGS if s[0] in TREE_RULES])
@pytest.mark.parametrize("draft, toy", [("iid-2", "T0"), ("iid-2", "G1"), ("iid-2", "G3"), ("iid-3", "G1")])
def test_sequences_by_hand(
    toys: dict[str, Toy], draft: str, toy: str, name: str, options: dict[str, Any], judge: Judge
) -> None:
    found = certify(toys[toy], DRAFTS[draft].build, lambda: rule(name, **options), markov=True)
    assert found.expected_tau[0] == pytest.approx(best_of(toys[toy], judge, int(draft[-1])), abs=1e-12)


@pytest.mark.parametrize("toy", ["T0", "G1", "G3"])
def test_certify_measures_the_loss(toys: dict[str, Toy], toy: str) -> None:
    for name, draft in [*itertools.product(LOSSY, CHAINS), *itertools.product(TREE_RULES, TREES)]:
        found = certify(toys[toy], DRAFTS[draft].build, lambda name=name: rule(name), rounds=2, gamma=1, markov=True)
        assert 0.01 < found.tv < 1, (name, draft)  # finite and visible
        assert not found.lossless
        assert 0 <= found.expected_tau[0] <= 1 + 1e-12


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
    """All that has probability on the toys is typical and unsurprising, which no lossless rule can say."""
    strict = certify(toys[toy], DRAFTS["chain"].build, lambda: rule("token"), markov=True)
    assert certify(toys[toy], DRAFTS["chain"].build, lambda: rule(name), markov=True).expected_tau[0] >= (
        strict.expected_tau[0] - 1e-12
    )


# -- typical acceptance: the threshold ------------------------------------------------------------------


@pytest.mark.parametrize(
    "law, entropy, threshold",
    [
        ([1 / 2, 1 / 3, 1 / 6], 1.011404264707, 0.09),
        ([0.2, 0.6, 0.2], 0.950270539233, 0.09),
        ([1 / 4] * 4, 1.386294361120, 0.075),
        ([0.97, 0.01, 0.01, 0.01], 0.167700536840, 0.09),
        ([0.0, 1.0, 0.0], 0.0, 0.09),
    ],
)
def test_typical_threshold(law: list[float], entropy: float, threshold: float) -> None:
    p = torch.tensor(law, dtype=torch.float64)
    assert rule("typical").threshold(p).item() == pytest.approx(threshold, abs=1e-12)
    # With epsilon out of the way the threshold shows the entropy, in nats.
    assert rule("typical", epsilon=1).threshold(p).item() == pytest.approx(0.3 * math.exp(-entropy), abs=1e-12)
    v = len(law)
    draft = Draft.chain(torch.arange(v)[:, None], torch.ones(v, dtype=torch.long))
    verdict = rule("typical").verify(draft, p.expand(v, 2, v), shipped_rng(0, range(v)))
    assert verdict.length.tolist() == [int(x > threshold) for x in law]


def test_the_threshold_itself_does_not_pass() -> None:
    p = torch.tensor([[[0.0625, 0.9375]] * 2], dtype=torch.float64)
    for epsilon, tau in ((0.0625, 0), (0.0624, 1)):
        draft = Draft.chain(torch.tensor([[0]]), torch.tensor([1]))
        verdict = rule("typical", epsilon=epsilon, delta=0.9).verify(draft, p, shipped_rng(0, [0]))
        assert verdict.length.tolist() == [tau]


def test_the_next_token_is_drawn_among_the_typical_ones() -> None:
    p = torch.tensor([[0.5, 0.25, 0.15, 0.1]])
    rng = Recording()
    rule("typical", epsilon=0.2, delta=0.9).verify(Draft.empty(1), p[None], rng)
    assert rng.weights[0].tolist() == pytest.approx([2 / 3, 1 / 3, 0, 0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_a_flat_law_has_something_typical(dtype: torch.dtype) -> None:
    """delta exp(-H) is all but 1 / V here, and rounding may put every token below it."""
    for v in range(1, 200):
        p = torch.full((1, 1, v), 1 / v, dtype=dtype)
        rng = Recording()
        rule("typical", epsilon=1, delta=1 - 1e-12).verify(Draft.empty(1), p, rng)
        assert rng.weights.isfinite().all() and (rng.weights > 0).all()


# -- top-k and rollback ---------------------------------------------------------------------------------


def lengths(name: str, law: list[float], **options: Any) -> list[int]:
    """tau of every one-token draft."""
    v, p = len(law), torch.tensor(law, dtype=torch.float64)
    draft = Draft.chain(torch.arange(v)[:, None], torch.ones(v, dtype=torch.long))
    return rule(name, **options).verify(draft, p.expand(v, 2, v), shipped_rng(0, range(v))).length.tolist()


def test_top_k_by_hand() -> None:
    law = [0.1, 0.4, 0.1, 0.2, 0.15, 0.05]  # ln 2 = 0.69, ln 4 = 1.39 behind
    assert lengths("top-k", law) == [0, 1, 0, 1, 1, 0]
    assert lengths("top-k", law, tolerance=0.69) == [0, 1, 0, 0, 0, 0]
    assert lengths("top-k", law, tolerance=0.70) == [0, 1, 0, 1, 0, 0]
    assert lengths("top-k", law, k=4, tolerance=2) == [1, 1, 0, 1, 1, 0]  # of equals the lowest id is in
    assert lengths("top-k", law, k=2, tolerance=2) == [0, 1, 0, 1, 0, 0]
    assert lengths("top-k", law, k=99, tolerance=math.inf) == [1] * 6
    assert lengths("top-k", [0.0, 1.0, 0.0], tolerance=math.inf) == [0, 1, 0]  # never what cannot be said


def test_rollback_by_hand() -> None:
    law = [0.5, 0.25, 0.2, 0.05, 0.0]  # surprises 0.69, 1.39, 1.61, 3.0, inf
    assert lengths("bild", law) == [1, 1, 1, 1, 0]
    assert lengths("bild", law, rollback=1.4) == [1, 1, 0, 0, 0]
    assert lengths("bild", law, rollback=0) == [1, 0, 0, 0, 0]  # what would be replaced by itself stays
    assert lengths("bild", [0.0, 1.0]) == [0, 1]


def test_rollback_drops_what_follows() -> None:
    p = torch.tensor([[[0.5, 0.3, 0.2], [0.5, 0.499, 0.001], [0.1, 0.2, 0.7], [0.1, 0.8, 0.1]]])
    for x, tau, token in ([1, 0, 2], 3, 1), ([1, 2, 2], 1, 0), ([2, 1, 0], 3, 1):
        verdict = rule("bild").verify(Draft.chain(torch.tensor([x]), torch.tensor([3])), p, Recording())
        assert (verdict.length.item(), verdict.token.item()) == (tau, token)


@pytest.mark.parametrize(
    "name, options",
    [
        ("lenient", {"lenience": 0}),
        ("lenient", {"lenience": 1.1}),
        ("typical", {"epsilon": 0}),
        ("typical", {"delta": 1}),
        ("top-k", {"k": 0}),
        ("top-k", {"tolerance": -1}),
        ("bild", {"rollback": math.inf}),
        ("bild", {"fallback": 0.6}),
    ],
)
def test_impossible_settings(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        rule(name, **options)


# -- random drafts --------------------------------------------------------------------------------------


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
    return Draft(tokens, parents, valid, drawn="deterministic"), p


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
def test_a_one_hot_law_is_a_point_mass(seed: int, v: int, lenience: float, b: int, n: int) -> None:
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
    twin = (draft.elder & (draft.tokens[..., None] == draft.tokens[:, None])).any(2)
    draft.valid = draft.valid & ~(draft.lineage & twin[:, None]).any(2)
    return Draft(draft.tokens, draft.parents, draft.valid, drawn="deterministic")


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
        lax = {"lenient": {"lenience": 0.01}, "top-k": {"tolerance": math.inf}, "bild": {"rollback": 1e9}}
        for name in names:
            for options in ({}, lax.get(name, {})):
                assert_same(rule(name, **options).verify(draft, p, shipped_rng(seed, range(b))), greedy)


@settings(deadline=None, max_examples=40)
@given(v=st.integers(1, 6), ties=st.booleans(), **sizes)
def test_the_strictest_settings_are_greedy(seed: int, v: int, ties: bool, b: int, n: int) -> None:
    strictest = {"k=1": rule("top-k", k=1, tolerance=math.inf), "rollback=0": rule("bild", rollback=0)}
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
    ("top-k", {"k": 3, "tolerance": math.inf}, top_k(3, math.inf)),
]


@pytest.mark.parametrize("name, options, judge", WALKED)
@pytest.mark.parametrize("make", [random_chains, random_trees])
@settings(deadline=None, max_examples=60)
@given(v=st.integers(1, 5), ties=st.booleans(), **sizes)
def test_the_deepest_path_by_hand(
    name: str, options: dict[str, Any], judge: Judge, make: Callable, seed: int, v: int, ties: bool, b: int, n: int
) -> None:
    draft, p = make(seed, b, n, v, torch.float64)
    if ties:
        p = (p * 6).round() + torch.eye(v, dtype=p.dtype)[0]  # some law somewhere
        p = p / p.sum(2, keepdim=True)
    rng = Recording()
    verdict = rule(name, **options).verify(draft, p, rng)
    for row in range(b):
        parents, tokens, laws = draft.parents[row].tolist(), draft.tokens[row].tolist(), p[row].tolist()
        reached = {-1: 0.0}  # node -> sum of ln P along its path
        for node in range(n):
            law = laws[parents[node] + 1]
            if draft.valid[row, node] and parents[node] in reached and judge(law, law, tokens[node])[0]:
                reached[node] = reached[parents[node]] + math.log(law[tokens[node]])
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
        after = judge(laws[node + 1], laws[node + 1], None)[1]
        if name == "typical":
            assert rng.weights[row].tolist() == pytest.approx(after, abs=1e-12)
        else:
            assert after[int(verdict.token[row])] == 1


def test_of_equal_paths_the_first_is_kept() -> None:
    """Two chains of two nodes: the second is more probable, or both are equally so."""
    draft = Draft(
        tokens=torch.tensor([[0, 1, 1, 0], [0, 1, 1, 0]]),
        parents=torch.tensor([[-1, -1, 0, 1]] * 2),
        valid=torch.ones(2, 4, dtype=torch.bool),
        drawn="deterministic",
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
def test_a_row_does_not_see_its_neighbours(
    name: str, make: Callable, point_mass: bool, seed: int, v: int, b: int, n: int
) -> None:
    """Neither the other rows nor the padding they need change a verdict, and p is left as it was."""
    draft, p = make(seed, b, n, v)
    if point_mass and draft.is_chain:
        draft = Draft.chain(draft.tokens, draft.count)
    before = p.clone()
    together = rule(name).verify(draft, p, shipped_rng(seed, range(b)))
    assert torch.equal(p, before)
    for row in range(b):
        count = int((draft.valid[row] * torch.arange(1, n + 1)).max()) if n else 0
        alone = Draft(
            draft.tokens[row : row + 1, :count],
            draft.parents[row : row + 1, :count],
            draft.valid[row : row + 1, :count],
            None if draft.q is None else draft.q[row : row + 1, :count],
            drawn=draft.drawn,
        )
        verdict = rule(name).verify(alone, p[row : row + 1, : count + 1], shipped_rng(seed, [row]))
        assert verdict.length.item() == together.length[row]
        assert verdict.token.item() == together.token[row]
        if verdict.path is not None:
            assert together.path is not None
            assert verdict.path[0].tolist() == together.path[row, :count].tolist()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name, make, point_mass", list(cases()))
@settings(deadline=None, max_examples=8)
@given(v=st.integers(1, 60), **sizes)
def test_any_draft_gets_a_sound_verdict(
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


# -- never without saying so ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSY)
def test_the_command_says_declared_lossy(capsys: Any, name: str) -> None:
    labels = [part for label in (*CHAINS, "iid-2", "tree-top-2-1") for part in ("--draft", label)]
    assert cli.main(["certify", "--verifier", name, *labels, "--gamma", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert len(lines) == len(TOYS) * (4 if name in TREE_RULES else 2)
    for line in lines:
        assert line.endswith("declared lossy")


def test_json_does_not_call_them_lossless(capsys: Any) -> None:
    verifiers = [part for name in LOSSY for part in ("--verifier", name)]
    assert cli.main(["certify", *verifiers, "--draft", "chain", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == len(LOSSY) * len(TOYS)
    assert not any(row["lossless"] for row in rows)


def test_tables_mark_them(tmp_path: Path) -> None:
    """In the table and wherever two verifiers are compared; a label does not hide it."""

    def result(drafter: str, verifier: Any) -> CellResult:
        config = CellConfig.model_validate({"target": "toy", "drafter": drafter, "verifier": verifier})
        records = [RoundRecord(0, "q", "", 0, i, 1, 2, 2, 2) for i in range(3)]
        seconds = {"draft": 0.0, "target": 1.0, "verify": 0.0, "rest": 0.0, "prefill": 0.0}
        return CellResult(config, measure(records, [Chunk(6, seconds)]), records=records)

    strict = result("prompt-lookup", "token")
    lossy = [result("prompt-lookup", {"name": name, "label": f"my {name}"}) for name in LOSSY]
    recipe = Recipe.model_validate({"target": "toy", "drafters": ["prompt-lookup"], "verifiers": ["token"]})
    for report in (terminal, summary_markdown):
        text = report(Outcome(recipe, tmp_path, [result("none", "token"), strict, *lossy]))
        assert "token (lossy)" not in text
        for name in LOSSY:
            assert f"BE of my {name} (lossy) − token, on the same prompts" in text
            assert text.count(f"my {name}") == text.count(f"my {name} (lossy)") == 2
        assert "lossy verifiers change what the target says" in text
        assert "lossy" not in report(Outcome(recipe, tmp_path, [result("none", "token"), strict]))
