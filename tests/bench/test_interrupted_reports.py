"""Report commands on an interrupted run: partial results are marked, and complete after resuming."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from companions import has_command, has_format, needs_page
from tiny_runs import ONE_GROUP

from crossdraft.drafters.retrieval.prompt_lookup import PromptLookup
from crossdraft.framework.cli import main as cli

SETTINGS = [*ONE_GROUP[:-1], "verifiers=[token, block]", "drafters=[{name: interrupting, gamma: 3}]"]


class Interrupting(PromptLookup):
    """Prompt lookup that sends SIGTERM to this process during the measurement."""

    name = "interrupting"
    after = 0

    def propose(self, sequences: Any, rng: Any) -> Any:
        type(self).after -= 1
        if not self.after:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().propose(sequences, rng)


@pytest.fixture
def interrupted(bench: Any, tmp_path: Path, install: Any) -> tuple[Path, str]:
    """Directory and output of a run of one group, interrupted in its fourth piece or so."""
    install("drafters", ("interrupting", Interrupting))
    Interrupting.after = 100
    code, out, _ = bench(*SETTINGS)
    assert code == 130, out
    (run,) = (tmp_path / "runs").iterdir()
    assert not list(run.glob("cells/*")) and list(run.glob("groups/*/cells/*/metrics.json"))
    return run, out


def rows(text: str) -> list[list[str]]:
    """Words of the table rows of pairs, in Markdown or text."""
    words = [line.replace("|", " ").split() for line in text.splitlines()]
    return [line for line in words if line[:1] == ["interrupting"] and line[1] in ("token", "block") and "." in line[2]]


@pytest.mark.with_companions
def test_partial_report_lists_finished_cells(
    interrupted: tuple[Path, str], capsys: Any, bench: Any, tmp_path: Path
) -> None:
    run, printed = interrupted
    path, other = str(run), str(shutil.copytree(run, tmp_path / "other"))

    def command(*words: str) -> tuple[str, str]:
        capsys.readouterr()
        code = cli.main(list(words))
        out, err = capsys.readouterr()
        assert code == 0, err
        return out, err

    page, _ = command("report", path)
    assert "**Partial results.** interrupted: 0 of 3 cells so far, and 3 on some of their prompts" in page
    assert "cut short after piece" in page
    assert len(rows(printed)) == 2 and rows(page)[:2] == rows(printed), "the table that the run printed"
    for words in (
        ["report", path, "--rows", "drafter"],
        ["compare", path, other],
        *[["report", path, "--format", "png", "--kind", "acceptance"]] * has_format("png"),
    ):
        _, err = command(*words)
        assert f"note: {run}: partial results, interrupted: " in err
    if has_command("replay"):
        out, _ = command("replay", path, "--drafter", "{name: prompt-lookup, gamma: 3}", "--json")
        files = run.glob("groups/*/cells/none*/*.jsonl")
        parts = [len(file.read_text(encoding="utf-8").splitlines()) for file in files]
        assert f'"responses": {parts[0]}' in out and "not finished" in out

    Interrupting.after = 10**9
    assert bench(*SETTINGS)[0] == 0
    assert not list(run.glob("groups/*"))
    page, _ = command("report", path)
    assert "Partial" not in page and "interrupted" not in page


@pytest.mark.with_companions
@needs_page
def test_page(interrupted: tuple[Path, str], tmp_path: Path, capsys: Any) -> None:
    assert cli.main(["report", str(interrupted[0]), "--format", "html", "--out", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "note: interrupted: 0 of 3 cells so far" in text
    assert "<b>Partial results.</b> interrupted: 0 of 3 cells so far" in text


def test_run_that_was_killed(interrupted: tuple[Path, str], capsys: Any) -> None:
    """A run without a summary."""
    run, _ = interrupted
    for name in ("summary.csv", "summary.md"):
        (run / name).unlink()
    state = json.loads((run / "state.json").read_text(encoding="utf-8"))
    (run / "state.json").write_text(json.dumps(state | {"state": "running"}), encoding="utf-8")
    assert cli.main(["report", str(run)]) == 0
    page = capsys.readouterr().out
    assert "**Partial results.** interrupted: " in page and len(rows(page)) >= 2
