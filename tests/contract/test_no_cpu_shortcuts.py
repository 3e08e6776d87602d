"""The contract of drafts without the branches that a CPU takes because it may read values (``eager_on_cpu``)."""

from __future__ import annotations

from typing import Any

import pytest
import test_drafters
import test_heads
from cpu_shortcuts import no_cpu_shortcuts
from test_heads import heads  # noqa: F401  (a fixture)

from crossdraft.framework.runs.threads import one_thread
from crossdraft.testing import DrafterContract, TinyModel

CASES = {
    name: value
    for module in (test_drafters, test_heads)
    for name, value in vars(module).items()
    if isinstance(value, type) and issubclass(value, DrafterContract) and name.startswith("Test")
}


#: Those on a model take seconds, those on tables do not.
PARAMS = [
    pytest.param(name, marks=pytest.mark.slow if isinstance(case.setting, TinyModel) else ())
    for name, case in CASES.items()
]


@pytest.mark.parametrize("name", PARAMS)
def test_drafts_keep_the_contract_without_cpu_shortcuts(name: str, request: Any) -> None:
    case = CASES[name]
    if issubclass(case, test_heads.Heads):
        case.use(request.getfixturevalue("heads"))
    with one_thread(), no_cpu_shortcuts():
        case().test_every_draft_keeps_the_contract()
