"""What the page's plots are put together from, with Bokeh.

What a plot calls people's things is text and never a formula, for which Bokeh would ask a server.
"""

# Bokeh's annotations say what its properties hold, not what they take.
# pyright: reportArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bokeh.models import HoverTool, Legend, LegendItem, Scatter
from bokeh.plotting import figure

from ...runs.labels import verifier_title

if TYPE_CHECKING:
    from ...runs.records import CellResult

#: Seen on light and on dark ground; most after M. Okabe and K. Ito, "Color Universal Design", 2008.
COLOURS = ("#0079bf", "#d55e00", "#009e73", "#cc79a7", "#3fa4dd", "#c98a00", "#8a6fd1", "#808080", "#a05a2c", "#7aa61c")
DASHES = ("solid", "dashed", "dotted", "dotdash")
MARKERS = ("circle", "square", "triangle", "diamond", "inverted_triangle", "star")


def blank(x: str, y: str, **options: Any) -> Any:
    """A plot without anything in it, as wide as the page lets it be."""
    plot = figure(
        sizing_mode="stretch_width", frame_height=300, tools="box_zoom,reset,save", active_drag=None, **options
    )
    plot.xaxis.axis_label, plot.yaxis.axis_label = x, y
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    plot.background_fill_color = plot.border_fill_color = plot.outline_line_color = None
    return plot


def hover(plot: Any, renderers: list[Any], **lines: str) -> None:
    """Name and value of each line; values are escaped by Bokeh."""
    tips = [(name.replace("_", " "), value) for name, value in lines.items()]
    plot.add_tools(HoverTool(renderers=renderers, tooltips=tips))


def add_legend(plot: Any, items: list[tuple[str, list[Any]]], hides: bool = True) -> None:
    """Below the plot; a click on an entry hides what it names."""
    entries = [LegendItem(label={"value": label}, renderers=renderers) for label, renderers in items]
    legend = Legend(items=entries, click_policy="hide" if hides else "none", border_line_color=None, spacing=8)
    legend.background_fill_color = None
    plot.add_layout(legend, "below")


def dot(size: int, fill: str, shape: str = "circle") -> Scatter:
    """A point at the columns x and y."""
    return Scatter(x="x", y="y", size=size, marker=shape, fill_color=fill, line_color=fill)


def pair_of(result: CellResult) -> str:
    config = result.config
    return "plain decoding" if config.is_baseline else f"{config.drafter.title} × {verifier_title(result)}"


def plain_text(text: str) -> str:
    """A text in which Bokeh finds no TeX: what would open a formula is parted by a space of no width."""
    text = "".join(c if c.isprintable() else "\ufffd" for c in text)
    for mark in ("$$", "\\[", "\\("):
        text = text.replace(mark, f"{mark[0]}\u200b{mark[1]}")
    return text


def colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def dash(i: int) -> str:
    return DASHES[i // len(COLOURS) % len(DASHES)]


def marker(i: int) -> str:
    return MARKERS[i % len(MARKERS)]
