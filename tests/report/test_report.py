"""Batch sizes and predictions in reports of synthetic cells."""

import csv
import io
from pathlib import Path

import pytest
from cell_results import SERIES, outcome

from crossdraft.framework.cost.curve import CostCurve, Point
from crossdraft.framework.cost.prediction import Prediction
from crossdraft.framework.metrics.cell_metrics import CategoryMetrics, Estimate, StepRecord
from crossdraft.framework.metrics.component_times import FAULT, TOO_FEW
from crossdraft.framework.report.caveats import differences
from crossdraft.framework.report.csv_rows import summary_csv
from crossdraft.framework.report.html.cell_table import best_of, table_of
from crossdraft.framework.report.load_run import FinishedRun
from crossdraft.framework.report.tables import summary_markdown, terminal


def words(text: str, *first: str) -> list[str]:
    """The line that starts with these words, split."""
    (result,) = [line for row in text.splitlines() if (line := row.split())[: len(first)] == list(first)]
    return result


def test_predicted_and_measured(tmp_path: Path) -> None:
    finished = outcome(tmp_path, {1: {"token": 2.0, "block": 4.0}})
    assert "predicted" not in summary_markdown(finished) and "predicted" not in summary_csv(finished)

    token, block = (result.config.hash for result in finished.results[1:])
    rates = {token: 18.0, block: 52.0}  # 10 % less than measured, 30 % more
    finished.__dict__["predicted"] = {name: Prediction(1.0, 0.0, 0.0, 1.0, rate, 1.5) for name, rate in rates.items()}
    text = terminal(finished)
    assert words(text, "draft-model", "token")[-3:] == ["20.0", "18.0", "2.00"]
    assert words(text, "none")[-2:] == ["10.0", "1"]  # no prediction, no number
    assert "predicted: tok/s from the cost curve; median |error| 20 % over 2 cells" in text
    rows = {row["cell"]: row for row in csv.DictReader(io.StringIO(summary_csv(finished)))}
    assert float(rows[token]["predicted_tokens_per_second"]) == 18
    assert float(rows[block]["predicted_speed_up"]) == 1.5


def test_predictions_come_from_curves_of_outcome(tmp_path: Path) -> None:
    finished = outcome(tmp_path, {1: {"token": 2.0}})
    points = tuple(Point(b, w, 9, 0.1 * w, 0.0, 1.0) for b in (1, 2) for w in (1, 3))
    finished.curves = [CostCurve("toy", "abc", "float32", {"device": "cuda (toy)"}, points)]
    # A row at a time: 2 tokens in 0.3 s; no curve for the draft model, whose measured time is 0.
    assert finished.predicted[finished.results[1].config.hash].tokens_per_second == pytest.approx(2 / 0.3)


def test_by_category(tmp_path: Path) -> None:
    finished = outcome(tmp_path, {1: {"token": 1.5, "block": 1.6}})
    assert "by category" not in summary_markdown(finished)  # there is but one
    for result in finished.results:
        metrics = result.metrics
        assert metrics is not None
        metrics.by_category = {
            "math": CategoryMetrics(3, Estimate(2.0, 1.9, 2.1), Estimate(1.25, 1.2, 1.3)),
            "chat": CategoryMetrics(4, Estimate(1.5, 1.4, 1.6)),
        }
    assert "by category of prompts: see summary.md" in terminal(finished)
    text = summary_markdown(finished)
    table = text.partition("## by category, temperature 1, batch size 1\n")[2]
    assert [cell.strip() for cell in table.splitlines()[3].split("|")[1:-1]] == [
        *("draft-model", "token", "math", "3", "2.00 [1.90, 2.10]", "1.25 [1.20, 1.30]")
    ]
    assert [cell.strip() for cell in table.splitlines()[6].split("|")[1:-1]] == [
        *("draft-model", "block", "chat", "4", "1.50 [1.40, 1.60]", "")
    ]
    (row,) = [r for r in csv.DictReader(io.StringIO(summary_csv(finished))) if r["verifier"] == "block"]
    assert [row[f"speed_up_math{part}"] for part in ("", "_low", "_high")] == ["1.25", "1.2", "1.3"]
    assert (row["block_efficiency_chat_high"], row["speed_up_chat"], row["prompts_chat"]) == ("1.6", "", "4")

    token, block = (result.metrics.by_category for result in finished.results[1:])  # type: ignore[union-attr]
    token["math"].speed_up = None  # measured in mixed pieces
    assert "| math" in summary_markdown(finished)
    block["math"].block_efficiency = Estimate(2.0)  # too few for an interval
    assert "| math" not in summary_markdown(finished)


def test_speed_up_by_batch_size(tmp_path: Path) -> None:
    text = terminal(outcome(tmp_path, SERIES))
    table = text.partition("speed-up by batch size, temperature 1\n")[2]
    assert words(table, "draft-model", "token")[2:] == ["2.00", "1.50", "1.50", "1.20", "1.00", "B", "≥", "16"]
    assert words(table, "draft-model", "block")[-6:] == ["1.60", "1.30", "0.80", "B", "=", "4"]
    assert words(table, "draft-model-iid", "specinfer")[-4:] == ["0.90", "0.80", "0.70", "none"]
    # 2.0 / 1.6, 1.1 / 1.3, 0.7 / 1.0: the second sequence pays at batch size 1 alone.
    assert words(table, "best", "multi-draft")[-6:] == ["1.25", "0.85", "0.70", "B", "=", "1"]
    markdown = summary_markdown(outcome(tmp_path, SERIES))
    assert "## speed-up by batch size, temperature 1\n" in markdown


def test_interpolation_with_curve(tmp_path: Path) -> None:
    finished = outcome(tmp_path, {4: {"token": 1.2}, 16: {"token": 0.8}})
    # Seconds in B x W beyond 16: twice the tokens of plain decoding cost twice its time at 3 B = 2 x 16.
    points = tuple(Point(b, w, 9, float(max(b * w, 16)), 0.0, 1.0) for b in range(1, 17) for w in (1, 2, 3))
    finished.curves = [CostCurve("toy", "abc", "float32", {"device": "cuda (toy)"}, points)]
    table = terminal(finished).partition("speed-up by batch size")[2]
    assert words(table, "draft-model", "token")[-3:] == ["B", "~", "10"]


def test_no_table_for_one_batch_size(tmp_path: Path) -> None:
    assert "by batch size" not in terminal(outcome(tmp_path, {4: SERIES[4]}))


def test_no_gain_without_multi_draft_pairs(tmp_path: Path) -> None:
    text = terminal(outcome(tmp_path, {b: {"token": 1.0} for b in (1, 2)}))
    assert "by batch size" in text and "best multi-draft  " not in text


def test_report_names_its_charts(tmp_path: Path) -> None:
    finished = outcome(tmp_path, {1: {"token": 1.0}})
    finished.charts = ["throughput.png"]
    assert "charts, in the run directory: throughput.png" in terminal(finished)
    assert "![throughput](throughput.png)" in summary_markdown(finished)


def test_differences_are_merged(tmp_path: Path) -> None:
    """Equal differences at several batch sizes share a line; pairs without a difference are counted."""
    finished = outcome(tmp_path, {b: {"token": 1.0, "block": 1.0} for b in (1, 4)})
    assert differences(finished) == ["2 pairs of verifiers have the same BE on the same prompts"]
    for result in finished.results:  # block emits one token more in one step of the second prompt
        if result.config.verifier.name == "block":
            last = result.records[-1]
            result.records[-1] = StepRecord(**{**vars(last), "tau": last.tau + 1, "emitted": last.emitted + 1})
    (line,) = differences(finished)
    assert line.startswith(
        "temperature 1, batch sizes 1, 4, draft-model: BE of block − token, on the same prompts: +0.17"
    )
    finished.results[-1].records[0] = finished.results[-1].records[-1]  # at batch size 4, in another one, too
    assert [line.partition(",")[2][:14] for line in differences(finished)] == [" batch size 1,", " batch size 4,"]


@pytest.mark.parametrize("reason", [TOO_FEW, FAULT])
def test_withheld_speed_ups(tmp_path: Path, reason: str) -> None:
    finished = outcome(tmp_path, {1: {"token": 1.5, "block": 15.68}})
    (block,) = (r.metrics for r in finished.results if r.config.verifier.name == "block" and r.metrics)
    block.speed_up, block.withheld, block.speed_up_wall = None, reason, 15.68
    for result in finished.results:
        assert result.metrics is not None
        result.metrics.undisturbed = 0.1
    text = terminal(finished)
    (line,) = (line for line in text.splitlines() if line.split()[1:2] == ["block"])
    assert line.split()[-2:] == f"— ({reason})".split()[-2:] and "15.68" not in text and " — " in line
    assert f"— ({reason}): " in text and ": 10 % of the steps were undisturbed" in text
    assert max(map(len, text.splitlines())) <= 130
    markdown = summary_markdown(finished)
    assert f"| — ({reason}) |" in markdown and "15.68" not in markdown
    (row,) = (row for row in csv.DictReader(io.StringIO(summary_csv(finished))) if row["verifier"] == "block")
    assert (row["speed_up"], row["withheld"], row["speed_up_wall"]) == ("", reason, "15.68")
    run = FinishedRun(finished, {}, [])
    (row,) = [row for row in table_of([("run", run)]).rows if row.verifier == "block"]
    assert row.values["speed_up"].text == f"— ({reason})" and row.values["rate"].text == ""
    assert [best.verifier for best in best_of([("run", run)])] == ["token"]
