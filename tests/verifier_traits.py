"""Which strategies are crossdraft's own, and what verifiers promise, for tests that go through all of them."""

from typing import Any

from crossdraft import VerifierTraits
from crossdraft.framework import plugins


def own(kind: str) -> list[str]:
    """The names of a kind that crossdraft itself provides: what else is installed is not for its tests to judge."""
    return sorted(name for name, entry in plugins.entries(kind).items() if entry.provider.startswith("crossdraft "))


def traits_of(rule: Any) -> VerifierTraits:
    """The traits of a verifier's class with its default options."""
    return rule.traits(rule.Config())
