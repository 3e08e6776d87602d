"""What a finished run writes beside its records: the curves it is predicted from, tables, charts."""

from __future__ import annotations

from ..cost.curve import stored_curves
from ..cost.finished_cells import used_curves
from ..runs.records import Outcome
from ..runs.run_directory import RunDirectory
from .charts.charts import draw
from .csv_rows import summary_csv
from .summary import Summary
from .tables import summary_markdown


def write_summary(outcome: Outcome) -> Summary:
    """Predict from the curves kept on this machine, write ``summary.csv`` and ``summary.md``, and draw.

    A disk that takes no more is told in `Outcome.stopped`: the table can be shown all the same.
    """
    directory = RunDirectory(outcome.directory)
    summary = Summary.of(outcome, used_curves(outcome.results, stored_curves()))
    try:
        # Kept with the run: later reports predict from the same curves, on any machine.
        directory.write_json("cost_curves.json", {"curves": [curve.to_json() for curve in summary.curves]})
        directory.write_text("summary.csv", summary_csv(summary))
        directory.write_text("summary.md", summary_markdown(summary))
        try:  # last, and never at the price of a table
            summary.charts = draw(summary)
        except Exception as error:
            summary.notes.append(f"no charts: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
        if summary.charts or summary.notes:
            directory.write_text("summary.md", summary_markdown(summary))
    except OSError as error:
        summary.stopped = f"cannot write to {directory.path}: {error.strerror or error}"
    return summary
