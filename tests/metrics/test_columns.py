"""Descriptions of the columns of a run: complete, and shared by README and page."""

import csv
import io
from pathlib import Path

from html_runs import RECIPE, finished_run

from crossdraft.framework.cost.prediction import Prediction
from crossdraft.framework.metrics.cell_metrics import SERVED
from crossdraft.framework.metrics.columns import ENDS, QUANTITIES, STEP_COLUMNS, quantity_of
from crossdraft.framework.report.csv_rows import summary_csv
from crossdraft.framework.runs import run_directory
from crossdraft.framework.runs.readme import readme


def test_every_column_of_summary_has_description(tmp_path: Path) -> None:
    run = finished_run(tmp_path, RECIPE | {"matrix": {"gamma": [2], "batch_size": [1]}}, tokens=12)
    summary = run.summary
    summary.__dict__["predicted"] = {r.config.hash: Prediction(1.0, 0.0, 0.0, 1.0, 9.0, 1.5) for r in summary.results}
    columns = next(csv.reader(io.StringIO(summary_csv(summary))))
    assert len(columns) > 60 and not [column for column in columns if quantity_of(column) is None]
    written = {quantity_of(column) for column in columns} | {quantity_of(name) for name in SERVED}
    assert written == set(QUANTITIES), "descriptions of columns that no run writes"
    for quantity in QUANTITIES:  # columns of an interval exist only for estimates
        if "<" not in quantity.name and quantity.name not in SERVED:
            assert quantity.estimate == all(quantity.name + end in columns for end in ENDS)
    assert quantity_of("trust_remote_code") is None  # of older versions


def test_readme_describes_every_column() -> None:
    run = finished_run(Path("some"), RECIPE | {"matrix": {}, "question": "which\n| one?"}, tokens=12)
    text = readme("some-0123456789ab", run.summary.recipe, 6, 48)
    lines = text.splitlines()
    assert lines[0] == "# some-0123456789ab" and lines[2] == "which | one?"
    assert "6 cells on 48 prompts of builtin, target org/name." in text
    columns = lines[lines.index("## Columns of summary.csv") : lines.index("## Columns of steps.parquet")]
    for quantity in QUANTITIES:
        (line,) = [line for line in columns if line.startswith(f"| `{quantity.name}`")]
        assert quantity.meaning in line and ("_low" in line) == quantity.estimate
    for column in run_directory._STEPS.names:
        meaning = STEP_COLUMNS[column].replace("|", "\\|")
        assert any(line.startswith(f"| `{column}`") and meaning in line for line in lines)
    assert set(run_directory._STEPS.names) == set(STEP_COLUMNS)
