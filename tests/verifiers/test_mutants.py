"""Plausible mistakes in the rules for one draft, each of which the certificate must catch.

A certificate that never fails proves nothing. These are common mistakes in
these rules, each with the total variation and E[tau] that exact rational enumeration finds on each toy. Where
a toy cannot see a mistake (TV 0) the table states it: that is why there are five of them. Mistakes over
several steps, and those of drafters, are in test_round_mutants.py.
"""

from typing import Any

import pytest
import torch
from golden_numbers import number
from torch import Tensor

from crossdraft.framework.certificate.certify import TOLERANCE, certify
from crossdraft.framework.certificate.table_lm import Toy
from crossdraft.framework.contracts.draft import Draft, Verdict
from crossdraft.framework.contracts.draft_kind import SINGLE_CHILD
from crossdraft.framework.contracts.verifier import Verifier, VerifierTraits

TOYS = ("T0", "G1", "G2", "G3", "G4")


class Textbook(Verifier):
    """Block verification written as in the paper, in pieces that a mutant can get wrong.

    Only for drafts of full length. Q_gamma is a row of zeros, so that one formula gives the interior h_i, the
    last h_gamma = p_gamma, and the bonus P_gamma as a residual. Column i of every array is index i.
    """

    name = "textbook"
    traits = classmethod(lambda cls, config: VerifierTraits(accepts=frozenset({SINGLE_CHILD})))

    def verify(self, draft: Draft, p: Tensor, rng: Any) -> Verdict:
        assert draft.q is not None and bool(draft.valid.all())
        q = torch.cat([draft.q, torch.zeros_like(p[:, :1])], 1)
        x = draft.tokens[..., None]
        ratio = (p[:, :-1].gather(2, x) / q[:, :-1].gather(2, x)).squeeze(2)
        joint = self.joint(torch.cat([torch.ones_like(ratio[:, :1]), ratio], 1))
        tau = self.choose(self.acceptance(joint, excess_mass(joint, p, q)), rng)
        weights = self.residual(tau, joint, p, q)
        fallback = p[torch.arange(len(tau)), tau]  # the drawn rejection had probability 0
        return Verdict(tau, rng.draw(torch.where(weights.sum(1, keepdim=True) > 0, weights, fallback)))

    def joint(self, ratio: Tensor) -> Tensor:
        """p_i; ``ratio[:, 0]`` is 1."""
        columns = [ratio[:, 0]]
        for r in ratio[:, 1:].unbind(1):
            columns.append((columns[-1] * r).clamp(max=1))
        return torch.stack(columns, 1)

    def acceptance(self, joint: Tensor, s: Tensor) -> Tensor:
        """h_i."""
        return interior(joint, s)

    def choose(self, h: Tensor, rng: Any) -> Tensor:
        """Tau."""
        accepted = rng.accept(h[:, 1:])
        return (accepted * torch.arange(1, h.shape[1])).amax(1)

    def residual(self, tau: Tensor, joint: Tensor, p: Tensor, q: Tensor) -> Tensor:
        rows = torch.arange(len(tau))
        return (joint[rows, tau, None] * p[rows, tau] - q[rows, tau]).clamp(min=0)


def excess_mass(joint: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """The excess mass S_i = sum_x (p_i P_i - Q_i)_+."""
    return (joint[..., None] * p - q).clamp(min=0).sum(2)


def interior(joint: Tensor, s: Tensor) -> Tensor:
    """S_i / (S_i + 1 - p_i), 0/0 = 1."""
    denominator = s + (1 - joint)
    return torch.where(denominator > 0, s / denominator, 1.0).clamp(0, 1)


class M1(Textbook):
    """No min in p_i; h clipped at 1."""

    def joint(self, ratio: Tensor) -> Tensor:
        return ratio.cumprod(1)

    def acceptance(self, joint: Tensor, s: Tensor) -> Tensor:
        h = torch.where(joint >= 1, 1.0, interior(joint, s))
        return torch.cat([h[:, :-1], joint[:, -1:].clamp(max=1)], 1)


class M2(Textbook):
    """h_i = S_i, not renormalised."""

    def acceptance(self, joint: Tensor, s: Tensor) -> Tensor:
        return s


class M3(Textbook):
    """h_i = p_i everywhere."""

    def acceptance(self, joint: Tensor, s: Tensor) -> Tensor:
        return joint


class M4(Textbook):
    """Token verification's residual: p_tau forgotten."""

    def residual(self, tau: Tensor, joint: Tensor, p: Tensor, q: Tensor) -> Tensor:
        return super().residual(tau, torch.ones_like(joint), p, q)


class M5(Textbook):
    """Residual with p_{tau+1}."""

    def residual(self, tau: Tensor, joint: Tensor, p: Tensor, q: Tensor) -> Tensor:
        return super().residual(tau, torch.cat([joint[:, 1:], joint[:, -1:]], 1), p, q)


class M6(Textbook):
    """h_gamma from the interior formula of the index before."""

    def acceptance(self, joint: Tensor, s: Tensor) -> Tensor:
        h = interior(joint, s)
        return torch.cat([h[:, :-1], h[:, -2:-1]], 1)


class M7(Textbook):
    """h_gamma = min(1, R_gamma), the unclipped joint ratio."""

    def joint(self, ratio: Tensor) -> Tensor:
        self.ratio = ratio.cumprod(1)
        return super().joint(ratio)

    def acceptance(self, joint: Tensor, s: Tensor) -> Tensor:
        return torch.cat([interior(joint, s)[:, :-1], self.ratio[:, -1:].clamp(max=1)], 1)


class M8(Textbook):
    """The interior h off by one index; h_gamma is right."""

    def acceptance(self, joint: Tensor, s: Tensor) -> Tensor:
        h = interior(joint, s)
        return torch.cat([h[:, :1], h[:, :-2], h[:, -1:]], 1)


class M9(Textbook):
    """Break at the first rejected index."""

    def choose(self, h: Tensor, rng: Any) -> Tensor:
        return rng.accept(h[:, 1:]).long().cumprod(1).sum(1)


class M10(Textbook):
    """One uniform for all indices of a row: Pr(tau >= i) = max of h_i, h_{i+1}, ..."""

    def choose(self, h: Tensor, rng: Any) -> Tensor:
        at_least = h.flip(1).cummax(1).values.flip(1)
        at_least[:, 0] = 1
        return rng.draw(at_least - torch.cat([at_least[:, 1:], torch.zeros_like(h[:, :1])], 1), "other")


class M11(Textbook):
    """The "last chosen token" listing with gamma passes where it takes gamma + 1."""

    def verify(self, draft: Draft, p: Tensor, rng: Any) -> Verdict:
        assert draft.q is not None
        x = draft.tokens[..., None]
        ratio = (p[:, :-1].gather(2, x) / draft.q.gather(2, x)).squeeze(2)
        joint = self.joint(torch.cat([torch.ones_like(ratio[:, :1]), ratio], 1))
        vocab = p.shape[2]
        tau = token = torch.zeros(draft.batch_size, dtype=torch.long)
        for i in range(draft.width):
            weights = torch.cat([(joint[:, i, None] * p[:, i] - draft.q[:, i]).clamp(min=0), 1 - joint[:, i, None]], 1)
            empty = weights.sum(1, keepdim=True) == 0  # p_i = 1 and P_i = Q_i: a token of P_i
            weights = torch.where(empty, torch.nn.functional.pad(p[:, i], (0, 1)), weights)
            chosen = rng.draw(weights, index=i)
            tau, token = torch.where(chosen < vocab, i, tau), torch.where(chosen < vocab, chosen, token)
        return Verdict(tau, token)


class InvertedRatio(Textbook):
    """Token verification with min(1, Q/P)."""

    def joint(self, ratio: Tensor) -> Tensor:
        self.inverse = 1 / ratio  # inf where P = 0
        return torch.ones_like(ratio)

    def acceptance(self, joint: Tensor, s: Tensor) -> Tensor:
        return self.inverse.clamp(max=1)

    def choose(self, h: Tensor, rng: Any) -> Tensor:
        return M9.choose(self, h, rng)  # type: ignore[arg-type]


#: mutant -> toy -> (E[tau], TV); "" = the reference gives no E, SAME = that of block verification itself.
SAME = "same"
GOLDEN: dict[type[Verifier], dict[str, tuple[str, str]]] = {
    InvertedRatio: {
        "T0": ("55/36", "1/3"),
        "G1": ("14357/9600", "209/576"),
        "G2": ("35426/16875", "102319/216000"),
        "G3": ("27/16", "5/8"),
        "G4": ("2155187/960000", "359/768"),
    },
    M1: {
        "T0": ("4/3", "1/9"),
        "G1": ("451/360", "371/3960"),
        "G2": ("499/320", "7/50"),
        "G3": ("", "0"),
        "G4": ("4417/2400", "31/288"),
    },
    M2: {
        "T0": ("31/27", "2/81"),
        "G1": ("15121/14400", "37237/864000"),
        "G2": ("205297/180000", "0.0471207"),
        "G3": ("13/16", "1/16"),
        "G4": ("178817/128000", "22277/256000"),
    },
    M3: {
        "T0": ("25/18", "1/6"),
        "G1": ("917/720", "1/9"),
        "G2": ("377717/230400", "6751/36864"),
        "G3": ("", "0"),
        "G4": ("141283/75600", "89407/756000"),
    },
    M4: {
        "T0": (SAME, "0"),
        "G1": (SAME, "0"),
        "G2": (SAME, "0"),
        "G3": (SAME, "0"),
        "G4": ("2733/1600", "67/2400"),
    },
    M5: {
        "T0": (SAME, "1/9"),
        "G1": (SAME, "5/54"),
        "G2": (SAME, "103/960"),
        "G3": (SAME, "1/8"),
        "G4": (SAME, "14893/144000"),
    },
    M6: {
        "T0": ("2/3", "1/3"),
        "G1": ("1", "169/720"),
        "G2": ("421/405", "6137/32400"),
        "G3": ("1", "1/8"),
        "G4": ("1915193/1155960", "0.180063"),
    },
    M7: {
        "T0": ("4/3", "1/9"),
        "G1": ("451/360", "13/144"),
        "G2": ("1199/800", "239/2400"),
        "G3": ("", "0"),
        "G4": ("167983/93600", "2837/37440"),
    },
    M8: {
        "T0": ("14/9", "1/3"),
        "G1": ("359/240", "1/3"),
        "G2": ("15103/8100", "103/240"),
        "G3": ("11/8", "1/2"),
        "G4": ("196121/91200", "43001/136800"),
    },
    M9: {
        "T0": ("5/9", "1/3"),
        "G1": ("199/240", "1/6"),
        "G2": ("1222/2025", "101/432"),
        "G3": ("", "0"),
        "G4": ("1465513/1185600", "2357/14820"),
    },
    M10: {
        "T0": ("", "0"),
        "G1": ("", "0"),
        "G2": ("2656/2025", "239/8100"),
        "G3": ("", "0"),
        "G4": ("1982237/1185600", "1229/37050"),
    },
    M11: {
        "T0": ("1/3", "1/3"),
        "G1": ("1/2", "103/360"),
        "G2": ("313/405", "43/240"),
        "G3": ("1/2", "0"),
        "G4": ("17923/14820", "120841/592800"),
    },
}


@pytest.mark.parametrize("toy", TOYS)
def test_without_mistake_textbook_is_block(toys: dict[str, Toy], golden: dict, drafts: dict, toy: str) -> None:
    certificate = certify(toys[toy], drafts["chain"], Textbook)
    assert certificate.tv <= TOLERANCE
    assert certificate.expected_tau[0] == number(golden["expected_tau"]["block"]["chain"][toy][0])
    assert certificate.first_tau == [number(p) for p in golden["tau_distribution"]["block"][toy]]


@pytest.mark.parametrize("toy", TOYS)
@pytest.mark.parametrize("mutant", GOLDEN, ids=lambda mutant: mutant.__name__)
def test_mutant_has_its_golden_numbers(
    toys: dict[str, Toy], golden: dict, drafts: dict, mutant: type[Verifier], toy: str
) -> None:
    expected_tau, tv = GOLDEN[mutant][toy]
    certificate = certify(toys[toy], drafts["chain"], mutant)
    assert certificate.tv == number(tv)
    assert certificate.lossless == (tv == "0")
    if expected_tau:
        want = golden["expected_tau"]["block"]["chain"][toy][0] if expected_tau == SAME else expected_tau
        assert certificate.expected_tau[0] == number(want)


@pytest.mark.parametrize("mutant", GOLDEN, ids=lambda mutant: mutant.__name__)
def test_every_mutant_is_seen_by_some_toy(mutant: type[Verifier]) -> None:
    assert any(tv != "0" for _, tv in GOLDEN[mutant].values())


def test_m4_is_detected_only_by_distribution_of_g4(golden: dict) -> None:
    visited = {toy: entry for toy, entry in GOLDEN[M4].items() if entry[1] != "0"}
    assert visited == {"G4": (golden["expected_tau"]["block"]["chain"]["G4"][0], "67/2400")}
