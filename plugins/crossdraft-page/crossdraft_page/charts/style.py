"""Chart style: sizes and fonts for papers, colours and markers, panels, legends, files.

matplotlib is imported inside functions to keep commands without charts fast; its global state is not used.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from math import ceil
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from crossdraft import printable

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from crossdraft import Estimate

#: File metadata that marks charts, so that `util.output_files.check_output` recognises them.
MARK = b"crossdraft report"
#: Widths of a column and of a page of a two-column paper, in inches.
WIDTHS = {"column": 3.4, "page": 7.0}
#: Maximum number of panels in a figure.
MOST_PANELS = 12
#: Colour-blind safe: M. Okabe and K. Ito, "Color Universal Design", 2008, without yellow.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
MARKERS = "os^DvP*X<>"
DASHES = ("-", "--", ":", "-.")
#: Line style of plain decoding.
PLAIN = {"color": "0.72", "linewidth": 4, "solid_capstyle": "round", "zorder": 1}
#: Line style of the Pareto front of certified pairs.
FRONT: dict[str, Any] = {"color": "0.75", "linewidth": 0.9, "zorder": 1}
#: Label of the axis of `batch_axis`.
BATCH_SIZE = "batch size (log scale)"
_PANEL_HEIGHT = 1.45
#: Width of the ticks and labels beside a panel, in inches.
_TICKS = 0.45
_STYLE: Any = {
    "font.family": ["DejaVu Sans"],  # ships with matplotlib
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "0.9",
    "grid.linewidth": 0.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "lines.linewidth": 1.1,
    "lines.markersize": 4,
    "legend.frameon": False,
    "legend.handlelength": 1.8,
    "legend.columnspacing": 1.2,
    "text.parse_math": False,  # names are not TeX
    "pdf.fonttype": 42,  # TrueType fonts, as required by journals
    "svg.hashsalt": "crossdraft",
    "savefig.dpi": 300,
}


@dataclass(frozen=True)
class PointMark:
    """Colour, marker and dash of a series; hollow if there are more series than markers."""

    colour: str
    marker: str
    hollow: bool = False
    dash: str = "-"

    @property
    def options(self) -> dict[str, Any]:
        if self.hollow:
            return {"color": self.colour, "marker": self.marker, "markerfacecolor": "white"}
        # A thin edge separates overlapping markers.
        return {"color": self.colour, "marker": self.marker, "markeredgecolor": "white", "markeredgewidth": 0.4}


def marks(names: Iterable[str]) -> dict[str, PointMark]:
    """A mark per name, in order of first appearance."""
    result = {}
    for i, name in enumerate(dict.fromkeys(names)):
        hollow, dash = i // len(MARKERS) % 2 == 1, DASHES[i // len(COLOURS) % len(DASHES)]
        result[name] = PointMark(COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)], hollow, dash)
    return result


@contextmanager
def style(inline: str = "") -> Iterator[None]:
    """Matplotlib's defaults with `_STYLE`, ignoring the user's settings; create and save figures inside.

    ``inline``: see `charts.chart`.
    """
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        svg = {"svg.fonttype": "none", "svg.hashsalt": inline} if inline else {}
        matplotlib.rcParams.update(_STYLE | svg)
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # missing glyphs are drawn as boxes
        yield


def panels(
    count: int, width: str, height: float = _PANEL_HEIGHT, maximum: int = 0, share_x: bool = False, share_y: bool = True
) -> tuple[Figure, list[Axes]]:
    """A figure with ``count`` panels.

    Args:
        width: a key of `WIDTHS`.
        height: of a row of panels, in inches.
        maximum: maximum panels per row; 0 = 2 in a column, 4 on a page.
    """
    from matplotlib.figure import Figure

    across = min(count, maximum or (2 if width == "column" else 4))
    if across > 1 and count > across:  # balance the rows
        across = ceil(count / ceil(count / across))
    rows = ceil(count / across)
    inches = WIDTHS[width] if width == "column" or across > 1 else min(WIDTHS[width], 4.4)
    figure = Figure(figsize=(inches, height * rows + 0.5), layout="constrained")
    axes = list(figure.subplots(rows, across, squeeze=False, sharex=share_x, sharey=share_y).flat)
    for panel in axes[count:]:
        panel.set_axis_off()
    if share_x:  # label the last panel of each column
        for panel in axes[max(count - across, 0) : count]:
            panel.xaxis.set_tick_params(labelbottom=True)
    return figure, axes[:count]


def label(figure: Figure, axes: Sequence[Axes], titles: Sequence[str], x: str, y: str) -> None:
    """Set panel titles, without the parts that all share, and the labels of the shared axes."""
    parts = [title.split(", ") for title in titles]
    shared = set.intersection(*map(set, parts)) if len(parts) > 1 else set()
    for panel, title in zip(axes, parts, strict=True):
        spec = panel.get_subplotspec()
        columns = spec.get_gridspec().ncols if spec is not None else 1
        own = [part for part in title if part not in shared]
        # Ticks and a label take some of a narrow panel.
        panel.set_title(wrapped(own or title, int((figure.get_figwidth() / columns - _TICKS * (columns > 1)) / 0.068)))
        _mark_cut_intervals(panel)
    figure.supxlabel(x, fontsize=8)
    if y:
        figure.supylabel(y, fontsize=8)


def _mark_cut_intervals(panel: Axes) -> None:
    """Draw an arrow at the border of the panel for each interval that reaches beyond it."""
    from matplotlib.container import ErrorbarContainer

    (left, right), (bottom, top) = panel.get_xlim(), panel.get_ylim()
    for container in panel.containers:
        for bars in container.lines[2] if isinstance(container, ErrorbarContainer) else ():
            for (x, y), (end_x, end_y) in bars.get_segments():  # type: ignore[attr-defined]
                cut = {"<": x < left, ">": end_x > right} if y == end_y else {"v": y < bottom, "^": end_y > top}
                places = {"<": (left, y), ">": (right, y), "v": (x, bottom), "^": (x, top)}
                for marker in (marker for marker, is_cut in cut.items() if is_cut):
                    at, colour = places[marker], bars.get_color()[0]
                    panel.plot(*at, marker=marker, markersize=3.5, color=colour, clip_on=False, linestyle="")
    panel.set(xlim=(left, right), ylim=(bottom, top))


def legend(figure: Figure, handles: Sequence[Any]) -> None:
    """Draw a legend above the panels, in as many columns as fit."""
    if not handles:
        return
    longest = max(len(handle.get_label()) for handle in handles)
    columns = max(1, min(len(handles), int(figure.get_figwidth() / (0.42 + 0.058 * longest))))
    rows = ceil(len(handles) / columns)
    figure.legend(handles=handles, loc="outside upper center", ncols=ceil(len(handles) / rows))
    figure.set_figheight(figure.get_figheight() + 0.15 * rows)


def entry(name: str, mark: PointMark, line: bool = False) -> Any:
    from matplotlib.lines import Line2D

    options: dict[str, Any] = mark.options | {"linestyle": mark.dash if line else ""}
    return Line2D([], [], label=text(name), **options)


def swatch(name: str, mark: PointMark) -> Any:
    """A legend entry for a colour."""
    from matplotlib.lines import Line2D

    style: dict[str, Any] = {"linestyle": (0, (0.6, 0.4))} if mark.hollow else {}
    return Line2D([], [], color=mark.colour, linewidth=4, label=text(name), **style)


def plain_entry() -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], label="plain decoding", **PLAIN)


def front_entry() -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], label="best certified pairs", **FRONT)


def set_tips(artist: Artist, tips: Iterable[str]) -> None:
    """Set the tooltips of an artist's points, or of a bar, for `svg.inline_svg`."""
    artist.set_gid("tip:" + "\n".join(map(text, tips)))


def ends(estimate: Estimate) -> tuple[float, float]:
    """Lengths of the interval below and above the value; 0 without an interval."""
    if estimate.low is None or estimate.high is None:
        return 0.0, 0.0
    return max(estimate.value - estimate.low, 0.0), max(estimate.high - estimate.value, 0.0)


def visible(estimates: Iterable[Estimate], *others: float) -> tuple[float, float]:
    """Axis limits that show all values and ``others``; very wide intervals are truncated."""
    items = list(estimates)
    values = [e.value for e in items] + list(others)
    low = min([*values, *(e.low for e in items if e.low is not None)])
    high = max([*values, *(e.high for e in items if e.high is not None)])
    span = max(max(values) - min(values), 0.1 * abs(max(values)), 1e-9)
    low, high = max(low, min(values) - span), min(high, max(values) + span)
    margin = 0.04 * (high - low) or span
    return low - margin, high + margin


def batch_axis(panel: Axes, batch_sizes: Sequence[int]) -> None:
    """Set a logarithmic axis with ticks at the batch sizes."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_locator(FixedLocator(batch_sizes))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda b, _: f"{b:g}"))


def text(name: str, longest: int = 0) -> str:
    """A name without control characters, shortened to ``longest`` characters unless that is 0."""
    name = printable(name)
    return f"{name[: longest - 1]}…" if longest and len(name) > longest else name


def wrapped(parts: Sequence[str], width: int) -> str:
    """Join the parts of a title with commas, wrapped to ``width`` characters, between parts if they fit."""
    lines = [""]
    whole = [text(part) + ("," if i + 1 < len(parts) else "") for i, part in enumerate(parts)]
    for part in (line for long in whole for line in wrap(long, max(width, 8))):
        if lines[-1] and len(lines[-1]) + 1 + len(part) > width:
            lines.append(part)
        else:
            lines[-1] = f"{lines[-1]} {part}".lstrip()
    return "\n".join(lines)


def encoded(figure: Figure, form: str) -> bytes:
    """A figure as a file of a format, reproducibly."""
    metadata: dict[str, Any] = {
        "pdf": {"CreationDate": None, "Creator": MARK.decode()},
        "svg": {"Date": None, "Creator": MARK.decode()},
        "png": {"Software": MARK.decode()},
    }[form]
    file = BytesIO()
    figure.savefig(file, format=form, metadata=metadata)
    return file.getvalue()
