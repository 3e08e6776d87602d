"""What the loop's books say about one occupied slot: how far its sequence may go, and how it ends."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from ..contracts.rounds import Round


@dataclass
class Slot:
    """A sequence in a slot.

    Attributes:
        index, name: which prompt it answers, and what messages call it.
        prompt_length: tokens of the prompt.
        wanted: tokens that are still to be generated.
        eos: ids that end it.
        context: most tokens of prompt and output, or None.
        ended: how it ends, where somebody outside of the loop ends it.
        rounds: its rounds so far.
        logprobs: log P of each generated token; None at temperature 0.
    """

    index: int
    name: str
    prompt_length: int
    wanted: int
    eos: Collection[int]
    context: int | None
    logprobs: list[float] | None
    ended: str | None = None
    rounds: list[Round] = field(default_factory=list)

    def until_eos(self, new: list[int]) -> list[int]:
        """``new`` tokens up to the first that ends the sequence."""
        for i, token in enumerate(new):
            if token in self.eos:
                return new[: i + 1]
        return new

    def finish(self, history: Sequence[int]) -> str | None:
        """How a sequence ends that holds ``history``, see `Response.finish`; None: it goes on."""
        if self.ended is not None:
            return self.ended
        if history[-1] in self.eos and len(history) > self.prompt_length:
            return "eos"
        if self.wanted <= 0:
            return "length"
        if self.context is not None and len(history) >= self.context:
            return "context"
        return None

    def limit(self, length: int) -> int:
        """How deep the next draft may go behind ``length`` committed tokens."""
        room = self.wanted
        if self.context is not None:
            # The deepest draft token is fed at position length - 1 + depth, which must stay inside the context.
            room = min(room, self.context - length)
        return max(room - 1, 0)
