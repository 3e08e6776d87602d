"""The contract of a verifier: what fails names the mistake."""

from example_name.verifier import ExampleName

from crossdraft.testing import VerifierContract


class TestExampleName(VerifierContract):
    verifier = ExampleName
