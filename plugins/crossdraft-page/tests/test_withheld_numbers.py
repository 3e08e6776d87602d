"""Numbers of the page and of charts that are withheld, marked, or by the clock."""

from pathlib import Path

import pytest
from cell_results import DRAFTERS, SERIES, outcome, withhold
from crossdraft_page.charts.charts import KINDS
from crossdraft_page.charts.style import style
from crossdraft_page.html.cell_table import CellRow, table_of
from crossdraft_page.html.panels import panels_of

from crossdraft.framework.cost.load_run import FinishedRun
from crossdraft.framework.cost.summary import Summary
from crossdraft.framework.metrics.cell_metrics import measure
from crossdraft.framework.metrics.component_times import FAULT, TOO_FEW


def block_row(finished: Summary) -> CellRow:
    (row,) = [row for row in table_of([("run", FinishedRun(finished, {}, []))]).rows if row.verifier == "block"]
    return row


@pytest.mark.parametrize("reason", [TOO_FEW, FAULT])
def test_withheld_speed_up_is_by_the_clock(tmp_path: Path, reason: str) -> None:
    finished = outcome(tmp_path, {1: {"token": 1.5, "block": 15.68}})
    withhold(finished, reason, "block")
    values = block_row(finished).values
    assert [(v.text, v.order, v.clock) for v in (values["speed_up"], values["rate"])] == [
        ("~15.7 clock", -1.0, True),
        ("~156.8", -1.0, True),
    ]


def test_pairs_without_full_drafts_have_a_marked_efficiency(tmp_path: Path) -> None:
    finished = outcome(tmp_path, {1: {"token": 1.5, "block": 1.5}})
    (block,) = (r for r in finished.results if r.config.verifier.name == "block")
    block.metrics = measure(block.records, block.pieces, depth=10)  # a limit of 9 has no room for it
    assert block_row(finished).values["block_efficiency"].text == "2.00 *"


def test_no_chart_of_estimates_has_withheld_numbers(tmp_path: Path) -> None:
    """Numbers by the clock are labelled, and a chart that is left out has the true reason."""
    finished = outcome(tmp_path, SERIES)
    for verifier in DRAFTERS:
        withhold(finished, TOO_FEW, verifier)
    _, absent = panels_of([("run", FinishedRun(finished, {}, []))])
    assert dict(absent)["Speed-up over batch size, or by pair"] == "every speed-up is withheld (too few undisturbed)"
    with style():
        assert KINDS["speed_up"].draw(finished.results, "page") is None
        for kind in ("throughput", "pareto"):
            drawn = KINDS[kind].draw(finished.results, "page")
            assert drawn is not None
            assert all("by the clock" in panel.texts[0].get_text() for panel in drawn[0].axes)
            assert not any(line.get_drawstyle() == "steps-pre" for panel in drawn[0].axes for line in panel.lines)
