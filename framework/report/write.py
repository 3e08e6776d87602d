"""What a finished run writes beside its records: the curves it is predicted from, charts, tables."""

from __future__ import annotations

from ..cost.curve import stored_curves
from ..cost.finished_cells import used_curves
from ..runs.records import Outcome, RunDirectory
from .charts import draw
from .csv_rows import summary_csv
from .summary import Summary
from .tables import summary_markdown


def write_summary(outcome: Outcome) -> Summary:
    """Predict from the curves kept on this machine, draw, and write ``summary.csv`` and ``summary.md``."""
    directory = RunDirectory(outcome.directory)
    summary = Summary.of(outcome, used_curves(outcome.results, stored_curves()))
    # Kept with the run: later reports predict from the same curves, on any machine.
    directory.write_json("cost_curves.json", {"curves": [curve.to_json() for curve in summary.curves]})
    try:
        summary.charts = draw(summary)
    except ImportError:
        summary.notes.append("charts need matplotlib: pip install 'crossdraft[plots]'")
    directory.write_text("summary.csv", summary_csv(summary))
    directory.write_text("summary.md", summary_markdown(summary))
    return summary
