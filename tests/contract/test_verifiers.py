"""Every registered verifier through the contract kit."""

import pytest

from crossdraft.framework import plugins
from crossdraft.testing import VerifierContract


@pytest.fixture(params=sorted(name for name, entry in plugins.entries("verifiers").items()))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


class TestVerifiers(VerifierContract):
    @pytest.fixture(autouse=True)
    def _choose(self, name: str) -> None:
        type(self).verifier = name
