"""Trackers receive the events of a run only if requested."""

from pathlib import Path
from typing import Any

import pytest
from companions import needs_launchers
from in_process_launcher import fresh
from tiny_runs import ONE_GROUP

from crossdraft.framework.contracts.hookspecs import hookimpl

SETTINGS = [*ONE_GROUP, "drafters=[prompt-lookup]", "limit=1", "max_new_tokens=5"]
TOLD: list[tuple[str, Any]] = []


class Recorder:
    @hookimpl
    def crossdraft_run_started(self, run: Any) -> None:
        TOLD.append(("started", dict(run)))

    @hookimpl
    def crossdraft_cell_finished(self, run: Any, cell: Any) -> None:
        TOLD.append((cell["config"]["drafter"]["name"], cell))

    @hookimpl
    def crossdraft_run_finished(self, run: Any, outcome: Any) -> None:
        TOLD.append(("finished", (dict(run), dict(outcome), sorted(p.name for p in Path(run["directory"]).iterdir()))))


@pytest.fixture(autouse=True)
def recorder(install: Any) -> None:
    TOLD.clear()
    install("trackers", ("recorder", Recorder))


def test_tracker_is_called_only_on_request(bench: Any, tmp_path: Path) -> None:
    assert bench(*SETTINGS)[0] == 0 and TOLD == []
    assert bench(*SETTINGS, flags=["--fresh", "--track", "recorder", "--track", "recorder"])[0] == 0
    assert [name for name, _ in TOLD] == ["started", "none", "prompt-lookup", "prompt-lookup", "finished"]
    (directory,) = tmp_path.glob("runs/*")
    run = {"name": "recipe", "directory": str(directory), "cells": 3, "shard": ""}
    assert TOLD[0][1] == run
    about, outcome, files = TOLD[-1][1]
    assert about == run and outcome == {"exit_code": 0, "failed": 0, "interrupted": False, "stopped": ""}
    assert {"summary.csv", "summary.md", "environment.json"} <= set(files)
    TOLD.clear()
    assert bench(*SETTINGS)[0] == 0 and TOLD == []


def test_run_that_ends_early_is_finished_too(bench: Any, models: dict[str, str]) -> None:
    other = f"drafters=[{{name: draft-model, model: {models['other']}}}]"
    assert bench(*ONE_GROUP, other, flags=["--track", "recorder"])[0] == 1
    assert [name for name, _ in TOLD] == ["started", "finished"]
    assert TOLD[-1][1][1] == {"exit_code": 1, "failed": 0, "interrupted": False, "stopped": "stopped by an error"}
    TOLD.clear()
    assert bench(*SETTINGS, "limit=-1", flags=["--track", "recorder"])[0] == 2 and TOLD == []


@needs_launchers
def test_launched_run_is_tracked_by_parent(bench: Any, install: Any) -> None:
    install("launchers", ("here", fresh()))
    flags = ["--launcher", "here", "--track", "recorder"]
    assert bench(*SETTINGS, flags=flags)[0] == 0
    # This launcher runs in this process, so its events are received, too.
    assert [name for name, _ in TOLD] == [
        *("started", "started", "none", "prompt-lookup", "prompt-lookup", "finished"),
        *("none", "prompt-lookup", "prompt-lookup", "finished"),
    ]
    assert [event["shard"] for name, event in TOLD if name == "started"] == ["", "1/1"]
    assert [event[0]["shard"] for name, event in TOLD if name == "finished"] == ["1/1", ""]
    TOLD.clear()
    assert bench(*SETTINGS, flags=flags)[0] == 0
    assert {name for name, _ in TOLD} == {"started", "finished"}, "what is reused was told before"


def test_unknown_and_broken_trackers(bench: Any, install: Any, tmp_path: Path) -> None:
    code, _, err = bench(*SETTINGS, flags=["--track", "recoder"])
    assert code == 2 and "there is no tracker named 'recoder'; did you mean 'recorder'?" in err

    class Broken:
        def __init__(self) -> None:
            raise ConnectionError("nobody answers")

    install("trackers", ("broken", Broken), ("no-class", 3))
    code, _, err = bench(*SETTINGS, flags=["--track", "broken"])
    assert code == 1 and "the tracker 'broken' of test-trackers" in err and "nobody answers" in err
    code, _, err = bench(*SETTINGS, flags=["--track", "no-class"])
    assert code == 1 and "a tracker is a class, not 3" in err
    assert not list(tmp_path.glob("runs/*"))
