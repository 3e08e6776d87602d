"""What the pieces of a cell took, and how fast it would have been on a quiet machine.

All times are seconds, all rates tokens per second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from .intervals import Estimate, estimate

#: Time that is not decoding.
PREFILL = "prefill"
#: A round in which threads waited for a processor for more than this share of it was disturbed; so many undisturbed
#: ones tell the pace of their shape.
DISTURBED, ENOUGH = 0.05, 4
#: A round of a shape is said to take what this share of them took at most. Another program can only make a round
#: slower: the lower quartile is that of a quiet machine as long as it is quiet for a quarter of the time, where a
#: median would change sides.
QUIET = 0.25


@dataclass(frozen=True)
class Piece:
    """What one cell did with one piece of the prompts; the cells of a group take turns piece by piece.

    The *tail*, the rounds in which slots stay empty because the piece's prompts have run out, is kept apart: its
    speed is not that of the batch size. Prompts that never filled the slots have no tail.

    Attributes:
        emitted: tokens generated, without the tail's.
        seconds: by phase (see ``decoding.stopwatch.PHASES``), without the tail's.
        tail_emitted, tail_seconds: tokens and decoding time of the tail.
        category: of all its prompts; empty if they have several.
        rounds: seconds of every round of the batch, without the tail's, by shape: ``"<nodes of the widest row> <length
            of the longest, in steps of 256 tokens>"``.
        waited: of the same rounds, for how many of these seconds threads waited for a processor that another program
            had, all threads added up; without a shape where that is not known.
    """

    emitted: int
    seconds: Mapping[str, float]
    tail_emitted: int = 0
    tail_seconds: float = 0.0
    category: str = ""
    rounds: Mapping[str, Sequence[float]] = field(default_factory=dict)
    waited: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def decode_seconds(self) -> float:
        """Time without the target's prefill."""
        return sum(s for phase, s in self.seconds.items() if phase != PREFILL)

    def untimed(self) -> Piece:
        """The same without any time: of a run that shared its device, whose clock says nothing."""
        return replace(self, seconds=dict.fromkeys(self.seconds, 0.0), tail_seconds=0.0, rounds={}, waited={})


@dataclass(frozen=True)
class _Timed:
    """A round: its shape, its seconds by the clock and without those that were waited, and whether any were."""

    shape: str
    seconds: float
    still: float
    disturbed: bool


def _timed(pieces: Sequence[Piece]) -> list[list[_Timed]]:
    """The rounds of each piece.

    What threads waited one after the other is what a round lost; what they waited at the same time counts twice. So no
    round is said to have taken less than the fastest one that was not disturbed.
    """
    found: list[list[tuple[str, float, float]]] = []
    for piece in pieces:
        rows: list[tuple[str, float, float]] = []
        for shape, every in piece.rounds.items():
            waited = piece.waited.get(shape) or [0.0] * len(every)
            rows += ((shape, seconds, lost) for seconds, lost in zip(every, waited, strict=True))
        found.append(rows)
    least = min((s for rows in found for _, s, lost in rows if lost <= DISTURBED * s), default=np.inf)
    return [
        [_Timed(shape, s, min(s, max(s - lost, least)), lost > DISTURBED * s) for shape, s, lost in rows]
        for rows in found
    ]


def quiet_seconds(pieces: Sequence[Piece]) -> dict[str, float]:
    """Seconds of a round of each shape while nothing else ran.

    The lower quartile of the undisturbed ones, if they are `ENOUGH`, else of all without what they waited.
    """
    by_shape: dict[str, list[_Timed]] = {}
    for one in (one for rows in _timed(pieces) for one in rows):
        by_shape.setdefault(one.shape, []).append(one)
    found = {}
    for shape, every in by_shape.items():
        quiet = [one.seconds for one in every if not one.disturbed]
        found[shape] = float(np.quantile(quiet if len(quiet) >= ENOUGH else [one.still for one in every], QUIET))
    return found


def busyness(pieces: Sequence[Piece]) -> float:
    """How many times as long as on a quiet machine the rounds took by the clock; 1.0 where no round was timed."""
    quiet = quiet_seconds(pieces)
    by_clock = sum(sum(seconds) for piece in pieces for seconds in piece.rounds.values())
    undisturbed = sum(len(seconds) * quiet[shape] for piece in pieces for shape, seconds in piece.rounds.items())
    return by_clock / undisturbed if undisturbed else 1.0


def speed_up(pieces: Sequence[Piece], baseline: Sequence[Piece]) -> Estimate | None:
    """Ratio of decoding rates on a quiet machine, over pieces: piece i of both cells held the same prompts.

    The interval holds what differs from piece to piece: what was accepted, and how fast a typical round of it was.
    None where no time passed.
    """
    wall = wall_ratio(pieces, baseline)
    if wall is None:
        return None
    sums = np.column_stack([_typical(pieces), _typical(baseline)])
    value = wall * busyness(pieces) / busyness(baseline)
    return estimate(lambda s: s[..., 0] / s[..., 1] / (s[..., 2] / s[..., 3]), sums, value=value)


def speed_up_ratio(
    pieces: Sequence[Piece], baseline: Sequence[Piece], others: Sequence[Piece], other_baseline: Sequence[Piece]
) -> Estimate | None:
    """`speed_up` of the first two over that of the last two, over pieces: piece i of all four held the same prompts.

    None where no time passed.
    """
    found = speed_up(pieces, baseline), speed_up(others, other_baseline)
    if found[0] is None or found[1] is None:
        return None
    sums = np.column_stack([_typical(one) for one in (pieces, baseline, others, other_baseline)])

    def ratio(s: np.ndarray) -> np.ndarray:
        rates = [s[..., 2 * i] / s[..., 2 * i + 1] for i in range(4)]
        return rates[0] / rates[1] / (rates[2] / rates[3])

    return estimate(ratio, sums, value=found[0].value / found[1].value)


def wall_ratio(pieces: Sequence[Piece], baseline: Sequence[Piece]) -> float | None:
    rates = []
    for cell in (pieces, baseline):
        emitted, seconds = sum(p.emitted for p in cell), sum(p.decode_seconds for p in cell)
        if emitted <= 0 or seconds <= 0:
            return None
        rates.append(emitted / seconds)
    return rates[0] / rates[1]


def _typical(pieces: Sequence[Piece]) -> np.ndarray:
    """``[n, 2]``: tokens of each piece, and its seconds at the pace of its own typical round.

    A round's pace is its time, without what it waited, over the quiet time of its shape; a piece's is the lower
    quartile of its rounds'.
    """
    quiet, rows = quiet_seconds(pieces), []
    for piece, rounds in zip(pieces, _timed(pieces), strict=True):
        if not rounds:
            rows.append((piece.emitted, piece.decode_seconds))
            continue
        pace = float(np.quantile([one.still / quiet[one.shape] for one in rounds if quiet[one.shape]], QUIET))
        by_clock, undisturbed = sum(one.seconds for one in rounds), sum(quiet[one.shape] for one in rounds)
        rows.append((piece.emitted, piece.decode_seconds * pace * undisturbed / by_clock))
    return np.array(rows, dtype=float)
