"""Prefill of waiting requests: passes shared by prompts, and chunks of long prompts between decoding steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from ..contracts.drafter import Drafter
from ..contracts.lm import LM, prefill
from ..contracts.steps import Request
from ..errors import UsageError
from .stopwatch import Stopwatch


class Prefill:
    """Requests that have a slot but have not started.

    Args:
        max_tokens: maximum number of tokens of a pass; 0 = `LM.start` feeds each prompt in full.

    Raises:
        UsageError: ``max_tokens`` is negative.
    """

    def __init__(self, target: LM, drafter: Drafter, clock: Stopwatch, max_tokens: int):
        if max_tokens < 0:
            raise UsageError(f"prefill_tokens={max_tokens} must be at least 1, or 0 to feed each prompt separately")
        self._target, self._drafter, self._clock, self._max_tokens = target, drafter, clock, max_tokens
        self._with_drafter = prefills(type(drafter))
        self._requests: dict[int, Request] = {}
        self._passes: Iterator[dict[int, int]] = iter(())

    @property
    def rows(self) -> list[int]:
        """Slots of the requests."""
        return list(self._requests)

    def add(self, row: int, request: Request) -> None:
        self._requests[row] = request

    def run(self, waited_for: bool) -> Iterator[tuple[int, Request]]:
        """Feed the prompts and yield slot and request of each that is ready; if ``waited_for``, stop after one pass."""
        while self._requests:
            fed, ready = self._next() if self._max_tokens else (False, self.rows)
            for row in sorted(ready):
                yield row, self._requests.pop(row)
            if waited_for and (fed or ready):
                return

    def abort(self) -> None:
        """Drop the requests and free their slots."""
        rows, self._requests, self._passes = self.rows, {}, iter(())
        for row in rows:
            self._target.free(row)
            if self._with_drafter:
                self._drafter.free(row)

    @torch.inference_mode()
    def _next(self) -> tuple[bool, list[int]]:
        """Run the next pass; return True if the target ran one, and the rows that are ready to start.

        Requests added after a plan was made wait for the next plan, so a long prompt does not starve.
        """
        if (lengths := next(self._passes, None)) is None:
            prompts = {row: len(request.prompt) - 1 for row, request in self._requests.items()}
            self._passes = passes(prompts, self._max_tokens)
            lengths = next(self._passes)
        tokens = {row: [int(token) for token in self._requests[row].prompt[:length]] for row, length in lengths.items()}
        self._clock.mark()
        fed = prefill(self._target, tokens)
        self._clock.mark("prefill")
        if self._with_drafter:
            self._drafter.prefill(tokens)
            self._clock.mark("draft_prefill")
        return fed, [row for row, length in lengths.items() if length == len(self._requests[row].prompt) - 1]


def prefills(drafter: type[Drafter]) -> bool:
    """True if the class overrides `prefill` at or below the class that overrides `start`."""
    first = next(cls for cls in drafter.__mro__ if {"prefill", "start"} & vars(cls).keys())
    return first is not Drafter and "prefill" in vars(first)


def passes(lengths: Mapping[int, int], max_tokens: int) -> Iterator[dict[int, int]]:
    """Plan prefill passes; yield for each the cached length of its rows after the pass.

    Rows of similar length share a pass of at most ``max_tokens`` tokens, padding included. A longer row is fed in
    chunks of ``max_tokens``, in passes of its own.
    """
    batch: dict[int, int] = {}
    for row, length in sorted(lengths.items(), key=lambda item: item[1]):
        if batch and (len(batch) + 1) * length > max_tokens:
            yield batch
            batch = {}
        for end in range(max_tokens, length, max_tokens):
            yield {row: end}
        batch[row] = length
    if batch:
        yield batch
