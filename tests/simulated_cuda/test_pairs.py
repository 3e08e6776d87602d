"""Every drafter with the verifiers that accept it: equal on the CPU and on the simulated device or a real one.

The quick set has every contract test of a drafter, and covers all pairs of drafter, temperature and batch size, of
verifier, temperature and batch size, and of verifier and kind of draft. The slow one is the product.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from crossdraft_simulated_cuda.device_comparison import BATCH_SIZES, SAMPLINGS, compare_drafter
from drafter_cases import contracts, write_all_heads

from crossdraft.framework.contracts.drafter import DraftTraits
from crossdraft.framework.plugins import entries
from crossdraft.testing import DrafterContract, TinyModel

if not torch.cuda.is_available():  # or every run would import the tests of all drafters
    pytest.skip("runs by: pytest -p crossdraft_simulated_cuda, or on a GPU", allow_module_level=True)

pytestmark = pytest.mark.simulated

ROOT = Path(__file__).parents[2]


def verifiers(contract: DrafterContract, sampling: Any) -> list[str]:
    """Names of the installed verifiers that accept the drafter's drafts."""
    return [verifier.name for verifier in contract.rules(sampling, entries("verifiers"))]


Case = tuple[str, str, int, int]


def all_cases() -> Iterator[Case]:
    for name, contract in contracts().items():
        for i, sampling in enumerate(SAMPLINGS):
            for verifier, batch_size in product(verifiers(contract, sampling), BATCH_SIZES):
                yield name, verifier, i, batch_size


def pairs(case: Case) -> set[Any]:
    """Pairs of values that a case covers."""
    name, verifier, i, batch_size = case
    contract = contracts()[name]
    drafter, traits = contract.drafting.name, contract.drafting.traits(contract.config, SAMPLINGS[i])
    covered = {name, (drafter, i), (drafter, batch_size), (verifier, i), (verifier, batch_size), (i, batch_size)}
    return covered | ({(traits.kind, traits.point_mass, verifier)} if traits.kind else set())


def covering(cases: list[Case]) -> list[Case]:
    """A greedy choice of cases that covers all pairs."""
    covers = {case: pairs(case) for case in cases}
    missing, chosen = set().union(*covers.values()), []
    while missing:
        best = max(covers, key=lambda case: len(covers[case] & missing))
        chosen.append(best)
        missing -= covers.pop(best)
    return chosen


@cache
def cases() -> list[Any]:
    product_of_all = list(all_cases())
    quick = set(covering(product_of_all))
    return [pytest.param(*case, marks=() if case in quick else pytest.mark.slow) for case in product_of_all]


def pytest_generate_tests(metafunc: Any) -> None:
    if "verifier" in metafunc.fixturenames:
        metafunc.parametrize(("name", "verifier", "sampling", "batch_size"), cases())


@pytest.fixture(scope="module")
def heads(tmp_path_factory: Any) -> Path:
    return write_all_heads(tmp_path_factory.mktemp("heads"), TinyModel.model())


@pytest.mark.gpu
def test_devices_agree(name: str, verifier: str, sampling: int, batch_size: int, heads: Path) -> None:
    contract = contracts()[name]
    if hasattr(contract, "use"):
        contract.use(heads)
    compare_drafter(contract, verifier, SAMPLINGS[sampling], batch_size)


def test_every_drafter_is_compared() -> None:
    compared = {contract.drafting.name for contract in contracts().values()}
    assert set(entries("drafters")) <= compared, "each needs a contract test"


def traits_of(name: str, sampling: int = 2) -> DraftTraits:
    contract = contracts()[name]
    return contract.drafting.traits(contract.config, SAMPLINGS[sampling])


def drafters_that_wait() -> list[str]:
    return [name for name in contracts() if traits_of(name).waits]


@pytest.mark.parametrize("name", drafters_that_wait())
def test_declared_waits_occur(name: str, heads: Path) -> None:
    """Some step waits as often as declared."""
    contract = contracts()[name]
    if hasattr(contract, "use"):
        contract.use(heads)
    sampling = 0 if traits_of(name, 0).temperature_zero_only else 2
    verifier = verifiers(contract, SAMPLINGS[sampling])[0]
    waits = compare_drafter(contract, verifier, SAMPLINGS[sampling], 4, max_new_tokens=16)
    assert waits.total() == 1 + traits_of(name, sampling).waits, waits


def test_table_of_waits_is_that_of_the_docs() -> None:
    """Rows of docs/internals.md, for the drafters that can be imported."""
    text = (ROOT / "docs" / "internals.md").read_text(encoding="utf-8")
    table = text.partition("| drafter | options | further waits a step |")[2].partition("\n\n")[0]
    compared = {contract.drafting.name for contract in contracts().values()}
    documented = {line for line in table.splitlines()[2:] if line.split("`")[1] in compared}
    rows = set()
    for name in drafters_that_wait():
        contract = contracts()[name]
        options = ", ".join(
            f"{key}: {value}" for key, value in contract.options.items() if key not in ("model", "layers")
        )
        options = re.sub(r"model: \w+, ", "", re.sub(r"[{}']", "", options))
        rows.add(f"| `{contract.drafting.name}` | {options} | {traits_of(name).waits} |")
    assert rows == documented, "\n".join(sorted(rows))
