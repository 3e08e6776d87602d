"""Charts with a point a pair: an estimate by drafter and verifier, and block efficiency against target rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ..runs.titles import group_title, verifier_title
from .chart_style import MOST_PANELS, Mark, ends, entry, label, legend, marks, panels, swatch, text, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..runs.intervals import Estimate
    from ..runs.metrics import Metrics
    from ..runs.records import CellResult

#: Inches for a pair in a list of pairs.
_ROW = 0.125
#: Rows between two drafters.
_GAP = 0.9
#: A list of so many pairs fills a page.
_MOST_ROWS = 60
_PLAIN_POINT: dict[str, Any] = {"marker": "x", "markersize": 5, "color": "0.45", "linestyle": ""}


def drafting(results: Sequence[CellResult]) -> list[CellResult]:
    """The finished cells of pairs."""
    return [r for r in results if r.metrics is not None and not r.config.is_baseline]


def pair_list(
    results: Sequence[CellResult], width: str, value: Callable[[Metrics], Estimate | None], axis: str
) -> tuple[Figure, int] | None:
    """An estimate of each pair as a point with its interval: drafters one below the other, a panel a setting.

    Of the batch sizes, the smallest one. Returns the figure and how many panels or drafters had no room; None if no
    cell has such an estimate.
    """
    cells = [r.config for r in results]
    settings: dict[str, dict[tuple[str, str], CellResult]] = {}
    for result in sorted(drafting(results), key=lambda r: r.config.batch_size):
        if result.metrics is not None and value(result.metrics) is not None:
            setting = settings.setdefault(group_title(result.config, cells, but="batch_size"), {})
            setting.setdefault((result.config.drafter.title, verifier_title(result.config)), result)
    if not settings:
        return None
    shown = dict(list(settings.items())[:MOST_PANELS])
    order = [(r.config.drafter.title, verifier_title(r.config)) for r in drafting(results)]
    pairs = [pair for pair in dict.fromkeys(order) if any(pair in found for found in shown.values())]
    drafters = list(dict.fromkeys(drafter for drafter, _ in pairs))
    rows, left_out = _rows(drafters, pairs)
    styles = marks(verifier for _, verifier in pairs)

    height = _ROW * (max(rows.values()) + 1) + 0.35
    figure, found = panels(len(shown), width, height, most=1 if width == "column" else 3, share_x=True)
    every: list[Estimate] = []
    for panel, pairs_of in zip(found, shown.values(), strict=True):
        panel.axvline(1.0, color="0.55", linewidth=0.8, linestyle="--", zorder=1)
        for pair, result in pairs_of.items():
            estimate = value(result.metrics) if result.metrics else None
            if estimate is not None and pair in rows:
                every.append(estimate)
                _point(panel, estimate.value, rows[pair], estimate, styles[pair[1]], across=True)
    named = {d: [y for (drafter, _), y in rows.items() if drafter == d] for d in drafters}
    centres = {text(d): sum(ys) / len(ys) for d, ys in named.items() if ys}
    for panel in found:
        panel.set_yticks(list(centres.values()), list(centres))
        panel.set_ylim(max(rows.values()) + 0.9, -0.9)
        panel.set_xlim(*visible(every, 1.0))
        panel.grid(False, axis="y")
        panel.tick_params(axis="y", length=0)
        for above, below in pairwise(ys for ys in named.values() if ys):
            panel.axhline((max(above) + min(below)) / 2, color="0.92", linewidth=0.5)
    titles = [_title(setting, found.values()) for setting, found in shown.items()]
    label(figure, found, titles, axis, "")
    legend(figure, [entry(name, mark) for name, mark in styles.items()])
    return figure, len(settings) - len(shown) + left_out


def target_rows(results: Sequence[CellResult], width: str) -> tuple[Figure, int] | None:
    """Block efficiency against the positions that the target evaluates in a round, a panel a batch size and setting.

    The step is the best there is for so many rows: no pair above it, and none to the left of its corners.
    """
    cells = [r.config for r in results]
    groups: dict[str, list[CellResult]] = {}
    for result in drafting(results):
        if result.metrics is not None and result.metrics.block_efficiency is not None:
            groups.setdefault(group_title(result.config, cells), []).append(result)
    if not groups:
        return None
    shown = dict(list(groups.items())[:MOST_PANELS])
    every = [r for found in shown.values() for r in found]
    colours = marks(r.config.drafter.title for r in every)
    shapes = marks(verifier_title(r.config) for r in every)

    figure, found = panels(len(shown), width)
    for panel, (_, group) in zip(found, shown.items(), strict=True):
        batch_size = group[0].config.batch_size
        points = [(float(batch_size), 1.0)]
        panel.plot(*points[0], **_PLAIN_POINT)
        for result in group:
            assert result.metrics is not None and result.metrics.block_efficiency is not None
            x, estimate = rows_in_a_round(result), result.metrics.block_efficiency
            points.append((x, estimate.value))
            drafter, shape = colours[result.config.drafter.title], shapes[verifier_title(result.config)]
            mark = Mark(drafter.colour, shape.marker, drafter.hollow)
            _point(panel, x, estimate.value, estimate, mark)
        corners = front(points)
        right = max(x for x, _ in points)
        xs, ys = [x for x, _ in corners], [y for _, y in corners]
        panel.step([*xs, right], [*ys, ys[-1]], where="post", color="0.75", linewidth=0.9, zorder=1)
        panel.set_ylim(
            *visible([r.metrics.block_efficiency for r in every if r.metrics and r.metrics.block_efficiency], 1)
        )
        low = min(x for x, _ in points)
        panel.set_xlim(low - 0.07 * (right - low or 1), right + 0.07 * (right - low or 1))
        panel.locator_params(axis="x", nbins=5)
    label(figure, found, list(shown), "target rows in a round: batch size × (nodes + 1)", "block efficiency")
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label="plain decoding", **_PLAIN_POINT)]
    handles += [swatch(name, mark) for name, mark in colours.items()]
    handles += [entry(name, Mark("0.3", mark.marker)) for name, mark in shapes.items()]
    legend(figure, handles)
    return figure, len(groups) - len(shown)


def rows_in_a_round(result: CellResult) -> float:
    """Positions that the target evaluates in a round with all slots in use."""
    assert result.metrics is not None
    metrics = result.metrics
    return metrics.target_rows_per_token * metrics.tokens / metrics.rounds * result.config.batch_size


def front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points of which no other one has more y at no more x; from the least x on."""
    found: list[tuple[float, float]] = []
    for x, y in sorted(set(points), key=lambda point: (point[0], -point[1])):
        if not found or y > found[-1][1]:
            found.append((x, y))
    return found


# -- pieces -----------------------------------------------------------------------------------------------------


def _rows(drafters: Sequence[str], pairs: Sequence[tuple[str, str]]) -> tuple[dict[tuple[str, str], float], int]:
    """The place of each pair from top to bottom, and how many drafters had no room."""
    rows: dict[tuple[str, str], float] = {}
    y = 0.0
    for i, drafter in enumerate(drafters):
        mine = [pair for pair in pairs if pair[0] == drafter]
        if rows and len(rows) + len(mine) > _MOST_ROWS:
            return rows, len(drafters) - i
        for pair in mine:
            rows[pair] = y
            y += 1
        y += _GAP
    return rows, 0


def _point(panel: Axes, x: float, y: float, estimate: Estimate, mark: Mark, across: bool = False) -> None:
    """A point and its interval, across or upright."""
    low, high = ends(estimate)
    bar = {"xerr": [[low], [high]]} if across else {"yerr": [[low], [high]]}
    panel.errorbar(x, y, **bar, linestyle="", elinewidth=0.9, zorder=3, **mark.options)  # type: ignore[arg-type]


def _title(setting: str, results: Sequence[CellResult] | object) -> str:
    sizes = sorted({r.config.batch_size for r in results})  # type: ignore[attr-defined]
    return f"{setting}, batch size{'s' if len(sizes) > 1 else ''} {', '.join(map(str, sizes))}"
