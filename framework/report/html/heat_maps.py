"""Speed-ups by draft length and batch size, with the line at which drafting stops paying."""

# Bokeh's annotations say what its properties hold, not what they take.
# pyright: reportArgumentType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bokeh.models import ColumnDataSource, Rect, Segment, Text

from ...runs.labels import group_title, verifier_title
from .bokeh_utils import blank, hover

if TYPE_CHECKING:
    from ...runs.records import CellResult


@dataclass
class Map:
    """The speed-ups of a pair, by gamma and batch size."""

    title: str
    cells: dict[tuple[int, int], float] = field(default_factory=dict)

    @property
    def gammas(self) -> list[int]:
        return sorted({gamma for gamma, _ in self.cells})

    @property
    def batch_sizes(self) -> list[int]:
        return sorted({batch_size for _, batch_size in self.cells})


def maps_of(results: Sequence[CellResult]) -> list[Map]:
    """A map for each pair and setting that was measured with several gammas at several batch sizes."""
    cells = [r.config for r in results]
    found: dict[str, Map] = {}
    for result in results:
        config = result.config
        gamma = config.drafter.config.get("gamma")
        if result.metrics is None or result.metrics.speed_up is None or config.is_baseline:
            continue
        if not isinstance(gamma, int):
            continue
        without = {key: value for key, value in config.drafter.config.items() if key != "gamma"}
        same = {"batch_size": 1, "drafter": config.drafter.model_copy(update={"config": without, "label": ""})}
        drafter = config.drafter.title.replace(f" gamma={gamma}", "")
        title = f"{drafter} × {verifier_title(result)}, {group_title(config, cells, but='batch_size')}"
        one = found.setdefault(config.model_copy(update=same).hash, Map(title))
        one.cells[gamma, config.batch_size] = result.metrics.speed_up.value
    return [one for one in found.values() if len(one.gammas) > 1 and len(one.batch_sizes) > 1]


def break_even_line(
    cells: Mapping[tuple[int, int], float], gammas: Sequence[int], batch_sizes: Sequence[int]
) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """The borders between neighbours of which one pays (a speed-up of 1 or more) and the other does not.

    Cell (i, j) of the i-th batch size and j-th gamma reaches from i - 0.5 to i + 0.5 and from j - 0.5 to j + 0.5.
    """
    lines = []
    for j, gamma in enumerate(gammas):
        for i, batch_size in enumerate(batch_sizes):
            here = cells.get((gamma, batch_size))
            right = cells.get((gamma, batch_sizes[i + 1])) if i + 1 < len(batch_sizes) else None
            above = cells.get((gammas[j + 1], batch_size)) if j + 1 < len(gammas) else None
            if here is not None and right is not None and (here >= 1) != (right >= 1):
                lines.append(((i + 0.5, j - 0.5), (i + 0.5, j + 0.5)))
            if here is not None and above is not None and (here >= 1) != (above >= 1):
                lines.append(((i - 0.5, j + 0.5), (i + 0.5, j + 0.5)))
    return lines


def heat_maps(results: Sequence[CellResult]) -> list[tuple[str, Any, str]]:
    """Title, plot and words of each map."""
    return [(one.title, *_draw(one)) for one in maps_of(results)]


def _draw(one: Map) -> tuple[Any, str]:
    gammas, batch_sizes = one.gammas, one.batch_sizes
    ends: dict[str, Any] = {
        "x_range": (-0.5, len(batch_sizes) - 0.5),
        "y_range": (-0.5, len(gammas) - 0.5),
    }
    plot = blank("batch size", "gamma", **ends)
    plot.frame_height = 44 * len(gammas) + 20
    plot.xgrid.grid_line_color = plot.ygrid.grid_line_color = None
    for axis, values in ((plot.xaxis, batch_sizes), (plot.yaxis, gammas)):
        axis.ticker = list(range(len(values)))
        axis.major_label_overrides = {i: str(value) for i, value in enumerate(values)}
    reach = max((abs(value - 1) for value in one.cells.values()), default=0.0) or 1.0
    data: dict[str, Any] = {key: [] for key in ("x", "y", "gamma", "b", "value", "text", "colour", "alpha")}
    for (gamma, batch_size), value in one.cells.items():
        colour = "#0079bf" if value >= 1 else "#d64545"
        row = (batch_sizes.index(batch_size), gammas.index(gamma), gamma, batch_size, value, f"{value:.2f}", colour)
        for key, item in zip(data, (*row, 0.12 + 0.6 * abs(value - 1) / reach), strict=True):
            data[key].append(item)
    source = ColumnDataSource(data)
    tile = Rect(x="x", y="y", width=0.98, height=0.96, fill_color="colour", fill_alpha="alpha", line_color=None)
    tiles = plot.add_glyph(source, tile)
    label = {"text_align": "center", "text_baseline": "middle", "text_font_size": "13px"}
    plot.add_glyph(source, Text(x="x", y="y", text="text", **label))
    lines = break_even_line(one.cells, gammas, batch_sizes)
    ends_of = [(f"{axis}{end}", [line[end][i] for line in lines]) for end in (0, 1) for i, axis in enumerate("xy")]
    border = Segment(x0="x0", y0="y0", x1="x1", y1="y1", line_width=4, line_color="#e69f00", line_cap="round")
    plot.add_glyph(ColumnDataSource(dict(ends_of)), border)
    hover(plot, [tiles], gamma="@gamma", B="@b", speed_up="@value{0.00}")
    pays = sum(value >= 1 for value in one.cells.values())
    return plot, f"drafting pays in {pays} of {len(one.cells)} combinations of gamma and batch size"
