"""Seconds of a step in logs and benchmarks, their identities, and the windows that are left out."""

import json
from pathlib import Path
from typing import Any

import pytest
from crossdraft_advisor import Source
from crossdraft_advisor.engines.engine_log import TimedSteps
from crossdraft_advisor.engines.formats import acceptances_in, read_acceptances
from crossdraft_advisor.engines.speeds import speed_notes
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


def timed(text: str) -> list[TimedSteps]:
    source = Source(text, "log")
    acceptances_in(source, plain=True)
    return source.timed


def test_seconds_of_vllm() -> None:
    """Tokens a step x rows / generated tokens per second are draft length x rows / drafted tokens per second."""
    (item,) = timed(ENGINE.format(0, 20, 0, 0.0, 50.0, 2) + BUSY)
    assert item[:3] == (1, 2, 3) and item.seconds == pytest.approx(0.1) and item.steps == 100 and not item.flaw
    assert item.seconds == pytest.approx(item.gamma * item.batch_size / 60.0, rel=0.01)


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
    assert [(item.gamma, item.seconds) for item in timed(text)] == [(0, 0.05), (0, 0.05)]
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
    assert (first.batch_size, first.gamma, first.context, first.seconds) == (4, 3, 200, pytest.approx(0.02))
    assert (first.flaw, second.flaw, third.flaw) == ("", "prefill", "another batch size")
    (plain,) = timed(DECODE.format(0, 0, 4, 800, "", 200.0))
    assert (plain.gamma, plain.seconds) == (0, 0.02)


def test_seconds_of_llama_cpp() -> None:
    text = EVAL.format(1, 100, 1, 60, 115) + EVAL.format(2, 100, 2, 49, 148)
    assert [(item.gamma, item.seconds) for item in timed(text)] == [(3, 1 / 39), (3, 1 / 50)]
    assert {item.flaw for item in timed(text + EVAL.replace("id  0", "id  1").format(3, 100, 3, 60, 115))} == {
        "another batch size"
    }
    (plain,) = timed(EVAL.partition("\n")[0].format(1, 101) + "\n")
    assert (plain.gamma, plain.seconds) == (0, 0.01)


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
    assert item[1:3] == (4, 4) and item.seconds == pytest.approx(0.025) and item.flaw == "prefill"
    assert [item.flaw for item in timed(text(2010, True))] == ["steps without a draft"]
    (plain,) = timed(text(1010, False))
    assert (plain.batch_size, plain.gamma, plain.seconds) == (4, 0, 0.01)


def test_table_by_hand() -> None:
    text = "batch_size,gamma,tokens_per_s,acceptance_length\n1,0,50,\n1,2,80,2.0\n1,4,90,2.7\n8,2,400,2.1\n"
    source = Source(text, "t.csv")
    acceptances = acceptances_in(source)
    assert [(item.draft_length, item.length) for item in acceptances] == [(2, 2.0), (4, pytest.approx(2.7))]
    assert [(t.batch_size, t.gamma, t.seconds) for t in source.timed] == [
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
    with pytest.raises(UsageError, match="unknown column 'tpot'"):
        acceptances_in(Source("gamma,acceptance_length,tpot\n1,1.5,2\n", "t.csv"))


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
