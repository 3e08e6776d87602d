"""The charts of a run, as PNG files beside its records; drawn with matplotlib, which is imported here alone.

Knows finished results only, like `tables`. One colour is one verifier, one marker one drafter, in all charts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ..runs.titles import group_title, verifier_title
from .batch_sizes import batch_size_series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..runs.records import CellResult
    from .summary import Summary

ACCEPTANCE, THROUGHPUT = "block_efficiency.png", "throughput.png"
#: M. Okabe and K. Ito, "Color Universal Design", 2008: told apart by colour-blind readers; yellow left out.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
_MARKERS = "os^DvP*X<>"
_PLAIN = {"color": "0.75", "linewidth": 5, "solid_capstyle": "round", "zorder": 1}


def draw(summary: Summary) -> list[str]:
    """Draw what the run has to show, and return the names of the files.

    `ACCEPTANCE`: block efficiency against target rows per emitted token, a panel for each group, if there are
    several verifiers or batch sizes. `THROUGHPUT`: tokens/s against batch size, a panel for each drafter, if there
    are several batch sizes.

    Raises:
        ImportError: matplotlib is not installed and there is something to draw.
    """
    pairs = [r for r in summary.results if r.metrics is not None and not r.config.is_baseline]
    several = len({r.config.batch_size for r in pairs}) > 1
    if not pairs or not (several or len({r.config.verifier.title for r in pairs}) > 1):
        return []
    figures = {ACCEPTANCE: _acceptance(summary, pairs)} | ({THROUGHPUT: _throughput(summary, pairs)} if several else {})
    for name, figure in figures.items():
        figure.savefig(summary.directory / name, dpi=150)
    return list(figures)


def break_even(speed_ups: Mapping[int, float]) -> float | None:
    """The batch size at which the speed-up falls through 1 for the last time; None if it does not.

    Interpolated between measured batch sizes, linearly in the logarithms of both: where lines of tokens/s cross on
    logarithmic axes.
    """
    found = None
    for (b, here), (c, there) in pairwise(sorted(speed_ups.items())):
        if there < 1 <= here:
            found = b * (c / b) ** (math.log(here) / math.log(here / there))
        elif there >= 1:
            found = None
    return found


def _acceptance(summary: Summary, pairs: Sequence[CellResult]) -> Figure:
    colours, markers = _styles(pairs)
    cells = [r.config for r in summary.results]
    groups: dict[str, list[CellResult]] = {}
    for result in pairs:
        groups.setdefault(group_title(result.config, cells), []).append(result)
    figure, panels = _panels(len(groups))
    for panel, (title, results) in zip(panels, groups.items(), strict=True):
        lines: dict[str, list[tuple[float, float, str]]] = {}
        for result in results:
            assert result.metrics is not None
            if result.metrics.block_efficiency is None:
                continue
            at = (result.metrics.target_rows_per_token, result.metrics.block_efficiency.value)
            lines.setdefault(verifier_title(result.config), []).append((*at, result.config.drafter.title))
        for verifier, points in lines.items():
            points.sort()
            panel.plot([p[0] for p in points], [p[1] for p in points], color=colours[verifier], linewidth=1)
            for x, y, drafter in points:
                panel.plot(x, y, color=colours[verifier], marker=markers[drafter], markersize=6, linestyle="")
        panel.set_title(_literal(title))
    _label(panels, "target rows per emitted token", "block efficiency (tokens per target call)")
    _legend(figure, colours, markers)
    return figure


def _throughput(summary: Summary, pairs: Sequence[CellResult]) -> Figure:
    colours, markers = _styles(pairs)
    series = batch_size_series(summary.results)
    drawn = [
        (setting, drafter, [pair for pair in found.pairs if pair.drafter == drafter], found.baselines)
        for setting, found in series.items()
        for drafter in dict.fromkeys(pair.drafter for pair in found.pairs)
    ]
    figure, panels = _panels(len(drawn))
    for panel, (setting, drafter, lines, baselines) in zip(panels, drawn, strict=True):
        plain = _rates(baselines)
        panel.plot(list(plain), list(plain.values()), **_PLAIN)
        remarks = []
        for pair in lines:
            rates, colour = _rates(pair.results), colours[pair.verifier]
            panel.plot(list(rates), list(rates.values()), color=colour, marker=markers[drafter], linewidth=1.5)
            if (at := break_even(pair.speed_ups)) is not None:
                panel.plot(at, _between(plain, at), "o", markersize=11, markerfacecolor="none", color=colour)
                remarks.append((f"B ≈ {at:.1f}", colour))
        for i, (text, colour) in enumerate(reversed(remarks)):  # rates grow with B, so this corner is free
            panel.annotate(text, (0.97, 0.04 + 0.07 * i), xycoords="axes fraction", ha="right", color=colour)
        if remarks:
            panel.annotate(
                "break-even", (0.97, 0.04 + 0.07 * len(remarks)), xycoords="axes fraction", ha="right", color="0.3"
            )
        panel.set_title(_literal(f"{drafter}, {setting}" if len(series) > 1 else drafter))
        _logarithmic(panel, sorted(plain))
    _label(panels, "batch size", "tokens/s")
    _legend(figure, colours, {}, plain=True)
    return figure


# -- pieces -----------------------------------------------------------------------------------------------------


def _styles(pairs: Sequence[CellResult]) -> tuple[dict[str, str], dict[str, str]]:
    """A colour for every verifier and a marker for every drafter."""
    verifiers = dict.fromkeys(verifier_title(r.config) for r in pairs)
    drafters = dict.fromkeys(r.config.drafter.title for r in pairs)
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(verifiers)}
    return colours, {name: _MARKERS[i % len(_MARKERS)] for i, name in enumerate(drafters)}


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(3 + 3.6 * columns, 0.6 + 2.9 * rows), layout="constrained")
    grid = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
    for panel in grid[count:]:
        panel.remove()
    for i, panel in enumerate(grid[:count]):
        panel.grid(color="0.92")
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
        panel.xaxis.set_tick_params(labelbottom=i + columns >= count)  # also above a gap in the last row
    return figure, grid[:count]


def _label(panels: Sequence[Axes], x: str, y: str) -> None:
    figure = panels[0].figure
    figure.supxlabel(x, fontsize="medium")
    figure.supylabel(y, fontsize="medium")
    for panel in panels:
        panel.title.set_fontsize("medium")


def _legend(figure: Figure, colours: Mapping[str, str], markers: Mapping[str, str], plain: bool = False) -> None:
    """Beside the panels: what colours and markers mean."""
    from matplotlib.lines import Line2D

    handles: list[Any] = [Line2D([], [], label="plain decoding", **_PLAIN)] if plain else []
    handles += [Line2D([], [], color=colour, linewidth=2, label=_literal(name)) for name, colour in colours.items()]
    handles += [
        Line2D([], [], color="0.3", marker=m, linestyle="", label=_literal(name)) for name, m in markers.items()
    ]
    figure.legend(handles=handles, loc="outside right upper", frameon=False)


def _literal(text: str) -> str:
    """What people called things, not as a formula."""
    return text.replace("$", r"\$")


def _logarithmic(panel: Axes, batch_sizes: Sequence[int]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_locator(FixedLocator(batch_sizes))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda b, _: f"{b:g}"))
    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())


def _rates(results: Mapping[int, CellResult]) -> dict[int, float]:
    return {b: r.metrics.tokens_per_second for b, r in sorted(results.items()) if r.metrics is not None}


def _between(rates: Mapping[int, float], at: float) -> float:
    """A rate between measured batch sizes, on the straight line between them on logarithmic axes."""
    for (b, here), (c, there) in pairwise(sorted(rates.items())):
        if b <= at <= c:
            return here * (there / here) ** (math.log(at / b) / math.log(c / b))
    raise ValueError(f"batch size {at:g} is outside those measured")
