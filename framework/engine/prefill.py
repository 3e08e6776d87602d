"""From a free slot to its first step: which prompts share a prefill pass, and how many passes are made at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from ..contracts.drafter import Drafter
from ..contracts.lm import LM, prefill
from ..contracts.steps import Request
from ..errors import UsageError
from .stopwatch import Stopwatch


class Prefill:
    """Requests that have a slot and have not begun.

    Args:
        most: most tokens of a pass; 0 = none is shared, `LM.start` feeds each prompt.

    Raises:
        UsageError: ``most`` is negative.
    """

    def __init__(self, target: LM, drafter: Drafter, clock: Stopwatch, most: int):
        if most < 0:
            raise UsageError(f"prefill_tokens={most} must be at least 1, or 0 for each prompt by itself")
        self._target, self._drafter, self._clock, self._most = target, drafter, clock, most
        self._shared = shares(type(drafter))
        self._requests: dict[int, Request] = {}
        self._passes: Iterator[dict[int, int]] = iter(())

    @property
    def rows(self) -> list[int]:
        """Slots that they have."""
        return list(self._requests)

    def add(self, row: int, request: Request) -> None:
        self._requests[row] = request

    def start(self, start: Callable[..., None], waited_for: bool) -> None:
        """Feed all of them, and call ``begin(row, *request)``; if running sequences wait for it, after one pass."""
        while self._requests:
            fed, whole = self._next() if self._most else (False, self.rows)
            for row in sorted(whole):
                start(row, *self._requests.pop(row))
            if waited_for and (fed or whole):
                return

    def give_up(self) -> None:
        """Forget them, and what was fed."""
        rows, self._requests, self._passes = self.rows, {}, iter(())
        for row in rows:
            self._target.free(row)
            if self._shared:
                self._drafter.free(row)

    @torch.inference_mode()
    def _next(self) -> tuple[bool, list[int]]:
        """Make the next pass; return True if the target made one, and the rows that may start.

        What was added since the last plan waits for the next one, so a long prompt is not overtaken for ever.
        """
        if (step := next(self._passes, None)) is None:
            self._passes = passes({row: len(one.prompt) - 1 for row, one in self._requests.items()}, self._most)
            step = next(self._passes)
        tokens = {row: [int(token) for token in self._requests[row].prompt[:upto]] for row, upto in step.items()}
        self._clock.start()
        fed = prefill(self._target, tokens)
        self._clock.mark("prefill")
        if self._shared:
            self._drafter.prefill(tokens)
            self._clock.mark("draft_prefill")
        return fed, [row for row, upto in step.items() if upto == len(self._requests[row].prompt) - 1]


def shares(drafter: type[Drafter]) -> bool:
    """True if the class overrides `prefill` at or below the class that overrides `start`."""
    first = next(cls for cls in drafter.__mro__ if {"prefill", "start"} & vars(cls).keys())
    return first is not Drafter and "prefill" in vars(first)


def passes(lengths: Mapping[int, int], most: int) -> Iterator[dict[int, int]]:
    """Pass after pass, how many tokens each row that takes part is to hold after it.

    Rows of like lengths share a pass of at most ``most`` tokens, as many as rows times the longest. A row that is
    longer goes alone, in pieces of ``most``.
    """
    together: dict[int, int] = {}
    for row, length in sorted(lengths.items(), key=lambda item: item[1]):
        if together and (len(together) + 1) * length > most:
            yield together
            together = {}
        for upto in range(most, length, most):
            yield {row: upto}
        together[row] = length
    if together:
        yield together
