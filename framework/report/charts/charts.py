"""The kinds of charts of finished cells, and their files.

A marker stands for a verifier in all charts; a colour as well, except in panels with several drafters, where it stands
for a drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...util.output_files import replacing
from .pairs import drafting, pair_list, target_rows
from .series import acceptance, speed_up, throughput
from .style import encoded, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ...cost.summary import Summary
    from ...runs.records import CellResult

    Draw = Callable[[Sequence[CellResult], str], tuple[Figure, int] | None]


@dataclass(frozen=True)
class Kind:
    """A kind of chart.

    Attributes:
        shows: a line of help.
        needs: required cells, for error messages.
        draw: returns the figure of cells at a width and the number of omitted panels or drafters; None if the required
            cells are missing.
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
    """Draw the charts of a run as PNG files in its directory, and return their names.

    Block efficiency by pair and against target rows if there are several pairs or batch sizes; speed-up and tokens/s if
    there are several batch sizes. Omitted panels are noted in the summary.
    """
    pairs = drafting(summary.results)
    varies = len({r.config.batch_size for r in pairs}) > 1
    kinds = ["speed_up", "throughput"] if varies else []
    if varies or len(pairs) > 1:
        kinds = ["block_efficiency", "target_rows", *kinds]
    names = []
    for kind in kinds:
        name = f"{kind}.png"
        content, omitted = chart(summary.results, kind, "page", "png")
        if content:
            with replacing(summary.directory / name) as file:
                file.write(content)
            names.append(name)
        if omitted:
            summary.notes.append(f"{name} omits {omitted} panels; crossdraft report --format png --where draws them")
    return names


def chart(results: Sequence[CellResult], kind: str, width: str, form: str) -> tuple[bytes, int]:
    """A chart as a file of a format, empty if the required cells are missing, and the number of omitted panels."""
    with style():
        drawn = KINDS[kind].draw(results, width)
        return (b"", 0) if drawn is None else (encoded(drawn[0], form), drawn[1])
