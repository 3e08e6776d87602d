"""Certificates compared with closed forms, also of stateful verifiers.

That every registered verifier has its golden numbers is tests/verifiers/test_golden.py.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from certificate_verifiers import ByTurn, WrongLater, exact, kind_of
from verifier_traits import traits_of

from crossdraft.framework import plugins
from crossdraft.framework.certificate.certify import TOLERANCE, Certificate, certify
from crossdraft.framework.certificate.drafts import DRAFTS
from crossdraft.framework.certificate.table_lm import Toy
from crossdraft.framework.contracts.draft import Draft
from crossdraft.framework.contracts.draft_kind import CHAIN
from crossdraft.framework.contracts.drafter import Drafter, DraftTraits

TOYS = ("T0", "G1", "G2", "G3", "G4")
CHAINS = ("chain", "point-mass", "stop-early")
Certified = Callable[[str, str, str], Certificate]


@pytest.fixture(scope="module")
def certified(toys: dict[str, Toy], drafts: dict[str, Callable]) -> Certified:
    """``certified(toy, draft label, verifier)``: two steps, each pair enumerated once."""
    results: dict[tuple[str, str, str], Certificate] = {}

    def look_up(toy: str, draft: str, verifier: str) -> Certificate:
        key = (toy, draft, verifier)
        if key not in results:
            rule = plugins.get("verifiers", verifier)
            temperature = 0.0 if verifier == "greedy" else 1.0
            results[key] = certify(toys[toy], drafts[draft], rule, steps=2, temperature=temperature, markov=True)
        return results[key]

    return look_up


# -- chains ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verifier", ["token", "block", "greedy"])
@pytest.mark.parametrize("draft", CHAINS)
@pytest.mark.parametrize("toy", TOYS)
def test_two_steps_are_lossless(certified: Certified, toy: str, draft: str, verifier: str) -> None:
    assert certified(toy, draft, verifier).tv <= TOLERANCE


def closed_form(toy: Toy, draft: str, verifier: str) -> float:
    """E[tau] of the first step without decoding: the sum over prefixes of Pr(drafted) Pr(accepted)."""
    total = 0.0
    for depth in range(1, toy.gamma + 1):
        for prefix in itertools.product(range(toy.vocab_size), repeat=depth):
            drafted = accepted = 1.0
            for i, (last, token) in enumerate(zip((toy.vocab_size, *prefix), prefix, strict=False)):
                p, q = float(toy.target[last, token]), float(toy.drafter[last, token])
                if draft == "point-mass":
                    q = float(token == int(toy.drafter[last].argmax()))
                if q == 0:
                    drafted = 0.0
                    break
                if draft == "stop-early" and q < 0.4 - 1e-9 and i + 1 < depth:
                    drafted = 0.0  # the draft ended with this token
                drafted *= q
                if verifier == "token":
                    accepted *= min(1.0, p / q)
                else:
                    accepted = min(1.0, accepted * p / q)
            total += drafted * accepted
    return total


@pytest.mark.parametrize("verifier", ["token", "block"])
@pytest.mark.parametrize("draft", CHAINS)
@pytest.mark.parametrize("toy", TOYS)
def test_expected_tau_of_every_kind_of_draft(
    certified: Certified, toys: dict[str, Toy], toy: str, draft: str, verifier: str
) -> None:
    want = closed_form(toys[toy], draft, verifier)
    assert certified(toy, draft, verifier).expected_tau[0] == pytest.approx(want, abs=1e-9)


@pytest.mark.parametrize("verifier", ["token", "block", "greedy"])
@pytest.mark.parametrize("toy", TOYS)
def test_stopping_early_accepts_less(certified: Certified, toy: str, verifier: str) -> None:
    early, full = certified(toy, "stop-early", verifier), certified(toy, "chain", verifier)
    assert early.expected_tau[0] < full.expected_tau[0] - 1e-3


@pytest.mark.parametrize("verifier", ["token", "block", "greedy"])
@pytest.mark.parametrize("draft", CHAINS)
def test_gamma_zero_is_plain_decoding(toys: dict[str, Toy], drafts: dict, draft: str, verifier: str) -> None:
    rule = plugins.get("verifiers", verifier)
    temperature = 0.0 if traits_of(rule).temperature_zero_only else 1.0
    certificate = certify(toys["G1"], drafts[draft], rule, steps=3, gamma=0, temperature=temperature)
    assert certificate.tv <= TOLERANCE
    assert certificate.expected_tau == [0, 0, 0]
    assert certificate.first_tau == pytest.approx([1])


class FixedChain(Drafter):
    """Proposes the same tokens every step, as a point mass."""

    name = "fixed-chain"

    def __init__(self, context: Any, tokens: Sequence[int]):
        super().__init__(self.Config(), context)
        self.tokens = tokens

    @classmethod
    def traits(cls, config: Any, sampling: Any) -> DraftTraits:
        return DraftTraits(kind=CHAIN, point_mass=True, nodes=16)

    def propose(self, sequences: Any, rng: Any) -> Draft:
        b = sequences.batch_size
        tokens = torch.tensor(self.tokens).expand(b, -1)
        return Draft.chain(tokens, torch.tensor(sequences.limit).clamp(max=tokens.shape[1]))


@pytest.mark.parametrize("verifier", ["token", "block"])
@pytest.mark.parametrize(
    "toy, tokens, want",
    [("T0", (1, 1), "10/9"), ("G1", (0, 1), "4/5"), ("G2", (0, 1, 0), "27/16"), ("G3", (0, 2), "5/8")],
)
def test_fixed_chain_as_point_mass(
    toys: dict[str, Toy], toy: str, tokens: Sequence[int], want: str, verifier: str
) -> None:
    rule = plugins.get("verifiers", verifier)
    certificate = certify(toys[toy], lambda context, gamma: FixedChain(context, tokens), rule, steps=2)
    assert certificate.tv <= TOLERANCE
    assert certificate.expected_tau[0] == pytest.approx(float(Fraction(want)), abs=1e-9)


# -- verifiers with state -------------------------------------------------------------------------------


@pytest.mark.parametrize("toy", ["T0", "G1"])
def test_state_travels_between_steps(toys: dict[str, Toy], drafts: dict, golden: dict, toy: str) -> None:
    certificate = certify(toys[toy], drafts["chain"], ByTurn, steps=2, markov=True)
    assert certificate.tv <= TOLERANCE
    assert certificate.expected_tau[0] == pytest.approx(
        exact(golden["expected_tau"]["token"]["chain"][toy])[0], abs=1e-9
    )
    if toy == "T0":  # its distributions do not depend on the context, so the second step is block's first
        assert certificate.expected_tau[1] == pytest.approx(
            exact(golden["expected_tau"]["block"]["chain"][toy])[0], abs=1e-9
        )


@pytest.mark.parametrize("toy", ["T0", "G1"])
def test_mistake_in_second_step_takes_two_steps_to_see(toys: dict[str, Toy], drafts: dict, toy: str) -> None:
    assert certify(toys[toy], drafts["chain"], WrongLater, steps=1).lossless
    certificate = certify(toys[toy], drafts["chain"], WrongLater, steps=2, markov=True)
    assert certificate.tv > 0.05
    assert certificate.expected_tau[1] == pytest.approx(toys[toy].gamma)


# -- draft labels, and the options of `certify` -------------------------------------------------------------


def drawn_children(q: list[float], label: str) -> Iterator[tuple[float, set[int]]]:
    """The children that a draft of one level can have, with their probability."""
    tokens = range(len(q))
    ranked = sorted(tokens, key=lambda x: -q[x])
    if draws := {"chain": 1, "iid-2": 2, "iid-delay-1": 2, "iid-3": 3}.get(label):
        for children in itertools.product(tokens, repeat=draws):
            yield math.prod(q[x] for x in children), set(children)
    elif label in ("tree-wor-2-1", "tree-sequoia"):
        for x, y in itertools.permutations(tokens, 2):
            if q[x] > 0:
                yield q[x] * (q[y] / (1 - q[x])), {x, y}
    elif label == "tree-greedy-2-1":
        for y in ranked[1:]:
            yield q[y] / (1 - q[ranked[0]]), {ranked[0], y}
    else:
        yield 1.0, set(ranked[: {"point-mass": 1, "tree-top-2-1": 2}[label]])


@pytest.mark.parametrize("label", [label for label in DRAFTS if label not in ("stop-early", "tree-opt")])
@pytest.mark.parametrize("toy", TOYS)
def test_draft_labels_match_their_drafts(toys: dict[str, Toy], drafts: dict, toy: str, label: str) -> None:
    """Sampling the target and looking for the token among the children finds it as often as it is one."""
    p, q = toys[toy].target[-1].tolist(), toys[toy].drafter[-1].tolist()
    certificate = certify(toys[toy], drafts[label], plugins.get("verifiers", "sample-match"), gamma=1)
    want = sum(probability * sum(p[x] for x in children) for probability, children in drawn_children(q, label))
    assert certificate.expected_tau == pytest.approx([want], abs=1e-12)
    assert certificate.first_tau == pytest.approx([1 - want, want], abs=1e-12)


@pytest.mark.parametrize(
    "label, kind",
    [
        ("chain", "chain"),
        ("point-mass", "chain"),
        ("stop-early", "chain"),
        ("iid-2", "iid"),
        ("iid-delay-1", "delayed_iid"),
        ("iid-3", "iid"),
        ("tree-wor-2-1", "without_replacement"),
        ("tree-greedy-2-1", "greedy_draft"),
        ("tree-top-2-1", "deterministic"),
        ("tree-sequoia", "without_replacement"),
        ("tree-opt", "deterministic"),
    ],
)
def test_labels_make_drafts_of_their_kind(label: str, kind: str) -> None:
    assert kind_of(DRAFTS[label], plugins.get("verifiers", "token")).name == kind


@pytest.mark.parametrize("label, verifier", [("chain", "greedy-block"), ("iid-2", "traversal"), ("chain", "token")])
def test_draft_length_for_each_step(toys: dict[str, Toy], drafts: dict, label: str, verifier: str) -> None:
    """T0 does not depend on the context: a stateless verifier has the same distribution in every step."""
    rule, t0 = plugins.get("verifiers", verifier), toys["T0"]
    lengths = [2, 0, 1, 2]
    certificate = certify(t0, drafts[label], rule, steps=4, gamma=lengths, markov=True)
    assert certificate.tv <= TOLERANCE
    assert len(certificate.first_tau) == 3
    if traits_of(rule).stateful:
        assert certificate.expected_tau[1] == 0
    else:
        separate = {n: certify(t0, drafts[label], rule, gamma=n).expected_tau[0] for n in set(lengths)}
        assert certificate.expected_tau == pytest.approx([separate[n] for n in lengths], abs=1e-12)


def test_one_draft_length_for_all_steps_is_list_of_equal_ones(toys: dict[str, Toy], drafts: dict) -> None:
    block = plugins.get("verifiers", "block")
    same, listed = (certify(toys["G1"], drafts["chain"], block, steps=2, gamma=gamma) for gamma in (1, [1, 1]))
    assert listed == same


def test_draft_lengths_must_be_as_many_as_steps(toys: dict[str, Toy], drafts: dict) -> None:
    with pytest.raises(ValueError, match="3 draft lengths for 2 steps"):
        certify(toys["T0"], drafts["chain"], plugins.get("verifiers", "token"), steps=2, gamma=[1, 2, 1])


@pytest.mark.parametrize(
    "toy, label, verifier, gamma",
    [
        ("T0", "chain", "greedy-block", [2, 2, 2]),
        ("G2", "chain", "greedy-block", [3, 1]),
        ("G1", "chain", "block", [2, 2]),
        ("T0", "iid-2", "multipath-block", [2, 1]),
        ("T0", "tree-wor-2-1", "traversal", [1, 2]),
    ],
)
def test_merging_equal_states_keeps_result(
    toys: dict[str, Toy], drafts: dict, toy: str, label: str, verifier: str, gamma: list[int]
) -> None:
    one_by_one, merged = (
        certify(
            toys[toy],
            drafts[label],
            plugins.get("verifiers", verifier),
            steps=len(gamma),
            gamma=gamma,
            markov=markov,
        )
        for markov in (False, True)
    )
    assert merged.expected_tau == pytest.approx(one_by_one.expected_tau, abs=1e-12)
    assert merged.first_tau == pytest.approx(one_by_one.first_tau, abs=1e-12)
    assert merged.tv <= TOLERANCE and one_by_one.tv <= TOLERANCE
    assert merged.paths < one_by_one.paths


def test_merging_keeps_distinct_states(toys: dict[str, Toy], drafts: dict) -> None:
    one_by_one, merged = (
        certify(toys["T0"], drafts["chain"], WrongLater, steps=2, markov=markov) for markov in (False, True)
    )
    assert one_by_one.tv > 0.05
    assert merged.tv == pytest.approx(one_by_one.tv, abs=1e-12)
