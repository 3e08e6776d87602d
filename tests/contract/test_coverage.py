"""No built-in strategy escapes the contract kit."""

import test_drafters
import test_heads
from verifier_traits import own

from crossdraft.testing import DrafterContract


def test_every_built_in_drafter_has_a_contract_test() -> None:
    """Verifiers are found in the registry; drafters need options, so each has a class."""
    classes = [c for module in (test_drafters, test_heads) for c in vars(module).values() if isinstance(c, type)]
    tried = {getattr(c, "drafter", None) for c in classes if issubclass(c, DrafterContract)}
    missing = set(own("drafters")) - tried
    assert not missing, f"no contract test: {sorted(missing)}"
