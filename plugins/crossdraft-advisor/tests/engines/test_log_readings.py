"""Readings of logs: steps without a draft, lengths that follow from counts, several drafters, pasted reports."""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from crossdraft_advisor import Acceptance, Source
from crossdraft_advisor.commands.gate import samples_of
from crossdraft_advisor.diagnosis.counters import read_counters, signatures_of
from crossdraft_advisor.engines import engine_log
from crossdraft_advisor.engines.formats import acceptances_in, read_acceptances
from crossdraft_advisor.replay.responses import Reader
from hypothesis import given
from hypothesis import strategies as st
from log_lines import ENGINE, EVAL, metrics_line
from prometheus_client import parser

from crossdraft.framework.errors import UsageError

POST = 'INFO: 10.0.0.1:5000 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
REPORT = """\
Successful requests:                     {requests}
Total generated tokens:                  {tokens}
Acceptance length:                       2.50
Drafts:                                  2,000
Draft tokens:                            8,000
Accepted tokens:                         3,000
  Position 0:                            75.00
  Position 1:                            37.50
  Position 2:                            25.00
  Position 3:                            12.50
"""
SCRAPE = 'vllm:spec_decode_num_{}_total{{engine="0"}} {}.0\n'
STATISTICS = "I statistics {}: #calls(b,g,a) = 2 {} 9, #gen drafts = {}, #acc drafts = {}, #gen tokens = {}, "
STATISTICS += "#acc tokens = {}, dur(b,g,a) = 0.1, 0.2, 0.3 ms\n"
MTP = "  {:<16} pred= {:>3} draft= {:>3} acc= {:>3} rate=0.5 tok/s=50.8\n"
SPEED_BENCH = """\
category | samples | avg_prompt_t/s | avg_pred_t/s | avg_latency | accept_rate
coding   | 8       | 900.1          | 80.2         | 1.2         | 0.9000
overall  | 16      | 900.1          | 70.2         | 1.4         | {}
"""
REQUEST = "draft acceptance rate = 0.75000 (  900 accepted /  1200 generated)\n"  # without its tokens
RAPID = 'rapid_mlx_spec_decode_{}_total{{family="m",method="mtp"{}}} {}\n'


def one(text: str, gamma: int | None = None) -> Acceptance:
    (acceptance,) = acceptances_in(Source(text, "log", gamma))
    return acceptance


def length(text: str, gamma: int | None = None) -> float:
    return one(text, gamma).block_efficiency().value


def window(minute: int, accepted: int, drafts: int, rates: str, throughput: float = 0.0) -> str:
    """A line of drafts of four tokens, in older versions without the throughput."""
    text = f"Accepted throughput: 9.99 tokens/s, Drafted throughput: {throughput:.2f} tokens/s, " if throughput else ""
    return metrics_line(minute, 20, 1 + accepted / drafts, text, accepted, 4 * drafts, rates)


# 100 drafts accept 160 tokens, in ten seconds that emit 1,000 tokens: 740 more steps.
RATES = "0.700, 0.500, 0.300, 0.100"
SPARSE = ENGINE.format(0, 20, 0, 0.0, 100.0, 8) + window(0, 160, 100, RATES)


# -- steps without a draft ---------------------------------------------------------------------------------------


def test_plain_steps_of_a_log() -> None:
    acceptance = one(SPARSE)
    assert acceptance.block_efficiency().value == pytest.approx(1000 / 840) and acceptance.drafts == 840
    assert acceptance.idle == pytest.approx(740 / 840) and acceptance.every_step
    assert acceptance.remarks == ("740 of 840 steps had no draft",)


def test_plain_steps_are_not_drafts(tmp_path: Path) -> None:
    """Diagnoses are of the steps with a draft, and print these."""
    (file := tmp_path / "log").write_text(SPARSE)
    assert re.search(r" 100  0\.70 0\.71 0\.60 0\.33\n", signatures_of([str(file)]).text())
    assert one(SPARSE).interval_assumes.startswith("840 independent steps")


def test_window_of_other_lengths() -> None:
    """The seconds are those of the drafted throughput; otherwise those between the lines."""
    timed = ENGINE.format(0, 20, 0, 0.0, 50.0, 8) + window(0, 160, 100, RATES, throughput=20.0)
    assert length(timed) == pytest.approx(1000 / 840)
    late = ENGINE.format(0, 0, 0, 0.0, 0.0, 0) + ENGINE.format(0, 20, 0, 0.0, 50.0, 8) + window(0, 160, 100, RATES)
    assert length(late) == pytest.approx(1000 / 840)


def test_tokens_are_of_the_same_engine_and_since_its_last_line_of_drafts() -> None:
    other = ENGINE.format(0, 20, 1, 0.0, 26.0, 8) + window(0, 160, 100, RATES)
    assert length(SPARSE + other) == pytest.approx((1000 + 260) / (840 + 100))
    before = ENGINE.format(0, 10, 0, 0.0, 40.0, 8)
    assert length(before + SPARSE) == pytest.approx(1400 / 1240)
    assert length(SPARSE + ENGINE.format(0, 30, 0, 0.0, 40.0, 8)) == pytest.approx(1000 / 840)  # cut off


def test_first_tokens_of_responses_are_those_of_the_prefill() -> None:
    assert length(40 * POST + SPARSE) == pytest.approx(960 / 800)


def test_heads_that_always_draft_have_no_plain_steps() -> None:
    exact = ENGINE.format(0, 20, 0, 0.0, 26.1, 8) + window(0, 160, 100, RATES)
    acceptance = one(exact)
    assert (acceptance.drafts, acceptance.idle, acceptance.remarks) == (100, 0, ())
    assert one(window(0, 160, 100, RATES) + exact).drafts == 200  # the first line is of a log that begins there


def test_steps_that_may_be_missing_are_noted() -> None:
    assert not one(window(0, 160, 100, RATES)).every_step
    assert not one("".join(SCRAPE.format(*item) for item in (("drafts", 9), ("accepted_tokens", 9)))).every_step


@given(st.integers(1, 6), st.integers(20, 2000), st.integers(0, 5000), st.integers(0, 2**16))
def test_tokens_a_step_are_those_of_all_steps(gamma: int, drafts: int, plain: int, seed: int) -> None:
    accepted = seed % (gamma * drafts + 1)
    counts = [min(max(accepted - i * drafts, 0), drafts) for i in range(gamma)]
    rates = ", ".join(f"{count / drafts:.3f}" for count in counts)
    tokens = accepted + drafts + plain
    line = metrics_line(0, 20, 1 + accepted / drafts, "", accepted, gamma * drafts, rates)
    value = length(ENGINE.format(0, 20, 0, 0.0, tokens / 10, 8) + line)
    assert value == pytest.approx(tokens / (drafts + plain), rel=0.021)


@pytest.mark.parametrize("requests, tokens, steps", [("10", "7,010", 4000), ("10", "5,010", 2000)])
def test_plain_steps_of_a_benchmark(requests: str, tokens: str, steps: int) -> None:
    acceptance = one(REPORT.format(requests=requests, tokens=tokens))
    assert (acceptance.drafts, acceptance.gamma) == (steps, 4)
    assert acceptance.block_efficiency().value == pytest.approx(1 + 3000 / steps)
    result: dict[str, Any] = {"completed": 10, "total_output_tokens": 7010, "spec_decode_acceptance_length": 2.5}
    result |= {"spec_decode_num_drafts": 2000, "spec_decode_draft_tokens": 8000, "spec_decode_accepted_tokens": 3000}
    assert length(json.dumps(result)) == pytest.approx(1.75)


def test_plain_steps_of_an_example() -> None:
    text = "total_num_output_tokens: 1000\nnum_drafts: 100\nnum_draft_tokens: 400\nnum_accepted_tokens: 160\n"
    text += "mean acceptance length: 2.60\nacceptance at token 0: 0.70\nacceptance at token 1: 0.50\n"
    text += "acceptance at token 2: 0.30\nacceptance at token 3: 0.10\n"
    assert length(text) == pytest.approx(1000 / 840)
    assert length("num_tokens_generated_without_sd: 300\n" + text.partition("\n")[2]) == pytest.approx(560 / 400)


def test_plain_steps_of_responses() -> None:
    counted = {"num_spec_steps": 10, "num_accepted_draft_tokens": 9, "num_draft_tokens": 20}
    counted |= {"acceptance_histogram": [4, 3, 3], "num_spec_tokens": 2}
    row = {"usage": {"completion_tokens": 50}, "metrics": {"speculative_decoding": counted}}
    acceptance = one(json.dumps(row) + "\n")
    assert (acceptance.drafts, acceptance.idle) == (40, pytest.approx(30 / 40))
    assert one(json.dumps(row | {"choices": [{}, {}]}) + "\n").drafts == 10  # whose tokens are counted together


# -- lengths that follow from counts -----------------------------------------------------------------------------


def test_draft_length_of_counters_without_positions() -> None:
    counters = {"drafts": 500, "draft_tokens": 3500, "accepted_tokens": 900}
    text = "".join(SCRAPE.format(name, n) for name, n in counters.items())
    assert one(text).draft_length == 7
    with pytest.raises(UsageError, match="as drafts of 7 tokens have, not of 9; remove the given draft length"):
        one(text, 9)
    with pytest.raises(UsageError, match=r"7\.00 a step, so drafts have more than 5 tokens"):
        one(text, 5)


def test_draft_length_of_requests() -> None:
    """The last drafts of a response are shorter; drafts that often are have an unknown length."""
    full = EVAL.format(1, 100, 1, 60, 115) + EVAL.format(2, 100, 2, 49, 148)  # 39 and 50 steps with three tokens
    acceptance = one(full)
    assert acceptance.draft_length == 3 and acceptance.idle == pytest.approx(0, abs=0.02)
    assert acceptance.block_efficiency().value == pytest.approx(1 + 109 / 89)
    with pytest.raises(UsageError, match="as drafts of 3 tokens have, not of 4"):
        one(full, 4)
    often = EVAL.format(1, 100, 1, 60, 80)
    assert one(often).draft_length is None
    assert one(often, 4).idle == pytest.approx(1 - 20 / 39)


@pytest.mark.parametrize("mean, rate, gamma", [("3.40", "0.80", 3), ("5.06", "0.81", 5), ("1.60", "0.60", 1)])
def test_draft_length_of_sglang(mean: str, rate: str, gamma: int) -> None:
    line = "[2026-01-01 10:00:00 TP0] Decode batch, #running-req: 2, #token: 900, accept len: {}, accept rate: {}, x\n"
    assert one(line.format(mean, rate)).draft_length == gamma
    assert one(line.format(mean, rate) + line.format("2.00", "0.99")).draft_length in (None, 1)


def test_accepted_drafts_are_the_first_position() -> None:
    """They determine both positions of drafts of two tokens."""
    acceptance = one(STATISTICS.format("draft-mtp", 100, 100, 90, 200, 160))
    assert acceptance.marginal == pytest.approx((0.9, 0.7)) and acceptance.drafts == 100
    acceptance = one(STATISTICS.format("draft-mtp", 120, 100, 90, 400, 250))
    assert acceptance.marginal[0] == pytest.approx(90 / 120) and sum(acceptance.marginal) == pytest.approx(250 / 120)
    assert acceptance.idle == pytest.approx(20 / 120)
    with pytest.raises(UsageError, match="160 accepted tokens in 60 accepted drafts are inconsistent"):
        one(STATISTICS.format("draft-mtp", 100, 100, 60, 200, 160))


def test_rounds_of_timings() -> None:
    timings = {"predicted_n": 100, "draft_n": 90, "draft_n_accepted": 60, "draft_rounds": 30}
    acceptance = one(json.dumps({"timings": timings}) + "\n")
    assert (acceptance.drafts, acceptance.draft_length, acceptance.idle) == (39, 3, pytest.approx(9 / 39))
    past = one(json.dumps({"timings": timings | {"draft_rounds": 45, "draft_n": 135}}) + "\n")
    assert past.length == pytest.approx(1 + 60 / 45)  # more rounds than the tokens need


# -- pasted reports ----------------------------------------------------------------------------------------------


def test_prompts_of_mtp_bench() -> None:
    rows = [("code", 100, 99, 66), ("qa", 100, 120, 59), ("plain", 100, 0, 0)]
    text = "".join(MTP.format(*row) for row in rows)
    acceptance = one(text)
    assert acceptance.rows == ((33, 66), (40, 59)) and acceptance.draft_length == 3
    first, second = acceptances_in(Source(text + text.replace("acc=  66", "acc=  65"), "log"))
    assert first.rows == acceptance.rows and second.rows[0] == (34, 65)


def test_table_of_speed_bench() -> None:
    for text in ("0.6000", "60.00%"):
        acceptance = one(SPEED_BENCH.format(text), 3)
        assert acceptance.length == pytest.approx(2.8) and not acceptance.every_step
    with pytest.raises(UsageError, match=r"60\.0 % of the drafted tokens .*'\{source: log, gamma: N\}'"):
        one(SPEED_BENCH.format("0.6000"))


def test_rates_without_a_space() -> None:
    spaced, packed = (one(window(0, 160, 100, rates)) for rates in (RATES, RATES.replace(", ", ",")))
    assert spaced == packed


def test_counters_of_rapid_mlx() -> None:
    older = RAPID.format("attempts", "", 1200) + RAPID.format("accepts", "", 900)
    assert (one(older).marginal, one(older).drafts) == ((0.75,), 1200)  # an attempt is a step
    with pytest.raises(UsageError, match="has drafts of 1 token, not 2"):
        one(older, 2)
    newer = older + RAPID.format("verify_calls", "", 400)
    assert (length(newer), one(newer).draft_length) == (1 + 900 / 400, 3)
    depths = [RAPID.format("accepted_by_depth", f',depth="{i}"', n) for i, n in ((1, 390), (2, 300), (3, 210))]
    assert one(newer + "".join(depths)).marginal == (390 / 400, 300 / 400, 210 / 400)
    with pytest.raises(UsageError, match="do not match 690 by depth"):
        one(newer + "".join(depths[:2]))
    with pytest.raises(UsageError, match="nothing was drafted"):
        one(re.sub(r" \d+\n", " 0\n", older))


def test_page_of_prometheus_that_was_copied() -> None:
    text = 'vllm:spec_decode_num_drafts_total{engine="0", job="vllm"}\n500\n'
    with pytest.raises(UsageError, match=r"the value is apart: save its answer instead, curl -G ADDRESS/api"):
        one(text)


def test_given_length_is_taken_by_diagnose(tmp_path: Path) -> None:
    """A scrape without steps is refused for its positions, not for the length that is given."""
    file = tmp_path / "log"
    file.write_text(REQUEST)
    with pytest.raises(UsageError, match=r"drafted tokens were accepted, .* give the draft length N"):
        read_counters([str(file)])
    ((source, acceptance),) = read_counters([f"{{source: {file}, gamma: 1}}"])
    assert (source.gamma, acceptance.length) == (0, 1.75)


def test_pipe_is_refused_by_every_reader(tmp_path: Path) -> None:
    """A reader does not wait for its writer."""
    os.mkfifo(pipe := str(tmp_path / "pipe"))
    for read in (read_acceptances, samples_of, lambda name: list(Reader(target="").read([name]))):
        with pytest.raises(UsageError, match=r"cannot read .*pipe: it is a device, a pipe or a socket, not a file"):
            read(pipe)


def test_each_source_has_its_own_length(tmp_path: Any) -> None:
    file = tmp_path / "log"
    file.write_text(REQUEST)
    lengths = [read_acceptances(str(file), None, gamma)[1][0].length for gamma in (1, 2)]
    assert lengths == [1.75, 2.5]


# -- long sources ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["log", "wrapped", "scrape"])
def test_long_source_is_read_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Formats see only lines with their texts, and the series of a scrape are parsed once."""
    seen, unwrapped, parsed = Counter[str](), Counter[str](), Counter[str]()
    having, original, parse = engine_log._Lines.having, engine_log.unwrapped, parser.text_string_to_metric_families

    def counted(self: Any, marks: Any) -> Iterator[tuple[int, str]]:
        for item in having(self, marks):
            seen[item[1]] += 1
            yield item

    monkeypatch.setattr(engine_log._Lines, "having", counted)
    monkeypatch.setattr(engine_log, "unwrapped", lambda line: unwrapped.update([line]) or original(line))
    monkeypatch.setattr(parser, "text_string_to_metric_families", lambda text: parsed.update([text]) or parse(text))
    others = [f"INFO 03-01 09:00:00 [worker.py:1] line {i} of a worker" for i in range(2000)]
    lines = [*others, *SPARSE.splitlines()]
    if kind == "wrapped":
        lines = [json.dumps({"log": line}) for line in lines]
    if kind == "scrape":
        names = ("drafts", "accepted_tokens", "draft_tokens")
        others = [f'vllm:request_success_total{{engine="{i}"}} 1.0' for i in range(2000)]
        lines = others + [SCRAPE.format(name, 9).strip().replace('"0"', f'"{i}"') for name in names for i in range(500)]
    assert length("\n".join(lines) + "\n") > 1
    assert max(unwrapped.values()) == 1
    assert sum(seen[line] for line in others) < 20 + 2000 * (kind == "scrape")
    assert sum(text.count("\n") + bool(text) for text in parsed) == (3500 if kind == "scrape" else 0)
