"""Advice from measured speeds of a server: its logs, benchmarks, CSV, and cells of a finished run."""

import json
from pathlib import Path
from typing import Any

import pytest
from advise_runs import GOOD, cell, curves
from crossdraft_advisor.advise.candidates import imported, of_run
from crossdraft_advisor.advise.decision import decide, schedule_for
from crossdraft_advisor.cost.step_cost import SpeedPoint, speed_up_of
from crossdraft_advisor.engines.acceptance import Acceptance
from hypothesis import given
from hypothesis import strategies as st
from test_decision import Fixed

from crossdraft.framework.cli import main as cli
from crossdraft.framework.errors import UsageError
from crossdraft.framework.util.estimate import Estimate

SAID = ("--drafter", "eagle3", "--verifier", "token", "--temperature", "0")
#: Llama-3.1-8B with an EAGLE-3 head on one H100, batch size 1 (vllm-project/vllm#20780): tokens per step, ms per token.
PLAIN_MS = 7.07
PUBLISHED = {2: (2.36, 4.32), 3: (2.79, 4.09), 4: (3.08, 4.05), 5: (3.32, 4.13), 6: (3.46, 4.20), 7: (3.54, 4.29)}
LLAMA_8B = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA_8B |= {"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256}


def advise(capsys: Any, *arguments: Any) -> dict[str, Any]:
    capsys.readouterr()
    code = cli.main(["advise", *map(str, arguments), "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    return json.loads(out)


def speeds(path: Path, measured: tuple[int, ...], predicted: int) -> Path:
    """A CSV with the published speeds of some draft lengths, and the length at ``predicted`` without its speed."""
    lines = ["batch_size,gamma,tokens_per_s,acceptance_length"]
    for gamma in measured:
        tokens, ms = PUBLISHED.get(gamma, (1.0, PLAIN_MS))
        lines.append(f"1,{gamma},{1000 / ms:.2f},{tokens}")
    if predicted not in measured:
        lines.append(f"1,{predicted},,{PUBLISHED[predicted][0]}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("measured", "on"), [((), False), ((), True), ((0, 4), False), ((0, 7), False), ((0, 2, 7), False)]
)
@pytest.mark.parametrize("gamma", PUBLISHED)
def test_published_speed_ups_are_inside(
    measured: tuple[int, ...], on: bool, gamma: int, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    options = ("--on", "h100", "--target", tmp_path / "config.json") if on else ()
    source = speeds(tmp_path / "speeds.csv", measured, gamma)
    (step,) = advise(capsys, source, *SAID, *options, "--batch-size", 1)["advice"]
    choices = [c for c in (step["best"], step["runner_up"]) if c is not None and c["gamma"] == gamma]
    published = PLAIN_MS / PUBLISHED[gamma][1]
    for choice in choices:
        assert choice["speed_up"]["low"] <= published <= choice["speed_up"]["high"]
        assert choice["speed_up"]["high"] <= 1.000001 * PUBLISHED[gamma][0]  # a step is not shorter than a plain one
    if measured == (0, 2, 7):  # the advised length is as good as the best published one
        assert PUBLISHED[step["best"]["gamma"]][1] <= 1.05 * min(ms for _, ms in PUBLISHED.values())


def test_prior_does_not_advise_against_drafting(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "length.csv"
    path.write_text("batch_size,gamma,tokens_per_s,acceptance_length\n1,4,,1.1\n", encoding="utf-8")
    report = advise(capsys, path, *SAID, "--batch-size", 1)
    (step,) = report["advice"]
    assert not step["draft"] and any("as in published series" in line for line in report["remarks"]["assumed"])
    capsys.readouterr()
    assert cli.main(["advise", str(path), *SAID, "--batch-size", "1"]) == 0
    out = capsys.readouterr().out
    assert "\n1    measure" in out and " off" not in out
    (unmeasured,) = imported([Acceptance((0.1,), "here", drafter="draft-model", refusal="")], None, None, 100)
    assert schedule_for([unmeasured], Fixed(), [1]).schedule.gamma == 1
    below = SpeedPoint(1, 0, 100, 0.01, 100, "a"), SpeedPoint(1, 1, 100, 0.02, 100, "a")
    (measured,) = imported([Acceptance((0.1,), "here", drafter="draft-model", refusal="")], None, None, 100, below)
    assert schedule_for([measured], Fixed(), [1]).schedule.gamma == 0 and decide([measured], 1).advice == "off"


WINDOW = "INFO 11-20 10:00:{} [loggers.py:257] Engine 000: Avg prompt throughput: {} tokens/s, Avg generation "
WINDOW += (
    "throughput: {} tokens/s, Running: {} reqs, Waiting: 0 reqs, GPU KV cache usage: 0.9%, Prefix cache hit rate: "
)
WINDOW += "0.0%\n"
DRAFTS = (
    "INFO 11-20 10:00:{} [metrics.py:100] SpecDecoding metrics: Mean acceptance length: 2.50, Accepted throughput: "
)
DRAFTS += "150.00 tokens/s, Drafted throughput: 300.00 tokens/s, Accepted: 1500 tokens, Drafted: 3000 tokens, "
DRAFTS += "Per-position acceptance rate: 0.800, 0.450, 0.250, Avg Draft acceptance rate: 50.0%\n"


def test_two_logs_of_one_server(tmp_path: Path, capsys: Any) -> None:
    """1,000 steps of 4 rows in 10 s with drafts, in windows of 4 requests; 150 tokens/s of them without."""
    log, plain = tmp_path / "drafts.log", tmp_path / "plain.log"
    windows = [(10, "0.0"), (20, "0.0"), (30, "0.0"), (40, "62.0")]
    log.write_text("".join(WINDOW.format(t, p, "250.0", 4) + DRAFTS.format(t) for t, p in windows), encoding="utf-8")
    plain.write_text("".join(WINDOW.format(t, "0.0", "150.0", 4) for t in (10, 20)), encoding="utf-8")
    report = advise(capsys, log, plain, *SAID)
    assert [step["batch_size"] for step in report["advice"]] == [2, 4, 8]  # within a factor of two of the measured one
    choices = [report["advice"][1][key] for key in ("best", "runner_up")]
    best = next(choice for choice in choices if choice["gamma"] == 3)
    assert best["speed_up"]["value"] == pytest.approx(250 / 150, rel=0.02)
    assert best["speed_up"]["low"] > 1.4 and best["tokens_per_second"] == pytest.approx(250, rel=0.02)
    assert any("1 with prefill" in line for line in report["remarks"]["measured"])
    assert cli.main(["advise", str(plain), *SAID]) == 2
    assert "speeds of plain decoding only; give one with drafts" in capsys.readouterr().err
    drafting = advise(capsys, log, *SAID, "--batch-size", "4,64")
    assert any("no speed of plain decoding is known" in line for line in drafting["remarks"]["warnings"])
    assert any("within a factor of two of B = 64" in line for line in drafting["remarks"]["warnings"])
    assert drafting["advice"][0]["best"]["tokens_per_second"] is None
    spread = drafting["advice"][0]["best"]["speed_up"]
    assert spread["high"] - spread["low"] > 2 * (best["speed_up"]["high"] - best["speed_up"]["low"])


def test_results_of_vllm_bench_serve(tmp_path: Path, capsys: Any) -> None:
    """Two files of `vllm bench serve --save-result`, one of them without drafts."""
    base = {"backend": "vllm", "completed": 16, "total_input_tokens": 4096, "max_concurrency": 4, "duration": 20.0}
    base |= {"request_rate": "inf", "mean_ttft_ms": 50.0, "mean_itl_ms": 20.0}
    off = base | {"total_output_tokens": 4096, "output_throughput": 200.0, "mean_tpot_ms": 20.0}
    on = base | {"total_output_tokens": 4096, "output_throughput": 330.0, "mean_tpot_ms": 12.0}
    on |= {"spec_decode_acceptance_length": 2.5, "spec_decode_num_drafts": 1638, "spec_decode_draft_tokens": 4914}
    on |= {"spec_decode_accepted_tokens": 2457, "spec_decode_per_position_acceptance_rates": [0.8, 0.45, 0.25]}
    for name, data in (("off.json", off), ("on.json", on)):
        (tmp_path / name).write_text(json.dumps(data), encoding="utf-8")
    report = advise(capsys, tmp_path / "on.json", tmp_path / "off.json", *SAID, "--batch-size", 4)
    (step,) = report["advice"]
    assert step["best"]["speed_up"]["value"] == pytest.approx(20 / 12, rel=0.05)


def test_cells_of_a_run_are_speeds() -> None:
    """Measured seconds decide; a withheld speed-up leaves no interval, so no advice is sure."""
    run = [cell(None), cell(GOOD)]
    (candidate,), _ = of_run(run, "run", [])  # no curve is necessary
    measured = run[1].metrics.tokens_per_second / run[0].metrics.tokens_per_second  # type: ignore[union-attr]
    best = decide([candidate], 1).best
    assert best.gamma == 3 and best.speed_up.value == pytest.approx(measured, rel=0.05)
    run[1].metrics.withheld, run[1].metrics.speed_up = "too few undisturbed", None  # type: ignore[union-attr]
    (candidate,), notes = of_run(run, "run", curves())
    step = decide([candidate], 1)
    assert step.best.speed_up.low is None and not step.sure
    assert any("withholds its speed-up at B = 1" in note for note in notes)


def test_curves_give_how_costs_grow() -> None:
    """From the nearest measured batch size; costs by which drafts save time are refused."""
    target, draft, _ = curves()
    acceptance = Acceptance((0.8, 0.7, 0.6), "here", drafter="draft-model", model="d", refusal="")
    points = SpeedPoint(4, 0, 100, 10.0, 100, "a"), SpeedPoint(4, 3, 100, 15.0, 100, "a")
    (candidate,) = imported([acceptance], target, draft, 100, points)

    def passes(b: int) -> float:
        return (target.seconds(b, 4, 100) + 3 * draft.seconds(b, 1, 100)) / target.seconds(b, 1, 100)

    near, far = candidate.ratio(4, 3), candidate.ratio(32, 3)
    assert far.value - near.value == pytest.approx(passes(32) - passes(4), rel=0.05)
    faster = SpeedPoint(4, 0, 100, 10.0, 100, "a"), SpeedPoint(4, 3, 100, 4.0, 100, "a")
    (candidate,) = imported([acceptance], target, draft, 100, faster)
    with pytest.raises(UsageError, match=r"takes 0\.40 times as long as one without drafts, which is not possible"):
        candidate.ratio(4, 3)


def test_costs_between_batch_sizes_are_interpolated() -> None:
    """Over the logarithm of the batch size, with the widest interval in the middle."""
    acceptance = Acceptance((0.8, 0.7, 0.6), "here", drafter="draft-model", model="d", refusal="")
    points = [SpeedPoint(b, g, 100, s, 100, "a") for b, g, s in ((1, 0, 1), (1, 3, 1.4), (16, 0, 2), (16, 3, 4))]
    (candidate,) = imported([acceptance], None, None, 100, points)
    ratios = {b: candidate.ratio(b, 3) for b in (1, 2, 4, 8, 16)}
    assert ratios[4].value == pytest.approx((ratios[1].value * ratios[16].value) ** 0.5)
    values = [ratio.value for ratio in ratios.values()]
    assert values == sorted(values)
    widths = {b: ratio.high / ratio.low for b, ratio in ratios.items() if ratio.high and ratio.low}
    assert widths[4] > max(widths[1], widths[16])


@given(st.floats(1, 9), st.floats(1, 9), st.floats(1, 1.5), st.floats(1, 1.5))
def test_speed_up_has_both_errors(tokens: float, ratio: float, of_tokens: float, of_ratio: float) -> None:
    limit = tokens * of_tokens  # steps take at least as long as plain ones
    exact = speed_up_of(Estimate(tokens, tokens, tokens), Estimate(ratio, ratio, ratio), limit)
    wide = speed_up_of(
        Estimate(tokens, tokens / of_tokens, limit), Estimate(ratio, ratio / of_ratio, ratio * of_ratio), limit
    )
    assert exact.value == wide.value == tokens / ratio
    assert wide.low is not None and wide.high is not None
    assert wide.value / wide.low >= 0.999999 * max(of_tokens, of_ratio)
    assert wide.high <= limit
