"""What a source of prompts has to keep, as tests: `PromptsContract`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from ..contracts.hookspecs import hookimpl
from ..plugins import manager
from ..recipe.prompts import Prompt, load_prompts

#: What the source is called while it is tried.
UNDER_TEST = "prompts-under-test"


class PromptsContract:
    """Subclass it, name the prompts, and let pytest run what it inherits.

    Attributes:
        prompts: what is registered: the `Path` of a JSONL file, or a function (wrapped in `staticmethod`) that gives
            one, or rows. For registered ones the name will do.
        at_least: how many prompts there are at the least.
    """

    prompts: ClassVar[Any]
    at_least: ClassVar[int] = 1

    def load(self, limit: int | None = None, **options: Any) -> list[Prompt]:
        return load_prompts(self.prompts if isinstance(self.prompts, str) else UNDER_TEST, limit=limit, **options)

    # -- the tests --------------------------------------------------------------------------------------------

    def test_every_row_is_a_prompt(self) -> None:
        """Texts that a tokenizer reads, ids that differ; what is wrong names the row."""
        assert len(self.load()) >= self.at_least

    def test_they_are_the_same_every_time(self) -> None:
        """Runs are compared prompt by prompt, and go on where they stopped: rows and their order do not change."""
        assert self.load() == self.load(), "the rows differ from one reading to the next"

    def test_the_first_ones_are_the_first(self) -> None:
        """``limit`` takes the first so many, and a category its own."""
        every = self.load()
        few = min(3, len(every))
        assert self.load(few) == list(islice(every, few))
        for category in {prompt.category for prompt in every}:
            assert self.load(categories=[category]) == [prompt for prompt in every if prompt.category == category]

    # -- pieces -----------------------------------------------------------------------------------------------

    @pytest.fixture(autouse=True)
    def _registered(self) -> Iterator[None]:
        """Under a name, as a run would find it, whether the package is installed or not."""
        prompts = self.prompts
        plugin = SimpleNamespace(crossdraft_register_prompts=hookimpl(lambda register: register(UNDER_TEST, prompts)))
        manager().register(plugin)
        yield
        manager().unregister(plugin)
