"""Built-in launchers with real processes: local, a Ray cluster, submitit's local executor."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import RECIPE, output

pytestmark = pytest.mark.slow

TWO_GROUPS = ["matrix.batch_size=1", "drafters=[prompt-lookup]"]
FOR_LONG = "max_new_tokens=60"
LOCAL = ["--launcher", "local", "--workers", "2", "--untimed"]


def texts(directory: Path) -> dict[str, Any]:
    return {cell.name: output(cell) for cell in sorted(directory.glob("cells/*"))}


@pytest.fixture
def start(tmp_path: Path, models: dict[str, str], recipe_file: Any, write_prompts: Any) -> Iterator[Callable[..., Any]]:
    """``start(out, *settings, flags=[...])`` starts the command as a process."""
    recipe = recipe_file(RECIPE.format(prompts=write_prompts(tmp_path / "prompts.jsonl"), **models))
    own = {"OMP_NUM_THREADS": "1", "CROSSDRAFT_CACHE": str(tmp_path / "cache")}
    processes: list[subprocess.Popen[str]] = []

    def go(out: str, *settings: str, flags: Any = ()) -> subprocess.Popen[str]:
        words = [part for setting in (*TWO_GROUPS, *settings) for part in ("--set", setting)]
        command = [sys.executable, "-m", "crossdraft", "run", recipe, "--out", str(tmp_path / out), *words, *flags]
        processes.append(subprocess.Popen(command, text=True, stdout=-1, stderr=-1, env=os.environ | own, cwd=tmp_path))
        return processes[-1]

    yield go
    for process in processes:
        if process.poll() is None:
            process.kill()


def finished(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    out, err = process.communicate(timeout=200)
    assert process.returncode == code, err + out
    return out, err


def run_in(folder: Path) -> Path:
    (result,) = folder.glob("recipe-*")
    return result


@pytest.mark.parametrize("launcher", ["local", "ray", "slurm"])
def test_every_launcher_gives_tokens_of_one_process(start: Any, tmp_path: Path, launcher: str) -> None:
    flags = ["--launcher", launcher, "--workers", "2", "--untimed"]
    if launcher == "slurm":
        pytest.importorskip("submitit")
        flags += ["--launcher-option", "cluster=local"]
    if launcher == "ray":
        pytest.importorskip("ray")
    finished(start("whole"))
    out, err = finished(start("runs", flags=flags))
    assert err.count(": measured\n") == 2 and "not timed (--untimed)" in out
    whole, run = run_in(tmp_path / "whole"), run_in(tmp_path / "runs")
    assert texts(run) == texts(whole) and len(texts(run)) == 5
    for name in ("summary.md", "summary.csv", "environment.json"):
        assert (run / name).is_file()


def wait_for(what: Callable[[], Any], process: subprocess.Popen[str]) -> Any:
    for _ in range(1000):
        if result := what():
            return result
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError("it took too long")


def owner(shard: Path) -> int | None:
    """Process of a shard after its first finished piece."""
    if not list(shard.glob("groups/*/0.json")):
        return None
    return json.loads((shard / ".owner.json").read_text(encoding="utf-8"))["pid"]


def test_rerun_completes_group_of_killed_process(start: Any, tmp_path: Path) -> None:
    finished(start("whole", FOR_LONG))
    whole = texts(run_in(tmp_path / "whole"))
    process = start("runs", FOR_LONG, flags=LOCAL)
    shard = tmp_path / "runs" / run_in(tmp_path / "whole").name / "shards" / "2-of-2"
    os.kill(wait_for(lambda: owner(shard), process), signal.SIGKILL)
    out, err = finished(process, 1)
    assert "1 of 2 groups were not measured; rerun to measure them: group 2 of 2" in out
    assert "its process was killed by SIGKILL before its group was finished" in err
    run = run_in(tmp_path / "runs")
    assert len(texts(run)) == 2 and all(whole[cell] == result for cell, result in texts(run).items())

    out, err = finished(start("runs", FOR_LONG, flags=LOCAL))
    assert err.count(": reused\n") == 1 and err.count(": measured\n") == 1
    assert texts(run) == whole
    assert "resuming after piece" in (run / "shards" / "2-of-2.log").read_text(encoding="utf-8")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_parent_ends_its_processes(start: Any, tmp_path: Path, number: int) -> None:
    process = start("runs", FOR_LONG, flags=LOCAL)
    result = wait_for(lambda: list((tmp_path / "runs").glob("recipe-*/shards/2-of-2")), process)
    pid = wait_for(lambda: owner(result[0]), process)
    process.send_signal(number)
    out, _ = finished(process, 130)
    assert "interrupted: unfinished cells are missing; run again to resume" in out
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert list(result[0].glob("groups/*/0.json")), "a finished piece was lost"
    _, err = finished(start("runs", FOR_LONG, flags=LOCAL))
    assert "not measured" not in err
    finished(start("whole", FOR_LONG))
    assert texts(run_in(tmp_path / "runs")) == texts(run_in(tmp_path / "whole"))


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (["ray", "--launcher-option", "cpus=1"], "CPUs and slow each other down; remove cpus"),
        (["slurm", "--launcher-option", "exclusive=false"], "exclusive=false: jobs without a GPU would share a"),
        (
            ["slurm", "--launcher-option", "cluster=local", "--workers", "2"],
            "--workers 2: they would share 1 device and slow",
        ),
    ],
)
def test_timed_groups_are_isolated(start: Any, flags: list[str], sentence: str) -> None:
    pytest.importorskip({"ray": "ray", "slurm": "submitit"}[flags[0]])
    if flags[0] == "ray" and os.cpu_count() == 1:
        pytest.skip("one processor cannot be shared")
    out, err = finished(start("runs", flags=["--launcher", *flags]), 2)
    assert sentence in err and out == ""


def test_mlflow_in_folder(start: Any, tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    from mlflow.tracking import MlflowClient

    _, err = finished(start("runs", flags=["--track", "mlflow"]))
    assert "mlflow" not in err.replace(str(tmp_path), ""), err
    client = MlflowClient()
    experiment = client.get_experiment_by_name("recipe")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = [item for item in runs if "mlflow.parentRunId" not in item.data.tags]
    run = run_in(tmp_path / "runs")
    names = {name.rpartition("_")[2]: name for name in texts(run)}
    cells = {names[item.data.tags["crossdraft.cell"]]: item for item in runs if item is not parent}
    assert cells.keys() == texts(run).keys()
    assert parent.info.run_name == run.name and parent.info.status == "FINISHED"
    assert {"summary.md", "summary.csv"} <= {file.path for file in client.list_artifacts(parent.info.run_id)}
    for name, item in cells.items():
        metrics = json.loads((run / "cells" / name / "metrics.json").read_text(encoding="utf-8"))["metrics"]
        assert item.data.metrics["tokens_per_second"] == metrics["tokens_per_second"]
        assert item.data.metrics["steps"] == metrics["steps"]
        assert item.data.params["batch_size"] == "1" and item.info.status == "FINISHED"
        assert item.data.tags["mlflow.parentRunId"] == parent.info.run_id


def test_trackio_on_this_machine(start: Any, tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    _, err = finished(start("runs", flags=["--track", "trackio"]))
    assert "crossdraft_cell_finished" not in err, err
    script = "import json, trackio\nprint(json.dumps(sorted(run.name for run in trackio.Api().runs('recipe'))))\n"
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio")}
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    names = json.loads(result.stdout.splitlines()[-1])
    hashes = {name.rpartition("_")[2] for name in texts(run_in(tmp_path / "runs"))}
    assert {name.rpartition("(")[2].rstrip(")") for name in names} == hashes, result


def test_missing_library_is_reported(start: Any, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "none").mkdir()
    for name in ("ray", "submitit", "mlflow", "trackio"):
        (tmp_path / "none" / f"{name}.py").write_text("raise ImportError('not installed')\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "none"))
    for option, name in (("--launcher", "ray"), ("--launcher", "slurm"), ("--track", "mlflow"), ("--track", "trackio")):
        _, err = finished(start("runs", flags=[option, name]), 2)
        assert f"pip install 'crossdraft[{name}]'" in err
