"""How charts look: sizes and type for papers, colours and markers, panels, legends, files.

matplotlib is imported inside functions, so that commands that draw nothing do not wait for it. Figures are drawn
without its global state.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import printable
from ...util.output_files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ...metrics.intervals import Estimate

FORMATS = ("png", "svg", "pdf")
#: The program that made a file, in its metadata: `util.output_files.check_output` recognises a chart by it.
MARK = b"crossdraft plot"
#: Inches: a column of a two-column paper, and its page.
WIDTHS = {"column": 3.4, "page": 7.0}
#: More panels than this are no figure any more.
MOST_PANELS = 12
#: M. Okabe and K. Ito, "Color Universal Design", 2008: told apart by colour-blind readers; yellow left out.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
MARKERS = "os^DvP*X<>"
DASHES = ("-", "--", ":", "-.")
#: Of plain decoding.
PLAIN = {"color": "0.72", "linewidth": 4, "solid_capstyle": "round", "zorder": 1}
_PANEL_HEIGHT = 1.45
_STYLE: Any = {
    "font.family": ["DejaVu Sans"],  # comes with matplotlib, so that a chart looks alike everywhere
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
    "text.parse_math": False,  # what people called things is no formula
    "pdf.fonttype": 42,  # whole fonts, which journals ask for
    "svg.fonttype": "path",  # outlines: the same wherever it is opened
    "svg.hashsalt": "crossdraft",
    "savefig.dpi": 300,
}


@dataclass(frozen=True)
class Mark:
    """How a series is told apart: by colour and marker; of more series than markers, the others' are hollow."""

    colour: str
    marker: str
    hollow: bool = False
    dash: str = "-"

    @property
    def options(self) -> dict[str, Any]:
        if self.hollow:
            return {"color": self.colour, "marker": self.marker, "markerfacecolor": "white"}
        # A thin rim parts marks that lie on each other.
        return {"color": self.colour, "marker": self.marker, "markeredgecolor": "white", "markeredgewidth": 0.4}


def marks(names: Iterable[str]) -> dict[str, Mark]:
    """A mark for each name, in order of first appearance."""
    found = {}
    for i, name in enumerate(dict.fromkeys(names)):
        hollow, dash = i // len(MARKERS) % 2 == 1, DASHES[i // len(COLOURS) % len(DASHES)]
        found[name] = Mark(COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)], hollow, dash)
    return found


@contextmanager
def style() -> Iterator[None]:
    """matplotlib's defaults with `_STYLE`, whatever the user's own settings are; figures are made and saved inside."""
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # drawn as a box
        yield


def panels(
    count: int, width: str, height: float = _PANEL_HEIGHT, most: int = 0, share_x: bool = False, share_y: bool = True
) -> tuple[Figure, list[Axes]]:
    """A figure with so many panels in rows.

    Args:
        width: a key of `WIDTHS`.
        height: of a row of panels, in inches.
        most: panels side by side; 0: as many as can be read, 2 in a column, 4 on a page.
    """
    from matplotlib.figure import Figure

    across = min(count, most or (2 if width == "column" else 4))
    if across > 1 and count > across:  # no row that is nearly empty
        across = ceil(count / ceil(count / across))
    rows = ceil(count / across)
    wide = WIDTHS[width] if width == "column" or across > 1 else min(WIDTHS[width], 4.4)
    figure = Figure(figsize=(wide, height * rows + 0.5), layout="constrained")
    found = list(figure.subplots(rows, across, squeeze=False, sharex=share_x, sharey=share_y).flat)
    for panel in found[count:]:
        panel.set_axis_off()
    if share_x:  # below a panel that is left out, the last one of a column keeps its labels
        for panel in found[max(count - across, 0) : count]:
            panel.xaxis.set_tick_params(labelbottom=True)
    return figure, found[:count]


def label(figure: Figure, found: Sequence[Axes], titles: Sequence[str], x: str, y: str) -> None:
    """What panels are called, by what tells them apart, and what the axes of all of them show."""
    parts = [title.split(", ") for title in titles]
    shared = set.intersection(*map(set, parts)) if len(parts) > 1 else set()
    for panel, title in zip(found, parts, strict=True):
        place = panel.get_subplotspec()
        columns = place.get_gridspec().ncols if place is not None else 1
        own = [part for part in title if part not in shared]
        panel.set_title(wrapped(own or title, int(figure.get_figwidth() / columns / 0.068)))
    figure.supxlabel(x, fontsize=8)
    if y:
        figure.supylabel(y, fontsize=8)


def legend(figure: Figure, handles: Sequence[Any]) -> None:
    """Above the panels, in as many columns as there is room for."""
    if not handles:
        return
    longest = max(len(handle.get_label()) for handle in handles)
    columns = max(1, min(len(handles), int(figure.get_figwidth() / (0.42 + 0.058 * longest))))
    rows = ceil(len(handles) / columns)
    figure.legend(handles=handles, loc="outside upper center", ncols=ceil(len(handles) / rows))
    figure.set_figheight(figure.get_figheight() + 0.15 * rows)


def entry(name: str, mark: Mark, line: bool = False) -> Any:
    """An entry of a legend."""
    from matplotlib.lines import Line2D

    look: dict[str, Any] = mark.options | {"linestyle": mark.dash if line else ""}
    return Line2D([], [], label=text(name), **look)


def swatch(name: str, mark: Mark) -> Any:
    """An entry for a colour, whatever the marker."""
    from matplotlib.lines import Line2D

    style: dict[str, Any] = {"linestyle": (0, (0.6, 0.4))} if mark.hollow else {}
    return Line2D([], [], color=mark.colour, linewidth=4, label=text(name), **style)


def plain_entry() -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], label="plain decoding", **PLAIN)


def ends(estimate: Estimate) -> tuple[float, float]:
    """How far the interval reaches below and above the value; 0 where there is none."""
    if estimate.low is None or estimate.high is None:
        return 0.0, 0.0
    return max(estimate.value - estimate.low, 0.0), max(estimate.high - estimate.value, 0.0)


def visible(estimates: Iterable[Estimate], *others: float) -> tuple[float, float]:
    """An axis on which all values, and ``others``, are seen; of an interval that is wider than all that, a part."""
    found = list(estimates)
    values = [e.value for e in found] + list(others)
    low = min([*values, *(e.low for e in found if e.low is not None)])
    high = max([*values, *(e.high for e in found if e.high is not None)])
    reach = max(max(values) - min(values), 0.1 * abs(max(values)), 1e-9)
    low, high = max(low, min(values) - reach), min(high, max(values) + reach)
    room = 0.04 * (high - low) or reach
    return low - room, high + room


def batch_axis(panel: Axes, batch_sizes: Sequence[int]) -> None:
    """Batch sizes, on a logarithmic axis with a tick at each that there is room for."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_locator(FixedLocator(batch_sizes))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda b, _: f"{b:g}"))


def text(name: str) -> str:
    """What people called something, as it can be drawn."""
    return printable(name)


def wrapped(parts: Sequence[str], room: int) -> str:
    """Parts of a title with commas between them, in lines of so many characters where they can be broken."""
    lines = [""]
    for i, part in enumerate(parts):
        part = text(part) + ("," if i + 1 < len(parts) else "")
        if lines[-1] and len(lines[-1]) + 1 + len(part) > room:
            lines.append(part)
        else:
            lines[-1] = f"{lines[-1]} {part}".lstrip()
    return "\n".join(lines)


def save(figure: Figure, path: Path) -> None:
    """Write a figure in the format that the path's ending names; the same figure is the same file."""
    form = path.suffix[1:]
    metadata: dict[str, Any] = {
        "pdf": {"CreationDate": None, "Creator": MARK.decode()},
        "svg": {"Date": None, "Creator": MARK.decode()},
        "png": {"Software": MARK.decode()},
    }[form]
    with replacing(path) as file:
        figure.savefig(file, format=form, metadata=metadata)
