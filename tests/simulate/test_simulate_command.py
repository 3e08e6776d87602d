"""``crossdraft simulate``: its output, and the inputs that it refuses."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from crossdraft.framework.cli import main as cli
from crossdraft.framework.errors import UsageError
from crossdraft.framework.metrics.columns import ENDS, SIMULATION_COLUMNS
from crossdraft.framework.simulate.arrivals import Arrival, read_trace

PASSES = "batch_size,width,context,seconds\n" + "".join(
    f"{b},{w},100,{0.01 + 0.001 * b * w:.3f}\n" for b in (1, 8) for w in (1, 5)
)
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,374,44\n2023-11-16 18:17:04.0319600,396,109\n"
)
MOONCAKE = (
    '{"timestamp": 27000, "input_length": 6955, "output_length": 52, "hash_ids": [1]}\n'
    '{"timestamp": 27000, "input_length": 655, "output_length": 2}\n'
    '{"timestamp": 30535, "input_length": 672, "output_length": 26}\n'
)


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, Path]:
    files = {"passes.csv": PASSES, "azure.csv": AZURE, "mooncake.jsonl": MOONCAKE}
    rows = [
        {"id": str(i), "prompt": [5, 6, 7, 5 + i], "tokens": [5, 6, 7, 5, 6, 7, 8 + i], "finish_reason": "length"}
        for i in range(12)
    ]
    files["responses.jsonl"] = "".join(json.dumps(row) + "\n" for row in rows)
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return {name: tmp_path / name for name in files}


def run(inputs: dict[str, Path], capsys: Any, *arguments: str) -> tuple[int, str, str]:
    common = [str(inputs["responses.jsonl"]), "--drafter", "prompt-lookup", "--temperature", "0", "--requests", "20"]
    capsys.readouterr()
    code = cli.main(["simulate", *common, "--cost", str(inputs["passes.csv"]), "--gamma", "4", *arguments])
    return code, *capsys.readouterr()


def test_table_has_row_per_policy_and_process(inputs: dict[str, Path], capsys: Any) -> None:
    code, out, _ = run(inputs, capsys, "--rate", "5,50", "--slo-token", "0.01")
    assert code == 0 and out.count("requests/s\n") == 2
    for policy in ("off", "static:4", "schedule:", "oracle"):
        assert sum(line.startswith(policy) for line in out.splitlines()) == 2
    assert "goodput /s" in out and "regret %" in out and "assumed: the cache holds all running requests" in out


def test_csv_and_json_hold_documented_columns(inputs: dict[str, Path], capsys: Any) -> None:
    _, out, _ = run(inputs, capsys, "--concurrency", "2", "--slo-first-token", "1", "--csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    estimates = {name.removesuffix(ENDS[0]) for name in rows[0] if name.endswith(ENDS[0])}
    assert set(SIMULATION_COLUMNS) == {name for name in rows[0] if not name.endswith(ENDS)}
    assert {"tokens_per_second", "first_token_seconds", "token_seconds"} <= estimates
    _, out, _ = run(inputs, capsys, "--concurrency", "2", "--json", "--policy", "off")
    (result,) = json.loads(out)["results"]
    assert set(result) == set(SIMULATION_COLUMNS)
    assert result["tokens_per_second"]["value"] == pytest.approx(float(rows[0]["tokens_per_second"]))
    assert result["requests"] == 160 and result["goodput"] is None


def test_options_of_engine_change_its_steps(inputs: dict[str, Path], tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "prefill.csv").write_text("batch_size,width,context,seconds\n1,2,0,5\n1,9,0,5\n", encoding="utf-8")
    common = ["--concurrency", "1", "--policy", "off", "--json"]

    def seconds(*arguments: str) -> tuple[float, float]:
        (result,) = json.loads(run(inputs, capsys, *common, *arguments)[1])["results"]
        return result["first_token_seconds"]["value"], result["token_seconds"]["value"]

    plain, slow = seconds(), seconds("--overhead", "1")
    assert slow == pytest.approx((plain[0] + 1, plain[1] + 1))
    prefill = seconds("--prefill-cost", str(tmp_path / "prefill.csv"))
    assert prefill == pytest.approx((5, plain[1]))
    loop = seconds("--loop", "crossdraft", "--prefill-cost", str(tmp_path / "prefill.csv"))
    assert loop == pytest.approx((5 + plain[1], plain[1]))


def test_same_seeds_give_same_numbers(inputs: dict[str, Path], capsys: Any) -> None:
    first, second = (run(inputs, capsys, "--rate", "20", "--json")[1] for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    "name, first", [("azure.csv", Arrival(0.0, 374, 44)), ("mooncake.jsonl", Arrival(0.0, 6955, 52))]
)
def test_traces_start_at_zero(inputs: dict[str, Path], capsys: Any, name: str, first: Arrival) -> None:
    trace = read_trace(str(inputs[name]))
    assert trace.arrivals[0] == first
    assert trace.arrivals[-1].seconds == pytest.approx(0.052 if name == "azure.csv" else 3.535)
    code, out, _ = run(inputs, capsys, "--trace", str(inputs[name]), "--policy", "off", "--json")
    (result,) = json.loads(out)["results"]
    assert code == 0 and result["requests"] == 8 * min(len(trace.arrivals), 20)
    assert read_trace(str(inputs[name]), 1).arrivals == (first,)


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("t.csv", "time,in,out\n1,2,3\n", r"t.csv:1: a CSV trace must begin with the line TIMESTAMP,"),
        ("t.csv", AZURE + "2023-11-16 18:17:05,3\n", r"t.csv:4: the line has 2 values; TIMESTAMP,"),
        ("t.csv", AZURE + "soon,3,4\n", r"t.csv:4: TIMESTAMP 'soon' is not a time; write it as 2023"),
        ("t.csv", AZURE + "2023-11-16 18:17:05,0,4\n", r"t.csv:4: 'ContextTokens' '0' is not a number of tokens; give"),
        ("t.csv", AZURE + "2023-11-16 18:17:01,3,4\n", r"t.csv:4: the request arrives before the previous one; sort"),
        ("t.csv", AZURE.splitlines()[0] + "\n", r"t.csv does not contain a request; give"),
        ("t.jsonl", "[1]\n", r"t.jsonl:1: a request is a JSON object, not list"),
        ("t.jsonl", '{"timestamp": 1, "input_length": 2}\n', r"t.jsonl:1: 'output_length' is missing; a request has"),
        ("t.jsonl", MOONCAKE + "{\n", r"t.jsonl:4: not JSON"),
        (
            "t.jsonl",
            '{"timestamp": -1, "input_length": 2, "output_length": 3}\n',
            r"t.jsonl:1: 'timestamp' -1 is not a time; give milliseconds",
        ),
        (
            "t.jsonl",
            '{"timestamp": 1, "input_length": 2, "output_length": true}\n',
            r"t.jsonl:1: 'output_length' True is not a number of tokens; give an integer",
        ),
    ],
)
def test_wrong_trace_is_refused_with_line_and_key(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        read_trace(str(tmp_path / name))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "requires one of --rate, --trace and --concurrency, got none of them"),
        (["--rate", "1", "--concurrency", "2"], "got --rate and --concurrency"),
        (["--rate", "1,0"], "--rate must be a positive number, got 0"),
        (["--rate", "nan"], "--rate must be a positive number, got nan"),
        (["--concurrency", "2", "--burstiness", "0.5"], "--burstiness requires --rate; remove it"),
        (["--concurrency", "1,8", "--requests", "8"], "--concurrency 8 of 8 requests leaves none to arrive"),
        (["--rate", "1", "--overhead", "-1"], "--overhead must be at least 0, got -1"),
        (["--rate", "1", "--slo-token", "-1"], "--slo-token must be a positive number, got -1"),
        (["--rate", "1", "--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["--rate", "1", "--policy", "dynamic"], "'dynamic' is not a policy; give off, static:N"),
        (["--rate", "1", "--policy", "static:x"], "'static:x' is not a policy"),
        (
            ["--rate", "1", "--policy", "static:9"],
            "static:9 drafts 9 tokens, but the replay has drafts of 4; set --gam",
        ),
        (["--rate", "1", "--policy", "schedule:4=1"], "has no length for 1 request; begin with schedule:1=N"),
        (["--rate", "1", "--policy", "schedule:1=2,1=3"], "is not a schedule; give increasing batch sizes"),
        (["--rate", "1", "--policy", "schedule:"], "is not a schedule"),
        (["--rate", "1", "--policy", "budget:" + "9" * 30], "has too many tokens; the maximum is"),
        (["--rate", "1", "--policy", "off", "--policy", "off"], "--policy off is given twice"),
        (["--rate", "1", "--prefill-cost", "PASSES"], "the batch sizes must be 1: a line is one prompt"),
        (["--rate", "1", "--on", "h100"], "--on and --cost cannot be combined"),
        (["--rate", "1", "--drafter", "{name: draft-model-iid, model: m, K: 2}"], ""),
    ],
)
def test_wrong_option_is_refused_with_remedy(
    inputs: dict[str, Path], capsys: Any, arguments: list[str], message: str
) -> None:
    words = [str(inputs["passes.csv"]) if word == "PASSES" else word for word in arguments]
    code, out, err = run(inputs, capsys, *words)
    assert code == 2 and not out and message in err, err


def test_cost_is_required(inputs: dict[str, Path], capsys: Any) -> None:
    words = ["simulate", str(inputs["responses.jsonl"]), "--drafter", "prompt-lookup", "--rate", "1"]
    assert cli.main(words) == 2
    assert "the cost of the target is unknown: give --cost FILE" in capsys.readouterr().err


def test_roofline_prices_steps_without_model(inputs: dict[str, Path], tmp_path: Path, capsys: Any) -> None:
    """Thousands of replicas of a model that is described by its config only."""
    config = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
    config |= {"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256}
    (tmp_path / "target.json").write_text(json.dumps(config), encoding="utf-8")
    common = [str(inputs["responses.jsonl"]), "--drafter", "prompt-lookup", "--temperature", "0", "--gamma", "4"]
    common += ["--target", str(tmp_path / "target.json"), "--on", "h100", "--requests", "3000", "--seeds", "1"]
    code = cli.main(["simulate", *common, "--rate", "3000", "--replicas", "2000", "--policy", "off", "--json"])
    report = json.loads(capsys.readouterr().out)
    (result,) = report["results"]
    assert code == 0 and result["requests"] == 3000 and 0.005 < result["token_seconds"]["value"] < 0.03
    assert any("2000 equal replicas" in remark for remark in report["remarks"]["assumed"])
