"""The contract tests of a drafter."""

from example_name.drafter import ExampleName

from crossdraft.testing import DrafterContract


class TestExampleName(DrafterContract):
    drafter = ExampleName


def test_it_copies() -> None:
    assert ExampleName().guess([7, 8, 9, 7], 2) == [8, 9]
    assert ExampleName().guess([7, 8, 9], 2) == []
