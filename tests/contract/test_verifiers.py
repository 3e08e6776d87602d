"""Every verifier of ours through the contract kit."""

import pytest
from verifier_traits import own

from crossdraft.testing import VerifierContract


@pytest.fixture(params=own("verifiers"))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


class TestVerifiers(VerifierContract):
    @pytest.fixture(autouse=True)
    def _choose(self, name: str) -> None:
        type(self).verifier = name
