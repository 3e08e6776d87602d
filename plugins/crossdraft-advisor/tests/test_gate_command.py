"""``crossdraft gate``: its sources, verdicts and errors."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from html_runs import RECIPE, finished_run, on_disk
from test_imports import SGLANG_LOG, VLLM_LOG, VLLM_SCRAPE

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
    code = cli.main(["gate", *map(str, arguments), "--fail-under", str(under)])
    return code, *capsys.readouterr()


def responses(path: Path, factor: float, count: int = 20) -> Path:
    """Responses of SGLang with ``factor`` times 100 to 119 tokens in 40 target calls."""
    rows = [{"completion_tokens": round(factor * (100 + i)), "spec_verify_ct": 40} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("factor, code, verdict", [(1.0, 0, "pass"), (0.8, 1, "drop"), (1.2, 0, "pass")])
def test_exit_code_follows_change_of_responses(
    tmp_path: Path, capsys: Any, factor: float, code: int, verdict: str
) -> None:
    sources = responses(tmp_path / "a.jsonl", 1.0), responses(tmp_path / "b.jsonl", factor)
    status, out, _ = gate(capsys, *sources, under=0.9)
    assert status == code and out.splitlines()[-1].startswith(verdict)
    result = json.loads(gate(capsys, *sources, "--json", under=0.9)[1])
    (pair,) = result["pairs"]
    assert result["verdict"] == pair["verdict"] == verdict and not pair["paired"] and pair["pieces"] == 20
    assert pair["change"]["value"] == pytest.approx(factor - 1, abs=0.01)
    status, out, _ = gate(capsys, *sources, "--markdown", under=0.9)
    assert status == code and out.startswith("| pair ") and out.splitlines()[-1].startswith(verdict)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_responses_with_ids_are_paired_in_any_order(tmp_path: Path, capsys: Any, engine: str) -> None:
    """Lines of other orders, one of which is missing, with tokens that differ much between prompts."""
    random, lines = np.random.default_rng(0), []
    for i in range(24):
        counts = random.multinomial(40, random.dirichlet([1, 1, 1, 2])).tolist()
        accepted = sum(k * n for k, n in enumerate(counts))
        row = {"completion_tokens": 40 + accepted, "spec_verify_ct": 40}
        if engine == "vllm":
            row = {"acceptance_histogram": counts, "num_spec_steps": 40, "num_draft_tokens": 120}
            row |= {"num_accepted_draft_tokens": accepted}
        lines.append({"custom_id": f"q{i}", "response": {"body": row}})
    files = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for path, rows in zip(files, (lines, lines[:0:-1]), strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (pair,) = json.loads(gate(capsys, *files, "--json")[1])["pairs"]
    assert pair["paired"] and pair["pieces"] == 23 and pair["verdict"] == "pass" and pair["detectable"] == 0
    for row in lines:
        row["custom_id"] = "same"
    for path in files:
        path.write_text("".join(json.dumps(row) + "\n" for row in lines), encoding="utf-8")
    (pair,) = json.loads(gate(capsys, *files, "--json")[1])["pairs"]
    assert not pair["paired"] and pair["verdict"] == "undecided" and pair["detectable"] > 0.1


def test_runs_are_paired_by_prompt(tmp_path: Path, capsys: Any) -> None:
    a, b = (on_disk(finished_run(tmp_path / name, RUN | {"name": name}, tokens=600)) for name in ("a", "b"))
    status, out, _ = gate(capsys, a, b)
    assert status == 0 and "of the same prompts" in out and "0.0 %" in out
    assert cli.main(["compare", str(a), str(b), "--fail-under", "0.95"]) == 0, "where it was before"
    assert capsys.readouterr().out == out
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


def test_few_responses_exit_with_3_and_number_needed(tmp_path: Path, capsys: Any) -> None:
    sources = responses(tmp_path / "a.jsonl", 1.0, 6), responses(tmp_path / "b.jsonl", 1.0, 6)
    status, out, _ = gate(capsys, *sources, under=0.99)
    assert status == 3 and "measure" in out.splitlines()[-1]
    status, out, _ = gate(capsys, sources[0], under=0.99)
    assert status == 3 and "current" not in out
    assert gate(capsys, responses(tmp_path / "c.jsonl", 1.0, 2), sources[1])[0] == 3


def test_replays_are_paired_by_prompt(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in RESPONSES), encoding="utf-8")
    for name in ("a", "b"):
        capsys.readouterr()
        assert cli.main(["replay", "r.jsonl", "--drafter", "prompt-lookup", "--gamma", "1,2", "--json"]) == 0
        Path(f"{name}.json").write_text(capsys.readouterr().out, encoding="utf-8")
    status, out, _ = gate(capsys, "a.json", "b.json", "--json")
    pairs = json.loads(out)["pairs"]
    assert status == 0 and all(pair["paired"] and pair["pieces"] == 4 for pair in pairs)
    assert [pair["title"].split(", ")[-1] for pair in pairs][:2] == ["gamma 1", "gamma 2"]
    data = json.loads(Path("b.json").read_text(encoding="utf-8"))
    for name, temperature in (("a", 0.0), ("b", 1.0)):
        sampled = data | {"sampling": {"temperature": temperature, "top_k": 0}}
        Path(f"{name}.json").write_text(json.dumps(sampled), encoding="utf-8")
    status, _, err = gate(capsys, "a.json", "b.json")
    assert status == 2 and "temperature is 0.0 in the baseline and 1.0 in the current responses" in err
    data["rows"] = [row for row in data["rows"] if row["gamma"] == 1]
    Path("b.json").write_text(json.dumps(data), encoding="utf-8")
    status, _, err = gate(capsys, "a.json", "b.json")
    assert status == 2 and "b.json lacks" in err and "gamma 2" in err
    data["rows"][0]["by_prompt"][0] = [1, 2]
    Path("b.json").write_text(json.dumps(data), encoding="utf-8")
    assert "is not the output of crossdraft replay --json" in gate(capsys, "a.json", "b.json")[2]


@pytest.mark.parametrize("text", [VLLM_LOG, VLLM_SCRAPE, SGLANG_LOG])
def test_logs_and_scrapes_are_read(tmp_path: Path, capsys: Any, text: str) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(text, encoding="utf-8")
    status, out, err = gate(capsys, tmp_path / "a", tmp_path / "b", under=0.5)
    assert status in (0, 3), err
    assert ("assumed: independent drafts" in out) == (text is VLLM_SCRAPE)


def test_errors(tmp_path: Path, capsys: Any) -> None:
    run, file = on_disk(finished_run(tmp_path / "run", RUN)), responses(tmp_path / "a.jsonl", 1.0)
    empty = tmp_path / "empty.txt"
    empty.write_text("hello\n", encoding="utf-8")
    for arguments, message in (
        ((run, file), "give two of one kind"),
        ((file, tmp_path / "missing"), "does not exist"),
        ((file, empty), "has no acceptance in a known format"),
        ((run, run), "given twice"),
    ):
        status, _, err = gate(capsys, *arguments)
        assert status == 2 and message in err, err
