"""Batch sizes and predictions in reports of synthetic cells."""

import csv
import io
import re
from pathlib import Path
from typing import Any

import pytest
from cell_results import DRAFTERS, SERIES, outcome, withhold

from crossdraft.framework.cost.curve import CostCurve, Point
from crossdraft.framework.cost.load_run import FinishedRun
from crossdraft.framework.cost.prediction import Prediction
from crossdraft.framework.errors import UsageError
from crossdraft.framework.metrics.cell_metrics import CategoryMetrics, Estimate, StepRecord, measure
from crossdraft.framework.metrics.component_times import FAULT, TOO_FEW
from crossdraft.framework.metrics.pieces import Piece
from crossdraft.framework.report.answer import best_of
from crossdraft.framework.report.batch_sizes import batch_size_series
from crossdraft.framework.report.caveats import differences
from crossdraft.framework.report.csv_rows import summary_csv
from crossdraft.framework.report.pivot import pivot, rendered, withheld_note
from crossdraft.framework.report.selection import finished_cells
from crossdraft.framework.report.tables import summary_markdown, terminal


def words(text: str, *first: str) -> list[str]:
    """The line that starts with these words, split."""
    (result,) = [line for row in text.splitlines() if (line := row.split())[: len(first)] == list(first)]
    return result


def with_intervals(finished: Any) -> Any:
    """The same run, whose speed-ups have intervals without width."""
    for result in finished.results:
        if result.metrics.speed_up:
            value = result.metrics.speed_up.value
            result.metrics.speed_up = Estimate(value, value, value)
    return finished


def test_predicted_and_measured(tmp_path: Path) -> None:
    finished = outcome(tmp_path, {1: {"token": 2.0, "block": 4.0}})
    assert "predicted" not in summary_markdown(finished) and "predicted" not in summary_csv(finished)

    token, block = (result.config.hash for result in finished.results[1:])
    rates = {token: 18.0, block: 52.0}  # 10 % less than measured, 30 % more
    finished.__dict__["predicted"] = {name: Prediction(1.0, 0.0, 0.0, 1.0, rate, 1.5) for name, rate in rates.items()}
    text = terminal(finished)
    assert words(text, "draft-model", "token")[-3:] == ["20.0", "18.0", "2.00"]
    assert words(text, "none")[-2:] == ["10.0", "1"]  # no prediction, no number
    assert "predicted: tok/s from the cost curve; median |error| 20 % over 2 cells" in summary_markdown(finished)
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
    finished = outcome(tmp_path, SERIES)
    table = terminal(finished).partition("speed-up by batch size, temperature 1\n")[2]
    assert words(table, "draft-model", "block")[-3:] == ["unknown", "(no", "interval)"]
    text = terminal(with_intervals(finished))
    table = text.partition("speed-up by batch size, temperature 1\n")[2]
    assert words(table, "draft-model", "token")[2:] == ["2.00", "1.50", "1.50", "1.20", "1.00", "B", "≥", "16"]
    assert words(table, "draft-model", "block")[-6:] == ["1.60", "1.30", "0.80", "B", "=", "4"]
    assert words(table, "draft-model-iid", "specinfer")[-4:] == ["0.90", "0.80", "0.70", "none"]
    # 2.0 / 1.6, 1.1 / 1.3, 0.7 / 1.0: the second sequence pays at batch size 1 alone.
    gains = text.partition("best multi-draft ÷ best single-draft, temperature 1\n")[2]
    pairs = ["draft-model-iid", "×", "spectr", "draft-model", "×", "token", "1.00"]
    assert [words(gains, str(b)) for b in SERIES] == [
        [str(b), *pairs, ratio] for b, ratio in zip(SERIES, ("1.25", "0.85", "0.70"), strict=True)
    ]
    markdown = summary_markdown(outcome(tmp_path, SERIES))
    assert "## speed-up by batch size, temperature 1\n" in markdown


def test_interpolation_with_curve(tmp_path: Path) -> None:
    finished = with_intervals(outcome(tmp_path, {4: {"token": 1.2}, 16: {"token": 0.8}}))
    # Seconds in B x W beyond 16: twice the tokens of plain decoding cost twice its time at 3 B = 2 x 16.
    points = tuple(Point(b, w, 9, float(max(b * w, 16)), 0.0, 1.0) for b in range(1, 17) for w in (1, 2, 3))
    finished.curves = [CostCurve("toy", "abc", "float32", {"device": "cuda (toy)"}, points)]
    table = terminal(finished).partition("speed-up by batch size")[2]
    assert words(table, "draft-model", "token")[-3:] == ["B", "~", "10"]


def test_no_table_for_one_batch_size(tmp_path: Path) -> None:
    assert "by batch size" not in terminal(outcome(tmp_path, {4: SERIES[4]}))


def test_no_gain_without_multi_draft_pairs(tmp_path: Path) -> None:
    text = terminal(outcome(tmp_path, {b: {"token": 1.0} for b in (1, 2)}))
    assert "by batch size" in text and "best multi-draft" not in text


def test_report_names_its_charts(tmp_path: Path) -> None:
    finished = outcome(tmp_path, {1: {"token": 1.0}})
    finished.charts = ["throughput.png"]
    assert "charts, in the run directory: throughput.png" in summary_markdown(finished)
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
def test_withheld_speed_up_is_by_the_clock(tmp_path: Path, reason: str) -> None:
    """In every table it is marked; it is never in the answer."""
    finished = outcome(tmp_path, {1: {"token": 1.5, "block": 15.68}})
    withhold(finished, reason, "block")
    text = terminal(finished)
    assert words(text, "draft-model", "block")[-3:] == ["~156.8", "~15.7", "clock"]
    assert f"10 % of the steps were undisturbed by other programs; 1 of 2 speed-ups are withheld ({reason})" in text
    assert max(map(len, text.splitlines()[:-1])) <= 130
    answer = "answer: no certified pair was shown to be faster; best: draft-model × token, 1.50 × plain decoding "
    assert text.startswith(f"{answer}(temperature 1, batch size 1)\n")
    markdown = summary_markdown(finished)
    assert "| ~15.7 clock |" in " ".join(markdown.split()) and f"- {reason}: " in markdown
    (row,) = (row for row in csv.DictReader(io.StringIO(summary_csv(finished))) if row["verifier"] == "block")
    assert (row["speed_up"], row["withheld"], row["speed_up_wall"]) == ("", reason, "15.68")
    assert [best.pair for best in best_of(finished.groups)] == ["draft-model × token"]


def test_withheld_is_unknown_and_not_none(tmp_path: Path) -> None:
    """No statement follows from a speed-up that is withheld."""
    finished = with_intervals(outcome(tmp_path, SERIES))
    withhold(finished, TOO_FEW, "block")  # at all batch sizes
    withhold(finished, TOO_FEW, "token", 16)
    withhold(finished, TOO_FEW, "specinfer", 1)
    withhold(finished, TOO_FEW, "spectr", 1)
    text = terminal(finished)
    table = text.partition("speed-up by batch size, temperature 1\n")[2]
    ends = {verifier: words(table, drafter, verifier)[-4:] for verifier, drafter in DRAFTERS.items()}
    assert ends["block"][-2:] == ["unknown", "(withheld)"] and "~1.6 clock" in table
    assert ends["token"][-3:] == ["4,", "then", "withheld"]
    assert ends["specinfer"][-2:] == ["unknown", "(withheld)"]  # slower from batch size 4 on, unknown below
    assert ends["spectr"][-3:] == ["B", "=", "4"]
    gains = text.partition("best multi-draft ÷ best single-draft, temperature 1\n")[2]
    assert [words(gains, str(b))[-1] for b in SERIES] == ["clock"] * 3  # the best single-draft pair is unknown
    for verifier in DRAFTERS:
        withhold(finished, TOO_FEW, verifier)
    text = terminal(finished)
    answer = text.partition("\n\n")[0].splitlines()
    reason = "every speed-up is withheld (too few undisturbed)"
    assert answer[0] == f"answer: not sure, {reason} (temperature 1, batch size 1)"
    assert answer[1].startswith("  greatest BE: ") and "other intervals overlap), " in answer[1]
    assert answer[-3:-1] != [] and sum(" rows/tok" in line for line in answer) >= 3  # of each batch size
    assert "none" not in [line.split()[-1] for line in text.splitlines() if line] and "12 of 12 speed-ups" in text


def test_withheld_answer_is_by_the_clock(tmp_path: Path) -> None:
    """Three pieces, decoded in turns: the pair takes half of the time of plain decoding in each, give or take 10 %."""
    finished = outcome(tmp_path, {1: {"block": 1.5}})
    withhold(finished, TOO_FEW, "block")
    for result in finished.results:
        plain = result.config.is_baseline
        result.pieces = [Piece(100, {"target": 2.0 if plain else seconds}) for seconds in (0.9, 1.0, 1.1)]
    first, second, remedy = terminal(finished).partition("\n\n")[0].splitlines()
    reason = "every speed-up is withheld (too few undisturbed)"
    assert first == f"answer: not sure, {reason} (temperature 1, batch size 1)"
    assert second.startswith("  greatest BE: draft-model × block, BE ") and remedy.endswith("for more prompts")
    match = re.search(r"2\.00 \[(\d\.\d\d), (\d\.\d\d)\] × plain decoding by the clock", second)
    assert match and 1.0 < float(match[1]) < 1.8 and 2.2 < float(match[2]) < 4.0
    for result in finished.results:
        result.pieces = result.pieces[:2]
    assert "for more prompts, of which an interval requires 3 pieces\n" in terminal(finished)


def test_terminal_is_short(tmp_path: Path) -> None:
    """An answer, the tables, three remarks and the path, however much there is to remark; the rest is in summary.md."""
    finished = outcome(tmp_path, SERIES)
    for verifier in DRAFTERS:
        withhold(finished, TOO_FEW, verifier)
    finished.notes = ["one", "two", "three"]
    finished.skipped = ["a pair", "another"]
    text, markdown = terminal(finished), summary_markdown(finished)
    *_, remarks, details = text.split("\n\n")
    assert len(remarks.splitlines()) == 3 and details.splitlines() == [
        f"details and 2 more remarks: {tmp_path / 'summary.md'}"
    ]
    for line in [*remarks.splitlines(), "note: three", "skipped: another"]:
        assert f"- {line}\n" in markdown


def test_pairs_without_full_drafts_have_a_marked_efficiency(tmp_path: Path) -> None:
    finished = outcome(tmp_path, {1: {"token": 1.5, "block": 1.5}})
    (block,) = (r for r in finished.results if r.config.verifier.name == "block")
    block.metrics = measure(block.records, block.pieces, depth=10)  # a limit of 9 has no room for it
    assert block.metrics.block_efficiency is not None and block.metrics.all_cut
    text, markdown = terminal(finished), summary_markdown(finished)
    assert words(text, "draft-model", "block")[2:4] == ["2.00", "*"] and "2.00 *" not in words(
        text, "draft-model", "token"
    )
    assert "* BE of all steps: draft-model × block had no step with room for a full draft; set max_new_tokens" in text
    assert "| 2.00 * |" in " ".join(markdown.split())


def test_equalities_at_temperature_zero(tmp_path: Path) -> None:
    finished = outcome(tmp_path, {1: {"token": 1.5, "block": 1.5, "spectr": 1.5}}, temperature=0.0)
    text = summary_markdown(finished)
    assert "all draft sequences of draft-model-iid" in text and "are equal, so it drafts one chain" in text
    assert "lossless verifiers accept the same tokens by construction" in text
    assert "by construction" not in summary_markdown(outcome(tmp_path, {1: {"token": 1.5, "block": 1.5}}))


def test_growth_of_target_rows_is_explained(tmp_path: Path) -> None:
    finished = outcome(tmp_path, {b: {"token": 1.5} for b in (1, 4)})
    assert "padded to the widest draft" not in summary_markdown(finished)
    assert finished.results[-1].metrics is not None
    finished.results[-1].metrics.target_rows_per_token *= 1.1
    assert "rows/tok grows with the batch size, because the rows" in summary_markdown(finished)


def test_rates_by_batch_size_leave_out_withheld(tmp_path: Path) -> None:
    finished = outcome(tmp_path, SERIES)
    withhold(finished, TOO_FEW, "block", 4)  # one point: the others stay
    (series,) = batch_size_series(finished.results).values()
    assert not series.by_clock
    assert [sorted(series.rates(pair.results)) for pair in series.pairs] == [
        [1, 4, 16],
        [1, 16],
        [1, 4, 16],
        [1, 4, 16],
    ]


def test_pivot_of_withheld_values(tmp_path: Path) -> None:
    finished = outcome(tmp_path, {1: {"token": 1.5, "block": 1.6}})
    for verifier in ("token", "block"):
        withhold(finished, TOO_FEW, verifier)
    pairs = [c for c in finished_cells([FinishedRun(finished, {}, [])]) if not c.result.config.is_baseline]
    table = pivot(pairs, ["drafter"], ["verifier"], ["speed_up", "tokens_per_second"])
    text = rendered(table, "markdown")
    assert words(text, "|", "draft-model")[3:] == [
        "~1.5",
        "clock",
        "|",
        "~15.00",
        "|",
        "~1.6",
        "clock",
        "|",
        "~16.00",
        "|",
    ]
    assert withheld_note(table).startswith("the speed-up of 2 of 2 cells is withheld (too few undisturbed); ~: by the")
    assert not withheld_note(pivot(pairs, ["drafter"], ["verifier"], ["block_efficiency"]))
    with pytest.raises(UsageError, match=r"these cells have no 'predicted_speed_up': .*Speed-up predicted from"):
        pivot(pairs, ["drafter"], ["verifier"], ["predicted_speed_up"])
