"""``crossdraft simulate``: its output, and the inputs that it refuses."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from crossdraft_advisor.simulate.arrivals import Arrival, read_trace
from crossdraft_advisor.simulate.outcome import PolicyResult

from crossdraft.framework.cli import main as cli
from crossdraft.framework.errors import UsageError
from crossdraft.framework.metrics.columns import ENDS

PASSES = "batch_size,width,context,seconds\n" + "".join(
    f"{b},{w},100,{0.01 + 0.001 * b * w:.3f}\n" for b in (1, 8) for w in (1, 5)
)
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
AZURE = f"{HEADER}2023-11-16 18:17:03.9799600,374,44\n2023-11-16 18:17:04.0319600,396,109\n"
MOONCAKE = (
    '{"timestamp": 27000, "input_length": 6955, "output_length": 52, "hash_ids": [1]}\n'
    '{"timestamp": 27000, "input_length": 655, "output_length": 2, "hash_ids": []}\n'
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
    columns = {field.name for field in fields(PolicyResult)}
    assert columns == {name for name in rows[0] if not name.endswith(ENDS)}
    assert {"tokens_per_second", "first_token_seconds", "token_seconds"} <= estimates
    _, out, _ = run(inputs, capsys, "--concurrency", "2", "--json", "--policy", "off")
    (result,) = json.loads(out)["results"]
    assert set(result) == columns
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


def request(time: object, **fields: object) -> str:
    return json.dumps({"timestamp": time, "input_length": 2, "output_length": 3, **fields}) + "\n"


BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


@pytest.mark.parametrize(
    "text, unit, seconds, times",
    [
        # A gap of 1.5 s in the unit that the keys are known for, or in the given one.
        (request(61.1, parent_chat_id=-1, hash_ids=[1]) + request(62.6, chat_id=2), None, 1.5, "s, as in the B"),
        (request(27000, hash_ids=[1]) + request(28500), None, 1.5, "ms, as in the Mooncake traces"),
        (BURST + "5,ChatGPT,472,18,490,Conversation log\n6.5,GPT-4,1,2,3,API log\n", None, 1.5, "s, as in the Burst"),
        (request(1700000000.25) + request(1700000001.75), "s", 1.5, "s (--time-unit)"),
        (request(1700000000000000001) + request(1700000001500000001), "ns", 1.5, "ns (--time-unit)"),
        ("timestamp,input_length,output_length\n1e3,2,3\n0002500,004,5\n", "ms", 1.5, "ms (--time-unit)"),
        (BURST + "5,ChatGPT,4,1,5,-\n6,GPT-4,7,0,7,-\n6.5,GPT-4,1,2,3,-\n", None, 1.5, "1 requests without output tok"),
        (request(1, hash_ids=[]) + '{"delay": 3, "output_length": 2}\n' + request(1501), None, 1.5, "at a delay"),
        ("timestamp,input_tokens,output_tokens\n0.5,2,3\n2,4,5\n", "s", 1.5, "s (--time-unit)"),
        # As tools write them: a list, floats of pandas, a byte order mark, a last line that is cut off.
        (f"[{request(27000, hash_ids=[1])},\n{request(28500)}]\n", None, 1.5, "ms, as in the Mooncake traces"),
        ("\ufeff" + BURST + "5.0,ChatGPT,4.0,1.0,5.0,-\r\n6.5,GPT-4,1,2,3,-\r\n", None, 1.5, "s, as in the BurstGPT"),
        (
            request(1, hash_ids=[]) + request(1501) + '{"timestamp": 17',
            None,
            1.5,
            "1 requests in a truncated last line",
        ),
        (BURST + "5,ChatGPT,4,1,5,-\n6.5,GPT-4,1,2,3,-\n6.7,GP", None, 1.5, "1 requests in a truncated last line"),
        # Dates: the same instants at other offsets, across the end of daylight saving time, without an offset.
        (request("2024-05-10 00:00:00+00:00") + request("2024-05-10T02:00:01.5+02:00"), None, 1.5, "offset from UTC"),
        (request("2024-10-27 02:59:59Z") + request("2024-10-27 02:00:00.5-0100"), None, 1.5, "offset from UTC"),
        (request("2024-03-10T01:59:59-08:00") + request("2024-03-10T03:00:00.5-07:00"), None, 1.5, "offset from UTC"),
        (f"{HEADER}2023-11-16 18:17:03,3,4\n2023-11-16 18:17:04.50000019,3,4\n", None, 1.5, "without an"),
    ],
)
def test_times_are_read_in_their_unit_and_offset(
    tmp_path: Path, text: str, unit: str | None, seconds: float, times: str
) -> None:
    (tmp_path / "trace").write_text(text, encoding="utf-8")
    trace = read_trace(str(tmp_path / "trace"), unit=unit)
    assert [arrival.seconds for arrival in trace.arrivals] == pytest.approx([0, seconds], abs=1e-6)
    assert times in trace.times and trace.title == "trace trace: 2 requests, 0.667 requests/s over 1.5 s"


def test_load_and_unit_of_trace_are_printed(inputs: dict[str, Path], tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "t.jsonl").write_text("".join(request(i / 4, chat_id=i) for i in range(9)), encoding="utf-8")
    code, out, _ = run(inputs, capsys, "--trace", str(tmp_path / "t.jsonl"), "--policy", "off")
    assert code == 0 and "trace t.jsonl: 9 requests, 4 requests/s over 2 s\n" in out
    assert "assumed: times of the trace t.jsonl are numbers in s, as in the Bailian traces" in out


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("t.csv", "time,in,out\n1,2,3\n", r"t.csv:1: a trace must begin with a JSON object, or with a line of diff"),
        ("t.csv", BURST.replace("Model", "Timestamp") + "1,2,3,4,5,6\n", r"t.csv:1: a trace must begin with"),
        ("t.csv", AZURE + "2023-11-16 18:17:05,3\n", r"t.csv:4: the line has 2 values; TIMESTAMP,"),
        ("t.csv", AZURE + '"2023-11-16 18:17:05,3,4\n', r"t.csv:4: not valid CSV"),
        *[
            ("t.csv", AZURE + f"{time},3,4\n", rf"t.csv:4: .* '{re.escape(time)}' is not a time")
            for time in ("soon", "2023-11-16", "2023-13-16 18:17:05", "2023-11-16 18:17:05 UTC", "nan", "-1", "1e999")
        ],
        ("t.csv", AZURE + "2023-11-16 18:17:05+01:00,3,4\n", r"t.csv:4: .* only one has an offset from UTC"),
        ("t.csv", AZURE + "1700158625,3,4\n", r"t.csv:4: 'TIMESTAMP' '1700158625' is a number, but the first time is"),
        ("t.csv", HEADER + "12.5,3,4\n", r"t.csv:2: .* has an unknown unit: .* set --time-unit"),
        *[
            ("t.csv", AZURE + f"2023-11-16 18:17:05,{n},4\n", r"t.csv:4: 'ContextTokens' .* is not a number")
            for n in ("0", "-3", "3.5", "3e2", "+3", "\u0663", "", "000015000000000", "0" * 99 + "1048577", "9" * 9999)
        ],
        ("t.csv", AZURE + "2023-11-16 18:17:01,3,4\n", r"t.csv:4: the request arrives before the previous one; sort"),
        ("t.csv", HEADER, r"t.csv does not contain a request; give"),
        ("t.csv", "PAR1", r"t.csv is a Parquet file; convert it to JSONL or CSV"),
        ("t.jsonl", "[1]\n", r"t.jsonl, item 1: a request is a JSON object, not int"),
        ("t.jsonl", '{"timestamp": 1, "input_length": 2}\n', r"t.jsonl:1: 'output_length' is missing; a request has"),
        ("t.jsonl", MOONCAKE + "{\n", r"t.jsonl:4: not JSON"),
        *[
            ("t.jsonl", request(time), r"t.jsonl:1: 'timestamp' .* is not a time; give a number")
            for time in (-1, True, None, "1", [1], float("nan"), float("inf"))
        ],
        ("t.jsonl", request(27000), r"t.jsonl:1: 'timestamp' 27000 has an unknown unit: .* --time-unit to"),
        ("t.jsonl", MOONCAKE + request(30536.5), r"t.jsonl:4: 'timestamp' 30536.5 is not a whole number of millisec"),
        ("t.jsonl", MOONCAKE + request(30536, chat_id=1), r"t.jsonl:4: .* is in s as in the Bailian .* in ms"),
        ("t.jsonl", MOONCAKE + request("2023-11-16 18:17:05Z"), r"t.jsonl:4: .* is a date, but the first"),
        # The clock was set back: an hour later on it, and half an hour earlier in fact.
        ("t.jsonl", request("2024-05-10 00:00:00-01:00") + request("2024-05-10 00:30:00Z"), r"t.jsonl:2: .* before"),
        *[
            ("t.jsonl", request(1, hash_ids=[], output_length=n), r"t.jsonl:1: 'output_length' .* is not a number")
            for n in (True, 2.0, "2", None, -1, 15_000_000_000, [2])
        ],
    ],
)
def test_wrong_trace_is_refused_with_line_and_key(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        read_trace(str(tmp_path / name))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "requires one of --rate, --trace and --concurrency"),
        (["--rate", "1", "--concurrency", "2"], "requires one of --rate, --trace and --concurrency"),
        (["--rate", "1", "--time-unit", "s"], "--time-unit requires --trace"),
        (["--rate", "1,0"], "--rate 0: should be greater than 0"),
        (["--concurrency", "2", "--burstiness", "0.5"], "--burstiness requires --rate"),
        (["--concurrency", "1,8", "--requests", "8"], "--concurrency 8 of 8 requests leaves none to arrive"),
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
