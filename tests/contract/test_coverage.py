"""No built-in strategy escapes the contract kit."""

import test_drafters
import test_heads

from crossdraft.framework.plugins import entries
from crossdraft.testing import DrafterContract


def test_every_built_in_drafter_has_contract_test() -> None:
    """Verifiers are found in the registry; drafters need options, so each has a class."""
    classes = [c for module in (test_drafters, test_heads) for c in vars(module).values() if isinstance(c, type)]
    tried = {getattr(c, "drafter", None) for c in classes if issubclass(c, DrafterContract)}
    ours = {name for name, entry in entries("drafters").items() if entry.provider.startswith("crossdraft ")}
    assert ours <= tried, f"no contract test: {sorted(ours - tried)}"
