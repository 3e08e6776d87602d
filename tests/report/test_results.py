"""``crossdraft report``: the page of synthetic runs, and invalid directories."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crossdraft.framework.bench.matrix import expand
from crossdraft.framework.cli import main as cli
from crossdraft.framework.cost.summary import Summary
from crossdraft.framework.metrics.cell_metrics import StepRecord, measure
from crossdraft.framework.metrics.intervals import Estimate
from crossdraft.framework.metrics.pieces import Piece, wall_ratio
from crossdraft.framework.recipe import builtin_recipes
from crossdraft.framework.recipe.recipe import Recipe
from crossdraft.framework.report.csv_rows import summary_csv
from crossdraft.framework.report.tables import summary_markdown
from crossdraft.framework.runs.records import CellResult
from crossdraft.framework.runs.run_directory import RunDirectory

#: Tokens emitted by each verifier in each of two steps, and their seconds.
EMITTED = {"none": (1, 1), "greedy": (2, 2), "token": (2, 2), "block": (3, 2), "spectr": (3, 3)}
SECONDS = {"none": 2.0, "greedy": 2.0, "token": 2.0, "block": 2.5, "spectr": 2.0}
SHA256 = "0123456789abcdef" * 4
MADE = Callable[..., Path]


def finished(config: Any) -> CellResult:
    rule = "none" if config.is_baseline else config.verifier.name
    tokens = EMITTED[rule]
    records = [StepRecord(0, "q1", "maths", 0, i, n - 1, n, 3, 3, 9) for i, n in enumerate(tokens)]
    phases = {"prefill": 1.0, "draft": 0.0, "target": SECONDS[rule], "verify": 0.0, "rest": 0.0}
    pieces = [Piece(sum(tokens), phases)]
    output = [{"question_id": "q1", "turn": 0, "tokens": [5] * sum(tokens), "prompt_tokens": 5}]
    provenance = {"device": "cpu (a processor)", "dtype": "float32", "models": {"org/name": {"sha256": SHA256}}}
    result = CellResult(
        config, measure(records, pieces), None, "", records, output, pieces, provenance, "2026-03-01T12:00:00"
    )
    ratio = wall_ratio(pieces, [Piece(2, phases | {"target": 2.0})])
    assert result.metrics is not None and ratio is not None
    result.metrics.speed_up = Estimate(ratio)
    return result


@pytest.fixture
def make_run(tmp_path: Path) -> MADE:
    """``make_run(name, failing="block", ...)``: a run directory; further options are keys of its recipe."""

    def make(name: str = "mine", failing: str = "", **options: Any) -> Path:
        data = {
            "name": name,
            "question": "which rule?",
            "target": "org/name",
            "drafters": [{"name": "prompt-lookup", "gamma": 3}],
            "verifiers": ["token", "block"],
        }
        recipe = Recipe.model_validate(data | options)
        expanded = expand(recipe)
        path = tmp_path / f"{name}-{expanded.hash}"
        run = RunDirectory(path)
        outcome = Summary(recipe, path, skipped=expanded.skipped, notes=["a note"])
        for config in expanded.cells:
            failed = config.verifier.name == failing and not config.is_baseline
            outcome.results.append(CellResult(config, error="it broke") if failed else finished(config))
        run.write_json("recipe.json", recipe.model_dump(mode="json"))
        about = {"versions": {"crossdraft": "0.1.0"}, "python": "3.12.1", "git_commit": "abc+changes"}
        cpu = {"model": "a processor", "cores": 2}
        run.write_json("environment.json", about | {"cpu": cpu, "memory_gib": 8.0, "gpus": []})
        run.write_text("summary.csv", summary_csv(outcome))
        run.write_text("summary.md", summary_markdown(outcome))
        for result in outcome.results:
            if result.metrics is not None:
                run.save(result)
        return path

    return make


def report(capsys: Any, *arguments: Any) -> tuple[int, str, str]:
    code = cli.main(["report", *map(str, arguments)])
    return code, *capsys.readouterr()


def rows(text: str, start: str) -> list[list[str]]:
    """The cells of the table rows whose first cell is `start`."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in table if row[0] == start]


def test_page(make_run: MADE, capsys: Any) -> None:
    code, text, _ = report(capsys, make_run())
    assert code == 0
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert headings == [
        "# Results",
        "## mine",
        "### temperature 1, batch size 1",
        "### Verifiers compared",
        "### How it was measured",
    ]
    assert "which rule?" in text and "- note: a note" in text
    # token: 4 tokens in 2 steps and 2 s; block: 5 tokens and 2.5 s; plain decoding 2 tokens in 2 s.
    token, block, both = rows(text, "prompt-lookup")
    assert (token[1], token[2], token[-1]) == ("token", "2.00", "2.00")
    assert (block[1], block[2], block[-1]) == ("block", "2.50", "2.00")
    assert both == ["prompt-lookup", "2.00", "2.50 (+25.0 %)", "2.00", "2.00 (+0.0 %)"]
    assert rows(text, "measured") == [["measured", "2026-03-01"]]
    assert rows(text, "machine") == [["machine", "a processor, 2 cores, 8.0 GiB"]]
    assert rows(text, "device, dtype") == [["device, dtype", "cpu (a processor), float32"]]
    assert rows(text, "software") == [["software", "crossdraft 0.1.0, Python 3.12.1, commit abc with changes"]]
    assert rows(text, "prompts") == [["prompts", "1 of builtin"]]
    assert rows(text, "SHA-256 of org/name") == [["SHA-256 of org/name", f"`{SHA256}`"]]


def test_failed_cells_are_noted(make_run: MADE, capsys: Any) -> None:
    _, text, _ = report(capsys, make_run(failing="block"))
    assert "- failed: prompt-lookup × block (temperature 1, batch size 1): it broke" in text
    assert "Verifiers compared" not in text  # one rule is left
    recipe = {"verifiers": ["greedy", "token"], "matrix": {"temperature": [0, 1]}}
    exclude = [{"temperature": 0, "verifier": "token"}]
    _, text, _ = report(capsys, make_run("other", **recipe, exclude=exclude))
    assert "- skipped: verifier 'greedy' compares with the target's argmax" in text


def test_contents_of_several_runs(make_run: MADE, capsys: Any, tmp_path: Path) -> None:
    first, second = make_run(), make_run("with.dot", seed=1)
    code, out, _ = report(capsys, first, second, "--out", tmp_path / "page.md")
    assert (code, out) == (0, f"wrote {tmp_path / 'page.md'}\n")
    text = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert "- [mine](#mine): which rule?\n- [with.dot](#withdot): which rule?\n" in text
    assert text.index("## mine\n") < text.index("## with.dot\n")
    # Two runs of one recipe are distinguished by their directories.
    third = make_run(seed=2)
    _, text, _ = report(capsys, first, third)
    assert f"## {first.name}\n" in text and f"## {third.name}\n" in text


def test_rows_by_group(make_run: MADE, capsys: Any) -> None:
    _, text, _ = report(capsys, make_run(matrix={"batch_size": [1, 8]}))
    both = ["prompt-lookup", "2.00", "2.50 (+25.0 %)", "2.00", "2.00 (+0.0 %)"]
    for batch_size in (1, 8):
        assert ["temperature 1, batch size " + str(batch_size), *both] in rows(
            text, f"temperature 1, batch size {batch_size}"
        )


def test_drafters_without_common_verifier_share_row(make_run: MADE, capsys: Any) -> None:
    """Single and multi-draft verifiers, such as token and SpecTr, are compared as in papers."""
    two = {"name": "draft-model-iid", "model": "org/small", "gamma": 3, "K": 2}
    exclude = [
        {"drafter": "prompt-lookup", "verifier": "spectr"},
        {"drafter": "draft-model-iid", "verifier": ["token", "block"]},
    ]
    drafters = [{"name": "prompt-lookup", "gamma": 3}, two]
    run = make_run(drafters=drafters, verifiers=["token", "block", "spectr"], exclude=exclude)
    _, text, _ = report(capsys, run)
    # spectr: 6 tokens in 2 steps and 2 s.
    row = ["2.00", "2.50 (+25.0 %)", "3.00 (+50.0 %)", "2.00", "2.00 (+0.0 %)", "3.00 (+50.0 %)"]
    assert rows(text, "prompt-lookup, draft-model-iid") == [["prompt-lookup, draft-model-iid", *row]]


def test_command_reproduces_run(make_run: MADE, capsys: Any, tmp_path: Path, install_recipe: Any) -> None:
    assert rows(report(capsys, make_run())[1], "command") == [["command", "`crossdraft run mine.yaml`"]]
    base = {"target": "org/name", "verifiers": ["token", "block"], "drafters": [{"name": "prompt-lookup", "gamma": 3}]}
    install_recipe("paper/mine", base | {"matrix": {"temperature": [1], "seed": [0]}})
    prompts = tmp_path / "question.jsonl"
    prompts.write_text('{"prompt": "w"}\n', encoding="utf-8")
    run = make_run(prompts=str(prompts), limit=4, matrix={"temperature": [1], "seed": [0, 1]}, dtype="float32")
    (command,) = rows(report(capsys, run)[1], "command")
    assert command[1] == (
        "`crossdraft run paper/mine --set dtype=float32 --set prompts=question.jsonl --limit 4 "
        "--set 'matrix.seed=[0, 1]'`"
    )
    # Only the name of the prompts file is shown, and the page does not need the file.
    prompts.unlink()
    assert str(tmp_path) not in report(capsys, run)[1]


@pytest.fixture
def install_recipe(tmp_path: Path, monkeypatch: Any) -> Any:
    monkeypatch.setattr(builtin_recipes, "FOLDER", tmp_path / "recipes")

    def add(name: str, data: dict[str, Any]) -> None:
        path = tmp_path / "recipes" / f"{name}.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(data), encoding="utf-8")

    return add


def test_invalid_runs(make_run: MADE, capsys: Any, tmp_path: Path) -> None:
    def error(directory: Path, *arguments: Any) -> str:
        code, out, err = report(capsys, directory, *arguments)
        assert (code, out) == (2, "") and err.count("\n") == 1
        return err.removeprefix("crossdraft: error: ").strip()

    advice = "give the directory of a finished run, which crossdraft run prints"
    assert error(tmp_path / "gone") == f"{tmp_path / 'gone'} is not a directory; {advice}"
    assert error(tmp_path) == f"{tmp_path} has no recipe.json; {advice}"
    run = make_run()
    assert error(run, "--out", tmp_path / "no" / "where.md").startswith(
        f"--out {tmp_path / 'no' / 'where.md'}: the directory {tmp_path / 'no'} does not exist; "
    )

    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    cell = sorted((copy / "cells").iterdir())[0]
    head = json.loads((cell / "config.json").read_text(encoding="utf-8"))
    (cell / "config.json").write_text(json.dumps(head | {"format": 1}), encoding="utf-8")
    assert error(copy).startswith(f"{cell / 'config.json'}: written by another version: it has format 1, ")
    shutil.rmtree(cell)
    missing = cell.name.rpartition("_")[2]
    assert error(copy) == f"cell {missing} of the run {copy} is missing or damaged; run its recipe again"
    (copy / "summary.csv").unlink()
    code, page, _ = report(capsys, copy)  # without its summary, it counts as interrupted
    assert code == 0 and "**Partial results.** interrupted: " in page
    (copy / "recipe.json").write_text('{"target": "org/name", "verifier": []}', encoding="utf-8")
    assert f"{copy / 'recipe.json'}:1: unknown key 'verifier'; did you mean 'verifiers'?" in report(capsys, copy)[2]
    cell = sorted((copy / "cells").iterdir())[0]
    (cell / "config.json").write_text(json.dumps(head | {"format": 1}), encoding="utf-8")
    assert error(copy).startswith(f"{cell / 'config.json'}: written by another version: it has format 1, ")
    everything = make_run("failing", failing="token", verifiers=["token"])
    shutil.rmtree(everything / "cells")
    text = (everything / "summary.csv").read_text(encoding="utf-8").splitlines()
    (everything / "summary.csv").write_text("\n".join(line for line in text if ",none," not in line), encoding="utf-8")
    assert error(everything) == f"the run {everything} has no finished cells; run its recipe again"
