"""Resuming: pieces on disk, drafters with memory, locks."""

import json
import os
import re
import shutil
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import ONE_GROUP, cells, output

from crossdraft.drafters.retrieval.prompt_lookup import PromptLookup
from crossdraft.framework.bench import group_runner, provenance
from crossdraft.framework.bench.cells.cell_runner import Cell
from crossdraft.framework.contracts.draft import Draft
from crossdraft.framework.cost.load_run import read_run
from crossdraft.framework.report.markdown import page
from crossdraft.framework.runs.marks import Mark
from crossdraft.framework.runs.run_directory import RunDirectory

SETTINGS = [*ONE_GROUP[:-1], "verifiers=[token]"]
#: Two cells of one prompt, for tests about files and keys.
SHORT = [*SETTINGS, "drafters=[prompt-lookup]", "limit=1"]


class Remembering(PromptLookup):
    """Drafts the token that followed the same token in any earlier sequence."""

    name = "remembering"
    kill_after = 10**9

    def __init__(self, config: Any, context: Any):
        super().__init__(config, context)
        self.reset()

    def reset(self) -> None:
        self.after: dict[int, int] = {}

    def propose(self, sequences: Any, rng: Any) -> Draft:
        type(self).kill_after -= 1
        if not self.kill_after:
            os.kill(os.getpid(), signal.SIGTERM)
        drafts = []
        for history, limit in zip(sequences.history, sequences.limit, strict=True):
            draft = [self.after[history[-1]]] if history and limit and history[-1] in self.after else []
            drafts.append(draft)
        return Draft.copied(drafts, sequences.device)

    def observe(self, sequences: Any, draft: Any, verdict: Any, accepted: Any, scores: Any) -> None:
        for history in sequences.history:
            self.after |= dict(pairwise(history))


def records(tmp_path: Path) -> dict[str, Any]:
    """Responses and steps of every cell, without the hash of its configuration, which names files."""
    from pyarrow import parquet

    return {
        d.name.rpartition("_")[0]: (
            output(d),
            parquet.read_table(d / "steps.parquet").drop_columns(["cell"]).to_pylist(),
        )
        for d in cells(tmp_path)
    }


_UNDISTURBED: dict[str, Any] = {}


@pytest.fixture
def undisturbed(bench: Any, tmp_path: Path, install: Any) -> dict[str, Any]:
    """Records of the run without a disturbance, measured once: they do not depend on the directory."""
    install("drafters", ("remembering", Remembering))
    Remembering.kill_after = 10**9
    if not _UNDISTURBED:
        assert bench(*SETTINGS, "drafters=[{name: remembering}, prompt-lookup]")[0] == 0
        _UNDISTURBED.update(records(tmp_path))
        assert len(_UNDISTURBED) == len(cells(tmp_path)) == 3
        (tmp_path / "runs").rename(tmp_path / "undisturbed")
    return _UNDISTURBED


def test_warm_up_leaves_no_trace(bench: Any, tmp_path: Path, undisturbed: dict[str, Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(Cell, "warm_up", lambda self, length: None)
    assert bench(*SETTINGS, "drafters=[{name: remembering}, prompt-lookup]")[0] == 0
    assert records(tmp_path) == undisturbed


@pytest.mark.parametrize(
    "moment", [pytest.param(12, marks=pytest.mark.slow), 25, pytest.param(40, marks=pytest.mark.slow)]
)
def test_interrupted_group_resumes_identically(
    bench: Any, tmp_path: Path, undisturbed: dict[str, Any], moment: int, monkeypatch: Any
) -> None:
    """SIGTERM in the middle of a piece: earlier pieces are kept and shown, and replayed for drafters with memory.

    Another certificate in the meantime does not change results.
    """
    Remembering.kill_after = moment
    code, out, err = bench(*SETTINGS, "drafters=[{name: remembering}, prompt-lookup]")
    assert code == 130 and "interrupted: unfinished cells are missing; run again to resume" in out
    (group,) = tmp_path.glob("runs/*/groups/*")
    kept = len(list(group.glob("[0-9]*.json")))
    if kept:
        (summary,) = tmp_path.glob("runs/*/summary.md")
        assert f"cut short after piece {kept} of 6" in summary.read_text(encoding="utf-8") and "remembering" in out
    monkeypatch.setattr(provenance, "mark_of", lambda config: Mark("lossy"))
    code, out, err = bench(*SETTINGS, "drafters=[{name: remembering}, prompt-lookup]")
    assert code == 0 and (f"resuming after piece {kept} of 6" in err) == (kept > 0)
    assert records(tmp_path) == undisturbed
    assert not list(tmp_path.glob("runs/*/groups/*"))


def test_interrupted_group_with_earlier_results_is_resumed(bench: Any, tmp_path: Path, install: Any) -> None:
    """Earlier results do not replace the pieces on disk; --retry-failed also measures an interrupted group again."""
    install("drafters", ("remembering", Remembering))
    settings = [*SETTINGS, "drafters=[{name: remembering}]", "limit=4"]
    for moment, code, flags in ((10**9, 0, []), (25, 130, ["--fresh"])):
        Remembering.kill_after = moment
        assert bench(*settings, flags=flags)[0] == code
    (head,) = tmp_path.glob("runs/*/groups/*/group.json")
    content = json.loads(head.read_text(encoding="utf-8"))
    failed = content | {"failed": {hash_: "made up" for hash_ in content["cells"]}}
    shutil.copytree(head.parent, tmp_path / "pieces")
    assert "resuming after piece" in bench(*settings)[2]
    shutil.copytree(tmp_path / "pieces", head.parent)
    head.write_text(json.dumps(failed | {"measured": "9999"}), encoding="utf-8")
    code, _, err = bench(*settings, flags=["--retry-failed"])
    assert code == 0 and "running 2 cells" in err and "resuming" not in err


def test_failures_of_an_interrupted_group_are_kept(bench: Any, tmp_path: Path, install: Any) -> None:
    install("drafters", ("remembering", Remembering))
    Remembering.kill_after = 25
    settings = [*SETTINGS, "drafters=[{name: remembering}, prompt-lookup]", "limit=4"]
    assert bench(*settings)[0] == 130
    (head,) = tmp_path.glob("runs/*/groups/*/group.json")
    content = json.loads(head.read_text(encoding="utf-8"))
    failed = list(content["cells"])[1:]  # all but plain decoding
    head.write_text(json.dumps(content | {"failed": dict.fromkeys(failed, "made up")}), encoding="utf-8")
    code, _, err = bench(*settings)
    assert code == 1 and "resuming after piece" in err and "2 of 3 cells failed" in err and err.count("made up") == 2


def test_group_records_threads_of_every_process(
    bench: Any, tmp_path: Path, undisturbed: dict[str, Any], monkeypatch: Any
) -> None:
    """A group resumed with another wait policy records both; a disturbance is reported once."""
    monkeypatch.setattr(group_runner, "threads_in_use", lambda: dict(settings))
    monkeypatch.setattr(group_runner, "disturbance", lambda waited, seconds: "other programs run")
    settings = {"number": 2, "wait_policy": "spin"}
    Remembering.kill_after = 40
    code, _, err = bench(*SETTINGS, "drafters=[{name: remembering}, prompt-lookup]")
    assert code == 130 and err.count("other programs run") == 1
    settings |= {"wait_policy": "passive"}
    code, _, err = bench(*SETTINGS, "drafters=[{name: remembering}, prompt-lookup]")
    (before, after) = re.findall(r"threads from piece (\d): 2, passive; before: 2, (spin)", err)[0]
    assert code == 0 and after == "spin"
    for cell in cells(tmp_path):
        used = json.loads((cell / "config.json").read_text(encoding="utf-8"))["provenance"]["decoding_threads"]
        assert [item["wait_policy"] for item in used] == ["spin", "passive"]
        assert [item["piece"] for item in used] == [1, int(before)]
    (directory,) = tmp_path.glob("runs/*")
    assert "2, spin; 2, passive" in page([read_run(directory)])


def test_damaged_piece_is_measured_again(bench: Any, tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    Remembering.kill_after = 40
    bench(*SETTINGS, "drafters=[{name: remembering}, prompt-lookup]")
    (last, *_) = sorted(tmp_path.glob("runs/*/groups/*/[0-9].json"), reverse=True)
    last.write_text(last.read_text(encoding="utf-8")[:-9], encoding="utf-8")
    assert bench(*SETTINGS, "drafters=[{name: remembering}, prompt-lookup]")[0] == 0
    assert records(tmp_path) == undisturbed


def test_second_run_is_refused(bench: Any, tmp_path: Path) -> None:
    assert bench(*SHORT)[0] == 0
    (directory,) = tmp_path.glob("runs/*")
    with RunDirectory(directory).locked():
        code, out, err = bench(*SHORT)
    assert (code, out) == (2, "")
    assert f"{directory} is locked by another run (process {os.getpid()} on " in err
    assert bench(*SHORT)[0] == 0


def test_full_disk_keeps_complete_files(bench: Any, tmp_path: Path, monkeypatch: Any) -> None:
    save, left = RunDirectory.save_piece, [3]

    def full(self: Any, *arguments: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        save(self, *arguments)

    monkeypatch.setattr(RunDirectory, "save_piece", full)
    code, _, err = bench(*SETTINGS, "drafters=[prompt-lookup]")
    (summary,) = tmp_path.glob("runs/*/summary.md")
    text = summary.read_text(encoding="utf-8")
    assert code == 1 and "cut short after piece 3 of 6" in text and "stopped: cannot write to " in text
    assert "Traceback" not in err and ": No space left on device" in err.splitlines()[-1]
    monkeypatch.undo()
    assert "resuming after piece 3 of 6" in bench(*SETTINGS, "drafters=[prompt-lookup]")[2]


def test_summary_that_cannot_be_written_is_shown(bench: Any, monkeypatch: Any) -> None:
    write = RunDirectory.write_text

    def full(self: Any, name: str, text: str) -> None:
        if name.startswith("summary"):
            raise OSError(28, "No space left on device")
        write(self, name, text)

    monkeypatch.setattr(RunDirectory, "write_text", full)
    code, out, err = bench(*SHORT)
    assert code == 1 and "prompt-lookup" in out and "No space left on device" in err and "Traceback" not in err


def test_group_survives_change_elsewhere(bench: Any, tmp_path: Path) -> None:
    settings = SHORT[1:]
    assert bench("matrix={batch_size: [1]}", *settings)[0] == 0
    code, _, err = bench("matrix={batch_size: [1, 2]}", *settings)
    assert code == 0 and "reusing 2 cells, measured in recipe-" in err and "running 2 cells\n" in err
    assert len(list(tmp_path.glob("runs/*"))) == 2


def test_files_have_permissions_that_user_wants(bench: Any, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        assert bench(*SHORT)[0] == 0
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "runs").rglob("*")]
    assert files and all(path.stat().st_mode & 0o077 == 0 for path in files)


def test_recipe_cannot_allow_remote_code(bench: Any) -> None:
    code, _, err = bench("trust_remote_code=true")
    assert code == 2
    assert "unknown key 'trust_remote_code'; a recipe cannot allow that; use crossdraft run --trust" in err


def test_code_of_strategy_is_part_of_key(bench: Any, tmp_path: Path, install: Any, monkeypatch: Any) -> None:
    import importlib
    import sys

    from crossdraft.framework.runs import code_digest

    text = (
        "from helping import LENGTH\n"
        "from crossdraft.drafters.retrieval.prompt_lookup import PromptLookup\n"
        "class Mine(PromptLookup):\n    name = 'mine'\n"
        "    def unused(self):\n        import failing.part\n"
    )
    (tmp_path / "failing").mkdir()
    (tmp_path / "failing" / "__init__.py").write_text("undefined\n", encoding="utf-8")
    (tmp_path / "failing" / "part.py").write_text("", encoding="utf-8")
    (tmp_path / "my_drafter.py").write_text(text, encoding="utf-8")
    (tmp_path / "helping.py").write_text("LENGTH = 1\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    install("drafters", ("mine", "my_drafter:Mine"))
    for known in (code_digest._digest, code_digest._file, code_digest._installed, code_digest._imports):
        known.cache_clear()  # of tests that had a module of this name
    settings = [*SHORT, "drafters=[mine]"]
    assert "running 2 cells" in bench(*settings)[2]
    assert "reusing 2 cells" in bench(*settings)[2]
    (tmp_path / "helping.py").write_text("LENGTH = 2\n", encoding="utf-8")
    code_digest._digest.cache_clear()  # another process would read the files anew
    assert "measured again because of changes: the code of the drafter\n" in bench(*settings)[2]
    record = [json.loads((d / "config.json").read_text(encoding="utf-8")) for d in cells(tmp_path)]
    assert all(item["provenance"]["verifier"]["distribution"] == "crossdraft" for item in record)
    # A drafter that runs another one by its name depends on that one's code.
    text = (
        "from crossdraft.drafters.retrieval.prompt_lookup import PromptLookup\n"
        "from crossdraft import find_drafter\n"
        "class Outer(PromptLookup):\n    name = 'outer'\n"
        "    @classmethod\n    def wrapped(cls, config): return [find_drafter('mine')[0]]\n"
    )
    (tmp_path / "my_wrapper.py").write_text(text, encoding="utf-8")
    install("drafters", ("outer", "my_wrapper:Outer"))
    wrapping = [*SHORT, "drafters=[outer]"]
    assert bench(*wrapping)[0] == 0
    assert "reusing 2 cells" in bench(*wrapping)[2]
    (tmp_path / "helping.py").write_text("LENGTH = 3\n", encoding="utf-8")
    code_digest._digest.cache_clear()
    assert "measured again because of changes: the code of the drafter\n" in bench(*wrapping)[2]
    for name in ("my_drafter", "my_wrapper", "helping"):
        sys.modules.pop(name)
    importlib.invalidate_caches()
