"""What a report says about batch size and cost, and what charts show, from made-up cells with known results."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from crossdraft.framework.cost.curve import CostCurve, Point
from crossdraft.framework.cost.prediction import Prediction
from crossdraft.framework.report import charts
from crossdraft.framework.report.charts import ACCEPTANCE, THROUGHPUT, break_even, draw
from crossdraft.framework.report.csv_rows import summary_csv
from crossdraft.framework.report.summary import Summary
from crossdraft.framework.report.tables import summary_markdown, terminal
from crossdraft.framework.runs.metrics import CategoryMetrics, Estimate, Piece, RoundRecord, measure
from crossdraft.framework.runs.recipe import CellConfig, Recipe
from crossdraft.framework.runs.records import CellResult

#: Drafters by the verifier that the cells below pair them with.
DRAFTERS = {"token": "small-lm", "block": "small-lm", "spectr": "small-lm-iid", "specinfer": "small-lm-iid"}
MODELS = {"models": {"toy": {"sha256": "abc"}, "d": {"sha256": "def"}}, "dtype": "float32", "device": "cuda (toy)"}


def cell(batch_size: int, verifier: str, speed_up: float, temperature: float = 1.0) -> CellResult:
    """Two tokens a round from two nodes, 10 B tokens/s times the speed-up; the verifier "" is plain decoding."""
    drafter = {"name": DRAFTERS[verifier], "model": "d", "gamma": 2} if verifier else "none"
    given = {"target": "toy", "drafter": drafter, "verifier": verifier or "token", "batch_size": batch_size}
    config = CellConfig.model_validate(given | {"sampling": {"temperature": temperature}})
    tau = 1 if verifier else 0
    records = [RoundRecord(p, f"q{p}", "a", 0, i, tau, tau + 1, 2 * tau, 2 * tau, 9) for p in (0, 1) for i in range(3)]
    tokens = sum(r.emitted for r in records)
    seconds = {
        "target": tokens / (10 * batch_size * speed_up),
        "draft": 0.0,
        "verify": 0.0,
        "rest": 0.0,
        "prefill": 0.0,
    }
    result = CellResult(config, measure(records, [Piece(tokens, seconds)], 6 * tau), records=records)
    result.pieces, result.responses = [Piece(tokens, seconds)], [{"prompt_tokens": 5}] * 2
    result.provenance = MODELS
    assert result.metrics is not None
    result.metrics.speed_up = Estimate(speed_up)
    return result


def outcome(directory: Path, speed_ups: Mapping[int, Mapping[str, float]], **sampling: float) -> Summary:
    """Cells by batch size and verifier, each beside a baseline; labelled by the name of what they use."""
    recipe = Recipe.model_validate({"target": "toy", "drafters": ["small-lm"], "verifiers": ["token"]})
    results = []
    for b, pairs in speed_ups.items():
        results += [cell(b, "", 1.0, **sampling), *(cell(b, name, value, **sampling) for name, value in pairs.items())]
    return Summary(recipe, directory, results)


def words(text: str, *first: str) -> list[str]:
    """The one line that starts with these words, split."""
    (found,) = [line for row in text.splitlines() if (line := row.split())[: len(first)] == list(first)]
    return found


# -- tables -----------------------------------------------------------------------------------------------------


def test_predicted_beside_measured(tmp_path: Path) -> None:
    made = outcome(tmp_path, {1: {"token": 2.0, "block": 4.0}})
    assert "predicted" not in summary_markdown(made) and "predicted" not in summary_csv(made)

    token, block = (result.config.hash for result in made.results[1:])
    rates = {token: 18.0, block: 52.0}  # 10 % less than measured, 30 % more
    made.__dict__["predicted"] = {name: Prediction(1.0, 0.0, 0.0, rate, 1.5) for name, rate in rates.items()}
    text = terminal(made)
    assert words(text, "small-lm", "token")[-3:] == ["20.0", "18.0", "2.00"]
    assert words(text, "none")[-2:] == ["10.0", "1"]  # no prediction, no number
    assert "predicted: tok/s from the cost curve; median |error| 20 % over 2 cells" in text
    rows = {row["cell"]: row for row in csv.DictReader(io.StringIO(summary_csv(made)))}
    assert float(rows[token]["predicted_tokens_per_second"]) == 18
    assert float(rows[block]["predicted_speed_up"]) == 1.5


def test_predictions_come_from_the_curves_of_the_outcome(tmp_path: Path) -> None:
    made = outcome(tmp_path, {1: {"token": 2.0}})
    points = tuple(Point(b, w, 9, 0.1 * w, 0.0, 1.0) for b in (1, 2) for w in (1, 3))
    made.curves = [CostCurve("toy", "abc", "float32", {"device": "cuda (toy)"}, points)]
    # A row at a time: 2 tokens in 0.3 s; no curve for the drafting model, whose measured time is 0.
    assert made.predicted[made.results[1].config.hash].tokens_per_second == pytest.approx(2 / 0.3)


def test_by_category(tmp_path: Path) -> None:
    made = outcome(tmp_path, {1: {"token": 1.5, "block": 1.6}})
    assert "by category" not in summary_markdown(made)  # there is but one
    for result in made.results:
        metrics = result.metrics
        assert metrics is not None
        metrics.by_category = {
            "math": CategoryMetrics(3, Estimate(2.0, 1.9, 2.1), Estimate(1.25, 1.2, 1.3)),
            "chat": CategoryMetrics(4, Estimate(1.5, 1.4, 1.6)),
        }
    assert "by category of prompts: summary.md" in terminal(made)
    text = summary_markdown(made)
    table = text.partition("## by category, temperature 1, batch size 1\n")[2]
    assert [cell.strip() for cell in table.splitlines()[3].split("|")[1:-1]] == [
        *("small-lm", "token", "math", "3", "2.00 [1.90, 2.10]", "1.25 [1.20, 1.30]")
    ]
    assert [cell.strip() for cell in table.splitlines()[6].split("|")[1:-1]] == [
        *("small-lm", "block", "chat", "4", "1.50 [1.40, 1.60]", "")
    ]
    (row,) = [r for r in csv.DictReader(io.StringIO(summary_csv(made))) if r["verifier"] == "block"]
    assert [row[f"speed_up_math{part}"] for part in ("", "_low", "_high")] == ["1.25", "1.2", "1.3"]
    assert (row["block_efficiency_chat_high"], row["speed_up_chat"], row["prompts_chat"]) == ("1.6", "", "4")

    token, block = (result.metrics.by_category for result in made.results[1:])  # type: ignore[union-attr]
    token["math"].speed_up = None  # measured in mixed pieces
    assert "| math" in summary_markdown(made)
    block["math"].block_efficiency = Estimate(2.0)  # too few for an interval
    assert "| math" not in summary_markdown(made)


SERIES = {
    1: {"token": 1.5, "block": 1.6, "spectr": 2.0, "specinfer": 0.9},
    4: {"token": 1.2, "block": 1.3, "spectr": 1.1, "specinfer": 0.8},
    16: {"token": 1.0, "block": 0.8, "spectr": 0.7, "specinfer": 0.7},
}


def test_speed_up_by_batch_size(tmp_path: Path) -> None:
    text = terminal(outcome(tmp_path, SERIES))
    table = text.partition("speed-up by batch size, temperature 1\n")[2]
    assert words(table, "small-lm", "token")[2:] == ["2.00", "1.50", "1.50", "1.20", "1.00", "B", "≥", "16"]
    assert words(table, "small-lm", "block")[-6:] == ["1.60", "1.30", "0.80", "B", "=", "4"]
    assert words(table, "small-lm-iid", "specinfer")[-4:] == ["0.90", "0.80", "0.70", "none"]
    # 2.0 / 1.6, 1.1 / 1.3, 0.7 / 1.0: the second sequence pays at batch size 1 alone.
    assert words(table, "best", "multi-draft")[-6:] == ["1.25", "0.85", "0.70", "B", "=", "1"]
    markdown = summary_markdown(outcome(tmp_path, SERIES))
    assert "## speed-up by batch size, temperature 1\n" in markdown


def test_between_measured_batch_sizes_the_curve_decides(tmp_path: Path) -> None:
    made = outcome(tmp_path, {4: {"token": 1.2}, 16: {"token": 0.8}})
    # Seconds in B x W beyond 16: twice the tokens of plain decoding cost twice its time at 3 B = 2 x 16.
    points = tuple(Point(b, w, 9, float(max(b * w, 16)), 0.0, 1.0) for b in range(1, 17) for w in (1, 2, 3))
    made.curves = [CostCurve("toy", "abc", "float32", {"device": "cuda (toy)"}, points)]
    table = terminal(made).partition("speed-up by batch size")[2]
    assert words(table, "small-lm", "token")[-3:] == ["B", "~", "10"]


def test_one_batch_size_is_no_axis(tmp_path: Path) -> None:
    assert "by batch size" not in terminal(outcome(tmp_path, {4: SERIES[4]}))


def test_single_draft_pairs_are_not_set_against_nothing(tmp_path: Path) -> None:
    text = terminal(outcome(tmp_path, {b: {"token": 1.0} for b in (1, 2)}))
    assert "by batch size" in text and "best multi-draft  " not in text


def test_the_report_names_its_charts(tmp_path: Path) -> None:
    made = outcome(tmp_path, {1: {"token": 1.0}})
    made.charts = ["throughput.png"]
    assert "charts, beside the records: throughput.png" in terminal(made)
    assert "![throughput](throughput.png)" in summary_markdown(made)


# -- charts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("speed_ups", "expected"),
    [
        ({1: 2.0, 4: 0.5}, 2.0),  # halfway, in logarithms
        ({4: 0.5, 1: 2.0}, 2.0),
        ({1: 4.0, 4: 1.0, 16: 0.25}, 4.0),
        ({1: 2.0, 4: 0.5, 16: 2.0, 64: 0.5}, 32.0),  # the last time
        ({1: 2.0, 4: 0.5, 16: 1.0}, None),  # it pays again
        ({1: 2.0, 4: 1.0}, None),
        ({1: 0.9, 4: 0.5}, None),
    ],
)
def test_break_even(speed_ups: dict[int, float], expected: float | None) -> None:
    assert break_even(speed_ups) == (expected if expected is None else pytest.approx(expected))


@pytest.fixture
def drawn(monkeypatch: Any) -> dict[str, Any]:
    """Figures by the name of their file, as `draw` makes them, instead of the files."""
    figure = pytest.importorskip("matplotlib.figure").Figure
    figures: dict[str, Any] = {}
    monkeypatch.setattr(figure, "savefig", lambda self, file, **options: figures.update({file.name: self}))
    return figures


def lines(panel: Any, colour: str) -> list[tuple[Sequence[float], Sequence[float]]]:
    found = [line for line in panel.lines if line.get_color() == colour and line.get_linestyle() != "None"]
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in found]


def test_what_charts_show(drawn: dict[str, Any], tmp_path: Path) -> None:
    assert draw(outcome(tmp_path, SERIES)) == [ACCEPTANCE, THROUGHPUT] == list(drawn)
    acceptance, throughput = drawn.values()
    assert [panel.get_title() for panel in acceptance.axes] == [f"temperature 1, batch size {b}" for b in SERIES]
    for panel in acceptance.axes:
        # One line a verifier, here through one point: 2 tokens a round of 3 positions.
        assert [lines(panel, colour) for colour in charts._COLOURS[:4]] == [[([1.5], [2.0])]] * 4

    chain, iid = throughput.axes
    assert (chain.get_title(), iid.get_title()) == ("small-lm", "small-lm-iid")
    assert lines(chain, charts._PLAIN["color"]) == [([1, 4, 16], [pytest.approx(10 * b) for b in SERIES])]
    token, block = (lines(chain, charts._COLOURS[i]) for i in (0, 1))
    assert token == [([1, 4, 16], [pytest.approx(rate) for rate in (15, 48, 160)])]
    assert block == [([1, 4, 16], [pytest.approx(rate) for rate in (16, 52, 128)])]
    assert [text.get_text() for text in chain.texts] == [f"B ≈ {break_even({4: 1.3, 16: 0.8}):.1f}", "break-even"]
    legend = [text.get_text() for text in throughput.legends[0].get_texts()]
    assert legend == ["plain decoding", "token", "block", "spectr", "specinfer"]


def test_what_needs_no_chart(drawn: dict[str, Any], tmp_path: Path) -> None:
    assert draw(outcome(tmp_path, {1: {"token": 1.0}})) == []
    assert draw(outcome(tmp_path, {1: {}})) == []
    assert draw(outcome(tmp_path, {1: {"token": 1.0, "block": 1.0}})) == [ACCEPTANCE]
    assert draw(outcome(tmp_path, {1: {"token": 1.0}, 2: {"token": 1.0}})) == [ACCEPTANCE, THROUGHPUT]


def test_panels_of_several_temperatures(drawn: dict[str, Any], tmp_path: Path) -> None:
    made = outcome(tmp_path, {1: {"token": 1.0}, 2: {"token": 1.0}})
    made.results += outcome(tmp_path, {1: {"token": 1.0}, 2: {"token": 1.0}}, temperature=0.5).results
    draw(made)
    titles = [panel.get_title() for panel in drawn[THROUGHPUT].axes]
    assert titles == ["small-lm, temperature 1", "small-lm, temperature 0.5"]


def test_charts_are_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (name,) = draw(outcome(tmp_path, {1: {"token": 1.0, "block": 1.0}}))
    assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
