"""Speed-ups by draft length and batch size, with the break-even line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...runs.labels import group_title, verifier_title
from .svg import Axis, Chart

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
    by_key: dict[str, Map] = {}
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
        heat_map = by_key.setdefault(config.model_copy(update=same).hash, Map(title))
        heat_map.cells[gamma, config.batch_size] = result.metrics.speed_up.value
    return [m for m in by_key.values() if len(m.gammas) > 1 and len(m.batch_sizes) > 1]


def break_even_line(
    cells: Mapping[tuple[int, int], float], gammas: Sequence[int], batch_sizes: Sequence[int]
) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """Borders between neighbouring cells of which only one pays: a speed-up of 1 or more.

    Cell (i, j) of the i-th batch size and j-th gamma reaches from i - 0.5 to i + 0.5 and from j - 0.5 to j + 0.5.
    """
    lines = []
    for j, gamma in enumerate(gammas):
        for i, batch_size in enumerate(batch_sizes):
            speed_up = cells.get((gamma, batch_size))
            right = cells.get((gamma, batch_sizes[i + 1])) if i + 1 < len(batch_sizes) else None
            above = cells.get((gammas[j + 1], batch_size)) if j + 1 < len(gammas) else None
            if speed_up is not None and right is not None and (speed_up >= 1) != (right >= 1):
                lines.append(((i + 0.5, j - 0.5), (i + 0.5, j + 0.5)))
            if speed_up is not None and above is not None and (speed_up >= 1) != (above >= 1):
                lines.append(((i - 0.5, j + 0.5), (i + 0.5, j + 0.5)))
    return lines


def heat_maps(results: Sequence[CellResult]) -> list[tuple[str, str]]:
    """Title and chart of each map."""
    return [(heat_map.title, _draw(heat_map)) for heat_map in maps_of(results)]


def _draw(heat_map: Map) -> str:
    gammas, batch_sizes = heat_map.gammas, heat_map.batch_sizes
    x, y = (
        Axis(title, -0.5, len(values) - 0.5, labels={float(i): str(value) for i, value in enumerate(values)})
        for title, values in (("batch size", batch_sizes), ("gamma", gammas))
    )
    chart = Chart(x, y, height=max(150, 60 + 44 * len(gammas)))
    strongest = max((abs(value - 1) for value in heat_map.cells.values()), default=0.0) or 1.0
    for (gamma, batch_size), value in heat_map.cells.items():
        i, j = batch_sizes.index(batch_size), gammas.index(gamma)
        left, top, right, bottom = chart.px(i - 0.49), chart.py(j + 0.48), chart.px(i + 0.49), chart.py(j - 0.48)
        chart.add(
            f'<path class="{"pays" if value >= 1 else "costs"}" d="M{left},{top}H{right}V{bottom}H{left}z" '
            f'fill-opacity="{0.12 + 0.55 * abs(value - 1) / strongest:.2f}"/>'
            f'<text class="value" x="{chart.px(i)}" y="{chart.py(j) + 5}" text-anchor="middle">{value:.2f}</text>'
        )
    for border in break_even_line(heat_map.cells, gammas, batch_sizes):
        chart.path(border, "break-even")
    pays = sum(value >= 1 for value in heat_map.cells.values())
    return chart.svg(f"drafting pays in {pays} of {len(heat_map.cells)} combinations of gamma and batch size")
