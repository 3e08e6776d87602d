"""The local launcher with real processes."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from launched_runs import FOR_LONG, LOCAL, check_tokens, finished, owner, run_in, texts, wait_for

pytestmark = pytest.mark.slow


def test_tokens_are_those_of_one_process(start: Any, tmp_path: Path) -> None:
    check_tokens(start, tmp_path, LOCAL)


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
