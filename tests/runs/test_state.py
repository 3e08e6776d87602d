"""State of a run: written by the run, and inferred after it was killed."""

import json
import os
import signal
import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from crossdraft.framework.cli import main as cli
from crossdraft.framework.errors import UsageError
from crossdraft.framework.runs.run_directory import RunDirectory
from crossdraft.framework.runs.state import Reporter, RunState, latest, runs_in, state_of


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "runs" / "some-0123456789ab")
    directory.write_json("recipe.json", {"target": "t"})
    return directory


def test_run_from_its_beginning_to_its_end(run: RunDirectory) -> None:
    with run.locked(), Reporter(run, 6) as state:
        initial = state_of(run.path)
        assert (initial.state, initial.cells, initial.finished, initial.progress) == ("running", 6, 0, 0.0)
        assert (initial.pid, initial.host) == (os.getpid(), socket.gethostname())
        state.update(finished=2, failed=1, progress=0.5)
        assert (state_of(run.path).finished, state_of(run.path).failed, state_of(run.path).progress) == (2, 1, 0.5)
        state.update_progress(0.6)  # too soon after the last note
        assert state_of(run.path).progress == 0.5
        state.update(finished=5, progress=1.0, state="finished")
    over = state_of(run.path)
    assert (over.state, over.finished, over.failed, over.note) == ("finished", 5, 1, "")
    assert initial.started == over.started <= over.updated


@pytest.mark.parametrize(
    ("error", "state", "note"),
    [
        (KeyboardInterrupt(), "interrupted", ""),
        (UsageError("the model is not there"), "stopped", "the model is not there"),
    ],
)
def test_exit_reason_is_recorded(run: RunDirectory, error: BaseException, state: str, note: str) -> None:
    with pytest.raises(type(error)), run.locked(), Reporter(run, 6):
        raise error
    assert (state_of(run.path).state, state_of(run.path).note) == (state, note)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the process is a fork of this one")
def test_process_that_was_killed(run: RunDirectory) -> None:
    """The file of a killed run contains running; only the lock shows that it is not."""
    ready, write_end = os.pipe()
    if not (child := os.fork()):
        with run.locked(), Reporter(run, 6) as state:
            state.update(finished=3, progress=0.5)
            os.write(write_end, b"!")
            signal.pause()
    assert os.read(ready, 1) == b"!"
    result = state_of(run.path)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert (result.state, result.pid) == ("running", child)
    result = state_of(run.path)
    assert (result.state, result.finished, result.progress) == ("interrupted", 3, 0.5)
    assert result.note == f"process {child} exited unexpectedly; rerun to resume"


def test_another_machine(run: RunDirectory) -> None:
    elsewhere = RunState(
        "running", 6, 2, 0, 0.5, "2026-03-01T12:00:00+00:00", "2026-03-01T12:30:00+00:00", 1, "elsewhere"
    )
    run.write_json("state.json", asdict(elsewhere))
    result = state_of(run.path)
    assert result.state == "unknown" and "running on elsewhere" in result.note and result.finished == 2
    with run.locked():  # as it looks where the lock can be seen
        assert state_of(run.path).state == "running"


def test_reading_state_does_not_block(run: RunDirectory) -> None:
    """A reader holds the lock for a moment; a run that starts then waits for it."""
    with run.locked():
        pass
    for _ in range(20):
        state_of(run.path) if (run.path / "summary.csv").exists() else runs_in(run.path.parent)
        with run.locked():
            pass
    assert runs_in(run.path.parent) == [run.path] == runs_in(run.path)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"state": "asleep"}', '{"state": "finished", "cells": "6"}', "\ufeff1"]
)
def test_damaged_state_is_one_sentence(run: RunDirectory, capsys: Any, text: str) -> None:
    (run.path / "state.json").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=r"state\.json is damaged or was written by another version"):
        state_of(run.path)
    assert cli.main(["runs", str(run.path.parent)]) == 1
    out = capsys.readouterr().out
    assert "cannot be read" in out and out.count("is damaged") == 1


def test_command(run: RunDirectory, tmp_path: Path, capsys: Any) -> None:
    with run.locked(), Reporter(run, 6) as state:
        state.update(finished=5, failed=1, progress=1.0, state="finished")
    other = RunDirectory(tmp_path / "runs" / "other-0123456789ab")
    (tmp_path / "runs" / "notes").mkdir()  # no run
    with other.locked(), Reporter(other, 4) as state:
        state.update(finished=1, progress=0.25)
        assert cli.main(["runs", str(tmp_path / "runs")]) == 0
        shown = capsys.readouterr().out
        assert cli.main(["runs", str(other.path), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["run"] == str(other.path) and row["state"] == "running" and row["finished"] == 1
    rows = {line.split()[0]: line.split()[1:] for line in shown.splitlines()[2:] if line}
    assert rows["other-0123456789ab"][:5] == ["running", "25", "%", "1", "of"]
    assert rows["some-0123456789ab"][:6] == ["finished", "5", "of", "6,", "1", "failed"] and len(rows) == 2
    part = RunDirectory(other.path / "shards" / "1-of-2")  # a part that was measured apart
    part.write_json("state.json", json.loads((run.path / "state.json").read_text(encoding="utf-8")))
    assert runs_in(tmp_path / "runs") == [other.path, run.path, part.path]
    assert runs_in(other.path) == [other.path, part.path]
    assert cli.main(["runs", str(tmp_path / "runs")]) == 0
    assert "\nother-0123456789ab/shards/1-of-2  finished " in capsys.readouterr().out
    for path in (run.path, other.path):
        (path / "recipe.json").write_text("{}", encoding="utf-8")
    os.utime(run.path / "recipe.json", (0, 0))
    assert latest(tmp_path / "runs" / "latest") == other.path and latest(run.path) == run.path
    with pytest.raises(UsageError, match="there are no runs in"):
        latest(tmp_path / "runs" / "notes" / "latest")
    (tmp_path / "empty").mkdir()
    assert cli.main(["runs", str(tmp_path / "empty")]) == 0
    assert capsys.readouterr().out == f"no runs in {tmp_path / 'empty'}\n"
    assert cli.main(["runs", str(tmp_path / "gone")]) == 2
    assert f"directory {tmp_path / 'gone'} does not exist" in capsys.readouterr().err
