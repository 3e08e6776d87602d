"""The contract of a source of prompts: what fails names the row."""

from example_name import questions

from crossdraft.testing import PromptsContract


class TestExampleName(PromptsContract):
    prompts = staticmethod(questions)
