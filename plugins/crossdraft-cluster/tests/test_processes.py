"""Real processes: a Ray cluster, the local executor of submitit, MLflow and Trackio in a folder."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launched_runs import check_tokens, finished, run_in, texts

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "library, flags",
    [("ray", ["ray"]), ("submitit", ["slurm", "--launcher-option", "cluster=local"])],
)
def test_tokens_are_those_of_one_process(start: Any, tmp_path: Path, library: str, flags: list[str]) -> None:
    pytest.importorskip(library)
    check_tokens(start, tmp_path, ["--launcher", *flags, "--workers", "2", "--untimed"])


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
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "none"), os.environ.get("PYTHONPATH", "")]))
    extras = {"ray": "--launcher", "slurm": "--launcher", "mlflow": "--track", "trackio": "--track"}
    for extra, option in extras.items():
        _, err = finished(start("runs", flags=[option, extra]), 2)
        assert f"pip install -e 'plugins/crossdraft-cluster[{extra}]'" in err
