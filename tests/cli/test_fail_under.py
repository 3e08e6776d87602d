"""``crossdraft compare --fail-under``: its sources, verdicts and errors."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from html_runs import RECIPE, finished_run, on_disk

from crossdraft.framework.cli import main as cli
from crossdraft.framework.metrics.cell_metrics import measure

RUN = RECIPE | {"name": "some", "drafters": ["prompt-lookup"], "verifiers": ["token"], "matrix": {"gamma": [3]}}
RUN |= {"exclude": []}
RESPONSES = [
    {"id": name, "prompt": [5, 6, 7, 5, 6], "tokens": [*tokens, 2], "finish_reason": "stop"}
    for name, tokens in (("a", [7, 5, 6, 7, 8]), ("b", [7, 5, 9, 7, 5]), ("c", [7, 5, 6, 8, 9]), ("d", [7, 5, 6, 7, 5]))
]


def gate(capsys: Any, *arguments: Any, under: float = 0.95) -> tuple[int, str, str]:
    capsys.readouterr()
    code = cli.main(["compare", *map(str, arguments), "--fail-under", str(under)])
    return code, *capsys.readouterr()


def test_runs_are_paired_by_prompt(tmp_path: Path, capsys: Any) -> None:
    a, b = (on_disk(finished_run(tmp_path / name, RUN | {"name": name}, tokens=600)) for name in ("a", "b"))
    status, out, _ = gate(capsys, a, b)
    assert status == 0 and "of the same prompts" in out and "0.0 %" in out
    status, out, _ = gate(capsys, a)
    assert status in (0, 3) and "independent" in out


def test_run_whose_drafts_are_cut_short_is_a_drop(tmp_path: Path, capsys: Any) -> None:
    """A run in which no step accepts more than one token."""
    good = finished_run(tmp_path / "a", RUN | {"name": "a"}, tokens=600)
    bad = finished_run(tmp_path / "b", RUN | {"name": "b"}, tokens=600)
    for result in bad.summary.results:
        if not result.config.is_baseline:
            result.records = [replace(r, tau=min(r.tau, 1), emitted=min(r.tau, 1) + 1) for r in result.records]
            result.metrics = measure(result.records, result.pieces, gamma=3, depth=3)
    status, out, _ = gate(capsys, on_disk(good), on_disk(bad), "--json")
    result = json.loads(out)
    assert status == 1 and result["verdict"] == "drop"
    assert all(pair["paired"] and pair["pieces"] == 6 and pair["change"]["value"] < -0.2 for pair in result["pairs"])
    assert gate(capsys, tmp_path / "b", tmp_path / "a")[0] == 0


def test_sources_of_two_kinds_are_refused(tmp_path: Path, capsys: Any) -> None:
    run, file = on_disk(finished_run(tmp_path / "run", RUN)), tmp_path / "a.jsonl"
    file.write_text("{}", encoding="utf-8")
    for arguments, message in (((run, file), "give two of one kind"), ((run, run), "given twice")):
        status, _, err = gate(capsys, *arguments)
        assert status == 2 and message in err, err
