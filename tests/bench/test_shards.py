"""Shards of a run, their reports, and untimed runs."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from companions import has_command
from tiny_runs import output

from crossdraft.framework.cli import main as cli
from crossdraft.framework.cost.load_run import read_run, read_runs
from crossdraft.framework.errors import UsageError
from crossdraft.framework.runs.shards import Shard, merge_environments

SETTINGS = ["drafters=[prompt-lookup]", "limit=2", "max_new_tokens=5"]
SETTINGS += ["matrix={batch_size: [1, 3]}", "sampling.temperature=1", "exclude=[]", "verifiers=[token]"]


def texts(directory: Path) -> dict[str, Any]:
    return {cell.name: output(cell) for cell in sorted(directory.glob("cells/*"))}


def report(capsys: Any, *directories: Path) -> str:
    assert cli.main(["report", *map(str, directories)]) == 0
    return capsys.readouterr().out


def test_shards_share_groups() -> None:
    groups = list("abcdefg")
    assert [list(Shard(k, 3).part(groups)) for k in (1, 2, 3)] == [["a", "d", "g"], ["b", "e"], ["c", "f"]]
    assert Shard.parse("2/4") == Shard(2, 4) and str(Shard(2, 4)) == "2/4"
    with pytest.raises(UsageError, match=r"^the recipe has 7 groups, fewer than the 8 shards; use fewer shards$"):
        Shard(1, 8).part(groups)


@pytest.mark.parametrize("text", ["0/2", "3/2", "1/0", "1", "a/b", "1/2/3", "-1/2", " 1/2", "1/9999999", "١/٢"])
def test_invalid_shards(text: str) -> None:
    with pytest.raises(UsageError, match="is not a valid shard; use K/N"):
        Shard.parse(text)


def test_environments_join() -> None:
    place, second_place = {"cpu": "a", "gpus": [], "memory_gib": 1}, {"cpu": "b", "gpus": [], "memory_gib": 1}
    one = {**place, "models": {"x": 1}, "conditions": ["c"], "python": "3"}
    two = {**second_place, "models": {"y": 2}, "conditions": ["c", "d"], "elsewhere": [place]}
    result = merge_environments([one, {}, two])
    assert result == {
        **one,
        "models": {"x": 1, "y": 2},
        "conditions": ["c", "d"],
        "elsewhere": [second_place],
    }
    assert merge_environments([result, one])["elsewhere"] == [second_place] and merge_environments([{}]) == {}


def test_shards_are_run(bench: Any, tmp_path: Path, capsys: Any) -> None:
    assert bench(*SETTINGS)[0] == 0
    (whole,) = tmp_path.glob("runs/*")
    whole = whole.rename(tmp_path / whole.name)
    for k in (2, 1):
        code, _, err = bench(*SETTINGS, flags=["--shard", f"{k}/2"])
        assert code == 0 and f"(shard {k}/2 of 2 groups)" in err
    (run,) = tmp_path.glob("runs/*")
    assert run.name == whole.name and [path.name for path in run.iterdir()] == ["shards"]
    shards = [run / "shards" / f"{k}-of-2" for k in (1, 2)]
    assert {name: output for shard in shards for name, output in texts(shard).items()} == texts(whole)

    (merged,) = read_runs([run])
    separate = read_run(whole)
    assert [r.config.hash for r in merged.summary.results] == [r.config.hash for r in separate.summary.results]
    assert [r.config for r in merged.summary.results] == [r.config for r in separate.summary.results]
    remarks = [[line for line in item.remarks if "this machine was busy" not in line] for item in (merged, separate)]
    assert remarks[0] == remarks[1] and merged.summary.directory == run
    page = report(capsys, *reversed(shards))
    assert page == report(capsys, run) and page.count("\n## ") == 1
    assert "cells have no results" not in page

    outputs = []
    for directories in ([run], shards, [whole]):
        assert (
            cli.main(
                [
                    "report",
                    *map(str, directories),
                    "--rows",
                    "drafter",
                    "--cols",
                    "batch_size",
                    "--value",
                    "mean_tau,tokens",
                ]
            )
            == 0
        )
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] == outputs[2]
    assert cli.main(["compare", str(run), str(whole), "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)
    assert len(compared["pairs"]) == 2 and not any(compared["only"])

    part = report(capsys, shards[0])
    assert "- note: 2 of 4 cells have no results: they failed or belong to a missing shard" in part

    file = shards[1] / "environment.json"
    about = json.loads(file.read_text(encoding="utf-8"))
    about["cpu"]["model"] = "Another Processor"
    file.write_text(json.dumps(about), encoding="utf-8")
    two = report(capsys, run)
    assert "; Another Processor, " in two and "Another Processor" not in page
    assert "- note: groups were measured on several machines; tok/s are comparable only within a group" in two

    code, _, err = bench(*SETTINGS)
    assert code == 0 and "running" not in err
    assert f"measured in {run.name}/shards/1-of-2" in err
    assert texts(run) == texts(whole)


def test_group_of_two_shards_is_last_one(bench: Any, tmp_path: Path) -> None:
    assert bench(*SETTINGS, flags=["--shard", "1/1"])[0] == 0
    assert bench(*SETTINGS, flags=["--shard", "2/2", "--fresh"])[0] == 0
    (merged,) = read_runs(list(tmp_path.glob("runs/*")))
    (run,) = tmp_path.glob("runs/*")
    first, second = read_run(run / "shards/1-of-1"), read_run(run / "shards/2-of-2")
    measured = {r.config.batch_size: r.measured for r in merged.summary.results}
    assert measured == {1: first.summary.results[0].measured, 3: second.summary.results[0].measured}
    assert measured[1] < measured[3] and len(merged.summary.results) == 4


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (["--shard", "3/3"], "the recipe has 2 groups, fewer than the 3 shards; use fewer shards"),
        (["--shard", "1/2", "--launcher", "local"], "--shard and --launcher cannot be combined"),
        (["--workers", "2"], "--workers requires --launcher"),
        (["--launcher-option", "a=1"], "--launcher-option requires --launcher"),
    ],
)
def test_options_that_do_not_fit(bench: Any, tmp_path: Path, flags: list[str], sentence: str) -> None:
    code, out, err = bench(*SETTINGS, flags=flags)
    assert (code, out) == (2, "") and sentence in err
    assert not list(tmp_path.glob("runs/*/shards"))


# -- without times --------------------------------------------------------------------------------------------


def test_untimed_cells_are_marked_everywhere(bench: Any, tmp_path: Path, capsys: Any) -> None:
    settings = [*SETTINGS, "matrix={}"]
    code, out, err = bench(*settings, flags=["--untimed"])
    assert code == 0
    assert "not timed (--untimed): the device may have been shared, so there are no tok/s" in out
    (run,) = tmp_path.glob("runs/*")
    rows = list(csv.DictReader((run / "summary.csv").read_text(encoding="utf-8").splitlines()))
    assert all(float(row["block_efficiency_all_steps"]) >= 1 for row in rows)
    times = {"tokens_per_second", "speed_up", "decode_seconds", "draft_share", "undisturbed"}
    assert not times & rows[0].keys()
    lines = [line.split() for line in out.splitlines() if line.startswith(("none", "prompt-lookup"))]
    assert len(lines) == 2, out
    for metrics in run.glob("cells/*/metrics.json"):
        record = json.loads(metrics.read_text(encoding="utf-8"))
        seconds = [s for piece in record["pieces"] for s in (*piece["seconds"].values(), piece["tail_seconds"])]
        assert seconds and not any(seconds) and not any(piece["steps"] for piece in record["pieces"])
        assert record["metrics"]["speed_up"] is None and record["metrics"]["tokens_per_second"] == 0
    assert "not timed (--untimed)" in report(capsys, run)
    assert cli.main(["report", str(run), "--value", "tokens_per_second"]) == 2
    assert "'tokens_per_second'" in capsys.readouterr().err
    assert cli.main(["report", str(run), "--value", "tokens"]) == 0 and "prompt-lookup" in capsys.readouterr().out
    for command in (["cost", "--run", str(run)], ["advise", str(run)]):
        if not has_command(command[0]):
            continue
        assert cli.main(command) == 2
        assert f"the run {run} was not timed (--untimed); run its recipe on a" in capsys.readouterr().err
    untimed = texts(run)

    code, out, err = bench(*settings)
    assert code == 0 and "measured again because of changes: times (the results on disk are untimed)" in err
    assert "not timed" not in out and texts(run) == untimed
    code, out, err = bench(*settings, flags=["--untimed"])
    assert code == 0 and "reusing 2 cells\n" in err and "not timed" not in out


@pytest.mark.slow
def test_untimed_group_does_not_resume_timed(bench: Any, tmp_path: Path, monkeypatch: Any) -> None:
    from crossdraft.framework.runs.run_directory import RunDirectory

    save, left = RunDirectory.save_piece, [1]

    def full(self: Any, *arguments: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        save(self, *arguments)

    settings = [*SETTINGS, "matrix={}"]
    monkeypatch.setattr(RunDirectory, "save_piece", full)
    assert bench(*settings, flags=["--untimed"])[0] == 1
    monkeypatch.undo()
    monkeypatch.setenv("CROSSDRAFT_CACHE", str(tmp_path / "cache"))
    code, out, err = bench(*settings)
    assert code == 0 and "starting over: the pieces on disk were measured under other conditions" in err
    assert "not timed" not in out
