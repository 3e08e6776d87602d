"""Measurement of one piece of the prompts by one cell, as stored on disk."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

#: The phase that is not part of decoding.
PREFILL = "prefill"
_SHAPE = re.compile(r"\d{1,9} \d{1,9}( resumed)?")


@dataclass(frozen=True)
class Piece:
    """Measurement of one piece of the prompts by one cell; the cells of a group take turns piece by piece.

    The *tail* is stored separately: the steps with empty slots, after the prompts of the piece have run out. Its
    throughput is not that of the batch size. If the prompts never filled the slots, no step belongs to the tail.

    Attributes:
        emitted: tokens generated, tail excluded.
        seconds: time by phase (see ``engine.stopwatch.PHASES``), tail excluded.
        tail_emitted, tail_seconds: tokens and decoding time of the tail.
        category: category of all its prompts; empty if they differ.
        steps: steps of the batch by shape, tail excluded. A shape is ``"<nodes of the widest row> <length of the
            longest row // 256>"``, followed by ``" resumed"`` if the target resumed from layers computed by the
            drafter. A step is a row of microseconds: draft, target, verify, rest, and the time that all threads waited
            for a processor (0 if unknown). If the drafter prefilled prompts before the step, their tokens and the
            microseconds of that prefill follow.
        requests: for an engine's server, which has no such steps, a row per response: tokens after the first,
            microseconds to the first token, microseconds from the first token to the last; then, of each step, the
            positions that the target evaluates for the whole batch, and microseconds.
    """

    emitted: int
    seconds: Mapping[str, float]
    tail_emitted: int = 0
    tail_seconds: float = 0.0
    category: str = ""
    steps: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    requests: Sequence[Sequence[int]] = ()

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Piece:
        """Parse a piece. Raises KeyError, TypeError or ValueError if the data does not have this form."""
        piece = cls(**data)
        piece.check_steps()
        return piece

    def check_steps(self) -> None:
        """Raise ValueError for a malformed shape, step or request."""
        rows = self.requests
        if not all(len(row) >= 3 and len(row) % 2 and all(isinstance(x, int) and x >= 0 for x in row) for row in rows):
            raise ValueError("requests: a request does not consist of three non-negative integers and pairs of them")
        for shape, rows in self.steps.items():
            if not _SHAPE.fullmatch(shape):
                raise ValueError(
                    f"steps: {shape[:40]!r} is not a shape; expected 'NODES LENGTH' or 'NODES LENGTH resumed'"
                )
            if not all(len(row) in (5, 7) and all(isinstance(x, int) and x >= 0 for x in row) for row in rows):
                raise ValueError(
                    f"steps: a step of shape {shape!r} does not consist of five or seven non-negative integers"
                )

    @property
    def decode_seconds(self) -> float:
        """Decoding time, without the target's prefill."""
        return sum(s for phase, s in self.seconds.items() if phase != PREFILL)

    def untimed(self) -> Piece:
        """Return a copy without times, for runs that share their device."""
        return replace(self, seconds=dict.fromkeys(self.seconds, 0.0), tail_seconds=0.0, steps={}, requests=())


def wall_ratio(pieces: Sequence[Piece], baseline: Sequence[Piece]) -> float | None:
    """Ratio of decoding rates by the clock; None without tokens or time."""
    rates = []
    for cell in (pieces, baseline):
        emitted, seconds = sum(p.emitted for p in cell), sum(p.decode_seconds for p in cell)
        if emitted <= 0 or seconds <= 0:
            return None
        rates.append(emitted / seconds)
    return rates[0] / rates[1]
