"""What a pass costs, measured, and what follows from it: tokens/s and speed-up of any pair at any batch size.

A `CostCurve` holds the seconds of one pass of a model, over W tokens in each of B rows whose caches hold C tokens,
as the decode loop makes it. Acceptance does not depend on the machine or the batch size, time does; so a pair's
measured acceptance (`CellStatistics`) and the curves of its models give its speed elsewhere (`predict`):

    seconds a round = T_target(B, nodes + 1) + passes x T_draft(B, nodes / passes) + the rest
    tokens/s        = rows in use x tokens a round / seconds a round

and plain decoding has one row, no draft and one token a round. A `roofline.Roofline` is a curve as well. All times
are seconds.
"""

from __future__ import annotations

import json
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from itertools import groupby, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from ..errors import UsageError
from .metrics import Chunk, RoundRecord
from .recipe import digest

if TYPE_CHECKING:
    from .records import CellResult

logger = logging.getLogger(__name__)

BATCH_SIZES = (1, 2, 4, 8, 16)
WIDTHS = (1, 2, 3, 5, 9, 17)
CONTEXTS = (128, 512)
REPEATS = 5


class Curve(Protocol):
    """Seconds of a pass."""

    def seconds(self, batch_size: float, width: float, context: float) -> float:
        """One pass over ``width`` tokens in each of ``batch_size`` rows that hold ``context`` tokens each."""
        ...


# -- the measured curve -----------------------------------------------------------------------------------------


class Point(NamedTuple):
    """One measured pass: where, and the median and quartiles of its seconds."""

    batch_size: int
    width: int
    context: int
    median: float
    low: float
    high: float


@dataclass(frozen=True)
class CostCurve:
    """The measured passes of one model on one device, and the times between them.

    Attributes:
        model, sha256, dtype: which weights, in which dtype.
        device: what `device_identity` says of the machine.
        points: every combination of some batch sizes, widths and contexts.
        repeats: how often each was measured; ``measured``: when (ISO 8601).
    """

    model: str
    sha256: str
    dtype: str
    device: Mapping[str, Any]
    points: tuple[Point, ...]
    repeats: int = REPEATS
    measured: str = ""
    _grid: tuple[Any, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        axes = [sorted(set(values)) for values in zip(*(p[:3] for p in self.points), strict=True)]
        medians = {p[:3]: p.median for p in self.points}
        if len(axes) != 3 or set(medians) != set(product(*axes)):
            raise ValueError("a cost curve needs a point for every combination of batch size, width and context")
        table = np.array([medians[key] for key in product(*axes)]).reshape([len(axis) for axis in axes])
        object.__setattr__(self, "_grid", (*axes, table))

    @property
    def batch_sizes(self) -> list[int]:
        return self._grid[0]

    @property
    def widths(self) -> list[int]:
        return self._grid[1]

    @property
    def contexts(self) -> list[int]:
        return self._grid[2]

    def seconds(self, batch_size: float, width: float, context: float) -> float:
        """Piecewise linear in the rows (B x W) at each measured B, and linear between batch sizes and contexts.

        Below the least measured value of an axis that value counts; above the greatest, the last piece goes on.

        Raises:
            UsageError: ``batch_size`` or ``width`` is greater than the only one that was measured.
        """
        table = self._grid[3]
        for axis, at, name in ((2, context, None), (1, width, "width"), (0, batch_size, "batch size")):
            places = self._grid[axis]
            if name and len(places) == 1 and at > places[0]:
                raise UsageError(
                    f"the cost curve of {self.model} has one {name}, {places[0]}, and cannot say what {at:g} costs; "
                    f"measure it: crossdraft cost --target {self.model} --{name.replace(' ', '-')} {places[0]},{at:g}"
                )
            table = _between(at, places, table)
        return float(table)

    def covers(self, batch_sizes: Iterable[int], widths: Iterable[int], contexts: Iterable[int]) -> bool:
        """Was every combination of these measured?"""
        asked = (batch_sizes, widths, contexts)
        return all(set(values) <= set(axis) for values, axis in zip(asked, self._grid[:3], strict=True))

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key != "_grid"}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CostCurve:
        return cls(**{**data, "points": tuple(Point(*point) for point in data["points"])})


def _between(at: float, places: Sequence[int], values: np.ndarray) -> np.ndarray:
    """Piecewise-linear interpolation of ``values [..., n]`` along their last axis: ``[...]``."""
    if len(places) == 1 or at <= places[0]:
        return values[..., 0]
    i = min(int(np.searchsorted(places, at)), len(places) - 1)
    slope = (values[..., i] - values[..., i - 1]) / (places[i] - places[i - 1])
    if at > places[-1]:  # more work never takes less time: a falling last piece is noise
        return values[..., -1] + np.maximum(slope, 0) * (at - places[-1])
    return values[..., i - 1] + slope * (at - places[i - 1])


def device_identity(device: Any) -> dict[str, Any]:
    """What the times of a model on the torch ``device`` depend on beside its weights and dtype."""
    import torch

    from ..environment import describe

    found = describe()
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else found["cpu"]["model"]
    identity = {"device": f"{device.type} ({hardware})", "torch": found["versions"]["torch"]}
    return identity | ({"threads": found["cpu"]["torch_threads"]} if device.type == "cpu" else {})


def measure_passes(
    model: Any,
    *,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    widths: Sequence[int] = WIDTHS,
    contexts: Sequence[int] = CONTEXTS,
    repeats: int = REPEATS,
    advance: Callable[[int], Any] = lambda n: None,
) -> list[Point]:
    """Time a loaded transformers model as the decode loop uses it: `TransformersLM.grow` and the softmax.

    W tokens are grown in each of B slots; the longest row holds C tokens and every other one a few less, as in the
    loop, where no two rows are equally long. What is in the cache does not change the time: it is not filled.
    Repetitions go round all points, so that a slow minute of the machine hits each of them once; the slots of all
    batch sizes are held at once for that.

    Args:
        advance: told the number of passes made since it was last told.

    Raises:
        UsageError: a context and a width together exceed the model's context.
    """
    import torch

    from ..decoding.lm import TransformersLM
    from ..decoding.loop import Stopwatch
    from ..decoding.sampling import Sampling

    longest = max(contexts) + max(widths)
    lms = {b: TransformersLM(model, b, longest) for b in batch_sizes}
    device, limit = model.device, lms[batch_sizes[0]].context_length
    if limit is not None and longest > limit:
        raise UsageError(
            f"a context of {max(contexts)} and {max(widths)} new tokens exceed the model's {limit} positions; "
            "give a smaller --context or --width"
        )
    sampling, clock = Sampling(), Stopwatch(device)
    points = list(product(batch_sizes, widths, contexts))
    seconds: dict[tuple[int, int, int], list[float]] = {point: [] for point in points}

    @torch.inference_mode()
    def once(b: int, width: int, context: int) -> float:
        lm = lms[b]
        lm.lengths = [max(context - row, 0) for row in range(b)]
        tokens = torch.randint(lm.vocab_size, (b, width), device=device)
        before = clock.seconds["target"]
        clock.start()
        sampling.checked_law(lm.grow(tokens)[0])
        clock.mark("target")
        lm.keep([0] * b)
        return clock.seconds["target"] - before

    order = deque(points)
    for repeat in range(repeats + 1):
        for point in order:
            taken = once(*point)
            if repeat:  # the first time round, buffers are made
                seconds[point].append(taken)
            advance(1)
        order.rotate(len(points) // 3)
    quartiles = {point: np.percentile(taken, [50, 25, 75]) for point, taken in seconds.items()}
    return [Point(*point, *map(float, quartiles[point])) for point in points]


def measure_curve(loaded: Any, **options: Any) -> CostCurve:
    """The curve of a `LoadedModel`; ``options`` are those of `measure_passes`."""
    points = measure_passes(loaded.model, **options)
    return CostCurve(
        model=loaded.name,
        sha256=loaded.sha256,
        dtype=str(loaded.model.dtype).removeprefix("torch."),
        device=device_identity(loaded.model.device),
        points=tuple(points),
        repeats=options.get("repeats", REPEATS),
        measured=datetime.now(UTC).isoformat(timespec="seconds"),
    )


# -- kept curves ------------------------------------------------------------------------------------------------


def curves_dir() -> Path:
    """Where curves are kept: beside the models, see `cache_dir`."""
    from ..models import cache_dir

    return cache_dir() / "costs"


def save_curve(curve: CostCurve) -> Path:
    """Keep a curve, in place of an earlier one of the same weights, dtype and device."""
    key = digest({"sha256": curve.sha256, "dtype": curve.dtype, "device": dict(curve.device)})
    path = curves_dir() / f"{key}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(".new")
        aside.write_text(json.dumps(curve.to_json(), indent=1) + "\n", encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        raise UsageError(f"cannot keep the cost curve in {path.parent}: {error.strerror}") from None
    return path


def stored_curves() -> list[CostCurve]:
    """Every curve that was kept; files that cannot be read are left out with a warning."""
    curves = []
    for path in sorted(curves_dir().glob("*.json")):
        try:
            curves.append(CostCurve.from_json(json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("crossdraft: the cost curve %s cannot be read and is left out: %s", path, error)
    return curves


def find_curve(curves: Iterable[CostCurve], sha256: str, dtype: str, device: Mapping[str, Any]) -> CostCurve | None:
    """The curve of these weights in this dtype on a device of which ``device`` says (some of) the identity."""
    for curve in curves:
        same = all(curve.device.get(key) == value for key, value in device.items())
        if curve.sha256 == sha256 and curve.dtype == dtype and same:
            return curve
    return None


# -- prediction -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CellStatistics:
    """What the speed of a pair depends on beside the curves of its models.

    Attributes:
        batch_size: rows that every pass computes.
        occupied: mean number of them that hold a sequence: less than all once prompts run out.
        tokens_per_round: tokens a row emits in a round: the block efficiency.
        widths: share of the rounds by nodes of the widest row; the target evaluates one position more.
        context: mean length of the longest row, in tokens.
        passes: forward passes of the drafting model in a round; draft_width: tokens of a row in each of them.
        draft_seconds: of a round's drafting, for drafters whose passes have no curve.
        other_seconds: of a round's verification and bookkeeping.
        acceptance: Pr(tau >= i) for i = 1, 2, ...
    """

    batch_size: int
    occupied: float
    tokens_per_round: float
    widths: Mapping[int, float]
    context: float
    passes: float = 0.0
    draft_width: float = 1.0
    draft_seconds: float = 0.0
    other_seconds: float = 0.0
    acceptance: tuple[float, ...] = ()

    @classmethod
    def chain(cls, batch_size: int, gamma: int, acceptance: float, context: float) -> CellStatistics:
        """Token verification of chains of ``gamma`` tokens, each accepted with the same probability if all before
        it were: E[tau] + 1 = (1 - a^(gamma+1)) / (1 - a) (Leviathan, Kalman and Matias, "Fast inference from
        transformers via speculative decoding", 2023, eq. 1). A pass of the drafting model for each token."""
        survival = tuple(acceptance**i for i in range(1, gamma + 1))
        return cls(batch_size, batch_size, 1 + sum(survival), {gamma: 1.0}, context, gamma, acceptance=survival)

    def plain(self) -> CellStatistics:
        """Plain decoding of the same rows, with the same bookkeeping."""
        return replace(self, tokens_per_round=1.0, widths={0: 1.0}, passes=0.0, draft_seconds=0.0, acceptance=())

    def at(self, batch_size: int) -> CellStatistics:
        """The same pair with ``batch_size`` rows, all in use. Times without a curve are taken to grow with the rows."""
        ratio = batch_size / self.batch_size
        return replace(
            self,
            batch_size=batch_size,
            occupied=batch_size,
            draft_seconds=self.draft_seconds * ratio,
            other_seconds=self.other_seconds * ratio,
        )

    def cut(self, gamma: int) -> CellStatistics:
        """Chains cut to ``gamma`` tokens. Exact for token verification of chains that all were that long;
        a rule that looks ahead (block verification) does slightly worse with less to look at.

        Raises:
            UsageError: ``gamma`` is longer than what was measured, or the drafts were trees.
        """
        if max(self.widths) > len(self.acceptance):
            raise UsageError(
                f"drafts of {max(self.widths)} nodes that go {len(self.acceptance)} deep are trees; "
                "only chains can be cut to another gamma"
            )
        if gamma > len(self.acceptance):
            raise UsageError(
                f"acceptance was measured for drafts of up to {len(self.acceptance)} tokens, not {gamma}; "
                f"run a cell with gamma {gamma}"
            )
        widths: dict[int, float] = {}
        for nodes, share in self.widths.items():
            widths[min(nodes, gamma)] = widths.get(min(nodes, gamma), 0.0) + share
        longest = max(self.widths)
        ratio = gamma / longest if longest > gamma else 1.0
        return replace(
            self,
            tokens_per_round=self.tokens_per_round - sum(self.acceptance[gamma:]),
            widths=widths,
            passes=self.passes * ratio,
            draft_seconds=self.draft_seconds * ratio,
            acceptance=self.acceptance[:gamma],
        )


@dataclass(frozen=True)
class Prediction:
    """A pair's predicted round.

    Attributes:
        target, draft, other: seconds of a round's parts.
        tokens_per_second: of all rows together.
        speed_up: over plain decoding, predicted the same way.
    """

    target: float
    draft: float
    other: float
    tokens_per_second: float
    speed_up: float = 1.0

    @property
    def seconds(self) -> float:
        """Of a round."""
        return self.target + self.draft + self.other


def predict(
    cell: CellStatistics, target: Curve, drafter: Curve | None = None, baseline: CellStatistics | None = None
) -> Prediction:
    """Seconds a round, tokens/s and speed-up of a pair.

    Args:
        target, drafter: curves of the two models; without the drafter's, ``cell.draft_seconds`` counts.
        baseline: statistics of plain decoding; `CellStatistics.plain` by default.
    """
    mine = _round(cell, target, drafter)
    plain = _round(baseline or cell.plain(), target, None)
    return replace(mine, speed_up=mine.tokens_per_second / plain.tokens_per_second)


def _round(cell: CellStatistics, target: Curve, drafter: Curve | None) -> Prediction:
    b, context = cell.batch_size, cell.context
    scoring = sum(share * target.seconds(b, nodes + 1, context) for nodes, share in cell.widths.items())
    if drafter is None:
        drafting = cell.draft_seconds
    else:
        drafting = cell.passes * drafter.seconds(b, cell.draft_width, context)
    total = scoring + drafting + cell.other_seconds
    return Prediction(scoring, drafting, cell.other_seconds, cell.occupied * cell.tokens_per_round / total)


def stops_paying(batch_sizes: Sequence[int], speed_ups: Sequence[float]) -> int | None:
    """The least batch size from which on every speed-up is below 1; None if the last one is not."""
    below = None
    for b, speed_up in sorted(zip(batch_sizes, speed_ups, strict=True), reverse=True):
        if speed_up >= 1:
            break
        below = b
    return below


def pays_until(speed_ups: Mapping[int, float]) -> int:
    """The greatest batch size before `stops_paying`; 0 if it is the least one that stops."""
    stop = stops_paying(list(speed_ups), list(speed_ups.values()))
    return max((b for b in speed_ups if stop is None or b < stop), default=0)


# -- from a finished cell ---------------------------------------------------------------------------------------


class BatchRound(NamedTuple):
    """A round of the whole batch: rows in use, nodes of the widest, tokens of the longest, tokens emitted by all."""

    occupied: int
    nodes: int
    context: int
    emitted: int


def batch_rounds(
    records: Sequence[RoundRecord], prompt_tokens: Sequence[int], chunks: Sequence[Chunk], batch_size: int
) -> list[BatchRound]:
    """The rounds that the whole batch made, from those of its rows, which is what records hold.

    Rows take turns on the slots in a known order: prompts of a chunk and turn in their order, a free slot to the
    next one. So the schedule can be made again.

    Args:
        records: of a cell, in the order they were made.
        prompt_tokens: of each response, in the same order.
    """
    sequences = [list(rows) for _, rows in groupby(records, key=lambda r: (r.prompt, r.turn))]
    rounds: list[BatchRound] = []
    waiting = deque(zip(sequences, prompt_tokens, strict=True))
    for chunk in chunks:
        left = chunk.emitted + chunk.tail_emitted
        runs: dict[int, deque[tuple[deque[RoundRecord], int]]] = {}
        while left > 0 and waiting:
            rows, length = waiting.popleft()
            left -= sum(r.emitted for r in rows)
            runs.setdefault(rows[0].turn, deque()).append((deque(rows), length))
        for queue in runs.values():
            rounds += _replay(queue, batch_size)
    return rounds


def _replay(queue: deque[tuple[deque[RoundRecord], int]], batch_size: int) -> list[BatchRound]:
    rounds: list[BatchRound] = []
    active: list[tuple[deque[RoundRecord], int]] = []
    while queue or active:
        while queue and len(active) < batch_size:
            active.append(queue.popleft())
        longest, emitted = max(length for _, length in active), sum(rows[0].emitted for rows, _ in active)
        rounds.append(BatchRound(len(active), active[0][0][0].width, longest, emitted))
        active = [(rows, length + rows.popleft().emitted) for rows, length in active]
        active = [(rows, length) for rows, length in active if rows]
    return rounds


def statistics(result: CellResult) -> CellStatistics | None:
    """What a finished cell says about its pair; None for one that failed.

    Like its measured rate, from the rounds in which all slots were in use, if there were any.
    """
    metrics, batch_size = result.metrics, result.config.batch_size
    if metrics is None:
        return None
    lengths = [response["prompt_tokens"] for response in result.responses]
    every = batch_rounds(result.records, lengths, result.chunks, batch_size)
    rounds = [r for r in every if r.occupied == batch_size] or every
    n, occupied = len(rounds), sum(r.occupied for r in rounds)
    phase = {name: metrics.shares.get(name, 0.0) * metrics.decode_seconds / n for name in ("draft", "verify", "rest")}
    nodes, passes = sum(r.nodes for r in rounds) / n, metrics.drafter_passes / len(every)
    return CellStatistics(
        batch_size=batch_size,
        occupied=occupied / n,
        tokens_per_round=sum(r.emitted for r in rounds) / occupied,
        widths={nodes: count / n for nodes, count in sorted(Counter(r.nodes for r in rounds).items())},
        context=sum(r.context for r in rounds) / n,
        passes=passes,
        draft_width=max(nodes / passes, 1.0) if passes else 1.0,
        draft_seconds=phase["draft"],
        other_seconds=phase["verify"] + phase["rest"],
        acceptance=tuple(metrics.acceptance),
    )


def curves_of(result: CellResult, curves: Iterable[CostCurve]) -> tuple[CostCurve | None, CostCurve | None]:
    """The curves of a cell's target and of its drafting model, None where there is none.

    A drafter without a model, or with several, has no curve: its time is the one that was measured.
    """
    curves, provenance = list(curves), result.provenance
    used = dict(provenance.get("models", {}))
    same = {key: provenance.get(key) for key in ("device", "torch")}
    if str(same["device"]).startswith("cpu"):
        same["threads"] = provenance.get("threads")

    def find(model: Mapping[str, Any] | None) -> CostCurve | None:
        return find_curve(curves, model["sha256"], provenance["dtype"], same) if model else None

    target = find(used.pop(result.config.target, None))
    drafts = len(used) == 1 and result.metrics is not None and result.metrics.drafter_passes > 0
    return target, find(next(iter(used.values()))) if drafts else None


def used_curves(results: Iterable[CellResult], curves: Iterable[CostCurve]) -> list[CostCurve]:
    """Those of ``curves`` that predictions for these cells read, in their order."""
    curves = list(curves)
    read = {id(curve) for result in results if result.error is None for curve in curves_of(result, curves)}
    return [curve for curve in curves if id(curve) in read]


def predicted(result: CellResult, curves: Iterable[CostCurve], baseline: CellResult | None = None) -> Prediction | None:
    """What the curves say about a finished cell, for a table to show beside what was measured.

    Args:
        curves: for instance `stored_curves()`; those of other models and devices do no harm.
        baseline: the cell of the same group that decodes plainly, for the speed-up.

    Returns:
        None for a failed cell and for a target without a curve for the device that the cell ran on.

    Raises:
        UsageError: the curve was measured for too few batch sizes or widths to say.
    """
    cell = statistics(result)
    target, drafter = curves_of(result, curves) if cell else (None, None)
    if cell is None or target is None:
        return None
    return predict(cell, target, drafter, statistics(baseline) if baseline else None)


def speed_ups_of(results: Mapping[int, CellResult]) -> dict[int, float]:
    """The measured speed-ups of a pair's cells by batch size, of those that have one."""
    return {b: r.metrics.speed_up.value for b, r in results.items() if r.metrics and r.metrics.speed_up}


def last_paying(
    results: Mapping[int, CellResult], baselines: Mapping[int, CellResult], curves: Iterable[CostCurve]
) -> int:
    """The greatest batch size at which a pair is still no slower than plain decoding; 0 if it is at none.

    That is the last measured one before `stops_paying`, or a greater one, below that at which it was measured not to
    pay, for which the curves predict that it pays.

    Args:
        results, baselines: of the pair and of plain decoding by batch size, with measured speed-ups.
    """
    speed_ups = speed_ups_of(results)
    last, stop = pays_until(speed_ups), stops_paying(list(speed_ups), list(speed_ups.values()))
    target, drafter = curves_of(results[last], curves) if last else (None, None)
    if stop is None or target is None or last not in baselines:
        return last
    cell, plain = statistics(results[last]), statistics(baselines[last])
    assert cell is not None and plain is not None  # they have a speed-up
    for b in range(last + 1, stop):
        try:
            found = predict(cell.at(b), target, drafter, plain.at(b))
        except UsageError:  # too small a curve, as `predictions` says
            break
        if found.speed_up < 1:
            break
        last = b
    return last


def predictions(results: Sequence[CellResult], curves: Iterable[CostCurve] | None = None) -> dict[str, Prediction]:
    """`predicted` for the cells of a run, each beside the baseline of its group, by the hash of the cell's config.

    Cells without a prediction are left out, those of too small a curve with a warning. ``curves``: `stored_curves()`
    by default.
    """
    curves = stored_curves() if curves is None else list(curves)
    baselines = {result.config.group: result for result in results if result.config.is_baseline}
    found = {}
    for result in results if curves else ():
        try:
            prediction = predicted(result, curves, baselines.get(result.config.group))
        except UsageError as error:
            logger.warning("crossdraft: %s", error)
            continue
        if prediction is not None:
            found[result.config.hash] = prediction
    return found
