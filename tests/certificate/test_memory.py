"""Certificates of drafters that are wrong only once their memory has filled."""

from __future__ import annotations

from itertools import product

import pytest
from drafters_with_memory import LATER, MISTAKES, EighthStep, SmallLimit, Squared, StaleTable, Successors

from crossdraft.framework import plugins
from crossdraft.framework.certificate.certify import UNEQUAL_SHARE, Coverage, WarmUp, certify
from crossdraft.framework.certificate.draft_faults import check_drafter, unequal_starts
from crossdraft.framework.certificate.drawn_tokens import check_long_texts
from crossdraft.framework.certificate.faults import FaultError
from crossdraft.framework.certificate.outcomes import certify_drafter, outcome
from crossdraft.framework.certificate.table_lm import Toy
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.testing import DrafterContract


def check(toy: Toy, drafter: type[Successors], lag: int) -> None:
    config = drafter.Config(lag=lag)
    build = lambda context, gamma: drafter(config, context)  # noqa: E731
    starts = unequal_starts(toy, build, Sampling(), 2)
    check_drafter(toy, build, (2,), Sampling(), "it", starts)


#: A table that is never entered is not stale.
LAGS = [(drafter, lag) for drafter, lag in product(MISTAKES, (24, 0)) if (drafter, lag) != (StaleTable, 0)]
#: The first drafter of each fault, late in a text: the default suite.
FIRST = [(list(MISTAKES)[list(MISTAKES.values()).index(fault)], 24) for fault in set(MISTAKES.values())]


@pytest.mark.parametrize(
    "drafter, lag", [row if row in FIRST else pytest.param(*row, marks=pytest.mark.thorough) for row in LAGS]
)
def test_mistake_is_named(toys: dict[str, Toy], drafter: type[Successors], lag: int) -> None:
    with pytest.raises(FaultError, match=MISTAKES[drafter]):
        check(toys["T0"], drafter, lag)


@pytest.mark.parametrize("toy", ["T0", "G1"])
def test_honest_memory_passes(toys: dict[str, Toy], toy: str) -> None:
    check(toys[toy], Successors, 0)


@pytest.mark.parametrize(
    "drafter, lag", [LATER[0], *(pytest.param(*row, marks=pytest.mark.thorough) for row in LATER[1:])]
)
def test_later_mistake_is_named(toys: dict[str, Toy], drafter: type[Successors], lag: int) -> None:
    """It passes by enumeration, and fails in long texts."""
    check(toys["T0"], drafter, lag)
    with pytest.raises(FaultError, match="depending on its value" if "Cut" in drafter.__name__ else "q is not the"):
        check_long_texts(lambda context: drafter(drafter.Config(lag=lag), context), "it")


@pytest.mark.thorough
@pytest.mark.parametrize("drafter", [EighthStep, SmallLimit])
def test_contract_kit_names_later_mistake(drafter: type[Successors]) -> None:
    """Its enumeration is that of `certify` and of the certificate of a run."""
    with pytest.raises(AssertionError, match=r"q is not the distribution|not lossless"):
        type("Contract", (DrafterContract,), {"drafter": drafter})().test_output_follows_the_target()
    verifier = plugins.get("verifiers", "token")
    certificate = outcome(certify_drafter(drafter, drafter.Config(), verifier, verifier.Config()))
    assert certificate is not None and not certificate.lossless


def test_honest_memory_passes_in_long_texts() -> None:
    check_long_texts(lambda context: Successors(Successors.Config(lag=0), context), "it")


def test_coverage_of_filled_memory(toys: dict[str, Toy]) -> None:
    """From a start with a filled memory q is unequal, and the joint distribution shows a wrong one."""
    verifier, start = plugins.get("verifiers", "token"), WarmUp((0, 1) * 6, 8, 2)
    honest, wrong = (
        certify(
            toys["T0"],
            lambda context, gamma, cls=cls: cls(cls.Config(lag=0), context),
            verifier,
            steps=1,
            gamma=1,
            start=start,
        )
        for cls in (Successors, Squared)
    )
    assert honest.lossless and honest.coverage.share >= UNEQUAL_SHARE and not honest.coverage.gap(False)
    assert wrong.tv > 1e-3


def test_coverage_below_bound() -> None:
    assert Coverage().gap(True) == "nothing was drafted"
    assert Coverage(100, 9, share=0.09).gap(False) == "q is unequal in 9 of 100 drafted steps"
    assert not Coverage(100, 10, share=0.1).gap(False) and not Coverage(100).gap(True)
    assert Coverage(3, 1, 1, 2, 4, 0.3) + Coverage(5, 0, 2, 3, 1, 0.0) == Coverage(8, 1, 3, 5, 4, 0.3)
