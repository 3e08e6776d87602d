"""The page's plots, drawn with Bokeh.

A panel asks one thing of the cells; a choice is its answer for one group of cells (or one pair), of which readers see
one at a time. One colour is one pair within a plot.
"""

# Bokeh's annotations say what its properties hold, not what they take.
# pyright: reportArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bokeh.embed import json_item
from bokeh.models import (
    ColumnDataSource,
    FactorRange,
    HBar,
    Line,
    Range1d,
    Segment,
    Step,
    VBar,
)

from ...runs.marks import mark_of
from ..batch_sizes import batch_size_series
from ..table_utils import groups_of
from .bokeh_utils import add_legend, blank, colour, dash, dot, hover, marker, pair_of, plain_text
from .heat_maps import heat_maps

if TYPE_CHECKING:
    from ...runs.records import CellResult
    from ..load_run import FinishedRun

RUNS = Sequence[tuple[str, "FinishedRun"]]
PHASES = ("draft", "target", "verify", "rest")


@dataclass(frozen=True)
class Choice:
    """One plot: its title among the panel's, what Bokeh embeds, and what it shows in words."""

    key: str
    title: str
    plot: dict[str, Any]
    words: str


@dataclass
class Panel:
    """Plots that ask the same of several groups."""

    key: str
    title: str
    note: str
    missing: str
    choices: list[Choice] = field(default_factory=list)


def panels_of(runs: RUNS) -> tuple[list[Panel], list[tuple[str, str]]]:
    """The panels that have data, and the title of each other one with the reason why it is left out."""
    panels = [
        Panel(
            "pareto",
            "Speed for each user against speed of the device",
            "A line is a pair, a point a batch size; plain decoding is the thick grey line. Up and to the right is "
            "better: the thin line joins the points that no other one beats in both.",
            "it needs cells at several batch sizes",
        ),
        Panel(
            "heat",
            "Draft length and batch size",
            "Speed-up of a pair by gamma and batch size. The heavy line is break-even: on its red side, drafting costs "
            "more than it gains.",
            "it needs a pair that was measured with several gammas at several batch sizes",
        ),
        Panel(
            "acceptance",
            "Acceptance by position",
            "Pr(τ ≥ i): the share of steps in which the first i drafted tokens were all accepted.",
            "no cell drafts",
        ),
        Panel(
            "rows",
            "Block efficiency against target rows",
            "What a pair gains for each position that the target evaluates; bars are 95 % intervals.",
            "no cell has a block efficiency",
        ),
        Panel(
            "category",
            "Block efficiency by category of prompts",
            "Bars are pairs; whiskers are 95 % intervals.",
            "the prompts are of one category",
        ),
        Panel(
            "time",
            "Where the time goes",
            "Shares of the decoding time; draft includes the drafter's prefill.",
            "no time was measured",
        ),
    ]
    by_key = {panel.key: panel for panel in panels}

    def add(key: str, title: str, drawn: tuple[Any, str] | None) -> None:
        if drawn is not None:
            panel = by_key[key]
            name = f"{key}-{len(panel.choices)}"
            panel.choices.append(Choice(name, title, json_item(drawn[0], f"plot-{key}"), drawn[1]))

    by_group: dict[str, Callable[[list[CellResult]], Any]]
    by_group = {"acceptance": _acceptance, "rows": _rows, "category": _categories, "time": _time}
    for title, run in runs:
        before = f"{title}: " if len(runs) > 1 else ""
        for what, series in batch_size_series(run.summary.results).items():
            add("pareto", before + what, _pareto(series))
        for what, plot, words in heat_maps(run.summary.results):
            add("heat", before + what, (plot, words))
        for what, results in groups_of(run.summary):
            finished = [r for r in results if r.metrics is not None]
            for key, draw in by_group.items():
                add(key, before + what, draw(finished))
    return [p for p in panels if p.choices], [(p.title, p.missing) for p in panels if not p.choices]


# -- plots --------------------------------------------------------------------------------------------------------


def _pareto(series: Any) -> tuple[Any, str] | None:
    plot = blank("tokens/s for each user", "tokens/s of the device")
    lines = [("plain decoding", series.baselines)]
    lines += [(f"{p.drafter} × {p.verifier}", p.results) for p in series.pairs]
    legend, every = [], []
    for i, (name, results) in enumerate(lines):
        rates = {b: r.metrics.tokens_per_second for b, r in sorted(results.items()) if r.metrics}
        rates = {b: rate for b, rate in rates.items() if rate > 0}
        if not rates:
            continue
        points = [(rate / b, rate) for b, rate in rates.items()]
        if all(r.config.is_baseline or mark_of(r).headline for r in results.values()):
            every += points
        data = {"x": [p[0] for p in points], "y": [p[1] for p in points], "b": list(rates)}
        source = ColumnDataSource(data | {"pair": [plain_text(name)] * len(points)})
        style: dict[str, Any] = {"line_color": "#999999", "line_width": 6, "line_alpha": 0.6}
        if i:
            style = {"line_color": colour(i - 1), "line_width": 2, "line_dash": dash(i - 1)}
        line = plot.add_glyph(source, Line(x="x", y="y", **style))
        dots = plot.add_glyph(source, dot(8, colour(i - 1) if i else "#999999"))
        legend.append((plain_text(name), [line, dots]))
    if not every:
        return None
    front = front_of(every)
    best = ColumnDataSource({"x": [x for x, _ in front], "y": [y for _, y in front]})
    plot.add_glyph(best, Step(x="x", y="y", mode="after", line_color="#999999"), level="underlay")
    hover(plot, [r for _, rs in legend for r in rs[1:]], pair="@pair", B="@b", user="@x{0.0}", device="@y{0.0}")
    add_legend(plot, legend)
    return plot, f"{len(lines)} lines, from {front[0][1]:.1f} to {front[-1][1]:.1f} tokens/s of the device at best"


def front_of(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other one beats in both, from the greatest x on."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(set(points), reverse=True):
        if not front or y > front[-1][1]:
            front.append((x, y))
    return front


def _acceptance(results: list[CellResult]) -> tuple[Any, str] | None:
    drafting = [r for r in results if not r.config.is_baseline and r.metrics and r.metrics.acceptance]
    if not drafting:
        return None
    plot = blank("position in the draft", "Pr(τ ≥ i)")
    plot.y_range, legend = Range1d(0, 1.02), []
    plot.xaxis.ticker.desired_num_ticks, plot.xaxis.ticker.num_minor_ticks = 8, 0  # positions are whole numbers
    plot.xaxis.ticker.min_interval = 1
    for i, result in enumerate(drafting):
        assert result.metrics is not None
        values = result.metrics.acceptance
        given = [p / q if q else 0.0 for p, q in zip(values, [1.0, *values], strict=False)]
        name = plain_text(pair_of(result))
        data = {"x": list(range(1, len(values) + 1)), "y": values, "given": given, "pair": [name] * len(values)}
        source = ColumnDataSource(data)
        line = plot.add_glyph(source, Line(x="x", y="y", line_color=colour(i), line_width=2, line_dash=dash(i)))
        dots = plot.add_glyph(source, dot(7, colour(i)))
        legend.append((name, [line, dots]))
    hover(plot, [r[1] for _, r in legend], pair="@pair", i="@x", accepted="@y{0.000}", given_before="@given{0.000}")
    add_legend(plot, legend)
    firsts = [r.metrics.acceptance[0] for r in drafting if r.metrics]
    return plot, f"{len(drafting)} pairs; Pr(τ ≥ 1) is {min(firsts):.2f} to {max(firsts):.2f}"


def _rows(results: list[CellResult]) -> tuple[Any, str] | None:
    found = [r for r in results if not r.config.is_baseline and r.metrics and r.metrics.block_efficiency]
    if not found:
        return None
    plot, legend = blank("target rows per emitted token", "block efficiency"), []
    for i, result in enumerate(found):
        assert result.metrics is not None and result.metrics.block_efficiency is not None
        efficiency, x = result.metrics.block_efficiency, result.metrics.target_rows_per_token
        low, high = (efficiency.value if end is None else end for end in (efficiency.low, efficiency.high))
        name = plain_text(pair_of(result))
        data = {"x": [x], "y": [efficiency.value], "low": [low], "high": [high], "pair": [name]}
        source = ColumnDataSource(data)
        bar = plot.add_glyph(source, Segment(x0="x", y0="low", x1="x", y1="high", line_color=colour(i), line_width=2))
        dots = plot.add_glyph(source, dot(10, colour(i), marker(i)))
        legend.append((name, [bar, dots]))
    hover(plot, [r[1] for _, r in legend], pair="@pair", rows="@x{0.00}", BE="@y{0.00} [@low{0.00}, @high{0.00}]")
    add_legend(plot, legend)
    values = [r.metrics.block_efficiency.value for r in found if r.metrics and r.metrics.block_efficiency]
    return plot, f"{len(found)} pairs with block efficiencies of {min(values):.2f} to {max(values):.2f}"


def _categories(results: list[CellResult]) -> tuple[Any, str] | None:
    found = [r for r in results if not r.config.is_baseline and r.metrics and len(r.metrics.by_category) > 1]
    names = list(dict.fromkeys(name for r in found if r.metrics for name in r.metrics.by_category))
    if not names:
        return None
    factors = [(plain_text(name), str(i)) for name in names for i in range(len(found))]
    x = FactorRange(*factors, group_padding=0.8, range_padding=0.02)
    plot, legend, most = blank("", "block efficiency", x_range=x), [], 0.0
    for i, result in enumerate(found):
        assert result.metrics is not None
        rows: dict[str, Any] = {key: [] for key in ("x", "y", "low", "high", "pair", "category")}
        for name, numbers in result.metrics.by_category.items():
            if (efficiency := numbers.block_efficiency) is None:
                continue
            low, high = (efficiency.value if end is None else end for end in (efficiency.low, efficiency.high))
            category, most = plain_text(name), max(most, high)
            values = ((category, str(i)), efficiency.value, low, high, plain_text(pair_of(result)), category)
            for key, value in zip(rows, values, strict=True):
                rows[key].append(value)
        source = ColumnDataSource(rows)
        bars = plot.add_glyph(source, VBar(x="x", top="y", width=0.9, fill_color=colour(i), line_color=None))
        whisker = Segment(x0="x", y0="low", x1="x", y1="high", line_color="#777777", line_width=1.5)
        legend.append((plain_text(pair_of(result)), [bars, plot.add_glyph(source, whisker)]))
    if not most:
        return None
    plot.y_range = Range1d(0, most * 1.05)
    plot.xaxis.major_label_text_font_size = "0px"  # the bars of a category are told apart by colour
    plot.xaxis.major_tick_line_color = None
    plot.xaxis.group_label_orientation = 0.6 if len(names) > 3 else 0
    plot.xgrid.grid_line_color = None
    tips = {"pair": "@pair", "category": "@category", "BE": "@y{0.00} [@low{0.00}, @high{0.00}]"}
    hover(plot, [drawn[0] for _, drawn in legend], **tips)
    add_legend(plot, legend)
    return plot, f"{len(found)} pairs on {len(names)} categories: {', '.join(names)}"


def _time(results: list[CellResult]) -> tuple[Any, str] | None:
    found = [r for r in results if r.metrics and any(r.metrics.shares.values())]
    if not found:
        return None
    names = [f"{i + 1}. {plain_text(pair_of(r))}" for i, r in enumerate(found)]
    data: dict[str, Any] = {"cell": names, "to_": [0.0] * len(found)}
    for before, phase in zip(("", *PHASES), PHASES, strict=False):
        data[phase] = [100 * r.metrics.shares.get(phase, 0.0) for r in found if r.metrics]
        data[f"to_{phase}"] = [end + share for end, share in zip(data[f"to_{before}"], data[phase], strict=True)]
    plot = blank("% of the decoding time", "", y_range=FactorRange(*reversed(names)), x_range=Range1d(0, 100))
    source = ColumnDataSource(data)
    bars = [
        plot.add_glyph(
            source,
            HBar(y="cell", left=f"to_{a}", right=f"to_{b}", height=0.75, fill_color=colour(i), line_color=None),
        )
        for i, (a, b) in enumerate(zip(("", *PHASES), PHASES, strict=False))
    ]
    hover(plot, bars, cell="@cell", **{phase: f"@{phase}{{0.0}} %" for phase in PHASES})
    plot.frame_height = 60 + 26 * len(found)
    plot.ygrid.grid_line_color = None
    add_legend(plot, [(phase, [bar]) for phase, bar in zip(PHASES, bars, strict=True)], hides=False)
    shares = [r.metrics.shares.get("target", 0.0) for r in found if r.metrics]
    return plot, f"{len(found)} cells; the target takes {100 * min(shares):.0f} to {100 * max(shares):.0f} %"
