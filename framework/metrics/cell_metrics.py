"""What the records of a cell come to: block efficiency, costs and speed, with 95 % intervals.

Works on plain numbers, so that metrics can be computed again from ``steps.parquet`` and the pieces. All
times are seconds, all rates tokens per second.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .component_times import TOO_FEW, CellPieces, ComponentTimes, Withheld
from .intervals import Estimate, estimate
from .pieces import PREFILL, Piece, wall_ratio

#: The metrics that come from the clock, see `Metrics.timed`.
TIMES = ("shares", "decode_seconds", "prefill_seconds", "tail_seconds", "tokens_per_second", "tokens_per_second_wall")
TIMES += ("tokens_per_second_with_prefill", "undisturbed", "speed_up", "speed_up_wall", "withheld")


@dataclass(frozen=True)
class StepRecord:
    """One step of one row, a line of ``steps.parquet``.

    Attributes:
        prompt: position of the prompt in its source; `question_id` is its name.
        turn, step: counted from 0.
        tau: accepted draft tokens.
        emitted: committed tokens, correction or bonus included.
        nodes: drafted tokens of this row.
        width: nodes of the batch's widest row: the target evaluated ``width + 1`` positions for this row.
        limit: how deep the draft was allowed to be: the tokens left to generate, less one.
        survival: sum over i of Pr(tau >= i | the first i drafted tokens), where the verifier knows it.
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
    """What a cell did on the prompts of one category.

    Attributes:
        prompts: how many.
        block_efficiency, speed_up: as in `Metrics`; the latter is None where pieces mix categories.
    """

    prompts: int
    block_efficiency: Estimate | None
    speed_up: Estimate | None = None


@dataclass
class Metrics:
    """The numbers of one cell.

    Attributes:
        tokens, steps, sequences: what was measured: tokens emitted, target calls of a row, turns answered.
        depth: of the deepest draft there can be.
        block_efficiency: tokens emitted per target call (bonus or correction included), over prompts, of the steps
            in which a sequence had room for a draft of that depth: the others were cut by the end of the sequence,
            whose length is the recipe's. None if there was no such step.
        steps_cut: how many steps that leaves out; block_efficiency_all_steps: the plain ratio with them.
        block_efficiency_expected: 1 + the mean of the verifier's own expectation of tau, which is less noisy;
            None where it has none. An end of sequence inside a draft is not taken into account.
        mean_tau: accepted draft tokens per step, of the same steps as block_efficiency; so is acceptance.
        acceptance: Pr(tau >= i) for i = 1, 2, ...
        nodes_per_step: drafted tokens of a row in a step.
        target_rows_per_token: positions the target evaluated per token emitted.
        drafter_passes: forward passes of the draft model, prefill not counted.
        shares: of the decoding time: draft (the drafter's prefill included), target, verify, rest.
        decode_seconds, prefill_seconds: the time it took, without the tail (see `Piece`).
        tail_seconds: the tail's, which no share and no rate but the next-named counts.
        tokens_per_second: while decoding on an undisturbed machine (see `component_times`), by the clock if that is
            unknown; ``..._wall``: by the clock; ``..._with_prefill``: by the clock all in all, with tail and prefill.
        undisturbed: share of the batch's steps.
        speed_up: of tokens_per_second over the baseline of the same group, None without one, or if it is withheld;
            ``_wall``: by the clock.
        withheld: why there is no speed-up beside a baseline (of the baseline: no tokens_per_second), or empty.
        by_category: the same by category, in the order of the prompts.
        same_as_baseline: at temperature 0, the share of responses with exactly the baseline's tokens.
        peak_memory: bytes, see `memory.peak`; None where the system does not say.
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
    peak_memory: int | None = None

    @property
    def timed(self) -> bool:
        """Did a clock run? Where none did (``--untimed``), every time, rate and share is 0 and there is no speed-up."""
        return self.decode_seconds > 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def free(records: Iterable[StepRecord], depth: int) -> list[StepRecord]:
    """The steps in which a draft of ``depth`` tokens had room: decided before anything was drafted."""
    return [record for record in records if record.limit >= depth]


def measure(
    records: Sequence[StepRecord], pieces: Sequence[Piece], passes: int = 0, gamma: int = 0, depth: int = 0
) -> Metrics:
    """The metrics of a cell by itself: rates are by the clock, and it has no speed-up yet (see `compare`).

    Args:
        gamma: least depth that `acceptance` goes to.
        depth: of the deepest draft there can be, see `DraftTraits.depth`.
    """
    emitted, steps, counted = sum(r.emitted for r in records), len(records), free(records, depth)
    tau = np.array([r.tau for r in counted or records])
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
        block_efficiency=block_efficiency(counted),
        steps_cut=steps - len(counted),
        block_efficiency_all_steps=emitted / steps,
        block_efficiency_expected=1 + float(np.mean(survival)) if counted and len(survival) == len(counted) else None,
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
            category: CategoryMetrics(len({r.prompt for r in mine}), block_efficiency(free(mine, depth)))
            for category, mine in by_category.items()
        },
    )


def block_efficiency(records: Sequence[StepRecord]) -> Estimate | None:
    """Tokens emitted per step, over prompts; None without steps."""
    if not records:
        return None
    sums = _by_prompt(records)
    return estimate(_ratio, np.array([sums[prompt] for prompt in sorted(sums)]), least=1.0)


def acceptance(records: Sequence[StepRecord], depth: int, positions: int) -> list[Estimate]:
    """Pr(tau >= i) for i = 1 to ``positions`` over the steps that `block_efficiency` counts, over prompts.

    Args:
        depth: of the deepest draft there can be; where no step had room for it, all steps count.
    """
    counted = free(records, depth) or list(records)
    rows: dict[int, np.ndarray] = {}
    for record in counted:
        row = rows.setdefault(record.prompt, np.zeros(positions + 1))
        row[0] += 1
        row[1 : record.tau + 1] += 1
    sums, found = np.array([rows[prompt] for prompt in sorted(rows)]), []
    for i in range(1, positions + 1):
        found.append(estimate(lambda s: s[..., 1] / s[..., 0], sums[:, [0, i]], log=False, least=0.0, most=1.0))
    return found


def _ratio(sums: np.ndarray) -> np.ndarray:
    return sums[..., 0] / sums[..., 1]


def _by_prompt(records: Iterable[StepRecord]) -> dict[int, tuple[float, float]]:
    """Tokens emitted and steps of each prompt."""
    sums: dict[int, tuple[float, float]] = {}
    for record in records:
        emitted, steps = sums.get(record.prompt, (0.0, 0.0))
        sums[record.prompt] = (emitted + record.emitted, steps + 1)
    return sums


def paired_difference(records: Sequence[StepRecord], other: Sequence[StepRecord]) -> Estimate | None:
    """Block efficiency of `records` minus that of `other` on the same prompts; None without steps of both."""
    mine, theirs = _by_prompt(records), _by_prompt(other)
    both = sorted(mine.keys() & theirs.keys())
    if not both:
        return None
    sums = np.array([(*mine[prompt], *theirs[prompt]) for prompt in both])
    return estimate(lambda s: s[..., 0] / s[..., 1] - s[..., 2] / s[..., 3], sums, log=False)


def prompts_of_pieces(records: Iterable[StepRecord], pieces: Iterable[Piece]) -> list[frozenset[int]]:
    """The prompts of each piece of a cell, from its records in the order they were made."""
    found, rest = [], iter(records)
    for piece in pieces:
        left, mine = piece.emitted + piece.tail_emitted, set()
        while left > 0 and (record := next(rest, None)) is not None:
            left -= record.emitted
            mine.add(record.prompt)
        found.append(frozenset(mine))
    return found


def compare(metrics: Sequence[Metrics], cells: Sequence[CellPieces], baseline: int | None) -> None:
    """Set what the cells of a group tell together: rates and speed-ups over the baseline, if that was measured.

    By category if the pieces are of one each.

    Args:
        metrics, cells: of every finished cell, in the same order; piece i of all held the same prompts.
        baseline: which of them is plain decoding.
    """
    if not all(one.timed for one in metrics):
        return
    times = ComponentTimes(cells)
    for i, (one, cell) in enumerate(zip(metrics, cells, strict=True)):
        one.undisturbed, seconds = times.undisturbed(i), times.seconds(i)
        if seconds:
            one.tokens_per_second = sum(piece.emitted for piece in cell.pieces) / seconds
        if baseline is None:
            continue
        one.speed_up_wall = wall_ratio(cell.pieces, cells[baseline].pieces)
        if i == baseline:
            one.speed_up, one.withheld = Estimate(1.0), "" if seconds else TOO_FEW
            continue
        found = times.speed_up(i, baseline)
        one.speed_up, one.withheld = (None, found.reason) if isinstance(found, Withheld) else (found, "")
        for category, of in one.by_category.items():
            pieces = [j for j, piece in enumerate(cell.pieces) if category and piece.category == category]
            part = times.speed_up(i, baseline, pieces) if pieces and not one.withheld else None
            of.speed_up = part if isinstance(part, Estimate) else None
