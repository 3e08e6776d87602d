"""Every registered verifier through the contract kit."""

import pytest

from crossdraft.framework import plugins
from crossdraft.testing import VerifierContract

#: Walks every outcome of two sequences; `specinfer` does the same in half the time.
SLOW = {"spectr"}
NAMES = [
    pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name
    for name in sorted(plugins.entries("verifiers"))
]


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


class TestVerifiers(VerifierContract):
    @pytest.fixture(autouse=True)
    def _choose(self, name: str) -> None:
        type(self).verifier = name
