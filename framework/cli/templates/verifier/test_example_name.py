"""The contract tests of a verifier."""

from example_name.verifier import ExampleName

from crossdraft.testing import VerifierContract


class TestExampleName(VerifierContract):
    verifier = ExampleName
