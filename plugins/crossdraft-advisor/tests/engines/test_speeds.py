"""Seconds of a step in logs and benchmarks, their identities, and the windows that are left out."""

import json
from pathlib import Path
from typing import Any

import pytest
from crossdraft_advisor import Source
from crossdraft_advisor.cost.step_cost import SpeedPoint
from crossdraft_advisor.engines.formats import acceptances_in, read_acceptances
from crossdraft_advisor.engines.speeds import speed_notes, speed_points
from hypothesis import given
from hypothesis import strategies as st
from log_lines import ENGINE, EVAL, metrics_line

from crossdraft.framework.errors import UsageError

DECODE = (
    "[2026-01-01 10:00:{:02d} DP{} TP0] Decode batch, #running-req: {}, #token: {}, {}gen throughput (token/s): {}, x\n"
)
ACCEPT = "accept len: 3.40, accept rate: 0.80, "
SERVED = """\
Successful requests:                     10
Total generated tokens:                  {tokens}
Output token throughput (tok/s):         400.00
Mean TPOT (ms):                          10.00
"""
DRAFTED = "Acceptance length: 2.50\nDrafts: 400\nDraft tokens: 1600\nAccepted tokens: 600\n"
#: 200 drafts of three tokens accept 300 in ten seconds, by two rows.
BUSY = metrics_line(
    0, 20, 2.5, "Accepted throughput: 30.00 tokens/s, Drafted throughput: 60.00 tokens/s, ", 300, 600, "0.8, 0.5, 0.2"
)


#: Ten seconds of as many tokens with fewer drafts.
SPARSE = ENGINE.format(0, 20, 0, 0.0, 100.0, 2) + BUSY


def timed(text: str) -> list[SpeedPoint]:
    source = Source(text, "log")
    acceptances_in(source, plain=True)
    return source.timed


def test_seconds_of_vllm() -> None:
    """Tokens a step x rows / generated tokens per second are draft length x rows / drafted tokens per second."""
    (item,) = timed(ENGINE.format(0, 20, 0, 0.0, 50.0, 2) + BUSY)
    assert (
        (item.place, *item[:2]) == ("log:1", 2, 3)
        and item.seconds_per_step == pytest.approx(0.1)
        and item.weight == 100
        and not item.flaw
    )
    assert item.seconds_per_step == pytest.approx(item.gamma * item.batch_size / 60.0, rel=0.01)


def test_windows_that_are_disturbed() -> None:
    prefill = ENGINE.format(0, 20, 0, 900.0, 50.0, 2) + BUSY
    other = ENGINE.format(0, 10, 0, 0.0, 0.0, 3) + ENGINE.format(0, 20, 0, 0.0, 50.0, 2) + BUSY
    assert [item.flaw for text in (prefill, other, SPARSE) for item in timed(text)] == [
        "prefill",
        "another batch size",
        "steps without a draft",
    ]


def test_plain_log(tmp_path: Path) -> None:
    """A log without drafts has the speed of plain decoding, and is otherwise refused as before."""
    text = ENGINE.format(0, 10, 0, 0.0, 80.0, 4) + ENGINE.format(0, 20, 0, 0.0, 80.0, 4)
    assert [(item.gamma, item.seconds_per_step) for item in timed(text)] == [(0, 0.05), (0, 0.05)]
    with pytest.raises(UsageError, match="has no acceptance"):
        acceptances_in(Source(text, "log"))
    with pytest.raises(UsageError, match="has no acceptance"):  # the lines of drafts are cut off
        timed("speculative_config=SpeculativeConfig(x)\n" + text)
    (tmp_path / "log").write_text(text)
    source, acceptances = read_acceptances(str(tmp_path / "log"), plain=True)
    assert not acceptances and len(source.timed) == 2


def test_seconds_of_sglang() -> None:
    lines = [DECODE.format(0, 0, 4, 800, ACCEPT, 680.0), "[x DP1 TP0] Prefill batch. #new-seq: 1\n"]
    lines += [DECODE.format(1, 1, 2, 400, ACCEPT, 100.0), DECODE.format(2, 0, 8, 1600, ACCEPT, 100.0)]
    first, second, third = timed("".join(lines))
    assert (first.batch_size, first.gamma, first.context, first.seconds_per_step) == (4, 3, 200, pytest.approx(0.02))
    assert (first.flaw, second.flaw, third.flaw) == ("", "prefill", "another batch size")
    (plain,) = timed(DECODE.format(0, 0, 4, 800, "", 200.0))
    assert (plain.gamma, plain.seconds_per_step) == (0, 0.02)
    assert not timed(DECODE.format(0, 0, 4, 800, ACCEPT, "1,680.00"))  # which is not 1
    with pytest.raises(UsageError, match="of an unsupported version"):
        timed(DECODE.format(0, 0, "1,004", 800, ACCEPT, 680.0))


def test_seconds_of_llama_cpp() -> None:
    text = EVAL.format(1, 100, 1, 60, 115) + EVAL.format(2, 100, 2, 49, 148)
    assert [(item.gamma, item.seconds_per_step) for item in timed(text)] == [(3, 1 / 39), (3, 1 / 50)]
    assert {item.flaw for item in timed(text + EVAL.replace("id  0", "id  1").format(3, 100, 3, 60, 115))} == {
        "another batch size"
    }
    (plain,) = timed(EVAL.partition("\n")[0].format(1, 101) + "\n")
    assert (plain.gamma, plain.seconds_per_step) == (0, 0.01)


@pytest.mark.parametrize("as_json", [False, True])
def test_seconds_of_benchmarks(as_json: bool) -> None:
    """Ten milliseconds a token at 400 tokens/s are four requests."""

    def text(tokens: int, drafts: bool) -> str:
        if not as_json:
            return SERVED.format(tokens=tokens) + DRAFTED * drafts
        fields: dict[str, Any] = {"completed": 10, "total_output_tokens": tokens, "output_throughput": 400.0}
        fields |= {"mean_tpot_ms": 10.0}
        spec = {"acceptance_length": 2.5, "num_drafts": 400, "draft_tokens": 1600, "accepted_tokens": 600}
        return json.dumps(fields | ({f"spec_decode_{k}": n for k, n in spec.items()} if drafts else {}))

    (item,) = timed(text(1010, True))
    assert item[:2] == (4, 4) and item.seconds_per_step == pytest.approx(0.025) and item.flaw == "prefill"
    assert [item.flaw for item in timed(text(2010, True))] == ["steps without a draft"]
    (plain,) = timed(text(1010, False))
    assert (plain.batch_size, plain.gamma, plain.seconds_per_step) == (4, 0, 0.01)


def test_table_by_hand() -> None:
    text = "batch_size,gamma,tokens_per_s,acceptance_length\n1,0,50,\n1,2,80,2.0\n1,4,90,2.7\n8,2,400,2.1\n"
    source = Source(text, "t.csv")
    acceptances = acceptances_in(source)
    assert [(item.draft_length, item.length) for item in acceptances] == [(2, 2.0), (4, pytest.approx(2.7))]
    assert [(t.batch_size, t.gamma, t.seconds_per_step) for t in source.timed] == [
        (1, 0, 0.02),
        (1, 2, 0.025),
        (1, 4, pytest.approx(0.03)),
        (8, 2, pytest.approx(0.042)),
    ]
    for row, message in (
        ("1,2,80,4.0", "4 tokens a step are not possible"),
        ("1,3,80,", "acceptance_length is missing"),
    ):
        with pytest.raises(UsageError, match=f"t.csv:2: {message}"):
            acceptances_in(Source(f"{text.splitlines()[0]}\n{row}\n", "t.csv"))
    with pytest.raises(UsageError, match=r"t\.csv:6: the batch size and gamma are those of line 3"):
        acceptances_in(Source(f"{text}1,2,85,2.2\n", "t.csv"))
    with pytest.raises(UsageError, match="unknown column 'tpot'"):
        acceptances_in(Source("gamma,acceptance_length,tpot\n1,1.5,2\n", "t.csv"))


# -- points ------------------------------------------------------------------------------------------------------


def points(text: str, gamma: int | None = None) -> list[tuple[float, float, float]]:
    """Batch size, drafted tokens and seconds of each speed that is used."""
    source = Source(text, "log", gamma)
    acceptances_in(source, plain=True)
    return [point[:2] + point[3:4] for point in speed_points(source)]


@given(st.integers(1, 8), st.integers(1, 64), st.integers(50, 2000), st.floats(0, 1))
def test_vllm_steps_are_drafts_over_time(gamma: int, rows: int, steps: int, share: float) -> None:
    """Steps of every row with a full draft, in ten seconds: both throughputs give their seconds."""
    drafts = steps * rows
    counts = [round(drafts * share**i) for i in range(1, gamma + 1)]
    accepted = sum(counts)
    throughput = f"Accepted throughput: {accepted / 10:.2f} tokens/s, Drafted throughput: {gamma * drafts / 10:.2f} "
    rates = ", ".join(f"{count / drafts:.3f}" for count in counts)
    window = metrics_line(0, 20, 1 + accepted / drafts, throughput + "tokens/s, ", accepted, gamma * drafts, rates)
    (point,) = points(ENGINE.format(0, 20, 0, 0.0, (drafts + accepted) / 10, rows) + window)
    assert point == (rows, gamma, pytest.approx(10 / steps, rel=0.002))
    assert point[2] == pytest.approx(gamma * rows / (gamma * drafts / 10), rel=0.002)


@given(st.integers(1, 8), st.integers(1, 64), st.floats(1e-3, 1), st.floats(0, 1))
def test_sglang_steps_are_rows_times_length_over_throughput(
    gamma: int, rows: int, seconds: float, share: float
) -> None:
    length = 1 + round(share * gamma, 2)
    accept = f"accept len: {length:.2f}, accept rate: {(length - 1) / gamma:.2f}, "
    line = DECODE.format(0, 0, rows, 100 * rows, accept, f"{rows * length / seconds:.2f}")
    assert points(line, gamma) == [(rows, gamma, pytest.approx(seconds, rel=0.01))]
    line = DECODE.format(0, 0, rows, 100 * rows, "", f"{rows / seconds:.2f}")
    assert points(line) == [(rows, 0, pytest.approx(seconds, rel=0.01))]


@given(st.integers(1, 8), st.integers(2, 500), st.floats(1e-3, 1), st.floats(0, 1))
def test_llama_cpp_steps_are_eval_time_over_tokens_that_were_not_drafted(
    gamma: int, steps: int, seconds: float, share: float
) -> None:
    accepted, milliseconds = round(gamma * steps * share), 1000 * seconds * steps
    text = EVAL.replace("1000.00 ms", f"{milliseconds:.6f} ms")
    line = text.format(1, 1 + steps + accepted, 1, accepted, gamma * steps)
    assert points(line, gamma) == [(1, gamma, pytest.approx(seconds, rel=1e-4))]
    assert points(text.partition("\n")[0].format(1, 1 + steps)) == [(1, 0, pytest.approx(seconds, rel=1e-4))]


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("tool", ["vllm", "sglang"])
@given(rows=st.integers(1, 64), length=st.integers(4, 20), seconds=st.floats(1e-3, 1))
def test_benchmarks_steps_are_tokens_a_step_times_seconds_a_token(
    as_json: bool, tool: str, rows: int, length: int, seconds: float
) -> None:
    """Runs of drafts of four tokens, and without drafts, of requests that always run."""
    for tau in (length / 4, 0.0):
        per_token = seconds / (tau or 1)
        text = benchmark(as_json, tool, rows, per_token, tau)
        expected = (pytest.approx(rows, rel=0.01), 4 * (tau > 0), pytest.approx(seconds, rel=0.01))
        assert points(text, 4 if tau and tool == "sglang" else None) == [expected]


def benchmark(as_json: bool, tool: str, rows: int, per_token: float, tau: float) -> str:
    """A benchmark of ``rows`` requests that run all the time, with ``tau`` tokens a step; 0: without drafts."""
    steps, name = 400 * rows, "Accept length" if tool == "sglang" else "Acceptance length"
    tokens = round(steps * (tau or 1)) + rows
    counts = {"num_drafts": steps, "draft_tokens": 4 * steps, "accepted_tokens": tokens - rows - steps}
    rate, milliseconds = rows / per_token, 1000 * per_token
    if as_json:
        fields: dict[str, Any] = {"completed": rows, "total_output_tokens": tokens, "output_throughput": rate}
        fields |= {"mean_tpot_ms": milliseconds}
        if tool == "sglang":
            return json.dumps(fields | {"accept_length": tau or None})
        fields |= {f"spec_decode_{key}": n for key, n in counts.items()} if tau else {}
        return json.dumps(fields | ({"spec_decode_acceptance_length": tau} if tau else {}))
    text = f"Successful requests: {rows}\nTotal generated tokens: {tokens}\nOutput token throughput (tok/s): {rate}\n"
    text += f"Mean TPOT (ms): {milliseconds}\n" + (f"{name}: {tau}\n" if tau else "")
    if tau and tool == "vllm":
        drafts, drafted, accepted = counts.values()
        text += f"Drafts: {drafts}\nDraft tokens: {drafted}\nAccepted tokens: {accepted}\n"
    return text


def test_drafts_of_an_unknown_length_are_counted() -> None:
    """Their seconds are known, and not of how many tokens."""
    line = DECODE.format(0, 0, 4, 800, "accept len: 3.40, ", 680.0)
    for text in (line, benchmark(True, "sglang", 4, 0.01, 2.5), benchmark(False, "sglang", 4, 0.01, 2.5)):
        source = Source(text, "log")
        assert acceptances_in(source) and not speed_points(source)
        assert speed_notes(source) == ["log: measured speeds are left out: 1 with an unknown draft length"]


@pytest.mark.parametrize("word", ["None", " None", ": null", " {'method': 'eagle3'}"])
def test_settings_of_a_server_without_drafts(word: str) -> None:
    text = f"speculative_config={word}\n" if word[0] != ":" else f'"speculative_config"{word}\n'
    text += ENGINE.format(0, 10, 0, 0.0, 80.0, 4)
    if "method" in word:
        with pytest.raises(UsageError, match="has no acceptance"):
            points(text)
    else:
        assert points(text) == [(4, 0, 0.05)]


def test_start_of_llama_cpp_without_drafts() -> None:
    """It loads a draft model even if no kind of drafts is requested."""
    plain = EVAL.partition("\n")[0].format(1, 101) + "\n"
    start = "srv load_model: loading draft model 'd.gguf'\n"
    with pytest.raises(UsageError, match="has no acceptance"):
        points(start + plain)
    assert points(start + "W init: no implementations specified for speculative decoding\n" + plain) == [(1, 0, 0.01)]


def test_slots_of_llama_cpp_that_are_used_in_turn() -> None:
    """Requests of several slots count if they did not run at the same time."""
    slot = "slot {}: id {:2} | task 1 | {}\n"
    evaluated = EVAL.partition("\n")[0].format(1, 101) + "\n"
    begins = [slot.format("launch_slot_", i, "processing task") for i in range(2)]
    ends = [slot.format("release", i, "stop processing: n_tokens = 9") for i in range(2)]
    times = [evaluated, evaluated.replace("id  0", "id  1")]
    in_turn = "".join(begins[i] + times[i] + ends[i] for i in range(2))
    assert points(in_turn) == [(1, 0, 0.01), (1, 0, 0.01)]
    parallel = "".join(begins) + times[0] + ends[0] + times[1] + ends[1]
    source = Source(parallel + in_turn, "log")
    acceptances_in(source, plain=True)
    assert len(speed_points(source)) == 2
    assert speed_notes(source)[1] == "log: measured speeds are left out: 2 with another batch size"


def test_seconds_with_steps_without_a_draft() -> None:
    """Half of the steps of an n-gram lookup had a draft."""
    source = Source(EVAL.format(1, 100, 1, 49, 75), "log", 3)
    assert acceptances_in(source) and not speed_points(source)
    assert "1 with steps without a draft" in speed_notes(source)[0]


def test_engines_in_one_line() -> None:
    """The throughput of several engines is their sum, so each runs its share of the requests."""
    line = ENGINE.format(0, 10, 0, 0.0, 80.0, 4).replace("Engine 000:", "2 Engines Aggregated:")
    assert points(line) == [(2, 0, 0.05)]


def test_lengths_of_last_drafts_are_those_of_the_others() -> None:
    """Shorter last drafts do not make another length; drafts that are often shorter do."""
    for drafted, gamma in ((1590, 4.0), (1400, 3.5)):
        text = SERVED.format(tokens=1010) + DRAFTED.replace("1600", str(drafted))
        assert points(text) == [(4, gamma, pytest.approx(0.025))]


# -- more tools ----------------------------------------------------------------------------------------------------

MTP = " {} pred= {:>3} draft= {:>3} acc= {:>3} rate={} tok/s={:.4f}\n"
SPEED_BENCH = "category | samples | avg_prompt_t/s | avg_pred_t/s | avg_latency | accept_rate\n"
SPEED_BENCH += "overall  | 16      | 900.1          | 50.0         | 1.4         | {}\n"


@given(st.integers(1, 8), st.integers(2, 400), st.floats(1e-3, 1), st.floats(0.1, 1))
def test_mtp_bench_steps_are_tokens_over_speed(gamma: int, steps: int, seconds: float, share: float) -> None:
    accepted = round(gamma * steps * share)
    tokens = 1 + steps + accepted
    drafting = MTP.format("code", tokens, gamma * steps, accepted, share, tokens / (seconds * steps))
    plain = MTP.format("code", 1 + steps, 0, 0, "n/a", (1 + steps) / (seconds * steps))
    same = pytest.approx(seconds, rel=0.01)
    assert points(plain) == [(1, 0, same)]
    assert points(plain + drafting, gamma) == [(1, 0, same), (1, gamma, same)]
    assert points(drafting + plain.replace("code", "qa"), gamma) == [(1, gamma, same)]  # not all prompts have drafts


def test_seconds_of_speed_bench() -> None:
    assert points(SPEED_BENCH.format("n/a")) == [(1, 0, 0.02)]
    assert points(SPEED_BENCH.format("0.5000"), 4) == [(1, 4, pytest.approx(0.06))]


@pytest.mark.parametrize("tau", [0.0, 2.5])
def test_seconds_of_aiperf(tau: float) -> None:
    """Four requests at ten milliseconds a token; the CSV has no counts of drafts."""
    steps, tokens = 1600, round(1600 * (tau or 1)) + 4
    means = {"inter_token_latency": 10.0, "output_token_throughput": 400.0, "request_count": 4.0}
    means |= {"total_output_tokens": tokens} if tau else {"output_sequence_length": tokens / 4}
    if tau:
        means |= {"total_spec_decode_steps": steps, "total_draft_tokens": 4 * steps}
        means["total_accepted_draft_tokens"] = tokens - 4 - steps
    fields = {key: {"unit": "ms", "avg": value} for key, value in means.items()}
    assert points(json.dumps(fields)) == [(4, 4 * (tau > 0), pytest.approx(0.01 * (tau or 1)))]
    rows = "Inter Token Latency (ms),10.00,9.0\nOutput Sequence Length (tokens),401.00,400\n\nMetric,Value\n"
    rows += 'Output Token Throughput (tokens/sec),"400.00"\nRequest Count,4.00\n'
    drafts = "Total Spec Decode Steps,1600.00\n" * (tau > 0)
    if tau:
        with pytest.raises(UsageError, match=r"counted in profile_export_aiperf\.json; give that file"):
            points("Metric,avg,min\n" + rows + drafts)
    else:
        assert points("Metric,avg,min\n" + rows) == [(4, 0, 0.01)]
    with pytest.raises(UsageError, match="inter_token_latency is not in ms"):
        points(json.dumps({"inter_token_latency": {"unit": "sec", "avg": 0.01}}))


def scrape(prefix: str, counters: dict[str, float], rows: int) -> str:
    running = "num_running_reqs" if prefix == "sglang" else "num_requests_running"
    series = {running: rows, **counters}
    return "".join(f'{prefix}:{name}{{model_name="m"}} {value!r}\n' for name, value in series.items())


def between(later: str, earlier: str, gamma: int | None = None) -> Source:
    source = Source(later, "after", gamma)
    acceptances_in(source, Source(earlier, "before"), plain=True)
    return source


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@given(st.integers(0, 6), st.integers(1, 64), st.integers(100, 1000), st.floats(1e-3, 1), st.floats(0.1, 1))
def test_scrapes_steps_are_the_time_between_outputs(
    engine: str, gamma: int, rows: int, steps: int, seconds: float, share: float
) -> None:
    """The time of an output is observed once by vLLM, and by SGLang once a token; the sum is the same."""
    calls = steps * rows
    accepted = round(calls * gamma * share)
    tokens, total = calls + accepted, calls * seconds
    counters: dict[str, float] = {"generation_tokens_total": tokens, "inter_token_latency_seconds_sum": total}
    counters["inter_token_latency_seconds_count"] = calls if engine == "vllm" else tokens
    if engine == "sglang":
        counters |= {"num_requests_total": 0} | ({"spec_verify_calls_total": calls} if gamma else {})
    elif gamma:
        numbers = {"drafts": calls, "draft_tokens": gamma * calls, "accepted_tokens": accepted}
        counters |= {f"spec_decode_num_{name}_total": n for name, n in numbers.items()}
    before = scrape(engine, dict.fromkeys(counters, 0.0), rows)
    source = between(scrape(engine, counters, rows), before, gamma if gamma and engine == "sglang" else None)
    (point,) = speed_points(source)
    assert point[:2] == (rows, gamma) and point.seconds_per_step == pytest.approx(seconds)
    assert point.weight == pytest.approx(steps)


def test_scrapes_with_other_requests() -> None:
    counters = {"inter_token_latency_seconds_sum": 4.0, "inter_token_latency_seconds_count": 100.0}
    zero, idle = dict.fromkeys(counters, 0.0), scrape("vllm", counters, 0)
    for later, earlier, note in (
        (idle, scrape("vllm", zero, 2), "left out: 1 with no running request at its end"),
        (scrape("vllm", counters, 4), scrape("vllm", zero, 2), "left out: 1 with another batch size"),
        (
            scrape("vllm", counters | {"prompt_tokens_total": 9.0}, 2),
            scrape("vllm", zero | {"prompt_tokens_total": 0.0}, 2),
            "without drafts have a prefill among them",
        ),
    ):
        assert note in speed_notes(between(later, earlier))[-1]
    with pytest.raises(UsageError, match="has no acceptance"):  # since the start of the server
        points(scrape("vllm", counters, 2))


def test_histogram_of_older_versions() -> None:
    """Versions between write both."""
    older = {f"time_per_output_token_seconds_{end}": value for end, value in (("sum", 4.0), ("count", 100.0))}
    both = older | {key.replace("time_per_output_token", "inter_token_latency"): n for key, n in older.items()}
    for counters in (older, both):
        source = between(scrape("vllm", counters, 2), scrape("vllm", dict.fromkeys(counters, 0.0), 2))
        assert [point[:4:3] for point in speed_points(source)] == [(2, 0.04)]


def test_gauges_of_sglang() -> None:
    gauges: dict[str, float] = {"gen_throughput": 400.0, "spec_accept_length": 2.5, "spec_num_steps": 3}
    assert points(scrape("sglang", gauges, 4)) == [(4, 3, 0.025)]
    assert points(scrape("sglang", {"gen_throughput": 400.0, "spec_accept_length": 0.0}, 4)) == [(4, 0, 0.01)]


def test_undisturbed_steps_are_used_and_the_others_counted() -> None:
    prefill, quiet = (ENGINE.format(0, 20, 0, rate, 50.0, 2) + BUSY for rate in (900.0, 0.0))
    for text, notes in (
        (quiet + prefill, ["seconds of a step from 1 measured speed at B = 2", "are left out: 1 with prefill"]),
        (prefill, ["from 1 measured speed at B = 2", "all steps with 3 drafted tokens have a prefill among them"]),
    ):
        source = Source(text, "log")
        acceptances_in(source)
        lines = speed_notes(source)
        assert len(lines) == len(notes) and all(part in note for part, note in zip(notes, lines, strict=True))
