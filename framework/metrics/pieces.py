"""What one cell did with one piece of the prompts, as it is kept on disk."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

#: Time that is not decoding.
PREFILL = "prefill"
_SHAPE = re.compile(r"\d{1,9} \d{1,9}( resumed)?")


@dataclass(frozen=True)
class Piece:
    """What one cell did with one piece of the prompts; the cells of a group take turns piece by piece.

    The *tail*, the steps in which slots stay empty because the piece's prompts have run out, is kept apart: its
    speed is not that of the batch size. Prompts that never filled the slots have no tail.

    Attributes:
        emitted: tokens generated, without the tail's.
        seconds: by phase (see ``engine.stopwatch.PHASES``), without the tail's.
        tail_emitted, tail_seconds: tokens and decoding time of the tail.
        category: of all its prompts; empty if they have several.
        steps: every step of the batch, without the tail's, by shape: ``"<nodes of the widest row> <length of the
            longest, in steps of 256 tokens>"``, followed by ``" resumed"`` if the target resumed from layers that the
            drafter had computed. A step is a row of microseconds: draft, target, verify, rest, and what threads waited
            for a processor, all threads added up (0 if unknown); then, if prompts were prefilled by the drafter before
            it, their tokens and the microseconds of that.
    """

    emitted: int
    seconds: Mapping[str, float]
    tail_emitted: int = 0
    tail_seconds: float = 0.0
    category: str = ""
    steps: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Piece:
        """Raise KeyError, TypeError or ValueError for data of another shape."""
        piece = cls(**data)
        piece.check_steps()
        return piece

    def check_steps(self) -> None:
        """Raise ValueError if a shape or a step is not as described above."""
        for shape, rows in self.steps.items():
            if not _SHAPE.fullmatch(shape):
                raise ValueError(f"steps: {shape[:40]!r} is not a shape")
            if not all(len(row) in (5, 7) and all(isinstance(x, int) and x >= 0 for x in row) for row in rows):
                raise ValueError(f"steps: a step of shape {shape!r} is not five or seven whole numbers")

    @property
    def decode_seconds(self) -> float:
        """Time without the target's prefill."""
        return sum(s for phase, s in self.seconds.items() if phase != PREFILL)

    def untimed(self) -> Piece:
        """The same without any time: of a run that shared its device, whose clock says nothing."""
        return replace(self, seconds=dict.fromkeys(self.seconds, 0.0), tail_seconds=0.0, steps={})


def wall_ratio(pieces: Sequence[Piece], baseline: Sequence[Piece]) -> float | None:
    """Ratio of decoding rates by the clock; None if no time passed."""
    rates = []
    for cell in (pieces, baseline):
        emitted, seconds = sum(p.emitted for p in cell), sum(p.decode_seconds for p in cell)
        if emitted <= 0 or seconds <= 0:
            return None
        rates.append(emitted / seconds)
    return rates[0] / rates[1]
