"""What the records of a cell come to: block efficiency, costs and speed, with 95 % bootstrap intervals.

Works on plain numbers, so that metrics can be computed again from ``rounds.parquet`` and ``chunks``. All
times are seconds, all rates tokens per second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

RESAMPLES = 2000
#: An interval over fewer independent pieces than this says nothing.
LEAST_PIECES = 3


@dataclass(frozen=True)
class RoundRecord:
    """One round of one row, a line of ``rounds.parquet``.

    Attributes:
        prompt: position of the prompt in its source; `question_id` is its name.
        turn, round: counted from 0.
        tau: accepted draft tokens.
        emitted: committed tokens, correction or bonus included.
        nodes: drafted tokens of this row.
        width: nodes of the batch's widest row: the target evaluated ``width + 1`` positions for this row.
        survival: sum over i of Pr(tau >= i | the draft), where the verifier knows it.
    """

    prompt: int
    question_id: str
    category: str
    turn: int
    round: int
    tau: int
    emitted: int
    nodes: int
    width: int
    survival: float | None = None


@dataclass(frozen=True)
class Chunk:
    """What one cell did with one chunk of the prompts; cells of a group take turns chunk by chunk.

    The *tail*, the rounds in which slots stay empty because the chunk's prompts have run out, is kept apart: its
    speed is not that of the batch size. Prompts that never filled the slots have no tail.

    Attributes:
        emitted: tokens generated, without the tail's.
        seconds: by phase (see ``decoding.loop.PHASES``), without the tail's.
        tail_emitted, tail_seconds: tokens and decoding time of the tail.
        category: of all its prompts; empty if they have several.
    """

    emitted: int
    seconds: Mapping[str, float]
    tail_emitted: int = 0
    tail_seconds: float = 0.0
    category: str = ""

    @property
    def decode_seconds(self) -> float:
        """Time without prefill."""
        return sum(s for phase, s in self.seconds.items() if phase != "prefill")


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % interval; no interval where there is too little to resample."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass
class CategoryMetrics:
    """What a cell did on the prompts of one category.

    Attributes:
        prompts: how many.
        block_efficiency, speed_up: as in `Metrics`; the latter is None where chunks mix categories.
    """

    prompts: int
    block_efficiency: Estimate
    speed_up: Estimate | None = None


@dataclass
class Metrics:
    """The numbers of one cell.

    Attributes:
        tokens, rounds, sequences: what was measured: tokens emitted, target calls of a row, turns answered.
        block_efficiency: tokens emitted per target call (bonus or correction included), over prompts.
        block_efficiency_expected: 1 + the mean of the verifier's own expectation of tau, which is less noisy;
            None where it has none. An end of sequence inside a draft is not taken into account.
        mean_tau: accepted draft tokens per round.
        acceptance: Pr(tau >= i) for i = 1, 2, ...
        nodes_per_round: drafted tokens of a row in a round.
        target_rows_per_token: positions the target evaluated per token emitted.
        drafter_passes: forward passes of the drafting model, prefill not counted.
        shares: of the decoding time: draft, target, verify, rest.
        decode_seconds, prefill_seconds: the time it took, without the tail (see `Chunk`).
        tail_seconds: the tail's, which no share and no rate but the next-named counts.
        tokens_per_second: while decoding; ``..._with_prefill``: all in all, tail and prefill included.
        speed_up: of the decoding rate over the baseline of the same group, None without one.
        by_category: the same by category, in the order of the prompts.
        same_as_baseline: at temperature 0, the share of responses with exactly the baseline's tokens.
        peak_memory: bytes, see `memory.peak`; None where the system does not say.
    """

    tokens: int
    rounds: int
    sequences: int
    block_efficiency: Estimate
    block_efficiency_expected: float | None
    mean_tau: float
    acceptance: list[float]
    nodes_per_round: float
    target_rows_per_token: float
    drafter_passes: int
    shares: dict[str, float]
    decode_seconds: float
    prefill_seconds: float
    tail_seconds: float
    tokens_per_second: float
    tokens_per_second_with_prefill: float
    speed_up: Estimate | None
    by_category: dict[str, CategoryMetrics]
    same_as_baseline: float | None = None
    peak_memory: int | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Metrics:
        categories = {name: CategoryMetrics(**{**row, **_estimates(row)}) for name, row in data["by_category"].items()}
        return cls(**{**data, **_estimates(data), "by_category": categories})


def _estimates(data: Mapping[str, Any]) -> dict[str, Estimate | None]:
    return {key: Estimate(**data[key]) if data[key] else None for key in ("block_efficiency", "speed_up")}


def measure(records: Sequence[RoundRecord], chunks: Sequence[Chunk], passes: int = 0, gamma: int = 0) -> Metrics:
    """The metrics of a cell, without its speed-up. ``gamma``: least depth that `acceptance` goes to."""
    tau = np.array([r.tau for r in records])
    emitted, rounds = sum(r.emitted for r in records), len(records)
    seconds = {phase: sum(chunk.seconds[phase] for chunk in chunks) for phase in chunks[0].seconds}
    prefill = seconds.pop("prefill", 0.0)
    decode, tail = sum(seconds.values()), sum(chunk.tail_seconds for chunk in chunks)
    survival = [r.survival for r in records if r.survival is not None]
    by_category: dict[str, list[RoundRecord]] = {}
    for record in records:
        by_category.setdefault(record.category, []).append(record)
    return Metrics(
        tokens=emitted,
        rounds=rounds,
        sequences=len({(r.prompt, r.turn) for r in records}),
        block_efficiency=block_efficiency(records),
        block_efficiency_expected=1 + float(np.mean(survival)) if len(survival) == rounds else None,
        mean_tau=float(tau.mean()),
        acceptance=[float((tau >= i).mean()) for i in range(1, max(gamma, int(tau.max())) + 1)],
        nodes_per_round=sum(r.nodes for r in records) / rounds,
        target_rows_per_token=sum(r.width + 1 for r in records) / emitted,
        drafter_passes=passes,
        shares={phase: s / decode if decode else 0.0 for phase, s in seconds.items()},
        decode_seconds=decode,
        prefill_seconds=prefill,
        tail_seconds=tail,
        tokens_per_second=sum(chunk.emitted for chunk in chunks) / decode if decode else 0.0,
        tokens_per_second_with_prefill=emitted / (decode + tail + prefill) if decode + tail + prefill else 0.0,
        speed_up=None,
        by_category={
            category: CategoryMetrics(len({r.prompt for r in mine}), block_efficiency(mine))
            for category, mine in by_category.items()
        },
    )


def block_efficiency(records: Sequence[RoundRecord]) -> Estimate:
    """Tokens emitted per round, resampling prompts."""
    emitted, rounds = _by_prompt(records)
    return _bootstrap(lambda pick: emitted[pick].sum(-1) / rounds[pick].sum(-1), len(emitted))


def compare(metrics: Metrics, chunks: Sequence[Chunk], baseline: Sequence[Chunk]) -> None:
    """Set the speed-ups of a cell over the baseline of its group: over all, and by category where chunks are of one."""
    metrics.speed_up = speed_up(chunks, baseline)
    for category, found in metrics.by_category.items():
        pairs = [pair for pair in zip(chunks, baseline, strict=True) if pair[0].category == category]
        found.speed_up = speed_up(*zip(*pairs, strict=True)) if category and pairs else None


def speed_up(chunks: Sequence[Chunk], baseline: Sequence[Chunk]) -> Estimate:
    """Ratio of decoding rates, resampling chunks: chunk i of both cells held the same prompts."""
    mine, base = (np.array([(c.emitted, c.decode_seconds) for c in cell], dtype=float) for cell in (chunks, baseline))

    def ratio(pick: np.ndarray) -> np.ndarray:
        a, b = mine[pick].sum(-2), base[pick].sum(-2)
        return (a[..., 0] / a[..., 1]) / (b[..., 0] / b[..., 1])

    return _bootstrap(ratio, len(mine))


def paired_difference(records: Sequence[RoundRecord], other: Sequence[RoundRecord]) -> Estimate:
    """Block efficiency of `records` minus that of `other` on the same prompts, resampling prompts."""
    (emitted_a, rounds_a), (emitted_b, rounds_b) = _by_prompt(records), _by_prompt(other)
    if len(emitted_a) != len(emitted_b):
        raise ValueError("a paired difference needs the same prompts on both sides")

    def difference(pick: np.ndarray) -> np.ndarray:
        first = emitted_a[pick].sum(-1) / rounds_a[pick].sum(-1)
        return first - emitted_b[pick].sum(-1) / rounds_b[pick].sum(-1)

    return _bootstrap(difference, len(emitted_a))


def _by_prompt(records: Iterable[RoundRecord]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens emitted and rounds of each prompt, in the order of the prompts."""
    sums: dict[int, list[int]] = {}
    for record in records:
        total = sums.setdefault(record.prompt, [0, 0])
        total[0] += record.emitted
        total[1] += 1
    table = np.array([sums[prompt] for prompt in sorted(sums)], dtype=float)
    return table[:, 0], table[:, 1]


def _bootstrap(statistic: Callable[[np.ndarray], np.ndarray], pieces: int) -> Estimate:
    """A statistic of indices into the pieces, with the percentile interval over resampled pieces."""
    value = float(statistic(np.arange(pieces)))
    if pieces < LEAST_PIECES:
        return Estimate(value)
    picks = np.random.default_rng(0).integers(0, pieces, (RESAMPLES, pieces))
    low, high = np.percentile(statistic(picks), [2.5, 97.5])
    return Estimate(value, float(low), float(high))
