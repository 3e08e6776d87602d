"""The base class of length policies, which set the length of each draft; itself the policy ``static``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...framework.contracts.drafter import DraftContext


class LengthPolicy:
    """Draft lengths of one drafter, with per-slot state if a subclass needs it. The base class is ``static``.

    Args:
        gamma: maximum draft length.
        batch_size: B.

    Attributes:
        fixed: True if gamma and the row's limit determine the length, so that drafts are replayable.
        stops_early: True if `should_continue` can return False. Costs one host sync per drafted token.
        keeps_last: True if the token at which a row stops stays in the draft.
        position_free: True if `should_continue` depends on logits, q and token only, not on the position in the draft.
        adapts: True if the length depends on earlier steps or on the other rows.
        remembers: True if other sequences change the lengths, earlier ones (until `reset`) or those in the batch.
    """

    fixed, stops_early, keeps_last, position_free, adapts, remembers = True, False, True, True, False, False

    def __init__(self, gamma: int, batch_size: int):
        self.gamma, self.batch_size = gamma, batch_size

    def load(self, context: DraftContext) -> None:
        """Load what the policy needs beside its options, once. Raises UsageError if it cannot be loaded."""

    def start(self, row: int) -> None:
        """Start a new sequence in slot ``row``."""

    def reset(self) -> None:
        """Forget state learnt from earlier sequences, see `Drafter.reset`."""

    def draft_lengths(self, limit: Sequence[int], rows: int) -> list[int]:
        """Maximum draft length of each row in this step.

        Args:
            limit: ``sequences.limit``.
            rows: number of occupied slots.
        """
        return [min(self.gamma, most) for most in limit]

    def should_continue(self, logits: Tensor, q: Tensor, token: Tensor) -> Tensor:
        """``[B]`` bool: True to draft another token after ``token [B]``, drawn from ``q [B, V]``.

        ``q`` was computed from ``logits [B, V]``; at temperature 0 it is their softmax.
        """
        raise NotImplementedError("this policy does not stop early")

    def observe(self, accepted: Sequence[int], lengths: Sequence[int]) -> None:
        """Update the state after a step, given tau of each slot and the `draft_lengths` of the step."""
