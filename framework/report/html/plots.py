"""The panels of charts below the page's table.

A panel shows one quantity; a choice is the chart of one group of cells (or of one pair), of which readers see one at a
time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ...metrics.cell_metrics import acceptance as acceptance_of
from ...metrics.intervals import Estimate
from ...runs.labels import verifier_title
from ...runs.marks import mark_of
from ...util.estimate import estimate_text
from ..batch_sizes import batch_size_series
from ..charts.style import visible
from ..metrics_text import no_speed_up
from .heat_maps import heat_maps
from .svg import WIDTH, Axis, Chart, Looks

if TYPE_CHECKING:
    from ...cost.load_run import FinishedRun
    from ...runs.records import CellResult

RUNS = Sequence[tuple[str, "FinishedRun"]]
PHASES = ("draft", "target", "verify", "rest")
_BREAK_EVEN = "The dashed line at 1 is plain decoding."
_INTERVALS = "Bars are 95 % intervals; points that coincide stand side by side."


@dataclass(frozen=True)
class Choice:
    """One chart.

    Attributes:
        title: the group or pair.
        svg: the chart; empty if ``shares`` hold it.
        legend: see `Looks.legend`.
        shares: of `time`: pair and per cent by phase.
    """

    title: str = ""
    svg: str = ""
    legend: Sequence[tuple[str, Sequence[tuple[str, str]]]] = ()
    shares: Sequence[tuple[str, Mapping[str, float]]] = ()


@dataclass
class Panel:
    """Charts of one quantity."""

    key: str
    title: str
    note: str
    missing: str
    choices: list[Choice] = field(default_factory=list)


def panels_of(runs: RUNS) -> tuple[list[Panel], list[tuple[str, str]]]:
    """The panels that have data, and the title of each other one with the reason why it is left out."""
    results = [result for _, run in runs for result in run.summary.results]
    no_batch_sizes, missing = "it needs cells at several batch sizes", no_speed_up(results)
    if any(batch_size_series(run.summary.results) for _, run in runs):
        no_batch_sizes = missing or "no pair was measured"
    elif missing.endswith("(--untimed)"):
        no_batch_sizes = missing
    panels = [
        Panel("speed", "Speed-up by batch size", f"{_BREAK_EVEN} {_INTERVALS}", no_batch_sizes),
        Panel(
            "pareto",
            "Throughput against speed for one user",
            "A line is a pair, a point a batch size; plain decoding is the thick grey line. Up and to the right is "
            "better: no certified pair lies beyond the thin grey steps. Withheld rates are left out; if all are, the "
            "axes are by the clock, which ranks no pair.",
            no_batch_sizes,
        ),
        Panel(
            "heat",
            "Speed-up by draft length and batch size",
            "The heavy line is break-even: on its red side (below 1), drafting costs more than it gains.",
            missing or "it needs a pair that was measured with several gammas at several batch sizes",
        ),
        Panel(
            "acceptance",
            "Acceptance by position",
            f"Pr(τ ≥ i): the share of steps in which the first i drafted tokens were all accepted. {_INTERVALS}",
            "no cell drafts",
        ),
        Panel(
            "rows",
            "Block efficiency against target rows",
            f"The gain of a pair for each position that the target evaluates. {_INTERVALS}",
            "no cell has a block efficiency",
        ),
        Panel("category", "Block efficiency by category of prompts", _INTERVALS, "the prompts are of one category"),
        Panel(
            "time",
            "Where the time goes",
            "Shares of the decoding time by the clock, in per cent; draft includes the drafter's prefill.",
            "no time was measured",
        ),
    ]
    if any(run.segments for _, run in runs):
        title = "Block efficiency by segment of responses"
        panels.insert(-1, Panel("segment", title, _INTERVALS, "no step starts in a segment"))
    by_key = {panel.key: panel for panel in panels}
    looks = Looks.of(results)

    by_group: dict[str, Callable[[list[CellResult], Looks], Choice | None]]
    by_group = {"acceptance": _acceptance, "rows": _rows, "category": _categories, "time": _time}
    for title, run in runs:
        before = f"{title}: " if len(runs) > 1 else ""

        def add(key: str, group: str, choice: Choice | None, before: str = before) -> None:
            if choice is not None:
                by_key[key].choices.append(replace(choice, title=before + group))

        for group, series in batch_size_series(run.summary.results).items():
            add("speed", group, _speed_up(series, looks))
            add("pareto", group, _pareto(series, looks))
        for pair, svg in heat_maps(run.summary.results):
            add("heat", pair, Choice(svg=svg))
        for group, results in run.summary.groups:
            finished = [r for r in results if r.metrics is not None]
            for key, draw in by_group.items():
                add(key, group, draw(finished, looks))
            if run.segments:
                add("segment", group, _segments(finished, run, looks))
    return [p for p in panels if p.choices], [(p.title, p.missing) for p in panels if not p.choices]


# -- estimates by category, batch size or position ----------------------------------------------------------------


def _estimates(
    pairs: Mapping[tuple[str, str], Mapping[Any, Estimate]],
    looks: Looks,
    x_title: str,
    y_title: str,
    joined: bool = True,
    reference: float | None = None,
) -> Choice:
    """A band for each key of the estimates, in which pairs stand side by side."""
    bands = list(dict.fromkeys(key for values in pairs.values() for key in values))
    if all(isinstance(band, int) for band in bands):
        bands.sort()
    longest = max(3, WIDTH // len(bands) // 8)
    labels = {
        i: text if len(text := str(band)) <= longest else text[: longest - 1] + "…" for i, band in enumerate(bands)
    }
    estimates = [estimate for values in pairs.values() for estimate in values.values()]
    y = Axis(y_title, *visible(estimates, *([] if reference is None else [reference])))
    chart = Chart(Axis(x_title, -0.5, len(bands) - 0.5, labels={float(i): text for i, text in labels.items()}), y)
    if reference is not None:
        chart.reference(reference)
    step = min(9.0, 0.75 * (chart.px(1) - chart.px(0)) / len(pairs))
    for i, ((drafter, verifier), values) in enumerate(pairs.items()):
        points = [
            (bands.index(band), e.value, e.low, e.high, f"{x_title} {band}: {estimate_text(e)}")
            for band, e in sorted(values.items(), key=lambda item: bands.index(item[0]))
        ]
        dodge = step * (i - (len(pairs) - 1) / 2)
        chart.series(points, looks.look(drafter, verifier), f"{drafter} × {verifier}", joined, dodge)
    values = [estimate.value for estimate in estimates]
    words = f"{y_title} of {len(pairs)} pairs, {min(values):.2f} to {max(values):.2f}"
    return Choice(svg=chart.svg(words), legend=looks.legend(pairs))


def _speed_up(series: Any, looks: Looks) -> Choice | None:
    pairs = {
        (pair.drafter, pair.verifier): {b: r.metrics.speed_up for b, r in sorted(pair.results.items()) if r.metrics}
        for pair in series.pairs
    }
    pairs = {pair: {b: e for b, e in values.items() if e is not None} for pair, values in pairs.items()}
    pairs = {pair: values for pair, values in pairs.items() if values}
    return _estimates(pairs, looks, "batch size", "speed-up over plain decoding", reference=1.0) if pairs else None


def _acceptance(results: list[CellResult], looks: Looks) -> Choice | None:
    pairs: dict[tuple[str, str], dict[int, Estimate]] = {}
    for result in _drafting(results):
        metrics = result.metrics
        if metrics is not None and metrics.acceptance:
            estimates = acceptance_of(result.records, metrics.depth, len(metrics.acceptance))
            pairs[_pair(result)] = dict(enumerate(estimates, 1))
    return _estimates(pairs, looks, "position i in the draft", "Pr(τ ≥ i)") if any(pairs.values()) else None


def _categories(results: list[CellResult], looks: Looks) -> Choice | None:
    pairs: dict[tuple[str, str], dict[str, Estimate]] = {}
    for result in _drafting(results):
        if result.metrics is not None and len(result.metrics.by_category) > 1:
            by_category = {name: numbers.block_efficiency for name, numbers in result.metrics.by_category.items()}
            pairs[_pair(result)] = {name: estimate for name, estimate in by_category.items() if estimate is not None}
    if not any(pairs.values()):
        return None
    return _estimates(pairs, looks, "category of prompts", "block efficiency", joined=False)


def _segments(results: list[CellResult], run: FinishedRun, looks: Looks) -> Choice | None:
    pairs = {
        _pair(result): {name: m.block_efficiency for name, m in segments.items() if m.block_efficiency is not None}
        for result in results
        if (segments := run.segments.get(result.config.hash))
    }
    if not any(pairs.values()):
        return None
    return _estimates(pairs, looks, "segment of responses", "block efficiency", joined=False)


# -- other charts -------------------------------------------------------------------------------------------------


def _rows(results: list[CellResult], looks: Looks) -> Choice | None:
    points = {
        _pair(r): (r.metrics.target_rows_per_token, r.metrics.block_efficiency)
        for r in _drafting(results)
        if r.metrics and r.metrics.block_efficiency
    }
    if not points:
        return None
    x = Axis.fit("target rows per emitted token", [rows for rows, _ in points.values()])
    chart = Chart(x, Axis("block efficiency", *visible([estimate for _, estimate in points.values()])))
    for (drafter, verifier), (rows, e) in points.items():
        tip = f"block efficiency {estimate_text(e)}, {rows:.2f} target rows per token"
        look, name = looks.look(drafter, verifier), f"{drafter} × {verifier}"
        chart.series([(rows, e.value, e.low, e.high, tip)], look, name, spread=True)
    values = [estimate.value for _, estimate in points.values()]
    words = f"{len(points)} pairs with block efficiencies of {min(values):.2f} to {max(values):.2f}"
    return Choice(svg=chart.svg(words), legend=looks.legend(points))


def _pareto(series: Any, looks: Looks) -> Choice | None:
    lines = {(p.drafter, p.verifier): _points(series.rates(p.results)) for p in series.pairs}
    lines = {pair: points for pair, points in lines.items() if points}
    plain = _points(series.rates(series.baselines))
    points_shown = [(x, y) for points in (plain, *lines.values()) for x, y, *_ in points]
    if not points_shown or not lines:
        return None
    clock = ", by the clock" if series.by_clock else ""
    chart = Chart(
        Axis.fit(f"tokens/s for one user{clock}", [x for x, _ in points_shown]),
        Axis.fit(f"tokens/s of the device{clock}", [y for _, y in points_shown], log=True),
        height=340,
    )
    words = f"{len(lines)} pairs{clock}"
    if not clock:
        certified = [p for p in series.pairs if all(mark_of(r).headline for r in p.results.values())]
        ranked = [plain, *(lines.get((p.drafter, p.verifier), []) for p in certified)]
        if reached := front_of([(x, y) for points in ranked for x, y, *_ in points]):
            following = [*reached[1:], reached[-1]]
            steps = [c for (x, y), (next_x, _) in zip(reached, following, strict=True) for c in ((x, y), (next_x, y))]
            chart.path(steps, "front")
            words += f"; at best {reached[0][0]:.1f} tokens/s for one user, {reached[-1][1]:.1f} of the device"
    if plain:
        chart.path([(x, y) for x, y, *_ in plain], "plain")
    for pair, points in lines.items():
        chart.series(points, looks.look(*pair), " × ".join(pair), joined=True)
    return Choice(svg=chart.svg(words), legend=looks.legend(lines))


def _points(rates: Mapping[int, float]) -> list[tuple[float, float, None, None, str]]:
    """Points of a line: tokens/s for one user and of the device, by batch size."""
    return [
        (rate / b, rate, None, None, f"batch size {b}: {rate / b:.1f} tokens/s for one user, {rate:.1f} of the device")
        for b, rate in rates.items()
        if rate > 0
    ]


def front_of(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other one beats in both, from the greatest x on."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(set(points), reverse=True):
        if not front or y > front[-1][1]:
            front.append((x, y))
    return front


def _time(results: list[CellResult], looks: Looks) -> Choice | None:
    shares = [
        (
            "plain decoding" if r.config.is_baseline else " × ".join(_pair(r)),
            {p: 100 * r.metrics.shares.get(p, 0.0) for p in PHASES},
        )
        for r in results
        if r.metrics and any(r.metrics.shares.values())
    ]
    return Choice(shares=shares) if shares else None


def _drafting(results: Sequence[CellResult]) -> list[CellResult]:
    return [r for r in results if r.metrics is not None and not r.config.is_baseline]


def _pair(result: CellResult) -> tuple[str, str]:
    return result.config.drafter.title, verifier_title(result)
