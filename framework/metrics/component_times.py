"""Seconds of each component of a step on an undisturbed machine, estimated from all cells of a group together.

The cells of a group run on one target, piece by piece of the prompts in turn. A step is the sum of its components:

    target           by nodes of the widest row and length of the longest (all cells share it)
    draft            by drafter, nodes and length
    draft prefill    by drafter, for a token of the prompts
    verify           by verifier and nodes
    rest             by nodes: the host's bookkeeping

A component's time is the mean over the undisturbed steps of all cells. A cell's seconds are its counts times these, so
cells with equal counts differ by their own drafter and verifier only. Undisturbed are steps that

1. waited for a processor for at most `DISTURBED` of their time (the kernel's counters, where there are any), and
2. whose target pass lies in the lowest cluster of the passes of its shape. Another program can only slow a pass down,
   so the lowest cluster is the undisturbed one, provided that it is there: it needs `ENOUGH` passes, of three
   pieces or more, a share of `CLUSTER`, and next to nothing below it; and if nearly all passes of a shape are in it
   while few of the other shapes are in theirs, then all passes of that shape were disturbed.

A shape with fewer undisturbed steps borrows from its neighbours, which costs precision; with too much borrowed there is
no estimate (`Withheld`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .intervals import FREEDOM, LEAST_PIECES, Estimate, Noise, estimate
from .pieces import Piece

#: Share of a step that its threads may wait for a processor.
DISTURBED = 0.05
#: A cluster reaches this factor up and down from its median.
WITHIN = 1.25
#: Steps that make a cluster: so many, and this share of those of a shape.
ENOUGH, CLUSTER = 5, 0.05
#: Share of the passes of a shape that may lie below its cluster: a clock's whim.
BELOW = 0.02
#: Difference between the undisturbed shares of a shape and of all others from which on the former is not believed.
CONTRADICTION = 0.5
#: A draft, verification or bookkeeping longer than this many medians is a disturbance of its own.
SPIKE = 3.0
#: Prefill costs differ more: by the length of the prompt.
PREFILL_WITHIN = 1.6
#: A prefill of which too few were undisturbed may be off by half: it counts as borrowed so many times.
PREFILL_LENT = 5.0
#: Relative error of a borrowed time, and the share of a cell's seconds that may be borrowed.
BORROWED_ERROR, MOST_BORROWED = 0.1, 0.25
#: A wider pass may be measured as faster than a plain one by this factor: noise.
TOLERANCE = 1.02
#: A component that takes this share of a cell's seconds decides the degrees of freedom.
MATERIAL = 0.1

TOO_FEW = "too few undisturbed"
FAULT = "above block efficiency"
_PHASES = ("draft", "target", "verify", "rest")


class CellPieces(NamedTuple):
    """A cell of the group: what tells its drafter and its verifier apart from others, and its pieces in order."""

    drafter: str
    verifier: str
    pieces: Sequence[Piece]


@dataclass(frozen=True)
class Withheld:
    """Why there is no estimate: `TOO_FEW` or `FAULT`."""

    reason: str


class _Key(NamedTuple):
    """A component and its shape; keys that differ in nodes and length only are a series."""

    phase: str
    owner: str
    nodes: int = 0
    length: int = 0


class _Counts(NamedTuple):
    """Of a cell, by piece: tokens and steps ``[pieces]``, and how often each component ran ``[pieces, keys]``."""

    emitted: np.ndarray
    steps: np.ndarray
    counts: np.ndarray


class ComponentTimes:
    """Component times of a group, and what its cells' rates and speed-ups come to with them.

    Args:
        cells: piece i of every one held the same prompts.
    """

    def __init__(self, cells: Sequence[CellPieces]):
        self._pieces = max((len(cell.pieces) for cell in cells), default=0)
        self._keys: dict[_Key, int] = {}
        rows = [self._rows(i, cell) for i, cell in enumerate(cells)]
        self._steps = np.array([row for of in rows for row in of], dtype=float).reshape(-1, _COLUMNS)
        seconds, waited = self._steps[:, _SECONDS], self._steps[:, _WAITED]
        still = waited <= DISTURBED * (seconds.sum(1) + self._steps[:, _PREFILL_SECONDS])
        self._still, self._quiet = still, self._quiet_targets(still)
        self._estimate_components()
        self._cells = [self._counts(i, cell) for i, cell in enumerate(cells)]

    # -- answers ---------------------------------------------------------------------------------------------

    def undisturbed(self, cell: int) -> float:
        """Share of the cell's steps that were undisturbed; 1.0 without any."""
        mine = self._quiet[self._steps[:, _CELL] == cell]
        return float(mine.mean()) if len(mine) else 1.0

    def seconds(self, cell: int) -> float | None:
        """Seconds of all steps of a cell; None if too much of that is unknown."""
        counts = self._cells[cell].counts.sum(0)
        known = counts.any() and self._borrowed(counts) <= MOST_BORROWED
        return float(_seconds(self._times, counts)) if known else None

    def speed_up(self, cell: int, baseline: int, pieces: Sequence[int] | None = None) -> Estimate | Withheld:
        """Ratio of tokens per second, of some pieces or of all, with an interval for prompts and component times."""
        found = self._ratio(cell, baseline, pieces)
        if isinstance(found, Withheld):
            return found
        return estimate(_quotient, found.sums, value=found.value, noise=found.noise)

    def _ratio(self, cell: int, baseline: int, pieces: Sequence[int] | None = None) -> _Ratio | Withheld:
        mine, plain = self._cells[cell], self._cells[baseline]
        of = list(range(self._pieces) if pieces is None else pieces)
        totals = [one.counts[of].sum(0) for one in (mine, plain)]
        borrowed = [self._borrowed(counts) for counts in totals]
        if not all(counts.any() for counts in totals) or max(borrowed) > MOST_BORROWED:
            return Withheld(TOO_FEW)
        both = [(one.emitted[of], _seconds(self._times, one.counts[of])) for one in (mine, plain)]
        sums = np.column_stack([*both[0], *both[1]])
        value = float(_quotient(sums.sum(0)))
        per_step = [one.emitted[of].sum() / one.steps[of].sum() for one in (mine, plain)]
        most = float(per_step[0] / per_step[1])
        if value > TOLERANCE * most:
            return Withheld(FAULT)
        # Deleting a piece from what component times are estimated from, with the counts as they are.
        seconds, without = ([_seconds(times, counts) for counts in totals] for times in (self._times, self._without))
        centre, without, n = np.log(seconds[1] / seconds[0]), np.log(without[1] / without[0]), self._pieces
        variance = float((n - 1) / n * ((without - centre) ** 2).sum()) if n > 1 else 0.0
        if not np.isfinite(variance):  # a component that one piece alone stands for
            return Withheld(TOO_FEW)
        borrowing = sum((BORROWED_ERROR * share) ** 2 for share in borrowed)
        noise = [Noise(variance, FREEDOM * self._independent(totals)), Noise(borrowing, np.inf)]
        return _Ratio(min(value, most), sums, tuple(noise))

    def _borrowed(self, counts: np.ndarray) -> float:
        """Share of the seconds of these counts that no undisturbed step of the same shape stands for."""
        seconds = counts * self._times
        if not np.isfinite(seconds[counts > 0]).all():
            return 1.0
        total = float(seconds[counts > 0].sum())
        return float((seconds * self._lent)[counts > 0].sum()) / total if total else 1.0

    def _independent(self, totals: Sequence[np.ndarray]) -> float:
        """Number of pieces of equal weight that the least known of the material components was measured in."""
        found = [float(self._pieces)]
        for counts in totals:
            shares = np.where(counts > 0, counts * self._times, 0.0) / _seconds(self._times, counts)
            for k in np.flatnonzero(shares >= MATERIAL):
                weight = self._weights[:, k]
                found.append(float(weight.sum() ** 2 / (weight**2).sum()) if weight.any() else 1.0)
        return min(found)

    # -- steps -----------------------------------------------------------------------------------------------

    def _key(self, *key: object) -> int:
        return self._keys.setdefault(_Key(*key), len(self._keys))  # type: ignore[arg-type]

    def _rows(self, number: int, cell: CellPieces) -> list[tuple[float, ...]]:
        rows = []
        for j, piece in enumerate(cell.pieces):
            for shape, steps in piece.steps.items():
                nodes, length, *resumed = shape.split()
                w, c = int(nodes), int(length)
                keys = (
                    self._key("draft", cell.drafter, w, c),
                    self._key("target", cell.drafter if resumed else "", w, c),
                    self._key("verify", cell.verifier, w),
                    self._key("rest", "", w),
                    self._key("prefill", cell.drafter),
                )
                for draft, target, verify, rest, waited, *prefill in steps:
                    seconds = (max(x, 1) / 1e6 for x in (draft, target, verify, rest))
                    tokens, more = prefill or (0, 0)
                    rows.append((number, j, *keys, *seconds, waited / 1e6, tokens, more / 1e6))
        return rows

    def _counts(self, number: int, cell: CellPieces) -> _Counts:
        mine = self._steps[self._steps[:, _CELL] == number]
        counts, j = np.zeros((self._pieces, len(self._keys))), mine[:, _PIECE].astype(int)
        for column in (*_KEYS, _PREFILL_KEY):
            at = j * len(self._keys) + mine[:, column].astype(int)
            ran = mine[:, _TOKENS] if column == _PREFILL_KEY else None
            counts += np.bincount(at, ran, counts.size).reshape(counts.shape)
        emitted = np.zeros(self._pieces)
        emitted[: len(cell.pieces)] = [piece.emitted for piece in cell.pieces]
        return _Counts(emitted, np.bincount(j, minlength=self._pieces), counts)

    # -- which steps are undisturbed ---------------------------------------------------------------------------

    def _quiet_targets(self, still: np.ndarray) -> np.ndarray:
        """Steps whose target pass is undisturbed."""
        passes, keys, pieces = (self._steps[:, column] for column in (_TARGET, _TARGET_KEY, _PIECE))
        quiet, rare = np.zeros(len(passes), dtype=bool), []
        found: dict[_Key, float] = {}
        shares: dict[_Key, tuple[int, int]] = {}
        for key, k in self._keys.items():
            if key.phase != "target":
                continue
            mine = np.flatnonzero(still & (keys == k))
            cluster = lowest_cluster(passes[mine])
            if cluster is None or len(set(pieces[mine[cluster[1]]])) < min(LEAST_PIECES, self._pieces):
                rare.append((key, mine))
                continue
            found[key], inside = cluster
            quiet[mine[inside]] = True
            shares[key] = int(inside.sum()), len(mine)
        for key, (undisturbed, every) in shares.items():
            others = [sum(x) for x in zip(*(of for k, of in shares.items() if k is not key), strict=True)]
            if others and undisturbed / every - others[0] / others[1] > CONTRADICTION:
                mine = np.flatnonzero(still & (keys == self._keys[key]))
                quiet[mine] = False
                del found[key]
                rare.append((key, mine))
        for key, mine in rare:
            low, high = _bounds(key, found)
            quiet[mine] = (low <= passes[mine]) & (passes[mine] <= high)
        return quiet

    # -- times -------------------------------------------------------------------------------------------------

    def _estimate_components(self) -> None:
        """Set the time of each key, those without each piece, the share that is borrowed, and its steps by piece."""
        n = len(self._keys)
        self._times, self._lent = np.full(n, np.nan), np.zeros(n)
        self._without, self._weights = np.full((self._pieces, n), np.nan), np.zeros((self._pieces, n))
        taken, steps = np.zeros((self._pieces, n)), self._steps
        for key, k in self._keys.items():
            if key.phase == "prefill":
                mine = self._quiet_prefills(k)
                seconds, weights = mine[:, _PREFILL_SECONDS], mine[:, _TOKENS]
            else:
                phase = _PHASES.index(key.phase)
                mine = steps[self._quiet & (steps[:, _KEYS[phase]] == k)]
                if key.phase != "target" and len(mine):
                    mine = mine[mine[:, _SECONDS[phase]] <= SPIKE * np.median(mine[:, _SECONDS[phase]])]
                seconds, weights = mine[:, _SECONDS[phase]], np.ones(len(mine))
            j = mine[:, _PIECE].astype(int)
            taken[:, k] = np.bincount(j, seconds, self._pieces)
            self._weights[:, k] = np.bincount(j, weights, self._pieces)
        for series in {key[:2] for key in self._keys}:
            members = [key for key in self._keys if key[:2] == series]
            self._estimate_series(members, taken)

    def _estimate_series(self, members: Sequence[_Key], taken: np.ndarray) -> None:
        """The times of the keys of a series: means of their own steps, one step's worth borrowed from neighbours."""
        columns = [self._keys[key] for key in members]
        seconds, weights = taken[:, columns], self._weights[:, columns]
        least = min(LEAST_PIECES, self._pieces)
        known = (weights.sum(0) >= ENOUGH) & ((weights > 0).sum(0) >= least)
        if members[0].phase == "prefill" and not known.all():
            self._estimate_prefill(columns[0])
            return
        # All of the series stand for each of its shapes where none is known, if they are enough.
        if not known.any() and (weights.sum() < ENOUGH or (weights.sum(1) > 0).sum() < least):
            return
        lent = _interpolation(members, known) if known.any() else np.zeros(0)

        def times(seconds: np.ndarray, weights: np.ndarray) -> np.ndarray:
            with np.errstate(invalid="ignore", divide="ignore"):
                own = np.where(known, seconds / weights, 0.0)
                every = seconds.sum() / weights.sum()
            other = lent @ own if known.any() else np.full(len(members), every)
            return np.where(known, own, (seconds + other) / (weights + 1))

        self._times[columns] = times(seconds.sum(0), weights.sum(0))
        self._lent[columns] = np.where(known, 0.0, 1 / (weights.sum(0) + 1))
        for j in range(self._pieces):
            self._without[j, columns] = times(seconds.sum(0) - seconds[j], weights.sum(0) - weights[j])

    def _quiet_prefills(self, k: int) -> np.ndarray:
        """Steps before which a drafter prefilled undisturbed: the lowest cluster of seconds for a token."""
        mine = self._steps[self._still & (self._steps[:, _PREFILL_KEY] == k) & (self._steps[:, _TOKENS] > 0)]
        cluster = lowest_cluster(mine[:, _PREFILL_SECONDS] / mine[:, _TOKENS], PREFILL_WITHIN, below=0)
        if cluster is None or cluster[1].mean() - self._quiet[self._still].mean() > CONTRADICTION:
            return mine[:0]
        return mine[cluster[1]]

    def _estimate_prefill(self, k: int) -> None:
        """The drafter's prefill where few were undisturbed: near the least that a token took, all of it borrowed."""
        mine = self._steps[(self._steps[:, _PREFILL_KEY] == k) & (self._steps[:, _TOKENS] > 0)]
        each = mine[:, _PREFILL_SECONDS] / mine[:, _TOKENS] if len(mine) else np.zeros(1)
        self._times[k] = self._without[:, k] = np.quantile(each, 0.1)
        self._lent[k] = PREFILL_LENT


class _Ratio(NamedTuple):
    """A speed-up: its value, tokens and seconds of the cell and of plain decoding by piece, and the times' noise."""

    value: float
    sums: np.ndarray
    noise: tuple[Noise, ...]


def speed_up_ratio(one: tuple[ComponentTimes, int, int], other: tuple[ComponentTimes, int, int]) -> Estimate | Withheld:
    """The first speed-up over the second; each is given by the times of its group, its cell and its baseline.

    Piece i of both groups held the same prompts.
    """
    a, b = (times._ratio(cell, baseline) for times, cell, baseline in (one, other))
    if isinstance(a, Withheld) or isinstance(b, Withheld):
        return a if isinstance(a, Withheld) else b  # type: ignore[return-value]
    sums = np.column_stack([a.sums, b.sums])

    def ratio(s: np.ndarray) -> np.ndarray:
        return _quotient(s[..., :4]) / _quotient(s[..., 4:])

    return estimate(ratio, sums, value=a.value / b.value, noise=a.noise + b.noise)


def lowest_cluster(
    seconds: np.ndarray, within: float = WITHIN, below: float = BELOW
) -> tuple[float, np.ndarray] | None:
    """The median of the lowest cluster of some times and which of them belong to it; None if there is not any.

    Args:
        within: the cluster reaches this factor up and down from its median.
        below: share of the times that may lie below it; 0: not one.
    """
    if not len(seconds):
        return None
    x, reach = np.log(np.maximum(seconds, 1e-9)), float(np.log(within))
    ordered = np.sort(x)
    counts = np.searchsorted(ordered, ordered + 2 * reach, "right") - np.arange(len(x))
    starts = np.flatnonzero(counts >= max(ENOUGH, CLUSTER * len(x)))
    if not len(starts):
        return None
    centre = float(np.median(ordered[starts[0] : starts[0] + counts[starts[0]]]))
    for _ in range(20):
        inside = np.abs(x - centre) <= reach
        centre = float(np.median(x[inside]))
    inside = np.abs(x - centre) <= reach
    if inside.sum() < ENOUGH or (x < centre - reach).sum() > (max(1, below * len(x)) if below else 0):
        return None
    return float(np.exp(centre)), inside


def _bounds(key: _Key, found: dict[_Key, float]) -> tuple[float, float]:
    """Least and greatest seconds of an undisturbed pass of a shape: it takes no longer than a wider one.

    Nor less than a narrower one, or less than its rows' share of a wider one. Nothing is known beyond the widest.
    """
    wider = [k for k in found if k.owner == key.owner and k.nodes >= key.nodes]
    if not wider:
        return np.inf, 0.0
    narrower = [found[k] for k in found if k.owner == key.owner and k.nodes <= key.nodes]
    next_one = min(wider, key=lambda k: (abs(k.length - key.length), k.nodes))
    low = min(narrower, default=found[next_one] * (key.nodes + 1) / (next_one.nodes + 1))
    return low / WITHIN, found[next_one] * WITHIN


def _interpolation(members: Sequence[_Key], known: np.ndarray) -> np.ndarray:
    """``[members, members]``: the weights of the known members' times in that of each, linear between their nodes.

    Of the known ones those of the nearest length count; beyond the narrowest and the widest the nearest does.
    """
    weights = np.zeros((len(members), len(members)))
    for i, key in enumerate(members):
        near = min(abs(k.length - key.length) for k, of in zip(members, known, strict=True) if of)
        some = [m for m, k in enumerate(members) if known[m] and abs(k.length - key.length) == near]
        some.sort(key=lambda m: members[m].nodes)
        nodes = [members[m].nodes for m in some]
        for m, share in zip(some, np.eye(len(some)), strict=True):
            weights[i, m] = np.interp(key.nodes, nodes, share)
    return weights


def _seconds(times: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Of counts by component; times of components that did not run may be unknown."""
    return np.where(counts > 0, counts * times, 0.0).sum(-1)


def _quotient(s: np.ndarray) -> np.ndarray:
    return s[..., 0] / s[..., 1] / (s[..., 2] / s[..., 3])


# Columns of a step; those of keys and of seconds are in the order of _PHASES.
_CELL, _PIECE, _KEYS, _TARGET_KEY, _PREFILL_KEY = 0, 1, [2, 3, 4, 5], 3, 6
_SECONDS, _TARGET, _WAITED, _TOKENS, _PREFILL_SECONDS, _COLUMNS = [7, 8, 9, 10], 8, 11, 12, 13, 14
