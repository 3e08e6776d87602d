"""The kinds of charts of finished cells, and their files.

A marker stands for a verifier in all charts; a colour as well, except in panels with several drafters, where it stands
for a drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from crossdraft.commands import replacing
from crossdraft.framework.report.batch_sizes import batch_size_series
from crossdraft.framework.report.metrics_text import no_speed_up

from .draft_lengths import draft_lengths
from .pairs import drafting, pair_list, target_rows, time_shares
from .series import acceptance, by_segment, categories, pareto, speed_up, throughput
from .style import encoded, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from crossdraft.runs import CellResult, FinishedRun, Summary

    Draw = Callable[[Sequence[CellResult], str], tuple[Figure, int] | None]


@dataclass(frozen=True)
class Kind:
    """A kind of chart.

    Attributes:
        shows: a line of help.
        needs: required cells, for error messages.
        draw: returns the figure of cells at a width and the number of omitted panels or drafters; None if the required
            cells are missing.
        note: explanation beside the chart.
    """

    shows: str
    needs: str
    draw: Draw
    note: str = ""


def _block_efficiency(results: Sequence[CellResult], width: str) -> tuple[Figure, int] | None:
    axis = "block efficiency (tokens per target call)"
    return pair_list(results, width, lambda metrics: metrics.block_efficiency, axis)


def _speed_up(results: Sequence[CellResult], width: str) -> tuple[Figure, int] | None:
    return speed_up(results, width) or pair_list(
        results, width, lambda metrics: metrics.speed_up, "speed-up over plain decoding"
    )


_INTERVALS = "Bars are 95 % intervals; an arrow marks one that goes on."
KINDS = {
    "speed_up": Kind(
        "speed-up over batch size, or by pair",
        "cells with a speed-up",
        _speed_up,
        f"The dashed line at 1 is plain decoding. {_INTERVALS}",
    ),
    "throughput": Kind(
        "tokens/s over batch size, with break-even",
        "cells at several batch sizes",
        throughput,
        "The thick grey line is plain decoding, a ring is break-even.",
    ),
    "pareto": Kind(
        "throughput against speed for one user",
        "cells at several batch sizes",
        pareto,
        "A line is a pair, a point a batch size; plain decoding is the thick grey line. Up and to the right is better: "
        "no certified pair lies beyond the thin grey steps. Withheld rates are left out; if all are, the axes are by "
        "the clock, which ranks no pair.",
    ),
    "draft_length": Kind(
        "speed-up by draft length and batch size",
        "a pair that was measured with several gammas at several batch sizes",
        draft_lengths,
        "The heavy line is break-even: on its red side (below 1), drafting costs more than it gains.",
    ),
    "block_efficiency": Kind(
        "block efficiency by pair", "cells with a block efficiency", _block_efficiency, _INTERVALS
    ),
    "target_rows": Kind(
        "block efficiency against target rows",
        "cells with a block efficiency",
        target_rows,
        f"The gain of a pair for the positions that the target evaluates in a step. {_INTERVALS}",
    ),
    "acceptance": Kind(
        "acceptance by position in the draft",
        "cells that draft",
        acceptance,
        f"Pr(τ ≥ i): the share of steps in which the first i drafted tokens were all accepted. {_INTERVALS}",
    ),
    "category": Kind(
        "block efficiency by category of prompts", "prompts of several categories", categories, _INTERVALS
    ),
    "time": Kind(
        "where the time goes",
        "cells with measured times",
        time_shares,
        "Shares of the decoding time by the clock; draft includes the drafter's prefill.",
    ),
}


def kinds_of(run: FinishedRun) -> dict[str, Kind]:
    """The kinds of charts for a run: those by segment of the responses only if it has segments."""
    if not run.segments:
        return KINDS
    draw = partial(by_segment, segments=run.segments)
    return KINDS | {"segment": Kind("block efficiency by segment of responses", "steps in segments", draw, _INTERVALS)}


def reason_missing(kind: str, results: Sequence[CellResult]) -> str:
    """The reason why a chart cannot be drawn."""
    missing = no_speed_up(results)
    if missing.endswith("(--untimed)") and kind in ("speed_up", "throughput", "pareto", "draft_length", "time"):
        return missing
    if missing and kind in ("speed_up", "draft_length"):
        return missing
    if kind in ("throughput", "pareto") and batch_size_series(results):
        return missing or "no pair was measured"
    return f"it requires {KINDS[kind].needs if kind in KINDS else '--segment'}"


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
        content, omitted = chart(summary.results, KINDS[kind], "page", "png")
        if content:
            with replacing(summary.directory / name) as file:
                file.write(content)
            names.append(name)
        if omitted:
            summary.notes.append(f"{name} omits {omitted} panels; crossdraft report --format png --where draws them")
    return names


def chart(results: Sequence[CellResult], kind: Kind, width: str, form: str, inline: str = "") -> tuple[bytes, int]:
    """A chart as a file of a format, empty if the required cells are missing, and the number of omitted panels.

    ``inline``: of SVG in a page, a name that no other chart of the page has; its text is left to the viewer's fonts.
    """
    with style(inline):
        drawn = kind.draw(results, width)
        return (b"", 0) if drawn is None else (encoded(drawn[0], form), drawn[1])
