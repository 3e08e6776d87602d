"""Charts with a point per pair: an estimate by drafter and verifier, and block efficiency against target rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from crossdraft.runs import estimate_text, group_title, mark_of, pair_title, verifier_title

from .style import (
    FRONT,
    MOST_PANELS,
    PointMark,
    ends,
    entry,
    front_entry,
    label,
    legend,
    marks,
    panels,
    set_tips,
    swatch,
    text,
    visible,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from crossdraft import Estimate
    from crossdraft.runs import CellResult, Metrics

#: Height of a pair in a list of pairs, in inches.
_ROW = 0.125
#: Gap between two drafters, in rows.
_GAP = 0.9
#: Distance of two marks of about as many target rows, as a share of the most rows.
_BESIDE = 0.025
#: Rows that fill a page.
_MAX_ROWS = 70
_PLAIN_POINT: dict[str, Any] = {"marker": "x", "markersize": 5, "color": "0.45", "linestyle": ""}


def drafting(results: Sequence[CellResult]) -> list[CellResult]:
    return [r for r in results if r.drafting]


def pair_list(
    results: Sequence[CellResult], width: str, value: Callable[[Metrics], Estimate | None], axis: str
) -> tuple[Figure, int] | None:
    """An estimate of each pair as a point with its interval, grouped by drafter, with a panel per setting.

    Uses the smallest batch size. Returns the figure and the number of omitted panels or drafters; None if no cell has
    the estimate.
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
    groups = [{pair: group[pair] for pair in order if pair in group} for group in shown.values()]
    shown_pairs = {pair for group in groups for pair in group}
    drafters = list(dict.fromkeys(pair[0] for pair in order if pair in shown_pairs))
    bands = _bands(drafters, groups)
    styles = marks(verifier for group in groups for _, verifier in group)

    rows = max(bottom for _, bottom in bands.values())
    figure, panels_of = panels(
        len(shown), width, _ROW * rows + 0.35, maximum=1 if width == "column" else 3, share_x=True
    )
    estimates: list[Estimate] = []
    for panel, group in zip(panels_of, groups, strict=True):
        panel.axvline(1.0, color="0.55", linewidth=0.8, linestyle="--", zorder=1)
        for drafter, (top, bottom) in bands.items():
            pairs = [pair for pair in group if pair[0] == drafter]
            for i, pair in enumerate(pairs):
                metrics = group[pair].metrics
                estimate = value(metrics) if metrics is not None else None
                assert estimate is not None
                estimates.append(estimate)
                y = (top + bottom - len(pairs)) / 2 + i + 0.5
                tip = f"{' × '.join(pair)}: {estimate_text(estimate)}"
                _point(panel, estimate.value, y, estimate, styles[pair[1]], tip, across=True)
    centres = {text(drafter): (top + bottom) / 2 for drafter, (top, bottom) in bands.items()}
    for panel in panels_of:
        panel.set_yticks(list(centres.values()), list(centres))
        panel.set_ylim(rows + _GAP / 2, -_GAP / 2)
        panel.set_xlim(*visible(estimates, 1.0))
        panel.grid(False, axis="y")
        panel.tick_params(axis="y", length=0)
        for (_, above), (below, _) in pairwise(bands.values()):
            panel.axhline((above + below) / 2, color="0.92", linewidth=0.5)
    titles = [_title(setting, group.values()) for setting, group in shown.items()]
    label(figure, panels_of, titles, axis, "")
    legend(figure, [entry(name, mark) for name, mark in styles.items()])
    return figure, len(settings) - len(shown) + len(drafters) - len(bands)


def target_rows(results: Sequence[CellResult], width: str) -> tuple[Figure, int] | None:
    """Block efficiency against target positions per step, with a panel per batch size and setting.

    The step line is the Pareto front of the certified pairs. Marks of about as many rows stand side by side.
    """
    cells = [r.config for r in results]
    groups: dict[str, list[CellResult]] = {}
    for result in drafting(results):
        if result.metrics is not None and result.metrics.block_efficiency is not None:
            groups.setdefault(group_title(result.config, cells), []).append(result)
    if not groups:
        return None
    shown = dict(list(groups.items())[:MOST_PANELS])
    results = [r for group in shown.values() for r in group]
    colours = marks(r.config.drafter.title for r in results)
    shapes = marks(verifier_title(r) for r in results)

    figure, axes = panels(len(shown), width)
    for panel, group in zip(axes, shown.values(), strict=True):
        batch_size = group[0].config.batch_size
        points = [(float(batch_size), 1.0)]
        certified = points[:]
        gap, place = _BESIDE * max(map(rows_per_step, group)), float("-inf")
        panel.plot(*points[0], **_PLAIN_POINT)
        for result in sorted(group, key=rows_per_step):
            assert result.metrics is not None and result.metrics.block_efficiency is not None
            x, estimate = rows_per_step(result), result.metrics.block_efficiency
            points.append((x, estimate.value))
            certified += points[-1:] * mark_of(result).headline
            drafter, shape = colours[result.config.drafter.title], shapes[verifier_title(result)]
            mark = PointMark(drafter.colour, shape.marker, drafter.hollow)
            tip = f"{pair_title(result)}: {estimate_text(estimate)} from {x:.1f} rows"
            place = max(x, place + gap)
            _point(panel, place, estimate.value, estimate, mark, tip)
        corners = front(certified)
        right = max(x for x, _ in points)
        xs, ys = [x for x, _ in corners], [y for _, y in corners]
        panel.step([*xs, right], [*ys, ys[-1]], where="post", **FRONT)
        panel.set_ylim(
            *visible([r.metrics.block_efficiency for r in results if r.metrics and r.metrics.block_efficiency], 1)
        )
        low = min(x for x, _ in points)
        panel.set_xlim(low - 0.07 * (right - low or 1), max(right, place) + 0.07 * (right - low or 1))
        panel.locator_params(axis="x", nbins=5)
    label(figure, axes, list(shown), "target rows per step: batch size × (nodes + 1)", "block efficiency")
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label="plain decoding", **_PLAIN_POINT), front_entry()]
    handles += [swatch(name, mark) for name, mark in colours.items()]
    handles += [entry(name, PointMark("0.3", mark.marker)) for name, mark in shapes.items()]
    legend(figure, handles)
    return figure, len(groups) - len(shown)


#: Phases of a step and their colours.
_PHASES = {"draft": "#5d3f8f", "target": "#b9a6dc", "verify": "#e0b23c", "rest": "#8b959e"}


def time_shares(results: Sequence[CellResult], width: str) -> tuple[Figure, int] | None:
    """Shares of the decoding time by phase, a bar per pair, with a panel per batch size and setting."""
    cells = [r.config for r in results]
    groups: dict[str, list[CellResult]] = {}
    for result in results:
        if result.metrics is not None and any(result.metrics.shares.values()):
            groups.setdefault(group_title(result.config, cells), []).append(result)
    if not groups:
        return None
    shown = dict(list(groups.items())[:MOST_PANELS])
    rows = max(map(len, shown.values()))
    figure, axes = panels(len(shown), width, _ROW * rows + 0.5, maximum=1 if width == "column" else 2, share_y=False)
    for panel, group in zip(axes, shown.values(), strict=True):
        left = [0.0] * len(group)
        for phase, colour in _PHASES.items():
            shares = [100 * r.metrics.shares.get(phase, 0.0) if r.metrics else 0.0 for r in group]
            bars = panel.barh(range(len(group)), shares, left=left, height=0.8, color=colour)
            for bar, share in zip(bars, shares, strict=True):
                set_tips(bar, [f"{phase}: {share:.0f} %"])
            left = [a + b for a, b in zip(left, shares, strict=True)]
        names = ["plain decoding" if r.config.is_baseline else pair_title(r) for r in group]
        panel.set_yticks(range(len(group)), [text(name, 40) for name in names])
        panel.set_ylim(rows - 0.5, -0.5)
        panel.set_xlim(0, 100)
        panel.tick_params(axis="y", length=0)
        panel.grid(False, axis="y")
    label(figure, axes, list(shown), "% of the decoding time", "")
    legend(figure, [swatch(phase, PointMark(colour, "s")) for phase, colour in _PHASES.items()])
    return figure, len(groups) - len(shown)


def rows_per_step(result: CellResult) -> float:
    """Positions that the target evaluates per step with all slots in use."""
    assert result.metrics is not None
    metrics = result.metrics
    return metrics.target_rows_per_token * metrics.tokens / metrics.steps * result.config.batch_size


def front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The Pareto front of points, by increasing x: maximal y for minimal x."""
    corners: list[tuple[float, float]] = []
    for x, y in sorted(set(points), key=lambda point: (point[0], -point[1])):
        if not corners or y > corners[-1][1]:
            corners.append((x, y))
    return corners


# -- pieces -----------------------------------------------------------------------------------------------------


def _bands(drafters: Sequence[str], groups: Sequence[Iterable[tuple[str, str]]]) -> dict[str, tuple[float, float]]:
    """First and last row of each drafter, with space for its pairs in every panel."""
    bands: dict[str, tuple[float, float]] = {}
    y = 0.0
    for drafter in drafters:
        rows = max(sum(name == drafter for name, _ in group) for group in groups)
        if bands and y + rows > _MAX_ROWS:
            break
        bands[drafter] = (y, y + rows)
        y += rows + _GAP
    return bands


def _point(
    panel: Axes, x: float, y: float, estimate: Estimate, mark: PointMark, tip: str, across: bool = False
) -> None:
    """Draw a point with its interval, horizontal if ``across``, and its tooltip."""
    low, high = ends(estimate)
    bar = {"xerr": [[low], [high]]} if across else {"yerr": [[low], [high]]}
    drawn = panel.errorbar(x, y, **bar, linestyle="", elinewidth=0.9, zorder=3, **mark.options)  # type: ignore[arg-type]
    set_tips(drawn.lines[0], [tip])


def _title(setting: str, results: Sequence[CellResult] | object) -> str:
    sizes = sorted({r.config.batch_size for r in results})  # type: ignore[attr-defined]
    return f"{setting}, batch size{'s' if len(sizes) > 1 else ''} {', '.join(map(str, sizes))}"
