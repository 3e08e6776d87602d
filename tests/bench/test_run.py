"""Complete runs on tiny models by the command line: tables, records, reuse."""

import csv
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import parquet
from tiny_runs import ONE_GROUP, cells, output

from crossdraft.framework.cost.load_run import read_run
from crossdraft.framework.runs.run_directory import FORMAT


def test_run_and_its_records(bench: Any, tmp_path: Path) -> None:
    code, out, err = bench()
    assert code == 0
    assert err.splitlines()[0] == "recipe: 16 cells in 4 groups, 6 prompts each"
    assert "group 2 of 4 (temperature 1, batch size 1): running 5 cells" in err
    assert "temperature 1, batch size 3\n" in out and "speed-up [95 %]" in out and "\ndetails" in out
    _, *tables, remarks, _ = out.split("\n\n")
    assert max(map(len, "\n".join(tables).splitlines())) <= 130 and len(remarks.splitlines()) == 3

    (directory,) = tmp_path.glob("runs/*")
    text = (directory / "summary.md").read_text("utf-8")
    assert "at temperature 0, 32 of 32 responses equal those of plain decoding, token for token" in text
    assert " the same BE on the same prompts" in text  # the drafter is the target
    assert "BE excludes " in text and "of the steps, whose drafts the end of a sequence truncated" in text
    assert {p.name for p in directory.iterdir()} - {".lock"} == {
        "recipe.json",
        "README.md",
        "cost_curves.json",
        "environment.json",
        "cells",
        "groups",
        "state.json",
        "summary.csv",
        "summary.md",
    }
    result = cells(tmp_path)
    assert len(result) == 16
    assert all(
        {p.name for p in d.iterdir()} == {"config.json", "steps.parquet", "responses.jsonl", "metrics.json"}
        for d in result
    )
    environment = json.loads((directory / "environment.json").read_text(encoding="utf-8"))
    assert len(environment["models"]) == 2 and environment["prompts"]["count"] == 6
    assert [condition["dtype"] for condition in environment["conditions"]] == ["float32"]
    assert environment["conditions"][0]["threads"] == torch.get_num_threads()

    for cell in result:
        config = json.loads((cell / "config.json").read_text(encoding="utf-8"))["config"]
        sampled = config["sampling"]["temperature"] > 0
        for line in (cell / "responses.jsonl").read_text(encoding="utf-8").splitlines():
            response = json.loads(line)
            assert ("logprobs" in response) == sampled  # at temperature 0 each is 0
            assert not sampled or len(response["logprobs"]) == len(response["tokens"])

    with (directory / "summary.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 16 and {row["error"] for row in rows} == {""}
    for row in rows:
        (cell,) = directory.glob(f"cells/*_{row['cell']}")
        assert cell.name.startswith(f"{row['drafter']}_{row['verifier']}_T{float(row['temperature']):g}_B")
        table = parquet.read_table(cell / "steps.parquet")
        emitted, steps = sum(table["emitted"].to_pylist()), table.num_rows
        assert float(row["block_efficiency_all_steps"]) == pytest.approx(emitted / steps)
        free = [
            e
            for e, limit in zip(*table.select(["emitted", "limit"]).to_pydict().values(), strict=True)
            if limit >= int(row["depth"])
        ]
        expected = sum(free) / len(free) if free else emitted / steps
        assert float(row["block_efficiency"]) == pytest.approx(expected)
        assert int(row["steps_cut"]) == steps - len(free)
        assert int(row["tokens"]) == emitted == sum(len(t) for t in output(cell).values())
        assert int(row["sequences"]) == 8  # two of the six prompts have a second turn
        assert int(row["peak_memory"]) > 10**7
        assert set(table["cell"].to_pylist()) == {row["cell"]}
        if row["drafter"] == "draft-model":
            assert int(row["drafter_passes"]) > 0 and float(row["block_efficiency_all_steps"]) > 2
        if row["drafter"] == "none":
            assert float(row["speed_up"]) == 1.0
    assert "| draft-model" in (directory / "summary.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_outputs_depend_on_neither_batch_size_nor_limit(bench: Any, tmp_path: Path) -> None:
    assert bench("drafters.0={name: prompt-lookup, gamma: 2}")[0] == 0
    by_cell: dict[str, list[dict[Any, list[int]]]] = {}
    for directory in cells(tmp_path):
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))["config"]
        config.pop("batch_size")
        by_cell.setdefault(json.dumps(config), []).append(output(directory))
    assert len(by_cell) == 8
    assert all(item == three for item, three in by_cell.values())
    shutil.rmtree(tmp_path / "runs")
    settings = [
        "drafters.0={name: prompt-lookup, gamma: 2}",
        "prompts.categories=[a, c]",
        "matrix.batch_size=[2]",
    ]
    assert bench(*settings, flags=["--limit", "3"])[0] == 0
    for directory in cells(tmp_path):
        some = output(directory)
        assert len(some) == 5  # q0 and q3 have two turns, q2 one
        assert any(some.items() <= answers.items() for pair in by_cell.values() for answers in pair)


def test_rerun_reuses_whole_groups(bench: Any, tmp_path: Path, models: dict[str, str], write_prompts: Any) -> None:
    settings = [
        "matrix={batch_size: [1, 2]}",
        *ONE_GROUP[1:],
        "drafters=[prompt-lookup]",
        "max_new_tokens=5",
        "limit=2",
    ]
    assert "running" in bench(*settings)[2]
    first = {d.name: (d / "metrics.json").read_bytes() for d in cells(tmp_path)}
    code, _, err = bench(*settings)
    assert code == 0 and err.count("reusing 3 cells") == 2 and "running" not in err
    assert {d.name: (d / "metrics.json").read_bytes() for d in cells(tmp_path)} == first

    (run,) = (tmp_path / "runs").iterdir()
    for matrix in ("matrix={batch_size: [1]}", settings[0]):  # from another run, and in the same one
        assert "running" not in bench(*settings, matrix, "verifiers=[{name: token, label: mine}, block]")[2]
    for directory in (tmp_path / "runs").iterdir():
        assert {r.config.verifier.title for r in read_run(directory).summary.results} == {"token", "mine", "block"}
        if directory != run:
            shutil.rmtree(directory)
    bench(*settings)

    removed_cell = cells(tmp_path)[0]
    shutil.rmtree(removed_cell)
    err = bench(*settings)[2]
    assert "running 3 cells, some cells are new" in err  # its group is measured together again
    assert "reusing 3 cells" in err
    changed = [d.name for d in cells(tmp_path) if (d / "metrics.json").read_bytes() != first[d.name]]
    assert len(changed) == 3 and removed_cell.name in changed

    earlier = cells(tmp_path)[0] / "config.json"
    written = earlier.read_text(encoding="utf-8").replace(f'"format": {FORMAT}', f'"format": {FORMAT - 1}')
    earlier.write_text(written, encoding="utf-8")
    assert bench(*settings)[2].count("running 3 cells") == 1
    (cells(tmp_path)[0] / "metrics.json").write_text("{", encoding="utf-8")  # damaged
    assert bench(*settings)[2].count("running 3 cells") == 1
    assert bench(*settings, flags=["--fresh"])[2].count("running 3 cells") == 2
    write_prompts(tmp_path / "prompts.jsonl", length=6)  # the same file name, other prompts
    assert bench(*settings)[2].count("running 3 cells, measured again because of changes: the prompts") == 2


def test_changed_model_is_measured_again(bench: Any, tmp_path: Path, models: dict[str, str]) -> None:
    shutil.copytree(models["same"], tmp_path / "draft")
    settings = [*ONE_GROUP, f"drafters=[{{name: draft-model, model: {tmp_path / 'draft'}}}]", "limit=1"]
    bench(*settings)
    assert "reusing 3 cells" in bench(*settings)[2]
    shutil.copytree(models["narrow"], tmp_path / "draft", dirs_exist_ok=True)
    name = tmp_path / "draft"
    assert (
        f"because of changes: the weights of {name}; the config, tokenizer or templates of {name}\n"
        in bench(*settings)[2]
    )


@pytest.mark.parametrize(
    "file",
    [
        "config.json",
        *[
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json")
        ],
    ],
)
def test_changed_settings_of_model_are_measured_again(
    bench: Any, tmp_path: Path, models: dict[str, str], file: str
) -> None:
    shutil.copytree(models["same"], tmp_path / "draft")
    drafter = f"drafters=[{{name: draft-model, model: {tmp_path / 'draft'}}}]"
    settings = [*ONE_GROUP[:-1], "verifiers=[token]", drafter, "limit=1"]
    bench(*settings)
    path = tmp_path / "draft" / file
    path.write_text((path.read_text(encoding="utf-8") if path.is_file() else "{}") + "\n", encoding="utf-8")
    assert f"because of changes: the config, tokenizer or templates of {tmp_path / 'draft'}\n" in bench(*settings)[2]
    assert "reusing 2 cells\n" in bench(*settings)[2]


@pytest.mark.slow  # as a model that changed
def test_changed_heads_are_measured_again(bench: Any, tmp_path: Path) -> None:
    def write(seed: int) -> str:
        torch.manual_seed(seed)
        weights = {f"{i}.0.linear.weight": torch.randn(16, 16) for i in range(2)}
        weights |= {f"{i}.0.linear.bias": torch.randn(16) for i in range(2)}
        (tmp_path / "heads").mkdir(exist_ok=True)
        torch.save(weights, tmp_path / "heads" / "medusa_lm_head.pt")
        config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "hidden_size": 16}
        (tmp_path / "heads" / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return hashlib.sha256((tmp_path / "heads" / "medusa_lm_head.pt").read_bytes()).hexdigest()

    digest = write(0)
    settings = [*ONE_GROUP, f"drafters=[{{name: medusa, model: {tmp_path / 'heads'}}}]"]
    code, _, err = bench(*settings)
    assert code == 0, err
    provenance = [json.loads((d / "config.json").read_text(encoding="utf-8"))["provenance"] for d in cells(tmp_path)]
    assert {p["models"][name]["sha256"] for p in provenance for name in p["models"] if "heads" in name} == {digest}
    assert "reusing 3 cells" in bench(*settings)[2]
    assert write(1) != digest
    assert "running 3 cells" in bench(*settings)[2]


def test_quiet(bench: Any) -> None:
    code, out, err = bench(*ONE_GROUP, flags=["--quiet"])
    assert (code, err) == (0, "") and out.startswith("answer: ") and "\ntemperature 1, batch size 1" in out
