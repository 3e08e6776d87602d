"""Plausible mistakes in the rules for several drafts, each of which the certificate must catch.

As in test_mutants.py, every mistake comes with the total variation (and E[tau], if known) that exact
rational enumeration finds. Where a toy cannot see it the table has TV 0: two tokens hide most mistakes that
concern a second sibling, and a toy whose drafts rarely agree hides those that concern copies.
"""

import math
from fractions import Fraction

import pytest
from golden_numbers import number
from textbook_trees import ROOT, KSeq, Law, MultiPath, MultiStep, Row, Textbook, Traversal, Walk, coin, norm, positive

from crossdraft.framework.certificate.certify import TOLERANCE, certify
from crossdraft.framework.certificate.table_lm import Toy

TOYS = ("T0", "G1", "G3")


class KSeqRhoOne(KSeq):
    """rho = 1, which is not valid for two sequences."""

    def rho(self, p: Law, q: Law, n: int) -> float:
        return 1.0


class KSeqRhoK(KSeq):
    """rho = K: valid, but weaker than rho*. Only E[tau] shows it."""

    def rho(self, p: Law, q: Law, n: int) -> float:
        return float(n)


class KSeqWithoutShare(KSeq):
    """The residual without the factor p_acc / beta."""

    def residual(self, p: Law, q: Law, rho: float, n: int) -> Law:
        return positive(px - min(qx, px / rho) for px, qx in zip(p, q, strict=True))


class KSeqTokenResidual(KSeq):
    """Token verification's residual."""

    def residual(self, p: Law, q: Law, rho: float, n: int) -> Law:
        return positive(px - qx for px, qx in zip(p, q, strict=True))


class MultiStepNotUpdated(MultiStep):
    """The second child is verified against P as if the first had not been rejected."""

    def rejected(self, p: Law, left: Law, q: Law) -> tuple[Law, Law]:
        return p, super().rejected(p, left, q)[1] if left is p else left


class SameLaw:
    """q_j = Q for every child, though equal draws were merged or removed."""

    def children(self, row: Row, at: int) -> list[tuple[int, Law]]:
        children = row.children[at]
        return [(child, row.q[children[0]]) for child in children]


class ByToken:
    """Children examined in the order of their token ids."""

    def order(self, row: Row, children: list[int]) -> list[int]:
        return sorted(children, key=lambda child: row.token[child])


class MultiStepSameLaw(SameLaw, MultiStep): ...


class MultiStepByToken(ByToken, MultiStep): ...


class TraversalSameLaw(SameLaw, Traversal): ...


class TraversalByToken(ByToken, Traversal): ...


class TraversalCreditKept(Traversal):
    """The credit is not updated after a child has failed."""

    def failed(self, a: float, p: Law, q: Law) -> tuple[float, Law]:
        return a, super().failed(a, p, q)[1]


class MultiPathPlainLaw(MultiPath):
    """Q for the distribution of the selected path."""

    def probs(self, q: Law, hat: Law) -> Law:
        return q


class MultiPathFirst(MultiPath):
    """The first sequence verified with the distribution of the selected one."""

    def select(self, p: Law, q: Law, order: list[int], drafted: list[int]) -> int:
        return drafted[0]


class MultiPathTies(MultiPath):
    """The ratio clamped at 1: ties that the sum resolves one way and the selection the other."""

    def score(self, p: float, q: float) -> float:
        return min(1.0, super().score(p, q))

    def select(self, p: Law, q: Law, order: list[int], drafted: list[int]) -> int:
        return max(drafted, key=lambda x: self.score(p[x], q[x]))


class SpecTrGbv(Textbook):
    """The released code of SpecTr-GBV, less all but its first token, which no later step could repair."""

    def walk(self, row: Row) -> Walk:
        assert row.sequences is not None
        k, depth, rejected = len(row.sequences), len(row.sequences[0]), set()
        accepted, best = 0, row.sequences[0]
        for sequence in row.sequences:
            for i in range(accepted, depth - 1):
                if sequence[i] in rejected:
                    continue
                above, below = self.joint(row, sequence[: i + 1])
                p, q = row.p[sequence[i]], row.q[sequence[i + 1]]
                missed = [(1 - self.capped(below * qx, above * px)) ** k for px, qx in zip(p, q, strict=True)]
                gain = sum(above * px * m for px, m in zip(p, missed, strict=True))
                gain -= above * (1 - self.capped(below, above)) ** k
                loss = 1 - (1 - below) ** k - sum(above * px * (1 - m) for px, m in zip(p, missed, strict=True))
                if (yield from coin(min(1.0, max(0.0, gain / (loss + 1e-20))))):
                    accepted, best = i + 1, sequence
                else:
                    rejected.add(sequence[i])
            above, below = self.joint(row, sequence)
            if (yield from coin(above * (1 - (1 - self.capped(below, above)) ** k) / (1 - (1 - below) ** k))):
                accepted, best = depth, sequence
                break
        if accepted:
            return [], row.token[best[0]]
        p, q = row.p[ROOT], row.q[best[0]]
        left = [px * (1 - self.capped(qx, px) ** k) for px, qx in zip(p, q, strict=True)]
        return [], (yield norm(left, p))

    def joint(self, row: Row, nodes: list[int]) -> tuple[float, float]:
        """Probabilities of the path to the last of ``nodes`` under the target and under the drafter."""
        parents = [ROOT, *nodes[:-1]]
        above = math.prod(row.p[parent][row.token[node]] for parent, node in zip(parents, nodes, strict=True))
        return above, math.prod(row.q[node][row.token[node]] for node in nodes)

    def capped(self, below: float, above: float) -> float:
        return min(1.0, below / above) if above > 0 else 1.0


#: (mutant, draft label) -> toy -> TV
GOLDEN: dict[tuple[type[Textbook], str], dict[str, str]] = {
    (KSeqRhoOne, "iid-2"): {"T0": "1/9", "G1": "1/16", "G3": "1/8"},
    (KSeqRhoK, "iid-2"): {"T0": "0", "G1": "0", "G3": "0"},
    (KSeqWithoutShare, "iid-2"): {"T0": "0.0438276", "G1": "0.0548059", "G3": "0.101732"},
    (KSeqTokenResidual, "iid-2"): {"T0": "0", "G1": "0.0412454", "G3": "0.0741338"},
    (MultiStepNotUpdated, "iid-2"): {"T0": "0", "G1": "9/400", "G3": "3/32"},
    (MultiStepSameLaw, "iid-2"): {"T0": "0", "G1": "0.0441667", "G3": "1/24"},
    (MultiStepByToken, "iid-2"): {"T0": "1/9", "G1": "0.0868056", "G3": "1/8"},
    (TraversalSameLaw, "iid-2"): {"T0": "0", "G1": "1/24", "G3": "1/24"},
    (TraversalByToken, "iid-2"): {"T0": "5/81", "G1": "19/160", "G3": "1/8"},
    (TraversalCreditKept, "iid-2"): {"T0": "0.179012", "G1": "0.124352", "G3": "0"},
    (MultiPathPlainLaw, "iid-2"): {"T0": "5/81", "G1": "0.0548611", "G3": "1/8"},
    (MultiPathFirst, "iid-2"): {"T0": "5/36", "G1": "0.125568", "G3": "7/36"},
    (MultiPathTies, "iid-2"): {"T0": "0", "G1": "0.0559863", "G3": "0.0501374"},
    (SpecTrGbv, "iid-2"): {"T0": "0.0238345", "G1": "0.0198767", "G3": "0.10131"},
    (MultiStepSameLaw, "tree-wor-2-1"): {"T0": "0", "G1": "1/12", "G3": "1/12"},
    (MultiStepNotUpdated, "tree-wor-2-1"): {"T0": "0", "G1": "1/24", "G3": "3/16"},
    (TraversalSameLaw, "tree-wor-2-1"): {"T0": "0", "G1": "1/12", "G3": "1/12"},
    (TraversalCreditKept, "tree-wor-2-1"): {"T0": "1/6", "G1": "1/9", "G3": "0"},
}
#: mutant -> toy -> E[tau], where the distribution does not show the mistake or shows it in E too.
EXPECTED_TAU: dict[type[Textbook], dict[str, str]] = {
    KSeqRhoOne: {"T0": "128/81"},
    KSeqRhoK: {"T0": "157/108", "G1": "1.378604405", "G3": "5867/5120"},
}


@pytest.mark.parametrize("toy", TOYS)
@pytest.mark.parametrize(
    "textbook, label, verifier",
    [
        (KSeq, "iid-2", "spectr"),
        (MultiStep, "tree-wor-2-1", "specinfer"),
        (Traversal, "iid-2", "traversal"),
        (Traversal, "tree-wor-2-1", "traversal"),
        (MultiPath, "iid-2", "multipath-block recycle=false"),
    ],
)
def test_without_mistake_textbook_is_shipped_rule(
    toys: dict[str, Toy], golden: dict, drafts: dict, textbook: type[Textbook], label: str, verifier: str, toy: str
) -> None:
    certificate = certify(toys[toy], drafts[label], textbook)
    want = golden["expected_tau"][verifier][label][toy][0]
    assert certificate.tv <= TOLERANCE
    assert certificate.expected_tau[0] == pytest.approx(float(Fraction(want)), abs=1e-9)


@pytest.mark.parametrize("toy, want", [("T0", "4/3"), ("G1", "76667/57600"), ("G3", "73/64")])
def test_multi_step_sampling_of_distinct_children(toys: dict[str, Toy], drafts: dict, toy: str, want: str) -> None:
    """The shipped rule keeps the multiplicity of i.i.d. children; without it, it is lossless too."""
    certificate = certify(toys[toy], drafts["iid-2"], MultiStep)
    assert certificate.tv <= TOLERANCE
    assert certificate.expected_tau[0] == number(want)


@pytest.mark.parametrize("toy", TOYS)
@pytest.mark.parametrize("mutant, label", GOLDEN, ids=lambda value: getattr(value, "__name__", value))
def test_mutant_has_its_golden_numbers(
    toys: dict[str, Toy], drafts: dict, mutant: type[Textbook], label: str, toy: str
) -> None:
    tv = GOLDEN[mutant, label][toy]
    certificate = certify(toys[toy], drafts[label], mutant)
    assert certificate.tv == number(tv)
    assert certificate.lossless == (tv == "0")
    if want := EXPECTED_TAU.get(mutant, {}).get(toy):
        assert certificate.expected_tau[0] == number(want)


def test_every_mutant_but_weaker_rule_is_seen_by_some_toy() -> None:
    unseen = {mutant for (mutant, _), per_toy in GOLDEN.items() if set(per_toy.values()) == {"0"}}
    assert unseen == {KSeqRhoK}


def test_weaker_rho_is_detected_only_by_expected_tau(golden: dict) -> None:
    for toy, weaker in EXPECTED_TAU[KSeqRhoK].items():
        best = Fraction(golden["expected_tau"]["spectr"]["iid-2"][toy][0])
        assert GOLDEN[KSeqRhoK, "iid-2"][toy] == "0" and abs(best - Fraction(weaker)) > Fraction(1, 50)
