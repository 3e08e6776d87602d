"""Every registered verifier has golden numbers, and every lossless one keeps the target's distribution.

The numbers are the exact E[tau] of tests/golden.json; the distributions are those of all five toys. Both are found by
walking the registry, so a verifier cannot be added without them.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from verifier_traits import traits_of

from crossdraft.framework import plugins
from crossdraft.framework.certificate.certify import TOLERANCE, Certificate, certify
from crossdraft.framework.certificate.drafts import DRAFTS
from crossdraft.framework.certificate.table_lm import Toy
from crossdraft.framework.contracts.hookspecs import hookimpl
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.contracts.verifier import incompatible

_TABLES = json.loads(Path(__file__).parents[1].joinpath("golden.json").read_text(encoding="utf-8"))
#: Verifier -> draft label -> toy -> E[tau] of each step. Words after the verifier's name are its options.
GOLDEN: dict[str, dict[str, dict[str, list[str]]]] = _TABLES["expected_tau"]
#: Verifier -> toy -> Pr(tau = i) of a chain in the first step.
TAU_DISTRIBUTION: dict[str, dict[str, list[str]]] = _TABLES["tau_distribution"]
#: Lossy verifier -> draft label -> toy -> total variation after one step.
TV: dict[str, dict[str, dict[str, str]]] = _TABLES["total_variation"]
TOYS = ("T0", "G1", "G2", "G3", "G4")
Certified = Callable[..., Certificate]


def rule(line: str) -> tuple[Any, Callable[[], Any], float]:
    """Subject of a line of the golden table: the verifier's class, how to make one, the target's temperature."""
    name, *options = line.split()
    result = plugins.get("verifiers", name)
    config = {key: json.loads(value) for key, value in (option.split("=") for option in options)}
    return result, lambda: result(result.Config(**config)), 0.0 if traits_of(result).temperature_zero_only else 1.0


def accepts(name: str, label: str) -> bool:
    result, _, temperature = rule(name)
    kind, sampling = DRAFTS[label], Sampling(temperature=temperature)
    drafter, config = kind.config(2)
    return incompatible(kind.drafter, drafter.traits(config, sampling), name, traits_of(result), sampling) is None


def without_golden_numbers() -> list[str]:
    return sorted(set(plugins.entries("verifiers")) - {line.split()[0] for line in GOLDEN})


#: Draft length of each toy.
GAMMA = {"T0": 2, "G1": 2, "G2": 3, "G3": 2, "G4": 3}


def by_toy(pairs: Iterable[tuple[str, str]], gamma: int | None = None) -> list[tuple[str, str, str]]:
    """(line, draft label, toy), less what would take minutes: three long drafts from more than two tokens."""
    return [
        (line, label, toy)
        for line, label in pairs
        for toy in TOYS
        if not (label == "iid-3" and toy not in ("T0", "G2") and (gamma or GAMMA[toy]) > 2)
    ]


#: (line, draft label): what every lossless verifier must survive. The golden table adds options to some names.
PAIRS = [
    (line, label)
    for line in dict.fromkeys([*GOLDEN, *sorted(plugins.entries("verifiers"))])
    for label in DRAFTS
    if traits_of(rule(line)[0]).lossless and accepts(line.split()[0], label)
]
#: (line, draft label, toy) of every golden number.
KNOWN = [(line, label, toy) for line in GOLDEN for label in GOLDEN[line] for toy in GOLDEN[line][label]]


@pytest.fixture(scope="module")
def certified(toys: dict[str, Toy]) -> Certified:
    """``certified(line, draft label, toy, steps=1, gamma=None, temperature=None)``, each enumerated once."""
    known: dict[tuple, Certificate] = {}

    def look_up(line: str, label: str, toy: str, **options: Any) -> Certificate:
        _, make, temperature = rule(line)
        options = {"steps": 1, "temperature": temperature, **options}
        key = (line, label, toy, *sorted(options.items()))
        if key not in known:
            known[key] = certify(toys[toy], DRAFTS[label].build, make, markov=True, **options)
        return known[key]

    return look_up


def golden_steps(line: str, label: str, toy: str) -> int:
    """Rounds that the golden table knows, at least one."""
    return len(GOLDEN.get(line, {}).get(label, {}).get(toy, ["first"]))


# -- the walk over the registry -------------------------------------------------------------------------


def test_every_registered_verifier_has_golden_numbers() -> None:
    missing = ", ".join(without_golden_numbers())
    assert not missing, (
        f"no golden numbers for: {missing}. Add a line to expected_tau in tests/golden.json, "
        '"name": {"draft label": {"toy": [E[tau] of step 1, ...]}}, with values derived independently of the code'
    )


@pytest.fixture
def newcomer() -> Iterator[str]:
    plugin = SimpleNamespace(
        crossdraft_register_verifiers=hookimpl(lambda register: register("newcomer", "nowhere:Newcomer"))
    )
    plugins.manager().register(plugin, "newcomer")
    yield "newcomer"
    plugins.manager().unregister(plugin)


def test_verifier_without_golden_numbers_is_noticed(newcomer: str) -> None:
    assert newcomer in without_golden_numbers()


@pytest.mark.parametrize("line", GOLDEN)
def test_golden_lines_name_drafts_that_their_verifier_accepts(line: str) -> None:
    for label, per_toy in GOLDEN[line].items():
        assert accepts(line.split()[0], label)
        assert set(per_toy) <= set(TOYS)


# -- golden numbers, and distributions ---------------------------------------------------------------------------


def cases(triples: Iterable[tuple[str, str, str]], slow: Callable[..., bool]) -> list[Any]:
    """Parameters of a test; those for which ``slow(line, label, toy)`` are marked."""
    return [pytest.param(*triple, marks=[pytest.mark.slow] if slow(*triple) else []) for triple in triples]


def large(line: str, label: str, toy: str) -> bool:
    """Takes a second or more."""
    return (label == "iid-3" and toy != "T0") or (toy == "G4" and label != "chain")


def repeated(line: str, label: str, toy: str) -> bool:
    """Only a rule with state meets in a later step what it did not meet in the first."""
    return not traits_of(rule(line)[0]).stateful or toy in ("G3", "G4")


@pytest.mark.parametrize("line, label, toy", cases(KNOWN, large))
def test_expected_tau_is_golden(certified: Certified, line: str, label: str, toy: str) -> None:
    want = GOLDEN[line][label][toy]
    certificate = certified(line, label, toy, steps=len(want))
    assert certificate.expected_tau == pytest.approx([float(Fraction(value)) for value in want], abs=1e-9)


@pytest.mark.parametrize("line, toy", [(line, toy) for line in TAU_DISTRIBUTION for toy in TAU_DISTRIBUTION[line]])
def test_tau_distribution_is_golden(certified: Certified, line: str, toy: str) -> None:
    certificate = certified(line, "chain", toy, steps=golden_steps(line, "chain", toy))
    assert certificate.first_tau == pytest.approx(
        [float(Fraction(value)) for value in TAU_DISTRIBUTION[line][toy]], abs=1e-9
    )


@pytest.mark.parametrize("line, label, toy", cases(by_toy(PAIRS), large))
def test_lossless(certified: Certified, line: str, label: str, toy: str) -> None:
    assert certified(line, label, toy, steps=golden_steps(line, label, toy)).tv <= TOLERANCE


@pytest.mark.parametrize("line, label", PAIRS)
def test_lossless_before_and_after_step_without_draft(certified: Certified, line: str, label: str) -> None:
    certificate = certified(line, label, "T0", steps=3, gamma=(1, 0, 1))
    assert certificate.tv <= TOLERANCE
    assert certificate.expected_tau[1] == 0


@pytest.mark.parametrize("line, label, toy", cases(by_toy(PAIRS), repeated))
def test_lossless_over_three_steps(certified: Certified, line: str, label: str, toy: str) -> None:
    assert certified(line, label, toy, steps=3).tv <= TOLERANCE


@pytest.mark.parametrize("line, label, toy", cases(by_toy(PAIRS, gamma=3), repeated))
def test_lossless_with_shorter_drafts_later(certified: Certified, line: str, label: str, toy: str) -> None:
    certificate = certified(line, label, toy, steps=3, gamma=(3, 1, 2))
    assert certificate.tv <= TOLERANCE


@pytest.mark.parametrize("line, label, toy", cases(by_toy(PAIRS, gamma=2), repeated))
def test_lossless_with_long_drafts_around_none(certified: Certified, line: str, label: str, toy: str) -> None:
    certificate = certified(line, label, toy, steps=3, gamma=(2, 0, 2))
    assert certificate.tv <= TOLERANCE
    assert certificate.expected_tau[1] == 0


@pytest.mark.parametrize("line, label, toy", by_toy((line, label) for line in TV for label in TV[line]))
def test_lossy_verifiers_deviate_by_golden_amount(certified: Certified, line: str, label: str, toy: str) -> None:
    assert not traits_of(rule(line)[0]).lossless
    assert certified(line, label, toy).tv == pytest.approx(float(Fraction(TV[line][label][toy])), abs=1e-9)


# -- what the rules become in special cases -------------------------------------------------------------


@pytest.mark.parametrize("toy", TOYS)
@pytest.mark.parametrize(
    "line, same_as",
    [
        ("specinfer", "token"),
        ("spectr", "token"),
        ("greedy-draft-optimal", "token"),
        ("lenient lenience=1", "token"),
        ("traversal", "block"),
        ("multipath-block", "block"),
    ],
)
def test_on_chain_rules_for_trees_are_rules_for_chains(certified: Certified, line: str, same_as: str, toy: str) -> None:
    result, want = certified(line, "chain", toy), certified(same_as, "chain", toy)
    assert result.first_tau == pytest.approx(want.first_tau, abs=1e-9)


@pytest.mark.parametrize(
    "line, label, toy", cases(by_toy(pair for pair in PAIRS if pair[1] in ("chain", "iid-2")), large)
)
def test_at_temperature_zero_every_rule_is_greedy_matching(
    certified: Certified, line: str, label: str, toy: str
) -> None:
    certificate = certified(line, label, toy, temperature=0.0)
    assert certificate.tv <= TOLERANCE
    assert certificate.expected_tau == pytest.approx([float(Fraction(GOLDEN["greedy"][label][toy][0]))], abs=1e-9)
