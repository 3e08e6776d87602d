"""The base of length policies: how long a draft should be. This one is ``static``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...framework.contracts.drafter import DraftContext


class LengthPolicy:
    """How long drafts are; one for a drafter, with a state for each slot where it needs any. This one is ``static``.

    Args:
        gamma: most tokens of a draft.
        batch_size: B.

    Attributes:
        fixed: is the length settled by gamma and the row's limit alone? Then the drafts are replayable.
        asks: does `goes_on` ever say no? Then the device is asked once for each drafted token.
        keeps_last: is the token after which a row stops part of the draft?
        anywhere: does `goes_on` ask for law and token alone, wherever in a draft they stand?
        adapts: does the length depend on how earlier steps went, or on what else is decoded?
        remembers: do other sequences change its lengths, those before it (until `reset`) or beside it?
    """

    fixed, asks, keeps_last, anywhere, adapts, remembers = True, False, True, True, False, False

    def __init__(self, gamma: int, batch_size: int):
        self.gamma, self.batch_size = gamma, batch_size

    def load(self, context: DraftContext) -> None:
        """Ask for what it needs beside its options, once. Raises UsageError where that is not there."""

    def start(self, row: int) -> None:
        """Slot ``row`` starts a new sequence."""

    def reset(self) -> None:
        """Forget what earlier sequences taught, see `Drafter.reset`."""

    def wanted(self, limit: Sequence[int], rows: int) -> list[int]:
        """Most tokens that each row drafts this step, given ``sequences.limit``; ``rows`` slots hold a sequence."""
        return [min(self.gamma, most) for most in limit]

    def goes_on(self, logits: Tensor, q: Tensor, token: Tensor) -> Tensor:
        """``[B]`` bool: draft another one after ``token [B]``, which was drawn from ``q [B, V]``?

        ``logits [B, V]`` are what ``q`` was made from; at temperature 0 ``q`` is their softmax.
        """
        raise NotImplementedError("a policy that never asks")

    def observe(self, accepted: Sequence[int], wanted: Sequence[int]) -> None:
        """The step is over: per slot tau, and what `wanted` had said."""
