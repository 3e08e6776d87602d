"""The bounds on E[tau] have their golden values, and no lossless rule exceeds them; ``crossdraft certify --bounds``."""

import json
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from verifier_traits import traits_of

from crossdraft.framework import plugins
from crossdraft.framework.certificate import bounds as module
from crossdraft.framework.certificate import table_lm
from crossdraft.framework.certificate.bounds import (
    Bounds,
    DraftDistribution,
    bounds,
)
from crossdraft.framework.certificate.certify import certify
from crossdraft.framework.certificate.drafts import DRAFTS
from crossdraft.framework.certificate.table_lm import Toy
from crossdraft.framework.cli import main as cli
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.contracts.verifier import incompatible

TOYS = ("T0", "G1", "G2", "G3", "G4")
Found = Callable[[str, str], Bounds]
#: Linear programs to 9 digits; of chains the value is block verification's.
LP: dict[str, dict[str, float]] = {
    "iid-2": dict(T0=1.617283951, G1=1.621093750, G2=1.907740741, G3=1.296875, G4=2.294853776),
    "iid-3": dict(T0=1.853223594, G1=1.854577185, G2=2.278360790),
    "tree-wor-2-1": dict(T0=1.888888889, G1=1.804166667, G2=2.376466667, G3=1.5, G4=2.335541667),
    "tree-greedy-2-1": dict(T0=1.888888889, G1=1.752777778, G2=2.376466667, G3=1.5, G4=2.314441667),
}
SINGLE = dict(T0="11/9", G1="93/80", G2="1207/900", G3="7/8", G4="2733/1600")
FULL: dict[str, dict[str, str]] = {
    "chain": dict(T0="4/3", G1="451/360", G2="499/320", G3="7/8", G4="4417/2400"),
    "iid-2": dict(T0="134/81", G1="2131/1280", G2="2041/960", G3="83/64", G4="6055999/2560000"),
    "iid-3": dict(T0="1351/729", G1="1025507/552960", G2="16491103/6750000"),
}
ALPHA: dict[str, dict[str, str]] = {
    "chain": dict(T0="2/3", G1="2/3", G2="7/12", G3="1/2", G4="5/6"),
    "iid-2": dict(T0="8/9", G1="11/12", G2="29/36", G3="11/16", G4="1"),
    "iid-3": dict(T0="1", G1="1", G2="103/108"),
}


def cases(table: dict[str, dict[str, Any]]) -> list[tuple[str, str, Any]]:
    return [(toy, label, value) for label, row in table.items() for toy, value in row.items()]


@pytest.fixture(scope="module")
def bounds_of(toys: dict[str, Toy]) -> Found:
    """``found(toy, draft label)``: all bounds, each computed once."""
    known: dict[tuple[str, str], Bounds] = {}

    def look_up(toy: str, label: str) -> Bounds:
        if (toy, label) not in known:
            known[toy, label] = bounds(toys[toy], DRAFTS[label].build, toys[toy].gamma)
        return known[toy, label]

    return look_up


# -- golden values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("toy, label, want", cases(LP))
def test_linear_program_is_golden(bounds_of: Found, toy: str, label: str, want: float) -> None:
    assert bounds_of(toy, label).lp == pytest.approx(want, abs=1e-7)


@pytest.mark.parametrize("toy, want", SINGLE.items())
def test_single_draft_optimum_is_golden_and_linear_program_agrees(bounds_of: Found, toy: str, want: str) -> None:
    assert bounds_of(toy, "chain").single_draft == pytest.approx(float(Fraction(want)), abs=1e-9)
    assert bounds_of(toy, "chain").lp == pytest.approx(float(Fraction(want)), abs=1e-7)


@pytest.mark.parametrize("toy, label, want", cases(FULL))
def test_full_information_is_golden(bounds_of: Found, toy: str, label: str, want: str) -> None:
    assert bounds_of(toy, label).full_information == pytest.approx(float(Fraction(want)), abs=1e-9)


@pytest.mark.parametrize("toy, label, want", cases(ALPHA))
def test_optimal_transport_is_golden(bounds_of: Found, toy: str, label: str, want: str) -> None:
    assert bounds_of(toy, label).optimal_transport == pytest.approx(float(Fraction(want)), abs=1e-9)


@pytest.mark.parametrize("toy", TOYS)
def test_transport_of_greedy_drafts_in_closed_form(bounds_of: Found, toys: dict[str, Toy], toy: str) -> None:
    """P of the greedy token, plus sum min(P, q) over the others, where q is the distribution of the drawn token."""
    p, q = toys[toy].target[-1], toys[toy].drafter[-1].clone()
    top = int(q.argmax())
    q[top] = 0
    want = p[top] + torch.minimum(p, q / q.sum()).sum()  # q(top) = 0
    assert bounds_of(toy, "tree-greedy-2-1").optimal_transport == pytest.approx(float(want), abs=1e-9)


@pytest.mark.parametrize("toy", TOYS)
def test_point_mass_is_accepted_while_target_agrees(bounds_of: Found, toys: dict[str, Toy], toy: str) -> None:
    directory, last, mass, want = toys[toy], toys[toy].vocab_size, 1.0, 0.0
    for _ in range(directory.gamma):
        token = int(directory.drafter[last].argmax())
        mass *= float(directory.target[last, token])
        want, last = want + mass, token
    own = bounds_of(toy, "point-mass")
    assert [own.single_draft, own.full_information, own.lp] == pytest.approx([want] * 3, abs=1e-9)


@pytest.mark.parametrize("toy", ["T0", "G4"])
def test_temperature_zero_leaves_one_way_to_accept(toys: dict[str, Toy], toy: str) -> None:
    want = {"T0": Fraction(62, 81), "G4": Fraction(34299, 40000)}[toy]
    own = bounds(toys[toy], DRAFTS["iid-2"].build, toys[toy].gamma, temperature=0)
    assert [own.lp, own.full_information] == pytest.approx([float(want)] * 2, abs=1e-9)


@pytest.mark.parametrize("label", list(DRAFTS))
def test_gamma_zero_has_tau_zero(toys: dict[str, Toy], label: str) -> None:
    assert bounds(toys["G1"], DRAFTS[label].build, 0) == Bounds(0.0, 0.0, 0.0, 0.0)


# -- what the bounds are for ----------------------------------------------------------------------------


def rules(label: str) -> Iterator[Any]:
    """The registered lossless rules that sample and accept such drafts."""
    drafter, config = DRAFTS[label].config(2)
    for name in plugins.entries("verifiers"):
        rule, sampling = plugins.get("verifiers", name), Sampling()
        draft = drafter.traits(config, sampling)
        if traits_of(rule).lossless and incompatible("it", draft, name, traits_of(rule), sampling) is None:
            yield rule


@pytest.mark.parametrize(
    "toy, label",
    [
        pytest.param(toy, label, marks=[pytest.mark.slow] * (toy in ("G2", "G4") or (label == "iid-3" and toy != "T0")))
        for toy in TOYS
        for label in DRAFTS
        if (toy, label) != ("G4", "iid-3")
    ],
)
def test_no_lossless_rule_exceeds_its_bounds(bounds_of: Found, toys: dict[str, Toy], toy: str, label: str) -> None:
    own = bounds_of(toy, label)
    assert own.lp is not None and own.full_information is not None and own.optimal_transport is not None
    assert own.lp <= own.full_information + 1e-9
    outcomes = 0
    for rule in rules(label):
        result = certify(toys[toy], DRAFTS[label].build, rule, markov=True)
        first = 1 - result.first_tau[0]
        assert first <= own.optimal_transport + 1e-9, rule.name
        assert result.expected_tau[0] <= own.full_information + 1e-9, rule.name
        if not traits_of(rule).stateful:  # state may take in this step what it repays in a later one
            assert result.expected_tau[0] <= own.lp + 1e-9, rule.name
        outcomes += 1
    assert outcomes >= 3


@pytest.mark.parametrize("toy", TOYS)
def test_bounds_that_are_attained(bounds_of: Found, toys: dict[str, Toy], toy: str) -> None:
    """Block verification attains the single-draft optimum, greedy block verification full information."""
    own = bounds_of(toy, "chain")
    for name, want in (("block", own.single_draft), ("greedy-block", own.full_information)):
        result = certify(toys[toy], DRAFTS["chain"].build, plugins.get("verifiers", name), markov=True)
        assert result.expected_tau[0] == pytest.approx(want, abs=1e-9)


# -- the command ----------------------------------------------------------------------------------------


def run(capsys: Any, options: str) -> tuple[int, str, str]:
    code = cli.main(["certify", *options.split()])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def only(tmp_path: Path) -> Callable[[str], str]:
    """``only("G1")``: the option that leaves this one of the built-in toys."""
    built_in = json.loads(Path(table_lm.__file__).with_name("toys.json").read_text(encoding="utf-8"))

    def option(toy: str) -> str:
        path = tmp_path / "toy.json"
        path.write_text(json.dumps({toy: built_in[toy]}), encoding="utf-8")
        return f"--toy {path} "

    return option


def test_json(capsys: Any, bounds_of: Found, only: Callable) -> None:
    options = "--json --bounds --draft chain --draft iid-2 --verifier token --verifier greedy-block --verifier spectr"
    code, out, _ = run(capsys, only("G1") + options)
    assert code == 0
    rows = {(row["toy"], row["draft"], row["verifier"]): row["bounds"] for row in json.loads(out)}
    own = bounds_of("G1", "chain")
    assert rows["G1", "chain", "token"] == pytest.approx(
        dict(
            single_draft=own.single_draft,
            full_information=own.full_information,
            optimal_transport=own.optimal_transport,
            lp=own.lp,
        )
    )
    # Its first step is not bound by the bounds of drop-in verifiers.
    assert rows["G1", "chain", "greedy-block"]["single_draft"] is None
    assert rows["G1", "chain", "greedy-block"]["lp"] is None
    assert rows["G1", "chain", "greedy-block"]["full_information"] == pytest.approx(own.full_information)
    assert rows["G1", "iid-2", "spectr"]["single_draft"] is None
    assert rows["G1", "iid-2", "spectr"]["lp"] == pytest.approx(bounds_of("G1", "iid-2").lp)


def test_table(capsys: Any, only: Callable) -> None:
    code, out, err = run(
        capsys, only("T0") + "--bounds --draft chain --verifier token --verifier greedy --verifier lenient"
    )
    assert code == 0 and not err
    head, _, *lines = out.splitlines()
    assert " ".join(head.split()).endswith("E[tau] per step single draft LP full information root lossless")
    assert [line.split()[6:] for line in lines if line.startswith("T0") and " token " in line] == [
        ["1.111111", "1.222222", "1.222222", "1.333333", "0.666667", "yes"]
    ]
    (greedy,) = (line.split() for line in lines if line.startswith("T0") and " greedy " in line)
    assert greedy[-6:] == ["0.444444", "0.444444", "0.444444", "0.444444", "0.333333", "yes"]
    (lossy,) = (line.split() for line in lines if line.startswith("T0") and " lenient " in line)
    assert lossy[-6:] == ["-", "-", "-", "-", "declared", "lossy"]  # nothing bounds a rule that is lossy


def test_programs_that_are_too_large_are_refused(capsys: Any, monkeypatch: Any, only: Callable) -> None:
    monkeypatch.setattr(module, "MOST_VARIABLES", 278)
    code, out, err = run(capsys, only("G1") + "--bounds --draft iid-2 --verifier specinfer")
    assert code == 0
    # Of the 45 drafts, 18 start with one token (5 outputs each) and 27 with two (7 outputs each).
    assert "toy G1: the linear program has 279 variables, more than the 278 that are allowed" in err
    (row,) = (line.split() for line in out.splitlines() if line.startswith("G1"))
    assert row[-5:] == ["-", "-", "1.664844", "0.916667", "yes"]


def test_too_many_drafts_are_refused(toys: dict[str, Toy], monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "MOST_DRAFTS", 44)
    own = bounds(toys["G1"], DRAFTS["iid-2"].build, 2)
    assert own == Bounds(missing=own.missing)
    assert "toy G1: bounds require at most 44 distinct drafts" in own.missing[0]
    monkeypatch.setattr(module, "MOST_DRAFTS", 45)
    assert bounds(toys["G1"], DRAFTS["iid-2"].build, 2).lp is not None


@pytest.mark.parametrize("named", ["", "--verifier block", "--draft tree-top-2-1"])
def test_incompatible_pairs_are_counted_unless_requested(capsys: Any, named: str, only: Callable) -> None:
    code, _, err = run(capsys, only("T0") + f"--gamma 1 {named}")
    assert code == 0
    if named:
        assert err.count("\n") == 1 and "incompatible" in err
        assert "accepts only:" in run(capsys, only("T0") + f"-v --gamma 1 {named}")[2]
        return
    assert err.count("\n") == 1
    pairs = sum(
        incompatible("it", drafter.traits(config, sampling), name, traits_of(rule), sampling) is not None
        for drafter, config in (kind.config(1) for kind in DRAFTS.values())
        for name, rule in ((name, plugins.get("verifiers", name)) for name in plugins.entries("verifiers"))
        for sampling in [Sampling(temperature=0 if traits_of(rule).temperature_zero_only else 1)]
    )
    assert f"skipped pairs of draft and verifier: {pairs} incompatible" in err


@pytest.mark.slow
def test_largest_built_in_case(bounds_of: Found) -> None:
    own = bounds_of("G4", "iid-3")
    assert own.lp is not None and own.full_information is not None
    assert 2.294853776 < own.lp < own.full_information < 3  # better than two sequences


def test_draft_distribution_without_drafts() -> None:
    drafts = DraftDistribution(gamma=2, trees={frozenset(): 1.0})
    joint = {(0,): 0.5, (1,): 0.5}
    assert drafts.is_chain
    assert module.linear_program(drafts, joint) == module.full_information(drafts, joint) == 0
