"""The contract tests of a prompt set."""

from example_name import questions

from crossdraft.testing import PromptsContract


class TestExampleName(PromptsContract):
    prompts = staticmethod(questions)
