"""Write the summary of a run: cost curves and tables."""

from __future__ import annotations

from ..cost.curve import stored_curves
from ..cost.finished_cells import used_curves
from ..cost.summary import Summary
from ..plugins import notify
from ..runs.run_directory import RunDirectory
from .csv_rows import summary_csv
from .tables import summary_markdown


def write_summary(summary: Summary) -> Summary:
    """Write ``summary.csv``, ``summary.md`` and files of plug-ins, with predictions from this machine's cost curves.

    If the files cannot be written, `Summary.stopped` is set.
    """
    directory = RunDirectory(summary.directory)
    summary.curves = used_curves(summary.results, stored_curves())
    try:
        # Stored with the run, so that later reports use the same curves on any machine.
        directory.write_json("cost_curves.json", {"curves": [curve.to_json() for curve in summary.curves]})
        directory.write_text("summary.csv", summary_csv(summary))
        directory.write_text("summary.md", summary_markdown(summary))
        notify("crossdraft_summary_written", summary=summary)  # last, so that an error does not affect the tables
        if summary.charts or summary.notes:
            directory.write_text("summary.md", summary_markdown(summary))
    except OSError as error:
        summary.stopped = f"cannot write to {directory.path}: {error.strerror or error}"
    return summary
