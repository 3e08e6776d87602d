"""The charts of the page: those of `charts.KINDS` as SVG in the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..charts.charts import chart, kinds_of, reason_missing
from ..charts.svg import inline_svg

if TYPE_CHECKING:
    from crossdraft.runs import FinishedRun

RUNS = Sequence[tuple[str, "FinishedRun"]]


@dataclass(frozen=True)
class Panel:
    """Charts of one kind.

    Attributes:
        figures: title of the run, description and SVG of each chart.
    """

    title: str
    note: str
    figures: list[tuple[str, str, str]]


def panels_of(runs: RUNS) -> tuple[list[Panel], list[tuple[str, str]]]:
    """The panels that have data, and the title of each other one with the reason why it is left out."""
    results = [result for _, run in runs for result in run.summary.results]
    kinds = {name: kind for _, run in runs for name, kind in kinds_of(run).items()}
    panels, absent = [], []
    for name, kind in kinds.items():
        title = kind.shows[0].upper() + kind.shows[1:]
        figures, omitted = [], 0
        for run_title, run in runs:
            words = f"{title}, {run_title}"
            content, left_out = chart(run.summary.results, kinds_of(run).get(name, kind), "column", "svg", words)
            omitted += left_out
            if content:
                figures.append((run_title if len(runs) > 1 else "", words, inline_svg(content.decode("utf-8"))))
        if figures:
            more = f" {omitted} more are left out; crossdraft report --where selects cells." if omitted else ""
            panels.append(Panel(title, kind.note + more, figures))
        else:
            absent.append((title, reason_missing(name, results)))
    return panels, absent
