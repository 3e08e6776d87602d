"""Charts with a line per pair: over batch sizes, and over positions of a draft."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from crossdraft.framework.metrics.cell_metrics import acceptance as acceptance_of
from crossdraft.framework.report.batch_sizes import Pair, Series, batch_size_series
from crossdraft.runs import estimate_text, group_title, mark_of, verifier_title

from .pairs import drafting, front
from .style import (
    BATCH_SIZE,
    FRONT,
    MOST_PANELS,
    PLAIN,
    PointMark,
    batch_axis,
    ends,
    entry,
    front_entry,
    label,
    legend,
    marks,
    panels,
    plain_entry,
    set_tips,
    text,
    visible,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from crossdraft import Estimate
    from crossdraft.framework.metrics.cell_metrics import SegmentMetrics
    from crossdraft.runs import CellResult

#: Offset between the bars of two series: in powers of two for batch sizes, in positions for positions.
_OFFSET = 0.09


def speed_up(results: Sequence[CellResult], width: str) -> tuple[Figure, int] | None:
    """Speed-up over batch size with intervals, a panel per drafter; None if there is only one batch size."""
    drawn = _by_drafter(results, lambda pair, _: pair.speed_ups)
    if not drawn:
        return None
    shown = drawn[:MOST_PANELS]
    styles = marks(pair.verifier for _, pairs, _ in drawn for pair in pairs)
    estimates = [e for _, pairs, _ in shown for pair in pairs for e in _speed_ups(pair).values()]
    figure, axes = panels(len(shown), width, share_x=_alike(shown))
    for panel, (_, pairs, group) in zip(axes, shown, strict=True):
        panel.axhline(1.0, color="0.55", linewidth=0.8, linestyle="--", zorder=1)
        for i, pair in enumerate(pairs):
            offset = 2 ** (_OFFSET * (i - (len(pairs) - 1) / 2))
            points = {b * offset: e for b, e in _speed_ups(pair).items()}
            tips = [f"{pair.verifier}, B = {b}: {estimate_text(e)} ×" for b, e in _speed_ups(pair).items()]
            _line(panel, points, styles[pair.verifier], tips)
        batch_axis(panel, sorted(group.baselines))
        panel.set_ylim(*visible(estimates, 1.0))
    label(figure, axes, [title for title, _, _ in shown], BATCH_SIZE, "speed-up over plain decoding")
    legend(figure, [entry(name, mark, line=True) for name, mark in styles.items()])
    return figure, len(drawn) - len(shown)


def throughput(results: Sequence[CellResult], width: str) -> tuple[Figure, int] | None:
    """Tokens/s over batch size with plain decoding, a panel per drafter; a ring marks break-even.

    Withheld rates are left out; if all are withheld, the panel is by the clock and has a remark. None if there is only
    one batch size.
    """
    drawn = _by_drafter(results, lambda pair, series: series.rates(pair.results))
    if not drawn:
        return None
    shown = drawn[:MOST_PANELS]
    styles = marks(pair.verifier for _, pairs, _ in drawn for pair in pairs)
    figure, axes = panels(len(shown), width, share_x=_alike(shown))
    for panel, (_, pairs, group) in zip(axes, shown, strict=True):
        plain = group.rates(group.baselines)
        panel.plot(list(plain), list(plain.values()), **PLAIN)
        remarks = []
        for pair in pairs:
            rates, mark = group.rates(pair.results), styles[pair.verifier]
            (line,) = panel.plot(list(rates), list(rates.values()), linestyle=mark.dash, **mark.options)
            set_tips(line, [f"{pair.verifier}, B = {b}: {rate:.1f} tokens/s" for b, rate in rates.items()])
            if (at := break_even(pair.speed_ups)) is not None:
                panel.plot(at, _between(plain, at), "o", markersize=8, markerfacecolor="none", color=mark.colour)
                remarks.append((f"B ≈ {at:.1f}", mark.colour))
        if remarks:
            remarks.append(("break-even", "0.3"))
        for i, (words, colour) in enumerate(remarks):  # rates grow with B, so this corner is free
            place = (0.97, 0.03 + 0.1 * i)
            panel.annotate(words, place, xycoords="axes fraction", ha="right", color=colour, fontsize=6.5)
        _remark_on_clock(panel, group)
        batch_axis(panel, sorted(group.baselines))
        _rate_axis(panel)
    label(figure, axes, [title for title, _, _ in shown], BATCH_SIZE, "tokens/s (log scale)")
    legend(figure, [plain_entry(), *(entry(name, mark, line=True) for name, mark in styles.items())])
    return figure, len(drawn) - len(shown)


def pareto(results: Sequence[CellResult], width: str) -> tuple[Figure, int] | None:
    """Tokens/s of the device against tokens/s of one user, a panel per drafter; a step line is the certified front.

    Rates as in `throughput`. None if there is only one batch size.
    """
    drawn = _by_drafter(results, lambda pair, series: series.rates(pair.results))
    if not drawn:
        return None
    shown = drawn[:MOST_PANELS]
    styles = marks(pair.verifier for _, pairs, _ in drawn for pair in pairs)
    figure, axes = panels(len(shown), width)
    for panel, (_, pairs, group) in zip(axes, shown, strict=True):
        plain = _per_user(group.rates(group.baselines))
        panel.plot(list(plain), list(plain.values()), **PLAIN)
        certified = list(plain.items())
        for pair in group.pairs:
            if all(mark_of(result).headline for result in pair.results.values()):
                certified += _per_user(group.rates(pair.results)).items()
        if not group.by_clock:
            corners = [(-x, y) for x, y in front([(-x, y) for x, y in certified])]
            panel.step([x for x, _ in corners], [y for _, y in corners], where="pre", **FRONT)
        for pair in pairs:
            rates, mark = group.rates(pair.results), styles[pair.verifier]
            points = _per_user(rates)
            (line,) = panel.plot(list(points), list(points.values()), linestyle=mark.dash, **mark.options)
            users = [f"{rate:.1f} tokens/s, {rate / b:.1f} for one user" for b, rate in rates.items() if rate > 0]
            set_tips(line, [f"{pair.verifier}, B = {b}: {words}" for b, words in zip(rates, users, strict=False)])
        _remark_on_clock(panel, group)
        _rate_axis(panel)
        panel.locator_params(axis="x", nbins=5)
    label(figure, axes, [title for title, _, _ in shown], "tokens/s for one user", "tokens/s of the device (log scale)")
    legend(figure, [plain_entry(), front_entry(), *(entry(name, mark, line=True) for name, mark in styles.items())])
    return figure, len(drawn) - len(shown)


def acceptance(results: Sequence[CellResult], width: str) -> tuple[Figure, int] | None:
    """Pr(tau >= i) by position i with intervals, a panel per drafter, at the smallest batch size."""

    def values(result: CellResult) -> dict[Any, Estimate]:
        metrics = result.metrics
        assert metrics is not None
        return dict(enumerate(acceptance_of(result.records, metrics.depth, len(metrics.acceptance)), 1))

    return _by_part(results, width, values, "position i in the draft", "Pr(τ ≥ i)")


def categories(results: Sequence[CellResult], width: str) -> tuple[Figure, int] | None:
    """Block efficiency by category of prompts with intervals, a panel per drafter, at the smallest batch size."""

    def values(result: CellResult) -> dict[Any, Estimate]:
        parts = result.metrics.by_category if result.metrics else {}
        return {name: m.block_efficiency for name, m in parts.items() if m.block_efficiency and len(parts) > 1}

    return _by_part(results, width, values, "category of prompts", "block efficiency")


def by_segment(
    results: Sequence[CellResult], width: str, segments: Mapping[str, Mapping[str, SegmentMetrics]]
) -> tuple[Figure, int] | None:
    """Block efficiency by segment of the responses, as `categories`; ``segments``: metrics by cell hash."""

    def values(result: CellResult) -> dict[Any, Estimate]:
        parts = segments.get(result.config.hash, {})
        return {name: m.block_efficiency for name, m in parts.items() if m.block_efficiency}

    return _by_part(results, width, values, "segment of responses", "block efficiency")


def _by_part(
    results: Sequence[CellResult], width: str, values: Callable[[CellResult], dict[Any, Estimate]], x: str, y: str
) -> tuple[Figure, int] | None:
    """Estimates by number, joined by lines, or by name, a panel per drafter, at the smallest batch size."""
    cells = [r.config for r in results]
    drawn: dict[tuple[str, str], dict[str, dict[Any, Estimate]]] = {}
    for result in sorted(drafting(results), key=lambda r: r.config.batch_size):
        if estimates := values(result):
            setting = group_title(result.config, cells, but="batch_size")
            lines = drawn.setdefault((result.config.drafter.title, setting), {})
            lines.setdefault(verifier_title(result), estimates)
    if not drawn:
        return None
    shown = dict(list(drawn.items())[:MOST_PANELS])
    styles = marks(verifier for lines in drawn.values() for verifier in lines)
    all_estimates = [e for lines in shown.values() for line in lines.values() for e in line.values()]
    figure, axes = panels(len(shown), width)
    for panel, lines in zip(axes, shown.values(), strict=True):
        parts = list(dict.fromkeys(part for line in lines.values() for part in line))
        numbered = all(isinstance(part, int) for part in parts)
        for i, (verifier, line) in enumerate(lines.items()):
            offset = _OFFSET * (i - (len(lines) - 1) / 2)
            points = {parts.index(part) + 1 + offset: e for part, e in line.items()}
            tips = [f"{verifier}, {part}: {estimate_text(e)}" for part, e in line.items()]
            _line(panel, points, styles[verifier], tips, joined=numbered)
        panel.set_ylim(*((-0.03, 1.03) if numbered else visible(all_estimates)))
        panel.set_xlim(0.5, len(parts) + 0.5)
        if numbered:
            panel.set_xticks(range(1, len(parts) + 1, max(1, len(parts) // 6)))
        else:
            panel.set_xticks(
                range(1, len(parts) + 1),
                [text(str(part), 24) for part in parts],
                rotation=60,
                ha="right",
                rotation_mode="anchor",
            )
    has_settings = len({setting for _, setting in drawn}) > 1
    titles = [f"{drafter}, {setting}" if has_settings else drafter for drafter, setting in shown]
    label(figure, axes, titles, x, y)
    legend(figure, [entry(name, mark, line=True) for name, mark in styles.items()])
    return figure, len(drawn) - len(shown)


def break_even(speed_ups: Mapping[int, float]) -> float | None:
    """The last batch size at which the speed-up falls below 1, or None.

    Log-log interpolation between measured batch sizes.
    """
    crossing = None
    for (b, low), (c, high) in pairwise(sorted(speed_ups.items())):
        if high < 1 <= low:
            crossing = b * (c / b) ** (math.log(low) / math.log(low / high))
        elif high >= 1:
            crossing = None
    return crossing


# -- pieces -----------------------------------------------------------------------------------------------------


Panels = Sequence[tuple[str, list[Pair], Series]]


def _by_drafter(results: Sequence[CellResult], values: Callable[[Pair, Series], Mapping[int, float]]) -> Panels:
    """Title, pairs that have values, and series of each panel."""
    series = batch_size_series(results)
    drawn = []
    for setting, group in series.items():
        for drafter in dict.fromkeys(pair.drafter for pair in group.pairs):
            title = f"{drafter}, {setting}" if len(series) > 1 else drafter
            pairs = [pair for pair in group.pairs if pair.drafter == drafter and values(pair, group)]
            if pairs:
                drawn.append((title, pairs, group))
    return drawn


def _alike(shown: Panels) -> bool:
    """True if all panels have the same batch sizes."""
    return len({tuple(sorted(series.baselines)) for _, _, series in shown}) == 1


def _speed_ups(pair: Pair) -> dict[int, Estimate]:
    return {b: r.metrics.speed_up for b, r in sorted(pair.results.items()) if r.metrics and r.metrics.speed_up}


def _line(
    panel: Axes, points: Mapping[float, Estimate], mark: PointMark, tips: Sequence[str], joined: bool = True
) -> None:
    """Draw estimates with intervals and tooltips, joined by a line if ``joined``."""
    lengths = [ends(e) for e in points.values()]
    bars = [[low for low, _ in lengths], [high for _, high in lengths]]
    values = [e.value for e in points.values()]
    dash = mark.dash if joined else ""
    drawn = panel.errorbar(list(points), values, yerr=bars, linestyle=dash, elinewidth=0.8, **mark.options)
    set_tips(drawn.lines[0], tips)


def _per_user(rates: Mapping[int, float]) -> dict[float, float]:
    """Rates of the device by rates of one user."""
    return {rate / b: rate for b, rate in rates.items() if rate > 0}


def _remark_on_clock(panel: Axes, series: Series) -> None:
    if series.by_clock:
        words = "by the clock: speed-ups are withheld"
        panel.annotate(words, (0.03, 0.97), xycoords="axes fraction", va="top", color="0.4", fontsize=6.5)


def _rate_axis(panel: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())


def _between(rates: Mapping[int, float], at: float) -> float:
    """Log-log interpolation of a rate between measured batch sizes."""
    for (b, low), (c, high) in pairwise(sorted(rates.items())):
        if b <= at <= c:
            return low * (high / low) ** (math.log(at / b) / math.log(c / b))
    raise ValueError(f"batch size {at:g} is outside the measured range")
