"""Charts of the page as inline SVG, coloured by the page's style sheet so that they follow light and dark mode."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

from ...runs.labels import verifier_title
from ...runs.marks import mark_of

if TYPE_CHECKING:
    from ...runs.records import CellResult

#: Outlines of markers around (0, 0), in the order in which verifiers take them.
MARKERS = (
    "M-5,0a5,5 0 1,0 10,0a5,5 0 1,0 -10,0z",
    "M-4.5,-4.5h9v9h-9z",
    "M0,-5.5L5.5,4.5H-5.5z",
    "M0,-6L6,0L0,6L-6,0z",
    "M0,5.5L5.5,-4.5H-5.5z",
    "M-5,-2H-2V-5H2V-2H5V2H2V5H-2V2H-5z",
)
#: Colours and dash patterns in page.css: ``.c0`` and ``.d0``, ...
COLOURS, DASHES = 10, 4
#: Pixels of a chart; the page scales it.
WIDTH, HEIGHT = 480, 300
_TOP, _RIGHT, _BOTTOM = 10, 14, 46
#: Centres of two markers closer than this are drawn side by side.
_APART = 9.0


@dataclass(frozen=True)
class Look:
    """Style of a series: a colour is a drafter, a marker and a dash pattern are a verifier, hollow is not certified."""

    colour: int = 0
    marker: int = 0
    hollow: bool = False

    def symbol(self) -> str:
        """The marker at (0, 0)."""
        hollow = " hollow" if self.hollow else ""
        return f'<path class="mark c{self.colour % COLOURS}{hollow}" d="{MARKERS[self.marker % len(MARKERS)]}"/>'


@dataclass(frozen=True)
class Looks:
    """Styles by drafter and verifier, the same in all charts of a page."""

    drafters: Mapping[str, int]
    verifiers: Mapping[str, Look]

    @classmethod
    def of(cls, results: Iterable[CellResult]) -> Looks:
        drafters: dict[str, int] = {}
        verifiers: dict[str, Look] = {}
        for result in results:
            if result.metrics is not None and not result.config.is_baseline:
                drafters.setdefault(result.config.drafter.title, len(drafters))
                look = Look(0, len(verifiers), not mark_of(result).headline)
                verifiers.setdefault(verifier_title(result), look)
        return cls(drafters, verifiers)

    def look(self, drafter: str, verifier: str) -> Look:
        look = self.verifiers[verifier]
        return Look(self.drafters[drafter], look.marker, look.hollow)

    def legend(self, pairs: Iterable[tuple[str, str]]) -> list[tuple[str, list[tuple[str, str]]]]:
        """For the drafters and the verifiers of these pairs: the title of the list, then symbol and name."""
        shown = list(pairs)
        drafters, verifiers = (list(dict.fromkeys(names)) for names in zip(*shown, strict=True))
        swatches = [
            (f'<path class="swatch c{self.drafters[d] % COLOURS}" d="M-6,-6h12v12h-12z"/>', d) for d in drafters
        ]
        markers = [(self.verifiers[v].symbol().replace("mark c0", "mark ink"), v) for v in verifiers]
        return [("drafter", swatches), ("verifier", markers)]


def ticks(low: float, high: float, most: int = 7) -> list[float]:
    """At most about ``most`` round numbers from ``low`` to ``high``."""
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= most)
    return [round(i * step, 10) for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


@dataclass
class Axis:
    """A linear or logarithmic axis.

    Attributes:
        title: quantity, with its unit.
        labels: ticks and their labels; by default round numbers.
    """

    title: str
    low: float
    high: float
    log: bool = False
    labels: dict[float, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.labels:
            return
        if not self.log:
            self.labels = {tick: f"{tick:g}" for tick in ticks(self.low, self.high)}
            return
        tens = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        values = [digit * 10.0**ten for ten in tens for digit in (1, 2, 5)]
        self.labels = {tick: f"{tick:g}" for tick in values if self.low <= tick <= self.high}

    @classmethod
    def fit(cls, title: str, values: Sequence[float], log: bool = False) -> Axis:
        """The axis that shows all of ``values``, with a margin of 5 %."""
        low, high = min(values), max(values)
        if log:
            margin = (high / low) ** 0.05 if high > low else 1.5
            return cls(title, low / margin, high * margin, log=True)
        margin = 0.05 * (high - low) or 0.1 * abs(high) or 1.0
        return cls(title, low - margin, high + margin)

    def fraction(self, value: float) -> float:
        """Position of a value between the ends of the axis, from 0 to 1."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


class Chart:
    """A chart with two axes, grid and axis titles; ``svg`` returns it."""

    def __init__(self, x: Axis, y: Axis, height: int = HEIGHT):
        self.x, self.y, self.height = x, y, height
        self.left = 30 + 7 * max(map(len, y.labels.values()), default=1)
        self._parts: list[str] = []
        self._taken: list[tuple[float, float]] = []

    def px(self, x: float) -> float:
        return round(self.left + self.x.fraction(x) * (WIDTH - _RIGHT - self.left), 1)

    def py(self, y: float) -> float:
        return round(self.height - _BOTTOM - self.y.fraction(y) * (self.height - _BOTTOM - _TOP), 1)

    def add(self, part: str) -> None:
        self._parts.append(part)

    def reference(self, y: float) -> None:
        """A line across the chart, such as break-even."""
        self.add(f'<path class="reference" d="M{self.left},{self.py(y)}H{WIDTH - _RIGHT}"/>')

    def path(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        """A line through ``points``, in data coordinates; ``kind`` is its CSS class."""
        self.add(f'<path class="{kind}" d="{self._through([(self.px(x), self.py(y)) for x, y in points])}"/>')

    def series(
        self,
        points: Sequence[tuple[float, float, float | None, float | None, str]],
        look: Look,
        name: str,
        joined: bool = False,
        dodge: float = 0.0,
        spread: bool = False,
    ) -> None:
        """Points of one pair with their intervals.

        Args:
            points: x, y, ends of the interval (None: no interval) and the text of a tooltip.
            joined: draw a line through them.
            dodge: pixels by which all points are shifted to the right.
            spread: shift a point that would cover another one.
        """
        parts, placed = [], []
        for x, y, low, high, tip in points:
            at, level = self.px(x) + dodge, self.py(y)
            while spread and any(abs(at - u) < _APART and abs(level - v) < _APART for u, v in self._taken):
                at += _APART
            self._taken.append((at, level))
            placed.append((at, level))
            if low is not None and high is not None:
                ends = [self.py(min(max(end, self.y.low), self.y.high)) for end in (low, high)]
                parts.append(f'<path class="interval c{look.colour % COLOURS}" d="M{at:.1f},{ends[0]}V{ends[1]}"/>')
            symbol, tip = look.symbol(), escape(f"{name}: {tip}")
            parts.append(f'<g transform="translate({at:.1f},{level})"><title>{tip}</title>{symbol}</g>')
        if joined and len(placed) > 1:
            style = f"line c{look.colour % COLOURS} d{look.marker % DASHES}"
            parts.insert(0, f'<path class="{style}" d="{self._through(placed)}"/>')
        self.add(f'<g class="series">{"".join(parts)}</g>')

    def svg(self, words: str) -> str:
        """The chart; ``words`` describes it to readers who cannot see it."""
        right, bottom = WIDTH - _RIGHT, self.height - _BOTTOM
        grid = []
        for value, label in self.x.labels.items():
            at = self.px(value)
            grid.append(f'<path class="grid" d="M{at},{_TOP}V{bottom}"/>')
            grid.append(f'<text x="{at}" y="{bottom + 17}" text-anchor="middle">{escape(label)}</text>')
        for value, label in self.y.labels.items():
            at = self.py(value)
            grid.append(f'<path class="grid" d="M{self.left},{at}H{right}"/>')
            grid.append(f'<text x="{self.left - 6}" y="{at + 4}" text-anchor="end">{escape(label)}</text>')
        middle, centre = (self.left + right) / 2, (_TOP + bottom) / 2
        titles = (
            f'<text class="title" x="{middle}" y="{self.height - 8}" text-anchor="middle">{escape(self.x.title)}</text>'
            f'<text class="title" transform="translate(13,{centre}) rotate(-90)" text-anchor="middle">'
            f"{escape(self.y.title)}</text>"
        )
        return (
            f'<svg class="chart" viewBox="0 0 {WIDTH} {self.height}" role="img" aria-label="{escape(words)}">'
            f"{''.join(grid)}{titles}{''.join(self._parts)}</svg>"
        )

    @staticmethod
    def _through(points: Sequence[tuple[float, float]]) -> str:
        return "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points)
