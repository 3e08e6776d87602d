"""Charts with a point a pair: an estimate by drafter and verifier, and block efficiency against target rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ...runs.labels import group_title, verifier_title
from ...runs.marks import mark_of
from .style import MOST_PANELS, Mark, ends, entry, label, legend, marks, panels, swatch, text, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ...metrics.cell_metrics import Metrics
    from ...metrics.intervals import Estimate
    from ...runs.records import CellResult

#: Inches for a pair in a list of pairs.
_ROW = 0.125
#: Rows between two drafters.
_GAP = 0.9
#: A list of so many rows fills a page.
_MOST_ROWS = 70
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
            setting.setdefault((result.config.drafter.title, verifier_title(result)), result)
    if not settings:
        return None
    shown = dict(list(settings.items())[:MOST_PANELS])
    order = dict.fromkeys((r.config.drafter.title, verifier_title(r)) for r in drafting(results))
    groups = [{pair: found[pair] for pair in order if pair in found} for found in shown.values()]
    shown_pairs = {pair for found in groups for pair in found}
    drafters = list(dict.fromkeys(drafter for drafter, rule in order if (drafter, rule) in shown_pairs))
    bands = _bands(drafters, groups)
    styles = marks(verifier for found in groups for _, verifier in found)

    rows = max(bottom for _, bottom in bands.values())
    figure, panels_of = panels(len(shown), width, _ROW * rows + 0.35, most=1 if width == "column" else 3, share_x=True)
    every: list[Estimate] = []
    for panel, found in zip(panels_of, groups, strict=True):
        panel.axvline(1.0, color="0.55", linewidth=0.8, linestyle="--", zorder=1)
        for drafter, (top, bottom) in bands.items():
            mine = [pair for pair in found if pair[0] == drafter]
            for i, pair in enumerate(mine):
                metrics = found[pair].metrics
                estimate = value(metrics) if metrics is not None else None
                assert estimate is not None
                every.append(estimate)
                y = (top + bottom - len(mine)) / 2 + i + 0.5
                _point(panel, estimate.value, y, estimate, styles[pair[1]], across=True)
    centres = {text(drafter): (top + bottom) / 2 for drafter, (top, bottom) in bands.items()}
    for panel in panels_of:
        panel.set_yticks(list(centres.values()), list(centres))
        panel.set_ylim(rows + _GAP / 2, -_GAP / 2)
        panel.set_xlim(*visible(every, 1.0))
        panel.grid(False, axis="y")
        panel.tick_params(axis="y", length=0)
        for (_, above), (below, _) in pairwise(bands.values()):
            panel.axhline((above + below) / 2, color="0.92", linewidth=0.5)
    titles = [_title(setting, found.values()) for setting, found in shown.items()]
    label(figure, panels_of, titles, axis, "")
    legend(figure, [entry(name, mark) for name, mark in styles.items()])
    return figure, len(settings) - len(shown) + len(drafters) - len(bands)


def target_rows(results: Sequence[CellResult], width: str) -> tuple[Figure, int] | None:
    """Block efficiency against the positions that the target evaluates in a step, a panel a batch size and setting.

    The step is the best of the certified pairs for so many rows: none of them lies above it.
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
    shapes = marks(verifier_title(r) for r in every)

    figure, found = panels(len(shown), width)
    for panel, (_, group) in zip(found, shown.items(), strict=True):
        batch_size = group[0].config.batch_size
        points = [(float(batch_size), 1.0)]
        certified = points[:]
        panel.plot(*points[0], **_PLAIN_POINT)
        for result in group:
            assert result.metrics is not None and result.metrics.block_efficiency is not None
            x, estimate = rows_in_a_step(result), result.metrics.block_efficiency
            points.append((x, estimate.value))
            certified += points[-1:] * mark_of(result).headline
            drafter, shape = colours[result.config.drafter.title], shapes[verifier_title(result)]
            mark = Mark(drafter.colour, shape.marker, drafter.hollow)
            _point(panel, x, estimate.value, estimate, mark)
        corners = front(certified)
        right = max(x for x, _ in points)
        xs, ys = [x for x, _ in corners], [y for _, y in corners]
        panel.step([*xs, right], [*ys, ys[-1]], where="post", color="0.75", linewidth=0.9, zorder=1)
        panel.set_ylim(
            *visible([r.metrics.block_efficiency for r in every if r.metrics and r.metrics.block_efficiency], 1)
        )
        low = min(x for x, _ in points)
        panel.set_xlim(low - 0.07 * (right - low or 1), right + 0.07 * (right - low or 1))
        panel.locator_params(axis="x", nbins=5)
    label(figure, found, list(shown), "target rows in a step: batch size × (nodes + 1)", "block efficiency")
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label="plain decoding", **_PLAIN_POINT)]
    handles += [swatch(name, mark) for name, mark in colours.items()]
    handles += [entry(name, Mark("0.3", mark.marker)) for name, mark in shapes.items()]
    legend(figure, handles)
    return figure, len(groups) - len(shown)


def rows_in_a_step(result: CellResult) -> float:
    """Positions that the target evaluates in a step with all slots in use."""
    assert result.metrics is not None
    metrics = result.metrics
    return metrics.target_rows_per_token * metrics.tokens / metrics.steps * result.config.batch_size


def front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points of which no other one has more y at no more x; from the least x on."""
    found: list[tuple[float, float]] = []
    for x, y in sorted(set(points), key=lambda point: (point[0], -point[1])):
        if not found or y > found[-1][1]:
            found.append((x, y))
    return found


# -- pieces -----------------------------------------------------------------------------------------------------


def _bands(drafters: Sequence[str], groups: Sequence[Iterable[tuple[str, str]]]) -> dict[str, tuple[float, float]]:
    """Where each drafter begins and ends, counted in pairs from the top: with room for its pairs in every panel."""
    bands: dict[str, tuple[float, float]] = {}
    y = 0.0
    for drafter in drafters:
        rows = max(sum(mine == drafter for mine, _ in found) for found in groups)
        if bands and y + rows > _MOST_ROWS:
            break
        bands[drafter] = (y, y + rows)
        y += rows + _GAP
    return bands


def _point(panel: Axes, x: float, y: float, estimate: Estimate, mark: Mark, across: bool = False) -> None:
    """A point and its interval, across or upright."""
    low, high = ends(estimate)
    bar = {"xerr": [[low], [high]]} if across else {"yerr": [[low], [high]]}
    panel.errorbar(x, y, **bar, linestyle="", elinewidth=0.9, zorder=3, **mark.options)  # type: ignore[arg-type]


def _title(setting: str, results: Sequence[CellResult] | object) -> str:
    sizes = sorted({r.config.batch_size for r in results})  # type: ignore[attr-defined]
    return f"{setting}, batch size{'s' if len(sizes) > 1 else ''} {', '.join(map(str, sizes))}"
