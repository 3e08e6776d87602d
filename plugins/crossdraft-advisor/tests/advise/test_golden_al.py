"""Golden acceptance-length curves: reading, intervals, and simulated acceptance of three engines."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from crossdraft_advisor import Acceptance, Schedule, Source
from crossdraft_advisor.engines.engine import Range
from engine_schemas import Sglang, trt, vllm

from crossdraft.framework import plugins
from crossdraft.framework.cli import main as cli
from crossdraft.framework.errors import UsageError
from crossdraft.framework.metrics.intervals import Estimate

#: Values as published, with a fall at 6.
PUBLISHED = """\
# Source GitHub Actions run: https://github.com/SemiAnalysisAI/InferenceX/actions/runs/28061204145
# dataset: coding | temperature: 1.0 | top_p: 0.95 | top_k: 40 | output_len: 4096
# Draft model: Inferact/MiniMax-M3-EAGLE3
_metadata:
  draft-model: Inferact/MiniMax-M3-EAGLE3
minimax-m3:
  thinking_on:
    1: 1.78
    2: 2.38
    3: 2.83
    4: 3.11
  thinking_off:
    1: 1.84
    2: 2.52
    3: 2.93
    4: 3.41
    5: 3.59
    6: 3.57
    7: 3.85
    8: 4.06
"""
COSTS = "batch_size,width,context,seconds\n" + "".join(
    f"{b},{w},100,{(10 + max(b * w - 8, 0)) / 1000}\n" for b in (1, 8, 64) for w in (1, 2, 3, 5, 9)
)


def read(text: str, name: str = "minimaxm3_eagle3.yaml") -> list[Acceptance]:
    return plugins.get("formats", "golden-al")().read(Source(text, name))


def lengths(acceptances: list[Acceptance]) -> dict[int, float]:
    return {acceptance.gamma: acceptance.block_efficiency().value for acceptance in acceptances}


def test_published_curves_are_read() -> None:
    """Every length keeps its published mean; where a curve falls or rises by more than before, too."""
    result = read(PUBLISHED)
    on, off = (
        [acceptance for acceptance in result if acceptance.setting == ("minimax-m3", mode)]
        for mode in ("thinking_on", "thinking_off")
    )
    first = on[0]
    assert (first.drafter, first.model, first.temperature) == ("eagle3", "Inferact/MiniMax-M3-EAGLE3", 1.0)
    assert first.source == "minimaxm3_eagle3.yaml:8"
    assert lengths(on) == pytest.approx({1: 1.78, 2: 2.38, 3: 2.83, 4: 3.11}) and on[3].remarks == ()
    assert on[3].marginal == pytest.approx((0.78, 0.60, 0.45, 0.28))
    published = yaml.safe_load(PUBLISHED)["minimax-m3"]["thinking_off"]
    assert lengths(off) == pytest.approx(published) and len(off) == 8
    assert all("constant" in remark for remark in off[5].remarks) and off[5].remarks, "it falls at 6"
    with pytest.raises(UsageError, match="each length is measured"):
        off[7].cut(6)


def test_single_length_gives_constant_rate() -> None:
    (result,) = read("qwen3.8-27b:\n  thinking_on:\n    7: 3.67\n", "qwen3.8_mtp.yaml")
    assert result.drafter == "mtp" and result.gamma == 7 and 1 + sum(result.marginal) == pytest.approx(3.67)
    assert any("constant conditional acceptance rate" in remark for remark in result.remarks)


@pytest.mark.parametrize(
    "text, message",
    [
        ("m:\n  on:\n    1: 2.5\n", "m.yaml:3: drafts of 1 token cannot have the acceptance length 2.5"),
        ("m:\n  on:\n    1: 0.5\n", "cannot have the acceptance length 0.5"),
        ("m:\n  on:\n    0: 1\n", "drafts of 0 tokens"),
        ("m:\n  on:\n    1: nan\n", "the acceptance length at 1 is nan"),
        ("m:\n  on:\n    1: 1.5\n    1: 1.6\n", "m.yaml:4: the acceptance length at 1 is given twice"),
        ("m:\n  on:\n    1: 1.5\n    - 3\n", "m.yaml:4: '- 3' is not a line of an acceptance-length curve"),
        ("m:\n  on:\n    999999: 1.5\n", "drafts of 999999 tokens"),
        *(
            (f"m:\n  on:\n    1: 1.5\n    {key}\n    3: 2.5\n", f"m.yaml:4: '{key}' is not a line of an")
            for key in ("2:", "2: # later", "2.5:", "-2:", "2 : 2.0")
        ),
    ],
)
def test_damaged_curves_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("(", "[(]")):
        read(text, "m.yaml")


@pytest.mark.parametrize("text", ["a: 1\n", "a:\n  - b\n", "1: 2\n", "a:\n  1: 2.0\n", "{}", "  1: 1.5\n"])
def test_other_yaml_is_not_a_curve(text: str) -> None:
    assert read(text) == []


# -- exports -----------------------------------------------------------------------------------------------------


def schedule(rows: list[tuple[float, ...]], **about: Any) -> Schedule:
    known: dict[str, Any] = {"drafter": "eagle3", "model": "org/head", "verifier": "token", "temperature": 1.0}
    acceptance = Acceptance.from_rows(rows, "here", point_mass=False, refusal="", **(known | about))
    lengths = tuple(acceptance.cut(gamma) for gamma in range(1, acceptance.gamma + 1))
    return Schedule(acceptance, (Range(1, 64, acceptance.gamma),), {1: Estimate(1.5)}, lengths)


def test_curve_with_intervals_reads_back() -> None:
    random = np.random.default_rng(1)
    taus = [random.binomial(3, 0.7, 40) for _ in range(12)]
    rows = [(40.0, *(float((tau >= i).sum()) for i in (1, 2, 3))) for tau in taus]
    result = schedule(rows, setting=("m", "thinking_on"))
    text = plugins.get("engines", "golden-al")().export(result).text
    assert list(yaml.safe_load(text)) == ["m"], "InferenceX expects one key"
    assert list(yaml.safe_load(text)["m"]["thinking_on"]) == [1, 2, 3] and text.count("# [") == 3
    reread = read(text, "m_eagle3.yaml")
    assert lengths(reread) == pytest.approx(lengths(list(result.lengths)), abs=0.006)
    assert (reread[0].model, reread[0].temperature, reread[0].setting) == ("org/head", 1.0, ("m", "thinking_on"))
    be = result.acceptance.block_efficiency()
    assert f"3: {be.value:.2f} # [{be.low:.2f}, {be.high:.2f}]" in text


def test_replay_exports_curve_of_all_lengths(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("passes.csv").write_text(COSTS, encoding="utf-8")
    texts = [[5, 6, 7, 8] * 8, [9, 8] * 16, [5, 9, 6] * 10, [11, 12, 13] * 10]
    rows = [{"id": str(i), "prompt": t[:6], "tokens": t[6:], "temperature": 1} for i, t in enumerate(texts)]
    Path("r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    options = ("--cost", "passes.csv", "--verifier", "token", "--batch-size", "1", "--export", "golden-al")
    assert cli.main(["advise", "--replay", "r.jsonl", "--drafter", "prompt-lookup", *options]) == 0
    curve = yaml.safe_load(capsys.readouterr().out)["target"]["thinking_off"]
    assert list(curve) == list(range(1, len(curve) + 1)) and len(curve) > 4
    assert np.diff(list(curve.values())).min() > -0.2, "each length has steps of its own"


def test_engines_simulate_the_mean_and_name_the_distribution() -> None:
    """The settings are played out: each engine's distribution has the mean, and the stated spread."""
    result = schedule([(100.0, 80.0, 60.0, 37.0)] * 3)
    mean, spread = 2.77, result.acceptance.spread()
    exported = {name: plugins.get("engines", f"{name}-synthetic")().export(result) for name in ("vllm", "sglang")}
    exported["tensorrt-llm"] = plugins.get("engines", "tensorrt-llm-synthetic")().export(result)
    rates = vllm(exported["vllm"].text).synthetic_acceptance_rates
    assert rates is not None and 1 + sum(rates) == pytest.approx(mean)
    assert "spread, too, is as measured" in exported["vllm"].remarks[1]
    assert "synthetic_acceptance_length 2.77" in exported["vllm"].remarks[1]
    variables, flags = exported["sglang"].text.split("\n\n")
    assert variables.splitlines() == [
        "export SGLANG_SIMULATE_ACC_LEN=2.77",
        "export SGLANG_SIMULATE_ACC_METHOD=match-expected",
        "export SGLANG_SIMULATE_ACC_TOKEN_MODE=real-draft-token",
    ]
    assert Sglang(flags).gamma(8) == 3
    first, config = exported["tensorrt-llm"].text.split("\n", 1)
    assert first == "# export TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS=1.77" and trt(config).gamma(8) == 3
    for name in ("sglang", "tensorrt-llm"):
        remark = exported[name].remarks[1]
        accepted = {1: 0.23, 2: 0.77}
        two_points = math.sqrt(
            sum(p * n * n for n, p in accepted.items()) - sum(p * n for n, p in accepted.items()) ** 2
        )
        assert "accepts 1 tokens or, with probability 0.77, 2" in remark
        assert f"{two_points:.2f} instead of {spread:.2f}" in remark
    assert any("one length is drawn for all sequences" in remark for remark in exported["sglang"].remarks)
    assert any("must be an integer" in remark for remark in exported["tensorrt-llm"].remarks)


def test_advice_separates_modes(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("passes.csv").write_text(COSTS, encoding="utf-8")
    Path("minimaxm3_eagle3.yaml").write_text(PUBLISHED, encoding="utf-8")
    words = ["advise", "minimaxm3_eagle3.yaml", "--cost", "passes.csv", "--verifier", "token", "--batch-size", "1"]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert "minimax-m3, thinking_on, temperature 1" in out and "minimax-m3, thinking_off, temperature 1" in out
    assert cli.main([*words, "--export", "sglang-synthetic"]) == 2
    assert "give a source with one of them" in capsys.readouterr().err
