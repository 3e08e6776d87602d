"""Traits of verifiers, for tests that go through all of them."""

from typing import Any

from crossdraft import VerifierTraits


def traits_of(rule: Any) -> VerifierTraits:
    """The traits of a verifier's class with its default options."""
    return rule.traits(rule.Config())
