"""The charts of finished cells: what kinds there are, and their files.

Charts know finished results only, like `tables`. A marker is one verifier in all of them; a colour is one, too, but
where drafters share a panel, in which it is one drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import UsageError, printable
from .pairs import drafting, pair_list, target_rows
from .series import acceptance, speed_up, throughput
from .style import save, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ...runs.records import CellResult
    from ..summary import Summary

    Draw = Callable[[Sequence[CellResult], str], tuple[Figure, int] | None]


@dataclass(frozen=True)
class Kind:
    """A kind of chart.

    Attributes:
        shows: a line of help.
        needs: what cells it cannot do without, for the sentence that says so.
        draw: the figure of some cells at a width, and how many panels or drafters had no room in it; None where they
            are not what it needs.
    """

    shows: str
    needs: str
    draw: Draw


def _block_efficiency(results: Sequence[CellResult], width: str) -> tuple[Figure, int] | None:
    axis = "block efficiency (tokens per target call)"
    return pair_list(results, width, lambda metrics: metrics.block_efficiency, axis)


def _speed_up(results: Sequence[CellResult], width: str) -> tuple[Figure, int] | None:
    return speed_up(results, width) or pair_list(
        results, width, lambda metrics: metrics.speed_up, "speed-up over plain decoding"
    )


KINDS = {
    "block_efficiency": Kind("block efficiency by pair", "cells with a block efficiency", _block_efficiency),
    "target_rows": Kind("block efficiency against target rows", "cells with a block efficiency", target_rows),
    "speed_up": Kind("speed-up over batch size, or by pair", "cells with a speed-up", _speed_up),
    "throughput": Kind("tokens/s over batch size, with break-even", "cells at several batch sizes", throughput),
    "acceptance": Kind("acceptance by position in the draft", "cells that draft", acceptance),
}


def draw(summary: Summary) -> list[str]:
    """Draw what a run has to show as PNG files beside its records, and return their names.

    That is block efficiency by pair and against target rows, if there are several pairs or batch sizes; speed-up and
    tokens/s over batch size, if there are several. What had no room is noted in the summary.
    """
    pairs = drafting(summary.results)
    several = len({r.config.batch_size for r in pairs}) > 1
    kinds = ["speed_up", "throughput"] if several else []
    if several or len(pairs) > 1:
        kinds = ["block_efficiency", "target_rows", *kinds]
    names = []
    for kind in kinds:
        found = draw_to(summary.results, kind, "page", [summary.directory / f"{kind}.png"])
        if found is not None:
            names.append(f"{kind}.png")
            if found:
                summary.notes.append(f"{kind}.png leaves out {found} panels; crossdraft plot --where draws others")
    return names


def draw_to(results: Sequence[CellResult], kind: str, width: str, files: Sequence[Path]) -> int | None:
    """Draw a chart into files of the formats that their names end with.

    Returns:
        how many panels or drafters had no room; None where the cells are not what the kind needs: nothing was drawn.

    Raises:
        UsageError: a file cannot be written.
    """
    with style():
        drawn = KINDS[kind].draw(results, width)
        if drawn is None:
            return None
        for file in files:
            try:
                save(drawn[0], file)
            except OSError as error:
                raise UsageError(f"cannot write {printable(str(file))}: {error.strerror or error}") from None
        return drawn[1]
