"""Formats of acceptance: own samples of the shape of each engine's and tool's files, whole and damaged."""

import gzip
import json
from dataclasses import replace
from typing import Any

import pytest
from crossdraft_advisor import Acceptance, AcceptanceFormat, Source
from crossdraft_advisor.advise.candidates import of_pair
from crossdraft_advisor.engines.engine_log import read_source
from crossdraft_advisor.engines.formats import acceptances_in

from crossdraft.framework import plugins
from crossdraft.framework.errors import ContractError, UsageError

LLAMA_OLD = """\
[7] 1.02.003 I slot print_timing: id  0 | task 4 |
[7] prompt eval time =     100.00 ms /    40 tokens (    2.50 ms per token,   400.00 tokens per second)
[7]        eval time =    1000.00 ms /    61 tokens (   16.39 ms per token,    61.00 tokens per second)
[7]       total time =    1100.00 ms /   101 tokens
[7] draft acceptance rate = 0.50000 (   40 accepted /    80 generated)
"""
LLAMA_MEAN = "9.1 I slot print_timing: id 0 | task 1 | draft acceptance = 0.75000 ( 150 accepted / 200 generated)"
STATISTICS = "1.2 I statistics {}: #calls(b,g,a) = 1 20 20, #gen drafts = {}, #acc drafts = 9, #gen tokens = {}, "
STATISTICS += "#acc tokens = {}{}, dur(b,g,a) = 0.1, 0.2, 0.3 ms\n"
BENCH = """\
---------------Speculative Decoding---------------
Acceptance rate (%):                     45.00
Acceptance length:                       1.90
Drafts:                                  1000
Draft tokens:                            2000
Accepted tokens:                         900
Per-position acceptance (%):
  Position 0:                            60.00
  Position 1:                            30.00
==================================================
"""
BENCH_JSON: dict[str, Any] = {
    "backend": "vllm",
    "spec_decode_acceptance_rate": 45.0,
    "spec_decode_acceptance_length": 1.9,
    "spec_decode_num_drafts": 1000,
    "spec_decode_draft_tokens": 2000,
    "spec_decode_accepted_tokens": 900,
    "spec_decode_per_position_acceptance_rates": [0.6, 0.3],
}
TENSORRT: dict[str, Any] = {
    "total_accepted_draft_tokens": 9,
    "total_draft_tokens": 30,
    "num_spec_steps": 10,
    "acceptance_histogram": [5, 2, 2, 1],
    "num_spec_tokens": 3,
}
AIPERF: dict[str, Any] = {
    "engine": "vllm",
    "num_accepted_draft_tokens": 9,
    "num_draft_tokens": 30,
    "num_spec_steps": 10,
    "acceptance_histogram": {"0": 5, "1": 2, "2": 2, "3": 1},
    "num_spec_tokens": 3,
}
ITERATION = {"numDraftTokens": 30, "numAcceptedTokens": 9, "numRequestsWithDraftTokens": 10, "acceptanceLength": 1.9}
SPEC_BENCH = {"index": 0, "turns": ["..."], "decoding_steps": [10], "new_tokens": [19], "wall_time": [0.5]}
WINDOW = "SpecDecoding metrics: Mean acceptance length: 1.90, Accepted throughput: 9.00 tokens/s, Drafted throughput: "
WINDOW += "20.00 tokens/s, Accepted: 900 tokens, Drafted: 2000 tokens, Per-position acceptance rate: 0.600, 0.300, Avg "
WINDOW += "Draft acceptance rate: 45.0%\n"
EARLY = "SpecDecoding metrics: Draft acceptance rate: 45.0%, Mean acceptance length: 1.90, Accepted: 900 tokens, "
EARLY += "Drafted: 2000 tokens, Per-position acceptance rate: 0.600, 0.300\n"
GAUGE = 'sglang:spec_accept_length{{dp_rank="{}"}} {}\n'
SGLANG = 'sglang:{}{{model_name="m",{}}} {}\n'
COUNTERS = SGLANG.format("spec_verify_calls_total", "", 1000) + "".join(
    SGLANG.format(name, f'is_streaming="{streams}"', n)
    for name, numbers in (("generation_tokens_total", (1500, 410)), ("num_requests_total", (4, 6)))
    for streams, n in zip(("true", "false"), numbers, strict=True)
)
STEPS = "sglang:spec_num_steps 3.0\nsglang:spec_num_draft_tokens {}\n"
ARGUMENTS = (
    "server_args=ServerArgs(speculative_algorithm='EAGLE3', speculative_num_steps=3, speculative_eagle_topk=1)\n"
)
DECODED = "[2026-01-01 DP0 TP0] Decode batch, #running-req: 4, #token: 10, accept len: 1.90, cuda graph: True\n"
NVIDIA = 'trtllm_spec_decode_{}_tokens_total{{engine_type="pytorch",token_position="{}"}} {}.0\n'
BY_POSITION = "".join(
    NVIDIA.format(name, i, n) for name, row in (("drafted", (10, 10)), ("accepted", (6, 3))) for i, n in enumerate(row)
)
TOTALS = 'trtllm_spec_decode_num_{}_tokens_total{{engine_type="pytorch"}} {}.0\n'
VLLM = {"drafts": 1000, "draft_tokens": 2000, "accepted_tokens": 900}
SCRAPE = "".join(f"vllm:spec_decode_num_{name}_total{{}} {n}.0\n" for name, n in VLLM.items())
SCRAPE += "".join(
    f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}} {n}.0\n' for i, n in enumerate((600, 300))
)
QUERY = [
    {"metric": {"__name__": f"vllm:spec_decode_num_{name}_total", "pod": "a"}, "value": [1.5, f"{n}"]}
    for name, n in VLLM.items()
]
AIPERF_SUMMARY = {"total_spec_decode_steps": 1000, "total_accepted_draft_tokens": 900, "total_draft_tokens": 2000}
AIPERF_RECORD = {"spec_decode_steps": 10, "spec_decode_accepted_draft_tokens": 9, "spec_decode_draft_tokens": 20}
#: Each request has 20 tokens in 11 iterations, the prefill's included.
TRTLLM_MEAN = {"choices": [{"avg_decoded_tokens_per_iter": 20 / 11}], "usage": {"completion_tokens": 20}}
TRTLLM_REPORT = {
    "request_info": {"num_requests": 10, "avg_output_length": 20.0},
    "decoding_stats": {
        f"num_{k}_tokens_percentiles": {"average": n} for k, n in (("draft", 22), ("accepted_draft", 9))
    },
}
TRTLLM_TEXT = """\
Number of requests:             10
Average Output Length (tokens): 20.0000
[DT] AVERAGE: 22.00
[ADT] AVERAGE: 9.00
"""
SPECULATIVE = "\nn_draft   = 2\nn_predict = 19\nn_drafted = 20\nn_accept  = 9\naccept    = 45.000%\n"
SGLANG_LOG = (
    "[2026-01-01] Finish: obj=GenerateReqInput(rid='a'), out={'text': \"it's\", 'meta_info': {'completion_tokens': "
)
SGLANG_LOG += "20, 'spec_accept_length': 2.0, 'spec_verify_ct': 10, 'spec_accept_token_num': 9, 'e2e_latency': 1.0}}\n"
SGLEXT = {"usage": {"completion_tokens": 20}, "sglext": {"spec_tokens_details": {"spec_verify_ct": 10}}}
EXAMPLE = """\
num_drafts: 1000
num_draft_tokens: 2000
num_accepted_tokens: 903
mean acceptance length: 1.90
--------------------------------------------------
acceptance at token 0: 0.60
acceptance at token 1: 0.30
"""
TIMINGS = {"timings": {"predicted_n": 20, "draft_n": 30, "draft_n_accepted": 9}}


def text_of(*objects: Any) -> str:
    return "".join(json.dumps(item) + "\n" for item in objects)


@pytest.mark.parametrize(
    "name, text, length, gamma, drafts",
    [
        ("llama.cpp", LLAMA_OLD, 1 + 40 / 20, 4, 20),
        ("llama.cpp", LLAMA_MEAN + ", mean len =  4.00\n", 4, 4, 50),
        ("llama.cpp", LLAMA_MEAN + ", mean len =  3.73\n", 3.73, 4, 150 / 2.73),
        ("llama.cpp", STATISTICS.format("draft_simple", 20, 60, 21, ""), 2.05, 3, 20),
        ("llama.cpp", STATISTICS.format("draft-mtp", 20, 40, 18, ", #acc rate/pos = (0.6, 0.3)"), 1.9, 2, 20),
        ("llama.cpp", text_of(TIMINGS, TIMINGS), 1.9, 3, 20),
        ("llama.cpp", SPECULATIVE, 1.9, 2, 10),
        ("aiperf", text_of({key: {"unit": "count", "avg": n} for key, n in AIPERF_SUMMARY.items()}), 1.9, 2, 1000),
        ("aiperf", text_of({"metrics": {key: {"value": n} for key, n in AIPERF_RECORD.items()}}), 1.9, 2, 10),
        ("tensorrt-llm-responses", text_of(TRTLLM_MEAN, TRTLLM_MEAN), 1.9, 0, 20),
        ("trtllm-bench", text_of(TRTLLM_REPORT), 1.9, 2, 100),
        ("trtllm-bench", TRTLLM_TEXT, 1.9, 2, 100),
        ("sglang-responses", SGLANG_LOG, 1.9, 0, 10),
        ("sglang-responses", text_of(SGLEXT), 1.9, 0, 10),
        ("vllm-bench", BENCH, 1.9, 2, 1000),
        ("vllm-bench", "Acceptance length: 1.90\nPosition 0: 60.00\nPosition 1: 30.00\n", 1.9, 2, None),
        ("vllm-bench", text_of(BENCH_JSON), 1.9, 2, 1000),
        ("vllm-bench", json.dumps([{"run": 1} | BENCH_JSON], indent=1), 1.9, 2, 1000),
        ("vllm-bench", text_of(BENCH_JSON | {"spec_decode_per_position_acceptance_rates": []}), 1.9, 2, 1000),
        ("vllm-bench", text_of({"spec_decode_acceptance_length": 1.9}), 1.9, 0, None),
        ("vllm", "\x1b[32mINFO\x1b[0m 05-06 06:11:23 [metrics.py:101] " + WINDOW, 1.9, 2, 1000),
        ("vllm", "2026-05-06T06:11:23Z pod-7 (EngineCore_DP0 pid=3) INFO 05-06 [metrics.py:86] " + EARLY, 1.9, 2, 1000),
        ("sglang", GAUGE.format(0, 1.8) + GAUGE.format(1, 2.0) + GAUGE.format(2, 0.0), 1.9, 0, None),
        ("sglang", GAUGE.format(0, "NaN") + GAUGE.format(1, 1.9) + STEPS.format(4), 1.9, 3, None),
        ("sglang", COUNTERS + STEPS.format(4), 1.9, 3, 1000),
        ("sglang", ARGUMENTS + DECODED, 1.9, 3, None),
        ("sglang-bench", text_of({"speculative_num_steps": 3, "avg_spec_accept_length": 1.9}), 1.9, 3, None),
        ("vllm", SCRAPE.replace("vllm:", "ray_vllm_"), 1.9, 2, 1000),
        ("vllm", SCRAPE.replace("_total{", "{"), 1.9, 2, 1000),
        ("vllm", SCRAPE.removesuffix("\n"), 1.9, 2, 1000),
        ("vllm", text_of({"status": "success", "data": {"result": QUERY}}), 1.9, 2, 1000),
        ("vllm-bench", EXAMPLE, 1.903, 2, 1000),
        ("tensorrt-llm-counters", BY_POSITION, 1.9, 2, 10),
        ("sglang-bench", "Concurrency:      1.0\nAccept length:                           1.90\n", 1.9, 0, None),
        ("sglang-bench", text_of({"backend": "sglang", "completed": 3, "accept_length": 1.9}), 1.9, 0, None),
        ("sglang-bench", text_of({"internal_states": [{"avg_spec_accept_length": 1.9}]}), 1.9, 0, None),
        ("response-statistics", text_of({"choices": [{"speculative_decoding": TENSORRT}]}), 1.9, 3, 10),
        ("response-statistics", text_of({"metadata": {}, "spec_decode_acceptance": AIPERF}), 1.9, 3, 10),
        ("tensorrt-llm-iterations", text_of([{"iter": 1, "specDecodingStats": ITERATION}]), 1.9, 3, 10),
        ("sglang-responses", text_of({"meta_info": {"completion_tokens": 20, "spec_verify_ct": 10}}), 1.9, 0, 10),
        ("speculators", "Weighted per-position acceptance rates:\n[0.6  0.3]\n", 1.9, 2, None),
        ("speculators", "Weighted acceptance rates: [0.6 0.3]\n", 1.9, 2, None),
        (
            "spec-bench",
            text_of({"choices": [SPEC_BENCH | {"accept_lengths": [1, 1, 2, 2, 2, 3, 3, 2, 2, 1]}]}),
            1.9,
            2,
            10,
        ),
        ("spec-bench", text_of({"choices": [SPEC_BENCH]}), 1.9, 0, 10),
        ("spec-bench", text_of({"choices": [{"turns": ["..."], "idxs": [9], "new_tokens": [19]}]}), 1.9, 0, 10),
    ],
)
def test_formats(name: str, text: str, length: float, gamma: int, drafts: float | None, tmp_path: Any) -> None:
    """Every format is read from a file with a broken byte before it, with its length, draft length and drafts."""
    prefix = b"" if text.startswith(("{", "[")) else b"D slot | next token: 9904 '\xe2\x82'\n"
    (tmp_path / "file").write_bytes(prefix + text.encode())
    (acceptance,) = acceptances_in(read_source(str(tmp_path / "file")))
    assert acceptance.format.startswith(f"{name}: ")
    assert acceptance.block_efficiency().value == pytest.approx(length, abs=1e-3)
    assert (acceptance.gamma or acceptance.draft_length or 0) == gamma
    assert acceptance.drafts == (None if drafts is None else pytest.approx(drafts))


DAMAGED = {
    "llama.cpp": (LLAMA_MEAN + ", mean len =  4.00\n", LLAMA_MEAN[:-9] + "\n"),
    "vllm": (WINDOW, WINDOW[:120] + "\n"),
    "vllm-bench": (text_of(BENCH_JSON), text_of(BENCH_JSON | {"spec_decode_num_drafts": 0})),
    "sglang": (GAUGE.format(0, 1.9), GAUGE.format(1, 0.0)),
    "sglang-bench": (text_of({"accept_length": 1.9}), text_of({"accept_length": 0.5})),
    "response-statistics": (text_of(TENSORRT), text_of(TENSORRT | {"num_spec_steps": 11})),
    "sglang-responses": (text_of({"spec_verify_ct": 3, "completion_tokens": 9}), text_of({"spec_verify_ct": None})),
    "tensorrt-llm-iterations": (text_of(ITERATION), text_of(ITERATION | {"numAcceptedTokens": 31})),
    "spec-bench": (text_of(SPEC_BENCH), text_of(SPEC_BENCH | {"new_tokens": [2]})),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_records_do_not_refuse_a_file(name: str) -> None:
    good, bad = DAMAGED[name]
    (expected,) = acceptances_in(Source(good, "log"))
    for text in (good + bad, bad + good, good + '{"num_spec_steps": 3, "accept_len\n'):
        source = Source(text, "log")
        (acceptance,) = acceptances_in(source)
        assert len(source.skipped) == 1 and source.skipped[0].startswith("log:")
        assert acceptance.block_efficiency().value == pytest.approx(expected.block_efficiency().value)
    with pytest.raises(UsageError, match="log:"):
        acceptances_in(Source(bad, "log"))


def test_several_drafters_of_llama_cpp() -> None:
    """They are shares of one system; counters that start again are those of another start."""
    counters = "1.2 I statistics {}: #calls(b,g,a) = 1 {} 20, #gen drafts = {}, #acc drafts = {}, #gen tokens = {}, "
    counters += "#acc tokens = {}, dur(b,g,a) = 0.1, 0.2, 0.3 ms\n"
    rows = [("ngram_mod", 24, 2, 1, 64, 10), ("draft-mtp", 22, 20, 11, 40, 18), ("ngram-map-k", 24, 0, 0, 0, 0)]
    rows += [("ngram_mod", 11, 0, 0, 0, 0), ("draft-mtp", 11, 10, 8, 20, 12)]
    (system,) = acceptances_in(Source(LLAMA_OLD + "".join(counters.format(*row) for row in rows), "log"))
    ngram, mtp = system.parts
    # 35 steps: 2 with a draft of 32 tokens, 30 with one of two, 3 without; they accepted 10 and 30 tokens.
    assert system.block_efficiency().value == pytest.approx(1 + 40 / 35) and system.drafts == 35
    assert dict(system.widths) == pytest.approx({32.0: 2 / 35, 2.0: 30 / 35, 0.0: 3 / 35})
    assert system.marginal[0] == pytest.approx((1 + 19) / 35) and system.gamma == 32
    assert (ngram.drafter, ngram.marginal[0], ngram.gamma) == ("ngram-mod", 0.5, 32)
    assert (mtp.drafter, mtp.marginal) == ("mtp", pytest.approx((19 / 30, 11 / 30)))
    assert "several drafters, ngram-mod, mtp" in system.remarks[0]


@pytest.mark.parametrize("pack", [gzip.compress, lambda data: gzip.compress(data[:50]) + gzip.compress(data[50:])])
def test_compressed(pack: Any, tmp_path: Any) -> None:
    (tmp_path / "log.gz").write_bytes(pack(WINDOW.encode()))
    (acceptance,) = acceptances_in(read_source(str(tmp_path / "log.gz")))
    assert acceptance.marginal == pytest.approx((0.6, 0.3))


@pytest.mark.parametrize(
    "text",
    [
        EARLY.replace("Mean acceptance length: 1.90, ", "").partition(", Per-position")[0] + "\n",
        TOTALS.format("draft", 2000) + TOTALS.format("accepted", 900),
        text_of({"choices": [{"speculative_decoding": {"total_accepted_draft_tokens": 9, "total_draft_tokens": 20}}]}),
        "Speculative metrics: Draft acceptance rate: 0.45, Number of accepted tokens: 9, Number of draft tokens: 20,\n",
        "draft acceptance rate = 0.45000 ( 9 accepted / 20 generated)\n",
    ],
)
def test_accepted_of_drafted_tokens_need_the_draft_length(text: str) -> None:
    (acceptance,) = acceptances_in(Source(text, "log", 2))
    assert (acceptance.length, acceptance.draft_length) == (pytest.approx(1.9), 2)
    with pytest.raises(UsageError, match=r"of 20.* drafted tokens were accepted, but .*--gamma"):
        acceptances_in(Source(text, "log"))


def csv_of(*rows: Any) -> str:
    return "".join(",".join(f'"{str(cell).replace(chr(34), chr(34) * 2)}"' for cell in row) + "\n" for row in rows)


NUMBERS = [("drafts", 1000, {}), ("draft_tokens", 2000, {}), ("accepted_tokens", 900, {})]
NUMBERS += [("accepted_tokens_per_pos", n, {"position": str(i)}) for i, n in enumerate((600, 300))]
SERIES: list[tuple[str, int, dict[str, str]]] = [
    (f"vllm:spec_decode_num_{name}_total", n, {"model_name": "m", **labels}) for name, n, labels in NUMBERS
]
LABELS = [", ".join(f'{key}="{value}"' for key, value in labels.items()) for _, _, labels in SERIES]
RANGE = [  # with a restart
    {"metric": {"__name__": name, **labels}, "values": [[1, f"{9 * n}"], [2, f"{9.5 * n}"], [3, "0"], [4, f"{n / 2}"]]}
    for name, n, labels in SERIES
]
METRICS: dict[str, Any] = {}
for name, n, labels in SERIES:
    metric = METRICS.setdefault(name.removesuffix("_total"), {"type": "counter", "series": []})
    metric["series"].append({"endpoint_url": "http://h/metrics", "labels": labels, "stats": {"total": float(n)}})
VALUES: dict[str, Any] = {name: n for name, n, labels in SERIES if "position" not in labels}
VALUES["vllm:spec_decode_num_accepted_tokens_per_pos"] = [600, 300]


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"status": "success", "data": {"resultType": "matrix", "result": RANGE}}),
        json.dumps({"summary": {}, "metrics": METRICS}, indent=1),
        json.dumps(VALUES),
        csv_of(
            ["Time", *(f"{name}{{{text}}}" for (name, _, _), text in zip(SERIES, LABELS, strict=True))],
            ["2026-01-01 00:00:00", *(7 for _ in SERIES)],
            ["2026-01-01 01:00:00", *(7 + n for _, n, _ in SERIES)],
        ),
        csv_of(
            ["Time", *(f'{{__name__="{name}", {text}}}' for (name, _, _), text in zip(SERIES, LABELS, strict=True))],
            ["1770000000000", *(n for _, n, _ in SERIES)],
        ),
        csv_of(
            ["Time", "__name__", "model_name", "position", "Value"],
            *(["1", name, labels["model_name"], labels.get("position", ""), n] for name, n, labels in SERIES),
        ),
        "".join(f"{line} 1770000000000\n" for line in SCRAPE.splitlines()),
        "# TYPE x counter\n" + "".join(f'{line} # {{trace_id="a"}} 1.0\n' for line in SCRAPE.splitlines()) + "# EOF\n",
    ],
)
def test_counters_outside_of_a_scrape(text: str) -> None:
    """Answers of Prometheus over a range, exports of AIPerf and Grafana, values by name, timestamps and exemplars."""
    (acceptance,) = acceptances_in(Source(text, "export"))
    assert (acceptance.marginal, acceptance.drafts) == (pytest.approx((0.6, 0.3)), 1000)


@pytest.mark.parametrize("line", [WINDOW, EARLY])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda line: text_of({"log": f"\x1b[32mINFO\x1b[0m {line}", "stream": "stderr", "time": "t"}),
        lambda line: text_of({"MESSAGE": list(f"\x1b[32mINFO\x1b[0m {line.strip()}".encode()), "PRIORITY": "6"}),
        lambda line: text_of({"labels": {"app": "vllm"}, "line": line, "timestamp": "t"}),
        lambda line: json.dumps({"data": {"result": [{"stream": {}, "values": [["17", line], ["18", "INFO other"]]}]}}),
        lambda line: json.dumps([{"line": line, "date": "2026"}, {"line": "INFO other"}], indent=1),
        lambda line: csv_of(["Date", "Line"], ["2026-01-01 00:00:00", line.strip()]),
        lambda line: f'Date,Host,Message\n2026-01-01,gpu,"INFO {line.strip()}"\n',
        lambda line: f"2026-05-06T06:11:23.1+00:00 stderr F (EngineCore_0 pid=7) INFO {line}",
        lambda line: f"May 06 06:11:23 gpu1 vllm[1234]: INFO {line.strip()}\r\n",
    ],
)
def test_lines_in_the_wrapping_of_a_collector(wrap: Any, line: str) -> None:
    (acceptance,) = acceptances_in(Source(wrap(line), "log"))
    assert (acceptance.marginal, acceptance.drafts) == (pytest.approx((0.6, 0.3)), 1000)


@pytest.mark.parametrize(
    "text, message",
    [
        (
            json.dumps({"data": {"resultType": "vector", "result": [{"metric": {}, "value": [1, "3.2"]}]}}),
            "without rate",
        ),
        (
            csv_of(["Time", SERIES[0][0]], ["1", "1.2 K"]),
            "log:2: '1.2 K' is not a number; export .* without formatting",
        ),
        (SCRAPE + SCRAPE, "several scrapes: give the last one, and the first as --since"),
        (json.dumps({"request_latency": {"avg": 3}}), "a benchmark without counts of accepted tokens: .*--since"),
        (json.dumps([{"id": 0, "n_ctx": 4096, "speculative": True}]), "/slots and /props have no counts"),
        ("<!DOCTYPE html><title>Sign in</title>", "a web page, perhaps one to log in"),
    ],
)
def test_other_files_are_refused_with_the_way_out(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        acceptances_in(Source(text, "log"))


@pytest.mark.parametrize("data", [b"PK\x03\x04", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\x00", b"BZh9", b"PAR1"])
def test_files_that_are_not_text(data: bytes, tmp_path: Any) -> None:
    (tmp_path / "log").write_bytes(data)
    with pytest.raises(UsageError, match=r"log is (compressed|an archive|a Parquet file); \w+ it"):
        read_source(str(tmp_path / "log"))


def chunk(n: int, event: str, **fields: Any) -> str:
    return (
        f"{event}{json.dumps({'meta_info': {'id': 'a', 'completion_tokens': 2 * n, 'spec_verify_ct': n} | fields})}\n"
    )


@pytest.mark.parametrize("event", ["data: ", ""])
def test_chunks_of_a_stream_are_one_response(event: str) -> None:
    """Their counts are those since the start of the response; other responses are apart."""
    running = "".join(chunk(n, event, finish_reason=None) for n in (1, 5))
    whole = running + chunk(10, event, finish_reason={"type": "stop"})
    other = "data: [DONE]\n" if event else ""
    for text, responses, steps in ((whole + other + whole, 2, 20), (running, 1, 5), (whole + other + running, 2, 15)):
        (acceptance,) = acceptances_in(Source(text, "stream"))
        assert (len(acceptance.rows), sum(row[0] for row in acceptance.rows)) == (responses, steps)
    timings = [{"choices": [{"finish_reason": reason}], "id": "a"} | TIMINGS for reason in (None, None, "stop")]
    (acceptance,) = acceptances_in(Source("".join(f"data: {json.dumps(item)}\n\n" for item in timings), "stream"))
    assert len(acceptance.rows) == 1


def test_failed_responses_are_counted() -> None:
    source = Source(text_of(TENSORRT, {"error": {"message": "too long"}}) + text_of(TENSORRT)[:30] + "\n", "log")
    assert len(acceptances_in(source)) == 1
    assert [place for place in source.skipped if place.startswith(("log:2: the request failed: too long", "log:3"))]
    assert len(source.skipped) == 2


def test_trees_have_other_costs() -> None:
    (acceptance,) = acceptances_in(Source(COUNTERS + STEPS.format(8), "scrape"))
    with pytest.raises(UsageError, match="trees of 7 tokens"):
        of_pair(replace(acceptance, drafter="eagle3", verifier="token"))


class Theirs(AcceptanceFormat):
    name = "theirs"
    definition = "steps of our server"

    def read(self, source: Source, earlier: Source | None = None) -> list[Acceptance]:
        lines = [line.split()[1:] for _, line in source.lines() if line.startswith("accepted ")]
        return [Acceptance(tuple(map(float, rates)), source.name) for rates in lines]


class Broken(Theirs):
    name = "broken"

    def read(self, source: Source, earlier: Source | None = None) -> list[Acceptance]:
        raise KeyError("accepted")


def test_formats_of_plug_ins(install: Any) -> None:
    install("formats", ("theirs", Theirs))
    (acceptance,) = acceptances_in(Source("accepted 0.8 0.6\n", "log"))
    assert acceptance.marginal == (0.8, 0.6) and acceptance.format == "theirs: steps of our server"
    install("formats", ("theirs", Theirs), ("broken", Broken))
    source = Source("accepted 0.8 0.6\n", "log")
    assert len(acceptances_in(source)) == 1 and "format 'broken'" in source.skipped[0]  # it fails alone
    with pytest.raises(UsageError, match=r"format 'broken'.*read\(\) raised KeyError"):
        acceptances_in(Source("nothing\n", "log"))
    install("formats", ("odd", object()))
    with pytest.raises(ContractError, match=r"crossdraft_advisor\.AcceptanceFormat"):
        plugins.get("formats", "odd")
