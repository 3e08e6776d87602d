"""Pivot tables: values and positions as in ``summary.csv``, and escaping."""

import csv
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from html_runs import RECIPE, finished_run, on_disk

from crossdraft.framework.cli import main as cli
from crossdraft.framework.contracts.constraint import Constraint
from crossdraft.framework.cost.load_run import FinishedRun
from crossdraft.framework.recipe.recipe import Strategy
from crossdraft.framework.report.csv_rows import row_of
from crossdraft.framework.report.pivot import hidden_keys, pivot, rendered
from crossdraft.framework.report.selection import SelectedCell, finished_cells
from crossdraft.framework.runs.labels import group_title

SOME = RECIPE | {"name": "some", "matrix": {"gamma": [2, 3], "batch_size": [1, 4]}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: Any) -> FinishedRun:
    return finished_run(tmp_path_factory.mktemp("some"), SOME, tokens=24)


def pairs(run: FinishedRun, *place: str) -> list[SelectedCell]:
    return [cell for cell in finished_cells([run], place) if not cell.result.config.is_baseline]


def rows(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text)))


def test_values_and_positions(run: FinishedRun) -> None:
    cells = pairs(run)
    table = pivot(cells, ["drafter", "gamma"], ["verifier", "batch_size"], ["speed_up"])
    header, *body = rows(rendered(table, "csv", intervals=False))
    assert header[:4] == ["drafter", "gamma", "token, batch size 1", "block, batch size 1"]
    assert [row[:2] for row in body][:2] == [["prompt-lookup", "2"], ["prompt-lookup", "3"]]  # gamma occurs once
    results = {
        (*row[:2], name): value for row in body for name, value in zip(header[2:], row[2:], strict=True) if value
    }
    assert len(results) == len(cells) == 20
    for cell in cells:
        config = cell.result.config
        key = (
            config.drafter.name,
            str(config.drafter.config["gamma"]),
            f"{config.verifier.name}, batch size {config.batch_size}",
        )
        assert cell.result.metrics is not None and cell.result.metrics.speed_up is not None
        assert float(results[key]) == cell.result.metrics.speed_up.value


def test_intervals_and_several_values(run: FinishedRun) -> None:
    cells = pairs(run, "batch_size=1", "gamma=2", "drafter=draft-model")
    table = pivot(cells, ["drafter"], ["verifier"], ["block_efficiency", "acceptance_1"])
    header, (name, *numbers) = rows(rendered(table, "csv"))
    ends = ["", "_low", "_high"]
    expected = [f"{rule}, block efficiency{end}" for rule in ("token", "block") for end in ends]
    expected.insert(3, "token, acceptance 1")
    assert header == ["drafter", *expected, "block, acceptance 1"] and name == "draft-model gamma=2"
    row = row_of(cells[0].result, None)
    keys = ["block_efficiency", "block_efficiency_low", "block_efficiency_high", "acceptance_1"]
    assert [float(number) for number in numbers[:4]] == [row[key] for key in keys]
    text = rendered(table, "markdown", digits=3)
    low, value, high = (f"{row[key]:.3f}" for key in (keys[1], keys[0], keys[2]))
    assert f" {value} [{low}, {high}] " in text and f" {row['acceptance_1']:.3f} |" in text
    assert "[" not in rendered(table, "markdown", intervals=False)


def test_category_with_the_name_of_another_column(run: FinishedRun) -> None:
    """It does not replace the interval of all prompts."""
    (cell, *_) = pairs(run, "batch_size=1", "gamma=2", "drafter=draft-model")
    metrics, before = cell.result.metrics, row_of(cell.result, None)
    assert metrics is not None
    by_category = dict(zip(("low", "wall", "chat"), metrics.by_category.values(), strict=True))
    changed = replace(cell.result, metrics=replace(metrics, by_category=by_category | {"chat_low": by_category["low"]}))
    row = row_of(changed, None)
    keys = ("block_efficiency_low", "speed_up_wall", "speed_up_low")
    assert [row[key] for key in keys] == [before[key] for key in keys]
    names = ("category_low", "category_wall", "chat", "category_chat_low")
    assert [row[f"block_efficiency_{name}"] for name in names] == [
        numbers.block_efficiency.value for numbers in changed.metrics.by_category.values()
    ]


def test_engine_of_cells(run: FinishedRun) -> None:
    """By its name, with crossdraft for the loop of this process."""
    (cell, *_) = pairs(run, "engine=crossdraft")
    config = cell.result.config.model_copy(update={"engine": Strategy(name="vllm", config={"port": 1})})
    served = replace(cell, result=replace(cell.result, config=config))
    assert (cell.value("engine"), served.value("engine")) == ("crossdraft", "vllm")


def test_groups_with_alike_constraints_have_different_titles(run: FinishedRun) -> None:
    """Their titles are shortened."""
    (cell, *_) = pairs(run)
    constraints = [Constraint(regex="a" * 60 + end) for end in "bc"]
    configs = [cell.result.config.model_copy(update={"constraint": constraint}) for constraint in constraints]
    titles = [group_title(config, configs) for config in configs]
    assert [title[-4:] for title in titles] == [" (1)", " (2)"] and titles[0][:-4] == titles[1][:-4]


def test_labels_are_escaped(tmp_path: Path) -> None:
    """In LaTeX and in Markdown."""
    labels = ["[x] 50 % of_a & b \\\\ $p$ {q} ~^#", "a|b"]
    drafters = [{"name": "prompt-lookup", "gamma": g, "label": label} for g, label in enumerate(labels, 2)]
    run = finished_run(
        tmp_path, RECIPE | {"drafters": drafters, "verifiers": ["token", "block"], "matrix": {}, "exclude": []}, 12
    )
    table = pivot(pairs(run), ["drafter"], ["verifier"], ["block_efficiency"])
    lines = rendered(table, "latex").splitlines()
    assert lines[0] == r"% \usepackage{booktabs}" and lines[1] == r"\begin{tabular}{lrr}"
    assert {r"\toprule", r"\midrule", r"\bottomrule"} <= {line.strip() for line in lines}
    (row,) = [line for line in lines if "50" in line]
    assert row.startswith(
        r"{[}x] 50 \% of\_a \& b \textbackslash{}\textbackslash{} \$p\$ \{q\} \textasciitilde{}\^{}\#"
    )
    assert row.replace(r"\&", "").count("&") == 2 and row.endswith(r"\\")
    (row,) = [line for line in rendered(table, "markdown").splitlines() if "a\\|b" in line]
    assert row.replace("\\|", "").count("|") == 4


def test_invalid_tables(run: FinishedRun, tmp_path: Path, capsys: Any) -> None:
    directory = on_disk(FinishedRun(run.summary, {}, []))

    def refused(*arguments: str) -> str:
        assert cli.main(["report", str(directory), "--rows", "drafter", *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1
        return err.removeprefix("crossdraft: error: ").strip()

    crowded = refused("--cols", "verifier", "--where", "gamma=2")
    assert crowded == (
        "several cells have the same place in the table; they differ in batch_size: add batch_size to --rows or "
        "--cols, or select with --where batch_size=1"
    )
    assert "did you mean 'verifier'" in refused("--rows", "verifer")
    assert "did you mean 'speed_up'" in refused("--rows", "drafter,gamma,batch_size", "--value", "sped_up")
    assert refused("--cols", "drafter").startswith("drafter occurs twice in --rows and --cols")
    assert refused("--where", "drafter=none") == (
        "no cells to show: --where excludes all of them (plain decoding requires --baseline)"
    )
    arguments = ["--cols", "verifier", "--where", "gamma=2", "--where", "batch_size=4"]
    out = tmp_path / "table.tex"
    assert cli.main(["report", str(directory), *arguments, "--format", "latex", "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"wrote {out}\n" and "tabular" in out.read_text(encoding="utf-8")
    plain = ["--value", "tokens_per_second", "--baseline", "--format", "csv"]
    assert cli.main(["report", str(directory), *arguments, *plain]) == 0
    header, *body = rows(capsys.readouterr().out)
    assert (
        header == ["drafter", "plain decoding", "token", "block", "spectr"]
        and body[0][0] == "none"
        and float(body[0][1]) > 0
    )
    # The title lists batch sizes that the table does not show.
    cells = pairs(run, "gamma=2", "batch_size=1") + pairs(run, "gamma=3", "batch_size=4")
    assert hidden_keys(pivot(cells, ["drafter"], ["verifier"], ["speed_up"]), cells) == ["batch_size"]
    assert hidden_keys(pivot(cells, ["drafter"], ["verifier", "batch_size"], ["speed_up"]), cells) == []
    # The same run twice: directories cannot distinguish them.
    assert cli.main(["report", str(directory), str(directory), *arguments]) == 2
    assert "the same cell is in the table twice; give each run once" in capsys.readouterr().err
