"""Contract tests of prompt sources: `PromptsContract`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from ..contracts.hookspecs import hookimpl
from ..plugins import manager
from ..recipe.prompts import Prompt, load_prompts

#: Registered name of the source under test.
UNDER_TEST = "prompts-under-test"


class PromptsContract:
    """Base class of a prompt source's contract tests; subclass it, set the prompts, and run pytest.

    Attributes:
        prompts: the registered object: the `Path` of a JSONL file, or a function (wrapped in `staticmethod`) that
            returns one, or rows; or the name of a registered source.
        at_least: minimum number of prompts.
    """

    prompts: ClassVar[Any]
    at_least: ClassVar[int] = 1

    def load(self, limit: int | None = None, **options: Any) -> list[Prompt]:
        return load_prompts(self.prompts if isinstance(self.prompts, str) else UNDER_TEST, limit=limit, **options)

    # -- the tests --------------------------------------------------------------------------------------------

    def test_every_row_is_a_prompt(self) -> None:
        """Rows are valid prompts with distinct ids."""
        assert len(self.load()) >= self.at_least

    def test_they_are_the_same_every_time(self) -> None:
        """Rows and their order are stable, because runs are compared by prompt and resumed."""
        assert self.load() == self.load(), "the rows differ between two loads; return them in a fixed order"

    def test_limit_returns_first_prompts(self) -> None:
        """``limit`` and ``categories`` select the first rows and those of a category."""
        rows = self.load()
        limit = min(3, len(rows))
        assert self.load(limit) == list(islice(rows, limit))
        for category in {prompt.category for prompt in rows}:
            assert self.load(categories=[category]) == [prompt for prompt in rows if prompt.category == category]

    # -- pieces -----------------------------------------------------------------------------------------------

    @pytest.fixture(autouse=True)
    def _registered(self) -> Iterator[None]:
        """Register the source under a name, whether its package is installed or not."""
        prompts = self.prompts
        plugin = SimpleNamespace(crossdraft_register_prompts=hookimpl(lambda register: register(UNDER_TEST, prompts)))
        manager().register(plugin)
        yield
        manager().unregister(plugin)
