"""Charts with a line per pair: over batch sizes, and over positions of a draft."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from ...metrics.cell_metrics import acceptance as acceptance_of
from ...runs.labels import group_title, verifier_title
from ..batch_sizes import Pair, Series, batch_size_series
from .pairs import drafting
from .style import MOST_PANELS, PLAIN, Mark, batch_axis, ends, entry, label, legend, marks, panels, plain_entry, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ...metrics.intervals import Estimate
    from ...runs.records import CellResult

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
            _line(panel, points, styles[pair.verifier])
        batch_axis(panel, sorted(group.baselines))
        panel.set_ylim(*visible(estimates, 1.0))
    label(figure, axes, [title for title, _, _ in shown], "batch size", "speed-up over plain decoding")
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
            panel.plot(list(rates), list(rates.values()), linestyle=mark.dash, **mark.options)
            if (at := break_even(pair.speed_ups)) is not None:
                panel.plot(at, _between(plain, at), "o", markersize=8, markerfacecolor="none", color=mark.colour)
                remarks.append((f"B ≈ {at:.1f}", mark.colour))
        if remarks:
            remarks.append(("break-even", "0.3"))
        for i, (words, colour) in enumerate(remarks):  # rates grow with B, so this corner is free
            place = (0.97, 0.03 + 0.1 * i)
            panel.annotate(words, place, xycoords="axes fraction", ha="right", color=colour, fontsize=6.5)
        if group.by_clock:
            words = "by the clock: speed-ups are withheld"
            panel.annotate(words, (0.03, 0.97), xycoords="axes fraction", va="top", color="0.4", fontsize=6.5)
        batch_axis(panel, sorted(group.baselines))
        _rate_axis(panel)
    label(figure, axes, [title for title, _, _ in shown], "batch size", "tokens/s")
    legend(figure, [plain_entry(), *(entry(name, mark, line=True) for name, mark in styles.items())])
    return figure, len(drawn) - len(shown)


def acceptance(results: Sequence[CellResult], width: str) -> tuple[Figure, int] | None:
    """Pr(tau >= i) by position i with intervals, a panel per drafter, at the smallest batch size."""
    cells = [r.config for r in results]
    drawn: dict[tuple[str, str], dict[str, CellResult]] = {}
    for result in sorted(drafting(results), key=lambda r: r.config.batch_size):
        if result.metrics is not None and result.metrics.acceptance:
            setting = group_title(result.config, cells, but="batch_size")
            lines = drawn.setdefault((result.config.drafter.title, setting), {})
            lines.setdefault(verifier_title(result), result)
    if not drawn:
        return None
    shown = dict(list(drawn.items())[:MOST_PANELS])
    styles = marks(verifier for lines in drawn.values() for verifier in lines)
    figure, axes = panels(len(shown), width)
    for panel, lines in zip(axes, shown.values(), strict=True):
        longest = 1
        for i, (verifier, result) in enumerate(lines.items()):
            metrics = result.metrics
            assert metrics is not None
            estimates = acceptance_of(result.records, metrics.depth, len(metrics.acceptance))
            offset = _OFFSET * (i - (len(lines) - 1) / 2)
            _line(panel, {k + offset: e for k, e in enumerate(estimates, 1)}, styles[verifier])
            longest = max(longest, len(estimates))
        panel.set_ylim(-0.03, 1.03)
        panel.set_xlim(0.5, longest + 0.5)
        panel.set_xticks(range(1, longest + 1, max(1, longest // 6)))
    has_settings = len({setting for _, setting in drawn}) > 1
    titles = [f"{drafter}, {setting}" if has_settings else drafter for drafter, setting in shown]
    label(figure, axes, titles, "position i in the draft", "Pr(τ ≥ i)")
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


def _line(panel: Axes, points: Mapping[float, Estimate], mark: Mark) -> None:
    """Draw estimates with intervals, joined by a line."""
    lengths = [ends(e) for e in points.values()]
    bars = [[low for low, _ in lengths], [high for _, high in lengths]]
    values = [e.value for e in points.values()]
    panel.errorbar(list(points), values, yerr=bars, linestyle=mark.dash, elinewidth=0.8, **mark.options)


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
