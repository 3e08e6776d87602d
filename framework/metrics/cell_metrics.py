"""Metrics of a cell: block efficiency, costs and speed, with 95 % intervals.

Computed from the records on disk (``steps.parquet`` and the pieces) and nothing else. Times are in seconds, rates in
tokens per second.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ..errors import CrossdraftError
from .component_times import TOO_FEW, CellPieces, ComponentTimes, Withheld
from .intervals import FREEDOM, Estimate, Noise, bounded_estimate, double_ratio, estimate, ratio, ratio_difference
from .pieces import PREFILL, Piece, wall_ratio

#: Metrics measured by the clock, see `Metrics.timed`.
TIMES = ("shares", "decode_seconds", "prefill_seconds", "tail_seconds", "tokens_per_second", "tokens_per_second_wall")
TIMES += ("tokens_per_second_with_prefill", "undisturbed", "speed_up", "speed_up_wall", "withheld")
#: Metrics of an engine's server only.
SERVED = ("first_token_seconds", "token_seconds")
TIMES += SERVED
#: Metrics with an interval.
ESTIMATES = ("block_efficiency", "speed_up", *SERVED)


@dataclass(frozen=True)
class StepRecord:
    """One step of one sequence: a row of ``steps.parquet``.

    Attributes:
        prompt: position of the prompt in its source; `question_id` is its name.
        turn, step: counted from 0.
        tau: accepted draft tokens.
        emitted: committed tokens, correction or bonus included.
        nodes: drafted tokens of this row.
        width: nodes of the batch's widest row; the target evaluated ``width + 1`` positions for this row.
        limit: maximum draft depth: the tokens left to generate, minus one.
        survival: sum over i of Pr(tau >= i | the first i drafted tokens); None if the verifier does not compute it.
    """

    prompt: int
    question_id: str
    category: str
    turn: int
    step: int
    tau: int
    emitted: int
    nodes: int
    width: int
    limit: int
    survival: float | None = None


@dataclass
class CategoryMetrics:
    """Metrics of a cell on the prompts of one category.

    Attributes:
        prompts: number of prompts.
        block_efficiency, all_cut, speed_up: as in `Metrics`; `speed_up` is None if pieces mix categories.
    """

    prompts: int
    block_efficiency: Estimate | None
    speed_up: Estimate | None = None
    all_cut: bool = False


@dataclass(frozen=True)
class SegmentMetrics:
    """Metrics of a cell on the steps that start in one segment.

    Attributes:
        tokens: tokens of the segment.
        steps: number of steps.
        block_efficiency, all_cut: as in `Metrics`.
        first: Pr(tau >= 1) over the same steps.
    """

    tokens: int
    steps: int
    block_efficiency: Estimate | None
    first: Estimate | None
    all_cut: bool = False


@dataclass
class Metrics:
    """Metrics of one cell.

    Attributes:
        tokens, steps, sequences: tokens emitted, target calls of a sequence, turns answered.
        depth: maximum depth of the drafter's drafts.
        block_efficiency: tokens emitted per target call, correction or bonus included (vLLM: mean acceptance length),
            over the uncut steps, or over all steps if all are cut (`all_cut`), see `counted_steps`; None in records of
            older versions.
        steps_cut: number of steps that are cut short by the end of the sequence.
        block_efficiency_all_steps: tokens emitted per target call over all steps.
        block_efficiency_expected: 1 + the mean of `StepRecord.survival`, which is less noisy than the observed tau;
            None if the verifier does not compute it. End-of-sequence tokens inside a draft are ignored.
        mean_tau: accepted draft tokens per step, over the steps of block_efficiency.
        acceptance: Pr(tau >= i) for i = 1, 2, ..., over the same steps.
        nodes_per_step: drafted tokens of a row in a step.
        target_rows_per_token: positions evaluated by the target per token emitted.
        drafter_passes: forward passes of the draft model, prefill not counted.
        shares: shares of the decoding time: draft (the drafter's prefill included), target, verify, rest.
        decode_seconds, prefill_seconds: measured time without the tail (see `Piece`).
        tail_seconds: time of the tail; only tokens_per_second_with_prefill includes it.
        tokens_per_second: decoding rate on an undisturbed machine (see `component_times`), or by the clock if that is
            unknown; ``..._wall``: by the clock; ``..._with_prefill``: by the clock, tail and prefill included.
        undisturbed: share of undisturbed steps.
        speed_up: tokens_per_second over that of the group's baseline; None without a baseline or if withheld;
            ``_wall``: by the clock.
        withheld: reason why the speed-up is missing and tokens_per_second is by the clock, or empty.
        by_category: metrics by category, in the order of the prompts.
        same_as_baseline: at temperature 0, the share of responses equal to the baseline's, token by token.
        ties, faults: at temperature 0, responses that differ from the baseline's at or after a tie of the target's
            logits within rounding, and at or after another token; those of an engine are not decided.
        largest_gap: largest difference of the logits of the two tokens at a first difference; None without one.
        peak_memory: bytes, see `memory.peak`; None if the system does not report it.
        missed_graphs: passes that ran without a CUDA graph because the warm-up did not record one: the cell is faster.
        first_token_seconds, token_seconds: of an engine's responses: mean seconds to the first token, and per token
            after it.
        other_traffic: numbers that a server counted during the pieces, and those of this cell's responses, by name, if
            they are not equal: it served other requests, too.
    """

    tokens: int
    steps: int
    sequences: int
    depth: int
    block_efficiency: Estimate | None
    steps_cut: int
    block_efficiency_all_steps: float
    block_efficiency_expected: float | None
    mean_tau: float
    acceptance: list[float]
    nodes_per_step: float
    target_rows_per_token: float
    drafter_passes: int
    shares: dict[str, float]
    decode_seconds: float
    prefill_seconds: float
    tail_seconds: float
    tokens_per_second: float
    tokens_per_second_wall: float
    tokens_per_second_with_prefill: float
    undisturbed: float
    speed_up: Estimate | None
    speed_up_wall: float | None
    withheld: str
    by_category: dict[str, CategoryMetrics]
    same_as_baseline: float | None = None
    ties: int | None = None
    faults: int | None = None
    largest_gap: float | None = None
    peak_memory: int | None = None
    missed_graphs: int = 0
    first_token_seconds: Estimate | None = None
    token_seconds: Estimate | None = None
    other_traffic: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def timed(self) -> bool:
        """True if times were measured. With ``--untimed`` every time, rate and share is 0 and speed-ups are None."""
        return self.decode_seconds > 0

    @property
    def all_cut(self) -> bool:
        """True if no step had room for a full draft, so that block_efficiency is of all steps."""
        return self.steps_cut == self.steps

    @property
    def undecided(self) -> int:
        """Number of responses that differ from the baseline's for an unknown reason."""
        same = 1.0 if self.same_as_baseline is None else self.same_as_baseline
        return round(self.sequences * (1 - same)) - (self.ties or 0) - (self.faults or 0)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def uncut_steps(records: Iterable[StepRecord], depth: int) -> list[StepRecord]:
    """Return the steps that could draft ``depth`` tokens; the others are cut short by the end of the sequence."""
    return [record for record in records if record.limit >= depth]


def counted_steps(records: Sequence[StepRecord], depth: int) -> list[StepRecord]:
    """Return the steps of block efficiency and acceptance: the uncut ones, or all if all are cut."""
    return uncut_steps(records, depth) or list(records)


def measure(
    records: Sequence[StepRecord], pieces: Sequence[Piece], passes: int = 0, gamma: int = 0, depth: int = 0
) -> Metrics:
    """Compute the metrics of a single cell: rates by the clock, no speed-up (see `compare`).

    Args:
        gamma: `acceptance` has at least this many entries.
        depth: maximum depth of the drafts, see `DraftTraits.depth`.
    """
    if not records:
        raise CrossdraftError("no step was measured: every response ended with its prefill; raise max_new_tokens")
    emitted, steps, uncut = sum(r.emitted for r in records), len(records), len(uncut_steps(records, depth))
    counted = counted_steps(records, depth)
    tau = np.array([r.tau for r in counted])
    seconds = {phase: sum(piece.seconds[phase] for piece in pieces) for phase in pieces[0].seconds}
    prefill = seconds.pop(PREFILL, 0.0)
    seconds["draft"] = seconds.get("draft", 0.0) + seconds.pop("draft_prefill", 0.0)
    decode, tail = sum(seconds.values()), sum(piece.tail_seconds for piece in pieces)
    wall = sum(piece.emitted for piece in pieces) / decode if decode else 0.0
    survival = [r.survival for r in counted if r.survival is not None]
    by_category: dict[str, list[StepRecord]] = {}
    for record in records:
        by_category.setdefault(record.category, []).append(record)
    return Metrics(
        tokens=emitted,
        steps=steps,
        sequences=len({(r.prompt, r.turn) for r in records}),
        depth=depth,
        block_efficiency=block_efficiency(counted, depth),
        steps_cut=steps - uncut,
        block_efficiency_all_steps=emitted / steps,
        block_efficiency_expected=1 + float(np.mean(survival)) if len(survival) == len(counted) else None,
        mean_tau=float(tau.mean()),
        acceptance=[float((tau >= i).mean()) for i in range(1, max(gamma, int(tau.max())) + 1)],
        nodes_per_step=sum(r.nodes for r in records) / steps,
        target_rows_per_token=sum(r.width + 1 for r in records) / emitted,
        drafter_passes=passes,
        shares={phase: s / decode if decode else 0.0 for phase, s in seconds.items()},
        decode_seconds=decode,
        prefill_seconds=prefill,
        tail_seconds=tail,
        tokens_per_second=wall,
        tokens_per_second_wall=wall,
        tokens_per_second_with_prefill=emitted / (decode + tail + prefill) if decode + tail + prefill else 0.0,
        undisturbed=1.0,
        speed_up=None,
        speed_up_wall=None,
        withheld="",
        by_category={
            category: CategoryMetrics(
                len({r.prompt for r in members}),
                block_efficiency(counted_steps(members, depth), depth),
                all_cut=not uncut_steps(members, depth),
            )
            for category, members in by_category.items()
        },
    )


def block_efficiency(records: Sequence[StepRecord], depth: int) -> Estimate | None:
    """Tokens emitted per step of drafts up to ``depth``, with an interval over prompts; None without steps."""
    if not records:
        return None
    sums = sums_by_prompt(records)
    return bounded_estimate(ratio, np.array([sums[prompt] for prompt in sorted(sums)]), 1.0, 1.0 + depth)


def acceptance(records: Sequence[StepRecord], depth: int, positions: int) -> list[Estimate]:
    """Pr(tau >= i) for i = 1 to ``positions`` over the uncut steps, with intervals over prompts.

    Args:
        depth: maximum depth of the drafts; if every step is cut, all steps count.
    """
    rows: dict[int, np.ndarray] = {}
    for record in counted_steps(records, depth):
        row = rows.setdefault(record.prompt, np.zeros(positions + 1))
        row[0] += 1
        row[1 : record.tau + 1] += 1
    sums, estimates = np.array([rows[prompt] for prompt in sorted(rows)]), []
    for i in range(1, positions + 1):
        estimates.append(bounded_estimate(lambda s: s[..., 1] / s[..., 0], sums[:, [0, i]], 0.0, 1.0, log=False))
    return estimates


def sums_by_prompt(records: Iterable[StepRecord]) -> dict[int, tuple[float, float]]:
    """Return tokens emitted and number of steps of each prompt."""
    sums: dict[int, tuple[float, float]] = {}
    for record in records:
        emitted, steps = sums.get(record.prompt, (0.0, 0.0))
        sums[record.prompt] = (emitted + record.emitted, steps + 1)
    return sums


def paired_difference(records: Sequence[StepRecord], baseline: Sequence[StepRecord]) -> Estimate | None:
    """Block efficiency of `records` minus that of `baseline` on the same prompts; None without common prompts."""
    sums = _paired_sums(records, baseline)
    return ratio_difference(sums) if len(sums) else None


def paired_ratio(records: Sequence[StepRecord], baseline: Sequence[StepRecord]) -> Estimate | None:
    """Block efficiency of `records` over that of `baseline` on the same prompts; None without common prompts."""
    sums = _paired_sums(records, baseline)
    return estimate(double_ratio, sums) if len(sums) else None


def _paired_sums(records: Sequence[StepRecord], baseline: Sequence[StepRecord]) -> np.ndarray:
    """Tokens and steps of both on each common prompt, ``[n, 4]``."""
    sums_a, sums_b = sums_by_prompt(records), sums_by_prompt(baseline)
    return np.array([(*sums_a[prompt], *sums_b[prompt]) for prompt in sorted(sums_a.keys() & sums_b.keys())])


def prompts_of_pieces(records: Iterable[StepRecord], pieces: Iterable[Piece]) -> list[frozenset[int]]:
    """Return the prompts of each piece of a cell.

    Args:
        records: all records of the cell, in the order in which they were measured.
    """
    prompts, remaining = [], iter(records)
    for piece in pieces:
        tokens, piece_prompts = piece.emitted + piece.tail_emitted, set()
        while tokens > 0 and (record := next(remaining, None)) is not None:
            tokens -= record.emitted
            piece_prompts.add(record.prompt)
        prompts.append(frozenset(piece_prompts))
    return prompts


#: Reason to withhold a speed-up of which one of both cells is faster than measured.
MISSED = "passes without a CUDA graph"


def compare(metrics: Sequence[Metrics], cells: Sequence[CellPieces], baseline: int | None) -> None:
    """Set the metrics that need the whole group: rates, and speed-ups over the baseline.

    Speed-ups by category need pieces of one category each.

    Args:
        metrics, cells: of every finished cell, in the same order; piece i of each cell has the same prompts.
        baseline: index of plain decoding; None if it was not measured.
    """
    if not all(cell_metrics.timed for cell_metrics in metrics):
        return
    if any(piece.requests for cell in cells for piece in cell.pieces):
        return _compare_served(metrics, cells, baseline)
    times = ComponentTimes(cells)
    for i, (own, cell) in enumerate(zip(metrics, cells, strict=True)):
        own.undisturbed, seconds = times.undisturbed(i), times.seconds(i)
        own.withheld = "" if seconds else TOO_FEW
        if baseline is not None:
            own.speed_up_wall = wall_ratio(cell.pieces, cells[baseline].pieces)
            speed_up = Estimate(1.0) if i == baseline else times.speed_up(i, baseline)
            if isinstance(speed_up, Withheld):
                own.withheld = speed_up.reason
            elif own.missed_graphs or metrics[baseline].missed_graphs:
                own.withheld = MISSED
            else:
                own.speed_up = speed_up
        if seconds and not own.withheld:
            own.tokens_per_second = sum(piece.emitted for piece in cell.pieces) / seconds
        if baseline is None or i == baseline:
            continue
        for category, numbers in own.by_category.items():
            pieces = [j for j, piece in enumerate(cell.pieces) if category and piece.category == category]
            part = times.speed_up(i, baseline, pieces) if pieces and not own.withheld else None
            numbers.speed_up = part if isinstance(part, Estimate) else None


def _compare_served(metrics: Sequence[Metrics], cells: Sequence[CellPieces], baseline: int | None) -> None:
    """`compare` for an engine, whose times are those of the clock: intervals are over pieces."""

    def mean_seconds(sums: np.ndarray) -> Estimate:
        """Seconds per unit from counts and microseconds ``[n, 2]``."""
        return estimate(lambda s: s[..., 1] / s[..., 0] / 1e6, sums)

    for i, (own, cell) in enumerate(zip(metrics, cells, strict=True)):
        requests = [np.array([row[:3] for row in piece.requests], dtype=float).reshape(-1, 3) for piece in cell.pieces]
        sums = np.array([[len(rows), *rows.sum(0)] for rows in requests])
        own.first_token_seconds = mean_seconds(sums[:, [0, 2]])
        if sums[:, 1].sum():
            own.token_seconds = mean_seconds(sums[:, [1, 3]])
        if baseline is None:
            continue
        own.speed_up_wall = wall_ratio(cell.pieces, cells[baseline].pieces)
        if i == baseline:
            own.speed_up = Estimate(1.0)
            continue
        both = list(zip(cell.pieces, cells[baseline].pieces, strict=False))
        own.speed_up = clock_ratio(both)
        for category, numbers in own.by_category.items():
            numbers.speed_up = clock_ratio([pair for pair in both if category and pair[0].category == category])


def clock_ratio(pieces: Sequence[tuple[Piece, Piece]]) -> Estimate | None:
    """Ratio of the rates by the clock of two cells, with an interval over pieces; None without tokens or time.

    With steps: the ratio of tokens per step times the median over pieces, which both cells decoded back to back, of the
    ratio of seconds per step. Other programs change seconds, not tokens, and a few slow pieces do not move a median.
    """
    rates = np.array([(a.emitted, a.decode_seconds, b.emitted, b.decode_seconds) for a, b in pieces])
    if not len(rates) or not rates[:, :3].sum(0).all() or not rates[:, 3].sum():
        return None

    steps = np.array([[sum(map(len, piece.steps.values())) for piece in pair] for pair in pieces])
    if not steps.all() or not rates.all():
        return estimate(double_ratio, rates)
    costs = np.log(rates[:, 3] / steps[:, 1] * steps[:, 0] / rates[:, 1])
    sums = np.column_stack([rates[:, 0], steps[:, 0], rates[:, 2], steps[:, 1]])
    variance = float(np.pi / 2 * costs.var(ddof=1) / len(costs)) if len(costs) > 1 else 0.0
    value = float(double_ratio(sums.sum(0)) * np.exp(np.median(costs)))
    return estimate(double_ratio, sums, value=value, noise=[Noise(variance, FREEDOM * len(costs))])
