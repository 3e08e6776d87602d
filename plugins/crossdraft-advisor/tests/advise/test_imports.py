"""Acceptance from recorded logs and metrics of engines, and damaged ones."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crossdraft_advisor import Source
from crossdraft_advisor.engines.acceptance import UNKNOWN_PAIR, Acceptance
from crossdraft_advisor.engines.engine_log import read_source
from crossdraft_advisor.engines.formats import acceptances_in
from hypothesis import given
from hypothesis import strategies as st

from crossdraft.framework.errors import UsageError

VLLM_LOG = """\
INFO 11-20 10:00:00 [loggers.py:123] Engine 000: Avg generation throughput: 100 tokens/s, Running: 4 reqs
INFO 11-20 10:00:10 [metrics.py:100] SpecDecoding metrics: Mean acceptance length: 2.40, Accepted throughput: 28.00 \
tokens/s, Drafted throughput: 60.00 tokens/s, Accepted: 280 tokens, Drafted: 600 tokens, Per-position acceptance rate: \
0.800, 0.400, 0.200, Avg Draft acceptance rate: 46.7%
INFO 11-20 10:00:20 [metrics.py:100] SpecDecoding metrics: Mean acceptance length: 2.00, Accepted throughput: 10.00 \
tokens/s, Drafted throughput: 30.00 tokens/s, Accepted: 100 tokens, Drafted: 300 tokens, Per-position acceptance rate: \
0.600, 0.300, 0.100, Avg Draft acceptance rate: 33.3%
INFO 11-20 10:00:30 [metrics.py:100] SpecDecoding metrics: Mean acceptance length: 1.00, Accepted throughput: 0.00 \
tokens/s, Drafted throughput: 3.00 tokens/s, Accepted: 0 tokens, Drafted: 30 tokens, Per-position acceptance rate: \
0.000, 0.000, 0.000, Avg Draft acceptance rate: 0.0%
"""


def vllm_line(mean: float, accepted: int, drafted: int, rates: str) -> str:
    return (
        f"INFO 11-20 10:00:10 [metrics.py:100] SpecDecoding metrics: Mean acceptance length: {mean:.2f}, Accepted: "
        f"{accepted} tokens, Drafted: {drafted} tokens, Per-position acceptance rate: {rates}, Avg Draft acceptance "
        f"rate: {100 * accepted / max(drafted, 1):.1f}%\n"
    )


VLLM_SCRAPE = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 100.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 300.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.76e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 200.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="m"} 600.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 120.0
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="m"} 280.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 80.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 40.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 200.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="1"} 80.0
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="1",model_name="m",position="1"} 1.76e+09
"""
LLAMA_SCRAPE = """\
# TYPE llamacpp:spec_decode_num_drafts_total counter
llamacpp:spec_decode_num_drafts_total 50
llamacpp:spec_decode_num_draft_tokens_total 120
llamacpp:spec_decode_num_accepted_tokens_total 60
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 30
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 20
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="2"} 10
"""
LLAMA_LOG = """\
0.06.896 I slot print_timing: id  0 | task 1 | draft acceptance = 0.60000 (   60 accepted /   100 generated), \
mean acceptance length =  2.20, acceptance rate per position = (0.800, 0.400)
0.07.896 I slot print_timing: id  0 | task 2 | draft acceptance = 0.50000 (   30 accepted /    60 generated), \
mean acceptance length =  2.00, acceptance rate per position = (0.667, 0.333)
"""
LATER_LOG = LLAMA_LOG.replace("mean acceptance length", "mean len").replace(
    ", acceptance rate per position = (", "\n0.07.896 I slot print_timing: id  0 |      acc per pos = ("
)
SGLANG_LOG = """\
[2026-11-20 10:00:00] Decode batch. #running-req: 2, #token: 900, token usage: 0.01, accept len: 2.50, \
accept rate: 0.50, cuda graph: True, gen throughput (token/s): 300.10, #queue-req: 0,
[2026-11-20 10:00:09] Prefill batch. #new-seq: 1, #new-token: 12
[2026-11-20 10:00:10] Decode batch. #running-req: 6, #token: 990, token usage: 0.01, accept len: 3.50, \
accept rate: 0.83, cuda graph: True, gen throughput (token/s): 310.20, #queue-req: 0,
[2026-11-20 10:00:11] Decode batch. #running-req: 0, #token: 0, token usage: 0.00, accept len: 0.00, \
accept rate: 0.00, cuda graph: True, gen throughput (token/s): 0.10, #queue-req: 0,
"""


def read(name: str, text: str, before: str | None = None) -> list[Acceptance]:
    earlier = None if before is None else Source(before, "before.txt")
    return acceptances_in(Source(text, "now.txt"), earlier)


def one(name: str, text: str, before: str | None = None) -> Acceptance:
    (result,) = read(name, text, before)
    return result


def vllm_response(histogram: list[int], **wrong: Any) -> dict[str, Any]:
    n, accepted = sum(histogram), sum(i * c for i, c in enumerate(histogram))
    counted = {"acceptance_histogram": histogram, "num_spec_steps": n, "num_accepted_draft_tokens": accepted}
    counted |= {"num_draft_tokens": n * (len(histogram) - 1), "num_spec_tokens": len(histogram) - 1}
    return {"choices": [], "metrics": {"speculative_decoding": counted | wrong}}


def sglang_response(histogram: list[int], **wrong: Any) -> dict[str, Any]:
    n, accepted = sum(histogram), sum(i * c for i, c in enumerate(histogram))
    counted = {"spec_verify_ct": n, "spec_num_correct_drafts": accepted, "spec_num_proposed_drafts": 4 * n}
    counted |= {"completion_tokens": n + accepted, "spec_correct_drafts_histogram": histogram, "spec_accept_rate": 0.1}
    return {"text": "...", "meta_info": counted | wrong}


def lines(*objects: Any) -> str:
    return "".join(json.dumps(result) + "\n" for result in objects)


# -- recorded formats ------------------------------------------------------------------------------------------


def test_log_of_vllm() -> None:
    result = one("vllm", VLLM_LOG)
    # 280 tokens at rates that sum to 1.4 are 200 drafts, 100 at 1.0 are 100; the idle window has 30 / 3.
    assert result.drafts == pytest.approx(310)
    assert result.marginal == pytest.approx((220 / 310, 110 / 310, 50 / 310))
    assert result.source == "now.txt:2-4" and result.interval_assumes == "3 independent windows of the log"


@given(st.integers(1, 8), st.sampled_from([1, 7, 400, 2500, 30_000]), st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_rounded_window_is_one_of_its_counts(gamma: int, drafts: int, rate: float, seed: int) -> None:
    """A window of full drafts gives their exact number and accepted tokens, however its rates and mean are rounded."""
    taus = np.minimum(np.random.default_rng(seed).geometric(1 - min(rate**2, 0.999), drafts) - 1, gamma)
    counts = [int((taus >= i).sum()) for i in range(1, gamma + 1)]
    rates = ", ".join(f"{count / drafts:.3f}" for count in counts)
    line = vllm_line(1 + sum(counts) / drafts, sum(counts), gamma * drafts, rates)
    result = one("vllm", line)
    ((steps, *accepted),) = result.rows
    assert steps == drafts and sum(accepted) == pytest.approx(sum(counts)) and result.remarks == ()
    assert accepted == pytest.approx(counts, abs=0 if drafts <= 400 else 0.001 * drafts)


def test_short_drafts_of_a_window() -> None:
    """Drafts of two to four tokens are more than the drafted tokens / 4, by the rates."""
    result = one("vllm", vllm_line(2.1, 1100, 3000, "0.500, 0.300, 0.200, 0.100"))
    assert result.drafts == pytest.approx(1000) and "drafts have 3.00 of 4 tokens" in result.remarks[1]


def test_counters_of_vllm() -> None:
    result = one("vllm", VLLM_SCRAPE)
    assert (result.drafts, result.marginal) == (400, (280 / 400, 120 / 400))
    assert result.source == "now.txt, model m" and result.remarks == ()
    two = VLLM_SCRAPE + VLLM_SCRAPE.replace('"m"', '"other"').replace(" 280.0", " 180.0").replace("} 200.0", "} 100.0")
    assert [a.source for a in read("vllm", two)] == ["now.txt, model m", "now.txt, model other"]


def test_difference_of_two_scrapes() -> None:
    before = VLLM_SCRAPE.replace("300.0", "100.0").replace("280.0", "80.0").replace("} 200.0", "} 70.0")
    before = before.replace(" 80.0", " 10.0")
    result = one("vllm", VLLM_SCRAPE, before)
    assert result.drafts == 200
    with pytest.raises(
        UsageError, match=r"now.txt:4: vllm:spec_decode_num_drafts_total is 100, was 300 in before.txt:4"
    ):
        read("vllm", before, VLLM_SCRAPE)
    removed_cell = "".join(line for line in VLLM_SCRAPE.splitlines(True) if 'engine="1"' not in line)
    with pytest.raises(UsageError, match=r"is missing, was 300 in before\.txt:4: the counter was reset"):
        read("vllm", removed_cell, VLLM_SCRAPE)


def totals(generated: float, finished: float) -> str:
    """Counters of generated tokens and finished requests of vLLM, by engine."""
    rows = [f'vllm:generation_tokens_total{{engine="{i}",model_name="m"}} {generated / 2}' for i in (0, 1)]
    rows += [
        f'vllm:request_success_total{{engine="0",finished_reason="{reason}",model_name="m"}} {finished / 2}'
        for reason in ("stop", "length")
    ]
    return "\n".join(rows) + "\n"


def test_steps_without_a_draft_follow_from_the_generated_tokens() -> None:
    """400 drafts accept 400 tokens; 20 requests of 1,020 tokens need 600 steps after their prefill."""
    acceptance = one("vllm", VLLM_SCRAPE + totals(1020, 20))
    drafts, accepted = 400, sum(one("vllm", VLLM_SCRAPE).rows[0][1:])
    steps = 1020 - 20 - accepted
    assert (acceptance.drafts, acceptance.idle) == (steps, pytest.approx(1 - drafts / steps))
    assert acceptance.marginal[0] == one("vllm", VLLM_SCRAPE).marginal[0] * drafts / steps
    assert f"{steps - drafts:.0f} of {steps:.0f} steps had no draft" in acceptance.remarks
    assert acceptance.block_efficiency().value == pytest.approx(1000 / steps)


def test_tokens_past_the_end_are_noted() -> None:
    accepted = sum(one("vllm", VLLM_SCRAPE).rows[0][1:])
    acceptance = one("vllm", VLLM_SCRAPE + totals(400 + accepted + 20 - 6, 20))
    assert acceptance.marginal == one("vllm", VLLM_SCRAPE).marginal and not acceptance.idle
    assert acceptance.remarks == (f"about 6 of {accepted:.0f} accepted tokens lie past the end of a response",)
    with pytest.raises(UsageError, match="has no acceptance"):
        read("vllm", totals(1000, 10))


def test_counters_of_a_real_run_of_vllm() -> None:
    """The recorded n-gram run: all steps after the prefill, as replay counts them, up to tokens past the end."""
    file = Path(__file__).parents[1] / "fixtures" / "vllm-ngram.json"
    recorded = json.loads(file.read_text(encoding="utf-8"))
    stem, counters = "vllm:spec_decode_num_", recorded["counters"]
    rows = [f"{stem}{name}_total {counters[name]}" for name in ("drafts", "draft_tokens", "accepted_tokens")]
    for i, count in enumerate(counters["accepted_per_position"]):
        rows.append(f'{stem}accepted_tokens_per_pos_total{{position="{i}"}} {count}')
    tokens = sum(len(response["tokens"]) for response in recorded["responses"])
    rows += [f"vllm:generation_tokens_total {tokens}", f"vllm:request_success_total {len(recorded['responses'])}"]
    acceptance = one("vllm", "\n".join(rows) + "\n")
    assert acceptance.drafts is not None and 175 <= acceptance.drafts <= 182
    assert acceptance.idle == pytest.approx(1 - 83 / acceptance.drafts)


def test_responses_of_vllm() -> None:
    rows = [[10, 5, 5], [0, 0, 4], [6, 2, 0]]
    result = one("vllm", lines(*map(vllm_response, rows)))
    assert result.rows == ((20.0, 10.0, 5.0), (4.0, 4.0, 4.0), (8.0, 2.0, 0.0))
    assert result.marginal == (16 / 32, 9 / 32) and result.pieces == "responses"
    stream = "data: " + lines(vllm_response([1, 1])) + "data: [DONE]\n"
    assert one("vllm", stream).marginal == (0.5,)
    assert one("vllm", json.dumps([vllm_response(row) for row in rows], indent=1)) == result


def test_short_drafts_are_noted() -> None:
    assert "drafts have 1.50 of 2 tokens" in one("vllm", VLLM_SCRAPE.replace("} 600.0", "} 400.0")).remarks[0]
    assert "drafts have 2.40 of 3 tokens" in one("llama.cpp", LLAMA_SCRAPE).remarks[0]
    assert "drafts have 1.00 of 2" in one("vllm", lines(vllm_response([2, 2, 0], num_draft_tokens=4))).remarks[0]


def test_llama_cpp() -> None:
    result = one("llama.cpp", LLAMA_SCRAPE)
    assert (result.drafts, result.marginal) == (50, (0.6, 0.4, 0.2))
    result = one("llama.cpp", LLAMA_LOG)
    assert result.drafts == pytest.approx(80) and result.marginal == pytest.approx((0.75, 0.375), abs=1e-3)
    later = one("llama.cpp", LATER_LOG)
    assert (later.drafts, later.marginal, later.source) == (result.drafts, result.marginal, "now.txt:1-3, 2 responses")
    older = "".join(line for line in LLAMA_SCRAPE.splitlines(True) if "per_pos" not in line)
    assert (one("llama.cpp", older).marginal, one("llama.cpp", older).length) == ((), 2.2)


def test_llama_cpps_large_counters_are_rounded_to_six_digits() -> None:
    def scrape(*counts: object) -> str:
        text = LLAMA_SCRAPE
        for old, new in zip(("50", "120", "60", "30", "20", "10"), counts, strict=True):
            text = text.replace(f" {old}\n", f" {new}\n")
        return text

    # 1234567 drafts of three tokens
    later = scrape("1.23457e+06", "3.7037e+06", "1.86421e+06", 1234567, 617284, 12356)
    result = one("llama.cpp", later)
    assert result.marginal == (1234567 / 1234570, 617284 / 1234570, 12356 / 1234570) and not result.remarks
    earlier = scrape("1.23356e+06", "3.70068e+06", "1.86271e+06", 1233561, 616792, 12356)
    result = one("llama.cpp", later, earlier)
    assert result.rows == ((1010.0, 1006.0, 492.0, 0.0),)
    assert result.remarks[0].startswith("the number of drafts, 1010, is rounded by up to 12;")
    with pytest.raises(UsageError, match=r"but its positions sum to 1.86431e\+06; repeat"):
        one("llama.cpp", later.replace("12356", "12456"))


def test_sglang() -> None:
    result = one("sglang", SGLANG_LOG)
    assert result.length == pytest.approx((2 * 2.5 + 6 * 3.5) / 8) and result.marginal == ()
    assert result.source == "now.txt:1-3" and "windows without drafts are omitted: 1" in result.remarks[1]
    gauge = 'sglang:spec_accept_length{model_name="m",tp_rank="0"} 2.25\nsglang:spec_accept_rate{model_name="m"} 0.4\n'
    assert one("sglang", gauge).length == 2.25
    result = one("sglang", lines(sglang_response([5, 3, 2]), sglang_response([0, 1, 0, 0, 9])))
    assert result.marginal == (15 / 20, 11 / 20, 9 / 20, 9 / 20)  # drafts of four tokens, though none was accepted
    older = {"completion_tokens": 7, "spec_verify_ct": 4, "spec_accept_token_num": 2, "spec_draft_token_num": 12}
    result = one("sglang", lines({"meta_info": older | {"spec_accept_histogram": [2, 2]}}))
    assert result.marginal == (0.5, 0.0, 0.0)


@pytest.mark.parametrize(
    "counted, length", [({}, 2.9), ({"spec_accept_token_num": 21}, 3.1), ({"spec_accepted_drafts": 0}, 1)]
)
def test_prefill_token_of_sglang_is_not_accepted(counted: dict[str, int], length: float) -> None:
    """10 target calls of 30 tokens emit 29, unless the accepted tokens are counted (past the response's end, too)."""
    bare = {"meta_info": {"completion_tokens": 30, "spec_verify_ct": 10} | counted}
    assert one("sglang", lines(bare, bare)).length == pytest.approx(length)


def profile(**changes: Any) -> str:
    profile_data = {
        "schema_version": "1.0",
        "measured": True,
        "method": "eagle3",
        "num_speculative_tokens": 3,
        "conditional_accept_rates": [0.8, 0.5, 0.5],
        "marginal_accept_rates": [0.8, 0.4, 0.2],
        "mean_accept_length": 2.4,
        "accept_length_model": "chain_analytic",
        "acceptance_length_histogram": {"1": 20, "2": 40, "3": 20, "4": 20},
        "draft_checkpoint": {"model": "org/head"},
    }
    return json.dumps(profile_data | changes, indent=2)


def test_speculation_profile() -> None:
    result = one("speculation-profile", profile())
    assert (result.marginal, result.drafts, result.drafter, result.model) == (
        (0.8, 0.4, 0.2),
        100,
        "eagle3",
        "org/head",
    )
    assert result.refusal == UNKNOWN_PAIR
    assert "accept_length_model" in one("speculation-profile", profile(accept_length_model="measured_per_k")).refusal
    separate = one("speculation-profile", profile(marginal_accept_rates=None))
    assert separate.marginal == pytest.approx((0.8, 0.4, 0.2))


@pytest.mark.parametrize(
    "text, remedy",
    [
        ("", r"\)$"),
        ("\n", r"\)$"),
        ("INFO: started\n", r"\)$"),
        ("process_open_fds 12.0\n", r"\)$"),
        ("[2026-11-20 10:00:00] up\n", r"\)$"),
        ('{"choices": []}\n', "crossdraft advise --replay"),
        ('{"timestamp": 0, "input_length": 3, "output_length": 2}\n', "crossdraft simulate --trace"),
        (vllm_line(1.0, 0, 0, "0.000"), "the server does not draft, had no requests"),
    ],
)
def test_sources_without_acceptance(text: str, remedy: str) -> None:
    with pytest.raises(UsageError, match=f"now.txt has no acceptance in a known format.*{remedy}"):
        read("", text)


# -- damage ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "engine, text, message",
    [
        ("vllm", VLLM_LOG.replace(", Avg Draft acceptance rate: 33.3%", ""), "now.txt:3: .*has no end"),
        ("vllm", VLLM_LOG.replace("46.7%", "64.7%"), "now.txt:2: 280 .* with the average rate 64.7 %"),
        ("vllm", VLLM_LOG[:330], "now.txt:2: .*has no "),
        ("vllm", VLLM_LOG.replace("0.600, 0.300", "nan, 0.300"), "now.txt:3: an acceptance rate is nan"),
        ("vllm", VLLM_LOG.replace("0.800, 0.400", "1.800, 0.400"), "now.txt:2: an acceptance rate is 1.800"),
        ("vllm", VLLM_LOG.replace("Accepted: 280", "Accepted: x"), "now.txt:2: the accepted tokens is x"),
        ("vllm", VLLM_LOG.replace("length: 2.40", "length: 2.60"), "now.txt:2: the mean length 2.6 is not 1"),
        ("vllm", VLLM_LOG.replace("Drafted: 600", "Drafted: 900"), "now.txt:2: 280 accepted and 900 .*inconsistent"),
        ("vllm", VLLM_LOG.replace("Drafted: 600", "Drafted: 200"), "now.txt:2: 280 accepted and 200 .*inconsistent"),
        ("vllm", VLLM_SCRAPE.replace("} 300.0", "} NaN"), "now.txt:4: .*is nan, which is not a count"),
        ("vllm", VLLM_SCRAPE.replace("} 300.0", "} -3"), "now.txt:4: .*is -3"),
        ("vllm", VLLM_SCRAPE.replace("} 300.0", "}"), "now.txt:4: the line is not valid in a Prometheus scrape"),
        ("vllm", VLLM_SCRAPE.replace("} 300.0", "} 3x"), "now.txt:4: the line is not valid in a Prometheus scrape"),
        ("vllm", VLLM_SCRAPE + VLLM_SCRAPE.splitlines()[3] + "\n", "now.txt:15: .*is a duplicate"),
        ("vllm", VLLM_SCRAPE.replace("} 40.0", "} 400.0"), "position 1 is 480, more than 280"),
        ("vllm", VLLM_SCRAPE.replace("} 40.0", "} 41.0"), "its positions sum to 401"),
        ("vllm", VLLM_SCRAPE.replace('"1"} 40.0', '"2"} 40.0').replace('"1"} 80.0', '"2"} 80.0'), "has no position 1"),
        ("vllm", VLLM_SCRAPE.replace('position="0"', 'position="a"'), "the position 'a'"),
        ("vllm", "".join(VLLM_SCRAPE.splitlines(True)[:6]), "has no vllm:spec_decode_num_accepted_tokens_total"),
        ("vllm", "".join(VLLM_SCRAPE.splitlines(True)[:12])[:-3], "now.txt:12: the scrape is truncated"),
        ("vllm", VLLM_SCRAPE.replace("100.0", "0.0").replace("300.0", "0.0"), "now.txt:4: no drafts were counted"),
        (
            "vllm",
            lines(vllm_response([1, 2]), vllm_response([1, 2], num_spec_steps=4)),
            "now.txt:2: .*does not match",
        ),
        ("vllm", lines(vllm_response([1, 2]), vllm_response([1, 2]))[:-9], "now.txt:2: not JSON"),
        ("vllm", lines(vllm_response([1, 2], acceptance_histogram=[4, -1])), "not a list of counts"),
        (
            "vllm",
            '{"num_speculative_tokens": 3, "synthetic_acceptance_rates": [0.5]}',
            "has 1 entries, num_speculative_tokens is 3",
        ),
        ("vllm", '{"synthetic_acceptance_rates": [0.5, 0.6]}', "increases from 0.5 to 0.6"),
        ("vllm", '{"synthetic_acceptance_rates": [0.5, NaN]}', "position 2 is nan"),
        ("vllm", lines(vllm_response([1, 2], num_draft_tokens=10**30)), "too long; the maximum is 1024"),
        ("llama.cpp", LLAMA_SCRAPE.replace('"1"} 20', '"1"} 40'), "position 1 is 40, more than 30"),
        (
            "llama.cpp",
            LLAMA_LOG.replace("(0.667, 0.333)", "(0.667, 0.3"),
            "now.txt:2: the draft acceptance line is truncated",
        ),
        ("llama.cpp", LLAMA_LOG.replace("0.667,", "7,"), "now.txt:2: an acceptance rate is 7"),
        (
            "sglang",
            SGLANG_LOG.replace("accept len: 3.50", "accept len: 0.50"),
            "now.txt:3: an accept len of 0.5 does not include",
        ),
        ("sglang", SGLANG_LOG.replace("accept len: 3.50", "accept len: nan"), "now.txt:3: the accept len is nan"),
        ("sglang", SGLANG_LOG[:100], "now.txt:1: the decode batch line is truncated"),
        ("sglang", "sglang:spec_accept_length 0.0\n", "now.txt:1: .*nothing has been drafted"),
        ("sglang", lines(sglang_response([1], spec_verify_ct=2)), "does not match spec_verify_ct 2"),
        (
            "sglang",
            lines({"completion_tokens": 3, "spec_verify_ct": 4}),
            r"-2 accepted tokens in 4 steps \(spec_verify_ct\) are inconsistent",
        ),
        ("speculation-profile", profile(measured=False), "the profile is not measured"),
        (
            "speculation-profile",
            profile(conditional_accept_rates=None, marginal_accept_rates=None),
            "has no acceptance rates",
        ),
        (
            "speculation-profile",
            profile(conditional_accept_rates=[0.8, 0.4, 0.2]),
            "are inconsistent at position 2: 0.4",
        ),
        ("speculation-profile", profile(mean_accept_length=float("nan")), "mean_accept_length is nan"),
        ("speculation-profile", profile(conditional_accept_rates=[0.8, float("nan"), 0.5]), "position 2: nan"),
        ("speculation-profile", profile(mean_accept_length=3.4), "mean_accept_length is 3.4"),
        ("speculation-profile", profile(num_speculative_tokens=2), "has 3 entries, num_speculative_tokens is 2"),
        ("speculation-profile", profile(marginal_accept_rates=[0.8, "a", 0.2]), "not a list of numbers"),
        ("speculation-profile", profile(marginal_accept_rates=[1.8, 0.4, 0.2]), "1.8, which is not a probability"),
        ("speculation-profile", profile(acceptance_length_histogram={"1": -1}), "not a count"),
        ("speculation-profile", profile()[:-20], "now.txt:.*not JSON"),
    ],
)
def test_damaged_sources(engine: str, text: str, message: str) -> None:
    """A damaged record is skipped, with its line and the reason; a source without another one is refused for it."""
    source = Source(text, "now.txt")
    try:
        assert acceptances_in(source)
    except UsageError as error:
        source.skipped.append(str(error))
    assert re.search(message, source.skipped[0])


def test_sources(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "scrape.txt").write_text("x 1\r\ny 2\n", encoding="utf-8")
    result = read_source(str(tmp_path / "scrape.txt"))
    assert list(result.lines()) == [(1, "x 1"), (2, "y 2")] and result.count == 2 and result.ended
    with pytest.raises(UsageError, match=r"cannot read .*missing"):
        read_source(str(tmp_path / "missing"))
    with pytest.raises(UsageError, match=r"cannot read http://127\.0\.0\.1:9/metrics"):
        read_source("http://127.0.0.1:9/metrics")


def test_url(tmp_path: Path) -> None:
    import threading
    from functools import partial
    from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

    (tmp_path / "metrics").write_text(VLLM_SCRAPE, encoding="utf-8")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path))) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        result = read_source(f"http://127.0.0.1:{server.server_port}/metrics")
        server.shutdown()
    assert result.text == VLLM_SCRAPE
