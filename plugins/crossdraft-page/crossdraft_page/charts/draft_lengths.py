"""Speed-ups by draft length and batch size, with the break-even line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from crossdraft.runs import group_title, verifier_title

from .style import MOST_PANELS, label, panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from crossdraft.runs import CellResult


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
        if result.drafting is None or result.drafting.speed_up is None or not isinstance(gamma, int):
            continue
        without = {key: value for key, value in config.drafter.config.items() if key != "gamma"}
        same = {"batch_size": 1, "drafter": config.drafter.model_copy(update={"config": without, "label": ""})}
        drafter = config.drafter.title.replace(f" gamma={gamma}", "")
        title = f"{drafter} × {verifier_title(result)}, {group_title(config, cells, but='batch_size')}"
        heat_map = by_key.setdefault(config.model_copy(update=same).hash, Map(title))
        heat_map.cells[gamma, config.batch_size] = result.drafting.speed_up.value
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


def draft_lengths(results: Sequence[CellResult], width: str) -> tuple[Figure, int] | None:
    """Speed-ups by gamma and batch size, a panel per pair and setting; None without a pair of several gammas."""
    from matplotlib.colors import TwoSlopeNorm

    maps = maps_of(results)
    if not maps:
        return None
    shown = maps[:MOST_PANELS]
    maximum = max(abs(value - 1) for heat_map in shown for value in heat_map.cells.values()) or 1.0
    rows = max(len(heat_map.gammas) for heat_map in shown)
    figure, axes = panels(len(shown), width, max(0.22 * rows, 0.5) + 0.6, share_y=False)
    for panel, heat_map in zip(axes, shown, strict=True):
        gammas, batch_sizes = heat_map.gammas, heat_map.batch_sizes
        values = [[heat_map.cells.get((gamma, b), math.nan) for b in batch_sizes] for gamma in gammas]
        norm = TwoSlopeNorm(1.0, 1 - maximum, 1 + maximum)
        panel.pcolormesh(range(len(batch_sizes)), range(len(gammas)), values, cmap="RdBu", norm=norm, alpha=0.7)
        for (gamma, b), value in heat_map.cells.items():
            panel.annotate(
                f"{value:.2f}", (batch_sizes.index(b), gammas.index(gamma)), ha="center", va="center", fontsize=6
            )
        for (x0, y0), (x1, y1) in break_even_line(heat_map.cells, gammas, batch_sizes):
            panel.plot((x0, x1), (y0, y1), color="#e69f00", linewidth=2.5, solid_capstyle="round")
        panel.set_xticks(range(len(batch_sizes)), list(map(str, batch_sizes)))
        panel.set_yticks(range(len(gammas)), list(map(str, gammas)))
        panel.grid(False)
    label(figure, axes, [heat_map.title for heat_map in shown], "batch size", "gamma")
    return figure, len(maps) - len(shown)
