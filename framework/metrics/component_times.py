"""Seconds of each component of a step on an undisturbed machine, estimated from all cells of a group.

The cells of a group share one target and take turns piece by piece. A step is the sum of its components:

    target           by nodes of the widest row and length of the longest row (shared by all cells)
    draft            by drafter, nodes and length
    draft prefill    by drafter, per prompt token
    verify           by verifier and nodes
    rest             by nodes: the host's bookkeeping

The time of a component is the mean over the undisturbed steps of all cells. The seconds of a cell are its counts times
these means, so cells with equal counts differ by their own drafter and verifier only. A step is undisturbed if

1. its threads waited for a processor for at most `DISTURBED` of its time (kernel counters, where available), and
2. its target pass lies in the lowest cluster of the passes of its shape. Other programs can only slow a pass down, so
   the lowest cluster is the undisturbed one. It needs `ENOUGH` passes of three pieces (or as many as any shape has), a
   share of `CLUSTER`, and next to nothing below it, or near below it if its share is `MAIN`. If nearly all passes of a
   shape are in its cluster, but few of the other shapes are in theirs, then all passes of that shape were disturbed.

A shape with too few undisturbed steps borrows from its neighbours, which costs precision; with too much borrowed time
the estimate is withheld (`Withheld`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .intervals import FREEDOM, LEAST_PIECES, Estimate, Noise, double_ratio, estimate
from .pieces import Piece

#: Maximum share of a step that its threads may wait for a processor.
DISTURBED = 0.05
#: A cluster extends this factor above and below its median.
WITHIN = 1.25
#: Minimum size of a cluster: steps, and share of the steps of its shape.
ENOUGH, CLUSTER = 5, 0.05
#: Maximum share of the passes of a shape below its cluster: clock noise.
BELOW = 0.02
#: Share of the passes of a cluster that is all but one end of a single distribution.
MAIN = 0.85
#: Maximum difference between the undisturbed share of a shape and that of all other shapes.
CONTRADICTION = 0.5
#: A draft, verification or rest longer than this many medians is an outlier.
SPIKE = 3.0
#: `WITHIN` for prefill, whose time per token depends on the length of the prompt.
PREFILL_WITHIN = 1.6
#: Weight as borrowed time of a prefill with too few undisturbed steps: it may be off by half.
PREFILL_BORROWED = 5.0
#: Relative error of a borrowed time, and maximum borrowed share of a cell's seconds.
BORROWED_ERROR, MOST_BORROWED = 0.1, 0.25
#: Noise factor by which a wider pass may be measured as faster than a plain one.
TOLERANCE = 1.02
#: Minimum share of a cell's seconds of the components that limit the degrees of freedom.
MATERIAL = 0.1

TOO_FEW = "too few undisturbed"
FAULT = "above block efficiency"
_PHASES = ("draft", "target", "verify", "rest")


class CellPieces(NamedTuple):
    """Pieces of a cell in order, with keys that identify its drafter and its verifier."""

    drafter: str
    verifier: str
    pieces: Sequence[Piece]


@dataclass(frozen=True)
class Withheld:
    """A missing estimate; the reason is `TOO_FEW` or `FAULT`."""

    reason: str


class _Key(NamedTuple):
    """Component and shape. Keys that differ only in nodes and length form a series."""

    phase: str
    owner: str
    nodes: int = 0
    length: int = 0


class _Counts(NamedTuple):
    """Counts of a cell by piece: tokens and steps ``[pieces]``, runs of each component ``[pieces, keys]``."""

    emitted: np.ndarray
    steps: np.ndarray
    counts: np.ndarray


class ComponentTimes:
    """Component times of a group, and the rates and speed-ups of its cells computed from them.

    Args:
        cells: piece i of each cell has the same prompts.
    """

    def __init__(self, cells: Sequence[CellPieces]):
        self._pieces = max((len(cell.pieces) for cell in cells), default=0)
        self._keys: dict[_Key, int] = {}
        rows = [self._rows(i, cell) for i, cell in enumerate(cells)]
        self._steps = np.array([row for cell_rows in rows for row in cell_rows], dtype=float).reshape(-1, _COLUMNS)
        seconds, waits = self._steps[:, _SECONDS], self._steps[:, _WAITED]
        unblocked = waits <= DISTURBED * (seconds.sum(1) + self._steps[:, _PREFILL_SECONDS])
        self._unblocked, self._undisturbed = unblocked, self._undisturbed_targets(unblocked)
        self._estimate_components()
        self._cells = [self._counts(i, cell) for i, cell in enumerate(cells)]

    # -- results ---------------------------------------------------------------------------------------------

    def undisturbed(self, cell: int) -> float:
        """Share of undisturbed steps of a cell; 1.0 without steps."""
        rows = self._undisturbed[self._steps[:, _CELL] == cell]
        return float(rows.mean()) if len(rows) else 1.0

    def seconds(self, cell: int) -> float | None:
        """Seconds of all steps of a cell; None if too much of them is borrowed."""
        counts = self._cells[cell].counts.sum(0)
        reliable = counts.any() and self._borrowed(counts) <= MOST_BORROWED
        return float(_seconds(self._times, counts)) if reliable else None

    def speed_up(self, cell: int, baseline: int, pieces: Sequence[int] | None = None) -> Estimate | Withheld:
        """Ratio of tokens per second, with an interval over prompts and component times.

        Args:
            pieces: indices of the pieces to use; all by default.
        """
        ratio = self._ratio(cell, baseline, pieces)
        if isinstance(ratio, Withheld):
            return ratio
        return estimate(double_ratio, ratio.sums, value=ratio.value, noise=ratio.noise)

    def _ratio(self, cell: int, baseline: int, pieces: Sequence[int] | None = None) -> _Ratio | Withheld:
        own_counts, base_counts = self._cells[cell], self._cells[baseline]
        selected = list(range(self._pieces) if pieces is None else pieces)
        totals = [cell_counts.counts[selected].sum(0) for cell_counts in (own_counts, base_counts)]
        borrowed = [self._borrowed(counts) for counts in totals]
        if not all(counts.any() for counts in totals) or max(borrowed) > MOST_BORROWED:
            return Withheld(TOO_FEW)
        columns = [
            (cell_counts.emitted[selected], _seconds(self._times, cell_counts.counts[selected]))
            for cell_counts in (own_counts, base_counts)
        ]
        sums = np.column_stack([*columns[0], *columns[1]])
        value = float(double_ratio(sums.sum(0)))
        per_step = [
            cell_counts.emitted[selected].sum() / cell_counts.steps[selected].sum()
            for cell_counts in (own_counts, base_counts)
        ]
        limit = float(per_step[0] / per_step[1])
        if value > TOLERANCE * limit:
            return Withheld(FAULT)
        # Jackknife of the component times only: the counts keep all pieces.
        seconds, without = ([_seconds(times, counts) for counts in totals] for times in (self._times, self._without))
        centre, without, n = np.log(seconds[1] / seconds[0]), np.log(without[1] / without[0]), self._pieces
        variance = float((n - 1) / n * ((without - centre) ** 2).sum()) if n > 1 else 0.0
        if not np.isfinite(variance):  # a component measured in one piece only
            return Withheld(TOO_FEW)
        borrowing = sum((BORROWED_ERROR * share) ** 2 for share in borrowed)
        noise = [Noise(variance, FREEDOM * self._independent(totals)), Noise(borrowing, np.inf)]
        return _Ratio(min(value, limit), sums, tuple(noise))

    def _borrowed(self, counts: np.ndarray) -> float:
        """Share of the seconds of these counts that is borrowed from other shapes."""
        seconds = counts * self._times
        if not np.isfinite(seconds[counts > 0]).all():
            return 1.0
        total = float(seconds[counts > 0].sum())
        return float((seconds * self._borrowed_share)[counts > 0].sum()) / total if total else 1.0

    def _independent(self, totals: Sequence[np.ndarray]) -> float:
        """Effective number of pieces in which the least measured of the `MATERIAL` components was measured."""
        effective = [float(self._pieces)]
        for counts in totals:
            shares = np.where(counts > 0, counts * self._times, 0.0) / _seconds(self._times, counts)
            for k in np.flatnonzero(shares >= MATERIAL):
                weight = self._weights[:, k]
                effective.append(float(weight.sum() ** 2 / (weight**2).sum()) if weight.any() else 1.0)
        return min(effective)

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
                for draft, target, verify, other, wait, *prefill in steps:
                    seconds = (max(x, 1) / 1e6 for x in (draft, target, verify, other))
                    tokens, more = prefill or (0, 0)
                    rows.append((number, j, *keys, *seconds, wait / 1e6, tokens, more / 1e6))
        return rows

    def _counts(self, number: int, cell: CellPieces) -> _Counts:
        rows = self._steps[self._steps[:, _CELL] == number]
        counts, j = np.zeros((self._pieces, len(self._keys))), rows[:, _PIECE].astype(int)
        for column in (*_KEYS, _PREFILL_KEY):
            at = j * len(self._keys) + rows[:, column].astype(int)
            amounts = rows[:, _TOKENS] if column == _PREFILL_KEY else None
            counts += np.bincount(at, amounts, counts.size).reshape(counts.shape)
        emitted = np.zeros(self._pieces)
        emitted[: len(cell.pieces)] = [piece.emitted for piece in cell.pieces]
        return _Counts(emitted, np.bincount(j, minlength=self._pieces), counts)

    # -- undisturbed steps -------------------------------------------------------------------------------------

    def _undisturbed_targets(self, unblocked: np.ndarray) -> np.ndarray:
        """Return a mask of the steps whose target pass is undisturbed."""
        passes, keys, pieces = (self._steps[:, column] for column in (_TARGET, _TARGET_KEY, _PIECE))
        quiet, rare = np.zeros(len(passes), dtype=bool), []
        medians: dict[_Key, float] = {}
        shares: dict[_Key, tuple[int, int]] = {}
        shapes = {key: keys == k for key, k in self._keys.items() if key.phase == "target"}
        max_pieces = max((len(set(pieces[shape])) for shape in shapes.values()), default=0)
        for key, shape in shapes.items():
            rows = np.flatnonzero(unblocked & shape)
            cluster = lowest_cluster(passes[rows])
            if cluster is None or len(set(pieces[rows[cluster[1]]])) < min(LEAST_PIECES, max_pieces):
                rare.append((key, rows))
                continue
            medians[key], members = cluster
            quiet[rows[members]] = True
            shares[key] = int(members.sum()), len(rows)
        for key, (undisturbed, passes_of_shape) in shares.items():
            other_shares = [sum(x) for x in zip(*(share for k, share in shares.items() if k is not key), strict=True)]
            if other_shares and undisturbed / passes_of_shape - other_shares[0] / other_shares[1] > CONTRADICTION:
                rows = np.flatnonzero(unblocked & shapes[key])
                quiet[rows] = False
                del medians[key]
                rare.append((key, rows))
        for key, rows in rare:
            low, high = _bounds(key, medians)
            quiet[rows] = (low <= passes[rows]) & (passes[rows] <= high)
        return quiet

    # -- times -------------------------------------------------------------------------------------------------

    def _estimate_components(self) -> None:
        """Set the time of each key, its leave-one-piece-out times, its borrowed share, and its steps by piece."""
        n = len(self._keys)
        self._times, self._borrowed_share = np.full(n, np.nan), np.zeros(n)
        self._without, self._weights = np.full((self._pieces, n), np.nan), np.zeros((self._pieces, n))
        seconds_by_piece, steps = np.zeros((self._pieces, n)), self._steps
        for key, k in self._keys.items():
            if key.phase == "prefill":
                rows = self._undisturbed_prefills(k)
                seconds, weights = rows[:, _PREFILL_SECONDS], rows[:, _TOKENS]
            else:
                phase = _PHASES.index(key.phase)
                rows = steps[self._undisturbed & (steps[:, _KEYS[phase]] == k)]
                if key.phase != "target" and len(rows):
                    rows = rows[rows[:, _SECONDS[phase]] <= SPIKE * np.median(rows[:, _SECONDS[phase]])]
                seconds, weights = rows[:, _SECONDS[phase]], np.ones(len(rows))
            j = rows[:, _PIECE].astype(int)
            seconds_by_piece[:, k] = np.bincount(j, seconds, self._pieces)
            self._weights[:, k] = np.bincount(j, weights, self._pieces)
        for series in {key[:2] for key in self._keys}:
            members = [key for key in self._keys if key[:2] == series]
            self._estimate_series(members, seconds_by_piece)

    def _estimate_series(self, members: Sequence[_Key], seconds_by_piece: np.ndarray) -> None:
        """Estimate the times of a series: means of each key's steps, plus one step borrowed from its neighbours."""
        columns = [self._keys[key] for key in members]
        seconds, weights = seconds_by_piece[:, columns], self._weights[:, columns]
        min_pieces = min(LEAST_PIECES, self._pieces)
        enough = (weights.sum(0) >= ENOUGH) & ((weights > 0).sum(0) >= min_pieces)
        if members[0].phase == "prefill" and not enough.all():
            self._estimate_prefill(columns[0])
            return
        # If no shape has enough steps, the mean over the whole series is used.
        if not enough.any() and (weights.sum() < ENOUGH or (weights.sum(1) > 0).sum() < min_pieces):
            return
        interpolation = _interpolation(members, enough) if enough.any() else np.zeros(0)

        def times(seconds: np.ndarray, weights: np.ndarray) -> np.ndarray:
            with np.errstate(invalid="ignore", divide="ignore"):
                means = np.where(enough, seconds / weights, 0.0)
                overall = seconds.sum() / weights.sum()
            borrowed = interpolation @ means if enough.any() else np.full(len(members), overall)
            return np.where(enough, means, (seconds + borrowed) / (weights + 1))

        self._times[columns] = times(seconds.sum(0), weights.sum(0))
        self._borrowed_share[columns] = np.where(enough, 0.0, 1 / (weights.sum(0) + 1))
        for j in range(self._pieces):
            self._without[j, columns] = times(seconds.sum(0) - seconds[j], weights.sum(0) - weights[j])

    def _undisturbed_prefills(self, k: int) -> np.ndarray:
        """Return the steps with an undisturbed drafter prefill: the lowest cluster of seconds for their tokens."""
        rows = self._steps[self._unblocked & (self._steps[:, _PREFILL_KEY] == k) & (self._steps[:, _TOKENS] > 0)]
        tokens, seconds = rows[:, _TOKENS], rows[:, _PREFILL_SECONDS]
        # Few tokens take longer per token; a power of their number fits the growth.
        power = np.polyfit(np.log(tokens), np.log(seconds + 1e-9), 1)[0] if len(set(tokens)) > 1 else 1.0
        cluster = lowest_cluster(seconds / tokens ** np.clip(power, 0.0, 1.0), PREFILL_WITHIN, below=0)
        if cluster is None or cluster[1].mean() - self._undisturbed[self._unblocked].mean() > CONTRADICTION:
            return rows[:0]
        return rows[cluster[1]]

    def _estimate_prefill(self, k: int) -> None:
        """Estimate a prefill with too few undisturbed steps by a low quantile; all of it counts as borrowed."""
        rows = self._steps[(self._steps[:, _PREFILL_KEY] == k) & (self._steps[:, _TOKENS] > 0)]
        per_token = rows[:, _PREFILL_SECONDS] / rows[:, _TOKENS] if len(rows) else np.zeros(1)
        self._times[k] = self._without[:, k] = np.quantile(per_token, 0.1)
        self._borrowed_share[k] = PREFILL_BORROWED


class _Ratio(NamedTuple):
    """A speed-up: value, tokens and seconds of cell and baseline ``[pieces, 4]``, and noise of the times."""

    value: float
    sums: np.ndarray
    noise: tuple[Noise, ...]


def speed_up_ratio(
    first: tuple[ComponentTimes, int, int], second: tuple[ComponentTimes, int, int]
) -> Estimate | Withheld:
    """Ratio of two speed-ups, each given by the times of a group, a cell and a baseline.

    Piece i of both groups has the same prompts.
    """
    a, b = (times._ratio(cell, baseline) for times, cell, baseline in (first, second))
    if isinstance(a, Withheld) or isinstance(b, Withheld):
        return a if isinstance(a, Withheld) else b  # type: ignore[return-value]
    sums = np.column_stack([a.sums, b.sums])

    def ratio(s: np.ndarray) -> np.ndarray:
        return double_ratio(s[..., :4]) / double_ratio(s[..., 4:])

    return estimate(ratio, sums, value=a.value / b.value, noise=a.noise + b.noise)


def lowest_cluster(
    seconds: np.ndarray, within: float = WITHIN, below: float = BELOW
) -> tuple[float, np.ndarray] | None:
    """Find the lowest cluster of times.

    Args:
        within: the cluster extends this factor above and below its median.
        below: maximum share of the times below the cluster; 0: none.

    Returns:
        the median of the cluster and a mask of its members; None without a cluster.
    """
    x, radius = np.log(np.maximum(seconds, 1e-9)), float(np.log(within))
    ordered = np.sort(x)
    counts = np.searchsorted(ordered, ordered + 2 * radius, "right") - np.arange(len(x))
    starts = np.flatnonzero(counts >= max(ENOUGH, CLUSTER * len(x)))
    if not len(starts):
        return None
    centre = float(np.median(ordered[starts[0] : starts[0] + counts[starts[0]]]))
    for _ in range(20):
        members = np.abs(x - centre) <= radius
        centre = float(np.median(x[members]))
    members = np.abs(x - centre) <= radius
    allowed = max(1, below * len(x)) if below else 0
    near = 2 if members.mean() >= MAIN else 1
    if members.sum() < ENOUGH or (x < centre - near * radius).sum() > allowed:
        return None
    return float(np.exp(centre)), members


def _bounds(key: _Key, medians: dict[_Key, float]) -> tuple[float, float]:
    """Bounds on the seconds of an undisturbed pass of a shape, from the medians of wider and narrower shapes.

    A pass takes at most as long as a wider one, and at least as long as a narrower one or as its rows' share of a wider
    one. Shapes wider than all measured ones have no bounds: the interval is empty.
    """
    wider = [k for k in medians if k.owner == key.owner and k.nodes >= key.nodes]
    if not wider:
        return np.inf, 0.0
    narrower = [medians[k] for k in medians if k.owner == key.owner and k.nodes <= key.nodes]
    next_one = min(wider, key=lambda k: (abs(k.length - key.length), k.nodes))
    low = min(narrower, default=medians[next_one] * (key.nodes + 1) / (next_one.nodes + 1))
    return low / WITHIN, medians[next_one] * WITHIN


def _interpolation(members: Sequence[_Key], enough: np.ndarray) -> np.ndarray:
    """Interpolation weights ``[members, members]`` from the measured members of a series, linear in their nodes.

    Only measured members of the nearest length are used; outside their range the nearest one is used.
    """
    weights = np.zeros((len(members), len(members)))
    for i, key in enumerate(members):
        distance = min(abs(k.length - key.length) for k, usable in zip(members, enough, strict=True) if usable)
        nearest = [m for m, k in enumerate(members) if enough[m] and abs(k.length - key.length) == distance]
        nearest.sort(key=lambda m: members[m].nodes)
        nodes = [members[m].nodes for m in nearest]
        for m, share in zip(nearest, np.eye(len(nearest)), strict=True):
            weights[i, m] = np.interp(key.nodes, nodes, share)
    return weights


def _seconds(times: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Sum counts times seconds; times of components that did not run may be NaN."""
    return np.where(counts > 0, counts * times, 0.0).sum(-1)


# Columns of a step; keys and seconds are in the order of _PHASES.
_CELL, _PIECE, _KEYS, _TARGET_KEY, _PREFILL_KEY = 0, 1, [2, 3, 4, 5], 3, 6
_SECONDS, _TARGET, _WAITED, _TOKENS, _PREFILL_SECONDS, _COLUMNS = [7, 8, 9, 10], 8, 11, 12, 13, 14
