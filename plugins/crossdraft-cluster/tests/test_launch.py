"""Runs with a launcher: same tokens, and a failed process loses only its group."""

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from crossdraft_cluster import local
from crossdraft_cluster.launcher import LauncherConfig, Work, exit_status
from in_process_launcher import fresh
from tiny_runs import output

SETTINGS = ["drafters=[prompt-lookup]", "limit=2", "max_new_tokens=5"]
SETTINGS += ["matrix={batch_size: [1, 3]}", "sampling.temperature=1", "exclude=[]", "verifiers=[token]"]
LAUNCHED = ["--launcher", "here"]


def texts(directory: Path) -> dict[str, Any]:
    return {cell.name: output(cell) for cell in sorted(directory.glob("cells/*"))}


@pytest.fixture
def launcher(install: Any) -> Any:
    launcher = fresh()
    install("launchers", ("here", launcher))
    return launcher


@pytest.fixture
def whole(bench: Any, tmp_path: Path) -> dict[str, Any]:
    """Output of a single process."""
    assert bench(*SETTINGS)[0] == 0
    (run,) = tmp_path.glob("runs/*")
    (tmp_path / "runs").rename(tmp_path / "whole")
    return texts(tmp_path / "whole" / run.name)


def test_launched_run_is_run(bench: Any, tmp_path: Path, launcher: Any, whole: dict[str, Any]) -> None:
    code, out, err = bench(*SETTINGS, flags=LAUNCHED)
    assert code == 0, err
    assert [arguments[-2:] for arguments in launcher.started] == [("--shard", f"{k}/2") for k in (1, 2)]
    (run,) = tmp_path.glob("runs/*")
    assert texts(run) == whole and len(whole) == 4
    separate = (tmp_path / "whole" / run.name / "summary.csv").read_text(encoding="utf-8").splitlines()
    assert [line.split(",")[0] for line in (run / "summary.csv").read_text(encoding="utf-8").splitlines()] == [
        line.split(",")[0] for line in separate
    ]
    assert "speed-up" in out and err.count(": measured\n") == 2
    assert sorted(path.name for path in (run / "shards").iterdir()) == [f"{k}-of-2.log" for k in (1, 2)]
    about = json.loads((run / "environment.json").read_text(encoding="utf-8"))
    assert about["elsewhere"] == [] and len(about["models"]) == 1 and about["python"]

    code, _, err = bench(*SETTINGS, flags=LAUNCHED)  # processes find what is there already
    assert code == 0 and err.count(": reused\n") == 2
    assert texts(run) == whole
    assert "reusing" in bench(*SETTINGS)[2]


def test_process_that_dies_costs_its_group(bench: Any, tmp_path: Path, launcher: Any, whole: dict[str, Any]) -> None:
    launcher.before = staticmethod(lambda work: "was killed by SIGKILL" if work.arguments[-1] == "2/2" else None)
    code, out, err = bench(*SETTINGS, flags=LAUNCHED)
    assert code == 1
    (run,) = tmp_path.glob("runs/*")
    sentence = "1 of 2 groups were not measured; rerun to measure them: group 2 of 2 (temperature 1, batch size 3): "
    assert (
        f"stopped: {sentence}its process was killed by SIGKILL before its group was finished" in out and sentence in err
    )
    kept = texts(run)
    assert len(kept) == 2 and all(whole[cell] == result for cell, result in kept.items())

    launcher.before = staticmethod(lambda work: None)
    code, out, err = bench(*SETTINGS, flags=LAUNCHED)
    assert code == 0 and err.count(": reused\n") == 1 and err.count(": measured\n") == 1
    assert texts(run) == whole


def test_stale_process_files_are_ignored(bench: Any, tmp_path: Path, launcher: Any) -> None:
    """A finished shard whose process fails before it has checked the stored records."""
    assert bench(*SETTINGS, flags=["--shard", "2/2"])[0] == 0
    launcher.before = staticmethod(lambda work: "was killed by SIGKILL" if work.arguments[-1] == "2/2" else None)
    code, out, _ = bench(*SETTINGS, flags=LAUNCHED)
    assert code == 1 and "1 of 2 groups were not measured" in out


def test_failures_are_reported(bench: Any, tmp_path: Path, launcher: Any, models: dict[str, str]) -> None:
    bad = f"drafters=[{{name: draft-model, model: {models['nan']}, gamma: 3}}]"
    code, out, err = bench(bad, *SETTINGS[1:], flags=LAUNCHED)
    assert code == 1 and "2 of 4 cells failed" in err
    assert err.count("failed: draft-model × ") == 2 and "failed: draft-model × token" in out
    assert "not measured" not in out


def test_fail_fast_stops_launching(bench: Any, launcher: Any, models: dict[str, str]) -> None:
    bad = f"drafters=[{{name: draft-model, model: {models['nan']}, gamma: 3}}]"
    code, out, _ = bench(bad, *SETTINGS[1:], flags=[*LAUNCHED, "--fail-fast"])
    assert code == 1 and "stopped: a cell failed; the run was stopped (--fail-fast)" in out
    assert len(launcher.started) == 1 and "--fail-fast" in launcher.started[0]


def test_wrong_recipe_is_one_sentence(bench: Any, tmp_path: Path, launcher: Any, models: dict[str, str]) -> None:
    other = f"drafters=[{{name: draft-model, model: {models['other']}}}]"
    code, out, err = bench(other, *SETTINGS[1:], flags=LAUNCHED)
    assert (code, out) == (1, "") and "tokenizer" in err.splitlines()[-1] and "Traceback" not in err


def test_interrupted(bench: Any, tmp_path: Path, launcher: Any, whole: dict[str, Any]) -> None:
    def interrupt(work: Work) -> None:
        if work.arguments[-1] == "2/2":
            os.kill(os.getpid(), signal.SIGINT)

    launcher.before = staticmethod(interrupt)
    code, out, _ = bench(*SETTINGS, flags=LAUNCHED)
    assert code == 130 and "interrupted: unfinished cells are missing; run again to resume" in out
    (run,) = tmp_path.glob("runs/*")
    assert len(texts(run)) == 2 and all(whole[cell] == result for cell, result in texts(run).items())


def test_processes_do_not_share_device(bench: Any, tmp_path: Path, launcher: Any) -> None:
    code, out, err = bench(*SETTINGS, flags=[*LAUNCHED, "--workers", "2"])
    sentence = "--workers 2: they would share 1 device and slow each other down; use --workers 1, or --untimed"
    assert (code, out) == (2, "") and sentence in err and not launcher.started
    code, out, err = bench(*SETTINGS, flags=["--launcher", "local", "--workers", "2"])
    assert (code, out) == (2, "") and sentence in err
    assert not list(tmp_path.glob("runs/*"))
    launcher.many = None
    code, out, err = bench(*SETTINGS, flags=[*LAUNCHED, "--workers", "2", "--untimed"])
    assert code == 0 and "not timed (--untimed)" in out and all("--untimed" in result for result in launcher.started)


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (["--launcher", "locale"], "there is no launcher named 'locale'; did you mean 'local'?"),
        ([*LAUNCHED, "--launcher-option", "sped=2"], "--launcher-option sped of here: is unknown"),
        (
            [*LAUNCHED, "--launcher-option", "speed=fast"],
            "--launcher-option speed of here: should be a valid int",
        ),
        ([*LAUNCHED, "--launcher-option", "speed"], "--launcher-option 'speed' is not KEY=VALUE"),
    ],
)
def test_bad_options(bench: Any, launcher: Any, flags: list[str], sentence: str) -> None:
    code, out, err = bench(*SETTINGS, flags=flags)
    assert (code, out) == (2, "") and sentence in err


def test_file_system_that_is_not_shared(tmp_path: Path) -> None:
    work = Work("", (), tmp_path, tmp_path / "elsewhere" / "log")
    with pytest.raises(Exception, match="use a shared file system for --out"):
        work.run()


def test_process_exit_codes() -> None:
    assert exit_status(2) == "ended with exit code 2"
    assert exit_status(-signal.SIGKILL) == "was killed by SIGKILL"


def test_each_local_process_has_device(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-b")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    arguments: list[Any] = []

    def start(work: Work, environment: Any = None, own_session: bool = False) -> Any:
        arguments.append(environment and environment["CUDA_VISIBLE_DEVICES"])
        return SimpleNamespace(poll=lambda: codes[work.title])

    codes: dict[str, int | None] = {"a": None, "b": None, "c": None}
    monkeypatch.setattr(Work, "start", start)
    launcher = local.Local(LauncherConfig(), "auto", True)
    assert launcher.devices() == 2
    workers = {t: launcher.start(Work(t, (), tmp_path, tmp_path / "log")) for t in "ab"}
    codes["b"] = 0
    assert [workers[t].poll() for t in "abb"] == [None, "ended with exit code 0", "ended with exit code 0"]
    launcher.start(Work("c", (), tmp_path, tmp_path / "log"))
    assert arguments == ["3", "GPU-b", "GPU-b"]
    assert local.Local(LauncherConfig(), "cuda:1", True).devices() == 1  # whichever it is, it is one


def test_every_process_has_time_budget(bench: Any, tmp_path: Path, launcher: Any) -> None:
    settings = [*SETTINGS, "matrix={temperature: [0.5, 1]}"]
    code, out, err = bench(*settings, flags=[*LAUNCHED, "--time", "0.001s"])
    assert code == 0 and err.count(": measured\n") == 2
    assert out.count("note: 1 of 2 prompts (time budget 0.001s); rerun to resume") == 1
    (run,) = tmp_path.glob("runs/*")
    cut = texts(run)
    assert [len({question for question, _ in cell}) for cell in cut.values()] == [1] * 4
    code, out, err = bench(*settings, flags=LAUNCHED)
    assert code == 0 and err.count(": measured\n") == 2 and "time budget" not in out
    whole = texts(run)
    assert all(cut[cell].items() < whole[cell].items() for cell in cut)
    assert [len({question for question, _ in cell}) for cell in whole.values()] == [2] * 4
    assert sorted(path.name for path in (run / "shards").iterdir()) == [f"{k}-of-2.log" for k in (1, 2)]
    assert "reusing" in bench(*settings)[2]


def test_process_imports_nothing_from_its_working_directory(tmp_path: Path) -> None:
    (tmp_path / "argparse.py").write_text("raise SystemExit('planted')")
    work = Work("group", ("--version",), tmp_path, tmp_path / "log")
    assert work.run() == "ended with exit code 0", work.log.read_text()
