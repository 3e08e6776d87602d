"""``crossdraft diagnose --counters``: likelihoods of the signatures, exactly and on counters with a known fault."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crossdraft_advisor.diagnosis.counters import served_model
from crossdraft_advisor.diagnosis.hypothesis import (
    GRID,
    NONE,
    PRECISION,
    Counts,
    Curve,
    Hypothesis,
    Known,
    Level,
    Shift,
    Walk,
    assess,
)
from scipy.special import expit
from scrapes import scrape_rates

from crossdraft.framework.cli import main as cli

SIGNATURES = {
    "healthy": [0.762, 0.616, 0.513, 0.424, 0.364, 0.309, 0.272, 0.237],
    "lower at all positions": [0.2, 0.05, 0.012, 0.003],
    "nothing at any position": [0.027, 0.0, 0.0, 0.0],
    "the first position only": [0.72, 0.09, 0.01, 0.0],
    "a cliff": [0.72, 0.5, 0.35, 0.02, 0.0],
    "low first, then high": [0.3, 0.21, 0.18, 0.16],
    "none of these": [0.5, 0.35, 0.1, 0.099, 0.098, 0.01],
}
COMPARED = {
    "healthy": ("temperature", [0.68, 0.45, 0.3]),
    "only above temperature 0": ("temperature", [0.4, 0.15, 0.05]),
    "only in batches": ("batch_size", [0.35, 0.12, 0.04]),
    "falls with the context length": ("context", [0.45, 0.2, 0.08]),
}


def diagnosed(capsys: Any, *sources: str) -> list[dict[str, Any]]:
    argv = [word for source in sources for word in ("--counters", source)]
    assert cli.main(["diagnose", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["hypotheses"]


@pytest.mark.parametrize("name", SIGNATURES)
def test_each_shape_is_recognised(name: str, tmp_path: Path, capsys: Any) -> None:
    first, *others = diagnosed(capsys, scrape_rates(tmp_path / "a.txt", SIGNATURES[name]))
    assert first["name"] == name and first["likelihood"] > 0.9
    assert sum(item["likelihood"] for item in (first, *others)) == pytest.approx(1)


@pytest.mark.parametrize("first", [0.47, 0.6, 0.8, 0.966, 0.99])
@pytest.mark.parametrize("falls", [[], [0.85], [0.85, 0.95]])
def test_short_drafts_of_sound_drafters_are_healthy(
    first: float, falls: list[float], tmp_path: Path, capsys: Any
) -> None:
    """Most servers draft one to three tokens; the second conditional rate is lower than the first."""
    conditional = np.maximum(first * np.cumprod([1.0, *falls]), 0.44)
    best = diagnosed(capsys, scrape_rates(tmp_path / "a.txt", np.cumprod(conditional).tolist(), 1500))[0]
    assert best["name"] == "healthy" and best["likelihood"] > 0.9


@pytest.mark.parametrize(
    ("rates", "name"),
    [
        ([0.2], "lower at all positions"),
        ([0.02], "nothing at any position"),
        ([0.8, 0.16], "the first position only"),
        ([0.8, 0.6, 0.12], "a cliff"),
        ([0.2, 0.14], "low first, then high"),
    ],
)
def test_short_drafts_with_a_fault_are_not_healthy(rates: list[float], name: str, tmp_path: Path, capsys: Any) -> None:
    best = diagnosed(capsys, scrape_rates(tmp_path / "a.txt", rates, 1500))[0]
    assert best["name"] == name and best["likelihood"] > 0.9


def test_low_mean_over_positions_of_a_healthy_server_is_explained(tmp_path: Path, capsys: Any) -> None:
    file = scrape_rates(tmp_path / "a.txt", [0.65, 0.43, 0.29, 0.2, 0.14, 0.1, 0.08], 1000)
    assert cli.main(["diagnose", "--counters", file]) == 0
    out = capsys.readouterr().out
    assert "Most likely: healthy" in out
    assert "27 % of the drafted tokens are accepted" in out and "65 % at position 1, 8 % at position 7" in out
    assert "a step with a draft emits 1 + 7 x 0.27 = 2.9 tokens" in out
    assert cli.main(["diagnose", "--counters", scrape_rates(tmp_path / "b.txt", [0.7])]) == 0
    assert "mean over" not in capsys.readouterr().out


@pytest.mark.parametrize("name", COMPARED)
def test_two_sources_show_what_one_does_not(name: str, tmp_path: Path, capsys: Any) -> None:
    key, marginal = COMPARED[name]
    files = scrape_rates(tmp_path / "a.txt", [0.7, 0.48, 0.33]), scrape_rates(tmp_path / "b.txt", marginal)
    sources = [f"{{source: {file}, {key}: {value}}}" for file, value in zip(files, (0, 1), strict=True)]
    sources = [text.replace("batch_size: 0", "batch_size: 8") for text in sources]
    if key == "batch_size":
        sources = [f"{{source: {files[1]}, batch_size: 8}}", f"{{source: {files[0]}, batch_size: 1}}"]
    first, *_ = diagnosed(capsys, *sources)
    assert first["name"] == name and first["likelihood"] > 0.9
    if name != "healthy":
        healthy = next(item for item in diagnosed(capsys, *sources) if item["name"] == "healthy")
        assert files[1] in healthy["against"] and "expected" in healthy["against"]


def test_rows_that_are_mixed_in_some_steps_are_recognised(tmp_path: Path, capsys: Any) -> None:
    """Nothing is accepted in 60 % of the steps, and the others are as before."""
    single = scrape_rates(tmp_path / "a.txt", [0.7, 0.48, 0.33])
    mixed = scrape_rates(tmp_path / "b.txt", [0.28, 0.19, 0.13])
    sources = f"{{source: {single}, batch_size: 1}}", f"{{source: {mixed}, batch_size: 8}}"
    assert diagnosed(capsys, *sources)[0]["name"] == "only in batches"


def test_sampled_drafts_may_be_accepted_more_often(tmp_path: Path, capsys: Any) -> None:
    files = scrape_rates(tmp_path / "a.txt", [0.65, 0.45, 0.31]), scrape_rates(tmp_path / "b.txt", [0.8, 0.64, 0.5])
    sources = [f"{{source: {file}, temperature: {value}}}" for file, value in zip(files, (0, 1), strict=True)]
    assert diagnosed(capsys, *sources)[0]["name"] == "healthy"


def test_shorter_drafts_are_compared_with_what_follows_from_longer_ones(tmp_path: Path, capsys: Any) -> None:
    """A real pair at K = 8 and K = 1: its rate at position 1 differs, as that of a sound drafter does."""
    long = scrape_rates(tmp_path / "8.txt", SIGNATURES["healthy"], 11_043)
    assert diagnosed(capsys, long, scrape_rates(tmp_path / "1.txt", [0.834], 26_407))[0]["name"] == "healthy"
    assert (
        diagnosed(capsys, long, scrape_rates(tmp_path / "0.txt", [0.3], 26_407))[0]["name"]
        == "depends on the draft length"
    )


def test_few_drafts_decide_nothing(tmp_path: Path, capsys: Any) -> None:
    assert cli.main(["diagnose", "--counters", scrape_rates(tmp_path / "a.txt", [0.5, 0.25], 4)]) == 0
    out = capsys.readouterr().out
    assert "Not decided between" in out and "Not examined, because they need a second source" in out


def test_likelihood_is_the_integral_over_curve_and_shift() -> None:
    """Against sums over all paths, on every tenth point of the grid."""
    sources = [Counts("a", (50.0, 30.0, 12.0)), Counts("b", (40.0, 12.0, 3.0), (0.1, -0.2))]
    curve, shift = Walk(Level(0.5, 0.7, 0.2, 0.9), 0.6), Shift(0.5)
    (assessment, none) = sorted(assess([Hypothesis("h", "", "", (curve,), (shift,))], sources), key=_is_none)
    values, weights = shift.grid()
    start = np.full((1, len(GRID)), 1 / len(GRID))
    total = 0.0
    for value, weight in zip(values, weights, strict=True):
        terms = [
            sum(
                source.log_likelihood(i, np.array([value if number else 0.0]))[0]
                for number, source in enumerate(sources)
            )
            for i in (1, 2)
        ]
        first = curve.prior(1, start)[0] * np.exp(terms[0])
        kernel = curve.prior(2, np.eye(len(GRID)))
        total += weight * float(first @ kernel @ np.exp(terms[1]))
    assert assessment.log_likelihood == pytest.approx(math.log(total), abs=1e-9)
    assert none.hypothesis is NONE


def _is_none(assessment: Any) -> bool:
    return assessment.hypothesis is NONE


def test_term_is_a_binomial_with_limited_trials() -> None:
    trials = 1 / (1 / 60 + 1 / PRECISION)
    source = Counts("", (60.0, 24.0))
    term = source.log_likelihood(1, np.zeros(1))[0]
    h = expit(GRID)
    expected = trials * (0.4 * np.log(h / 0.4) + 0.6 * np.log((1 - h) / 0.6))
    assert np.allclose(term, expected) and abs(expit(GRID[term.argmax()]) - 0.4) < 0.01
    assert not source.log_likelihood(2, np.zeros(1)).any()


def test_distributions_sum_to_one() -> None:
    start = np.full((1, len(GRID)), 1 / len(GRID))
    level = Level(0.8, 0.5)
    for curve in (Curve(), Walk(level), Walk(level, turn=2), Known((0.5, 0.0), (0.1, 0.2))):
        for position in (1, 2, 3):
            start = curve.prior(position, start)
            assert start.sum() == pytest.approx(1)
    for shift in (Shift(), Shift(1.0, fall=0.7), Shift(1.0, fall=0.7, both=True), Shift(1.0, first=True)):
        assert shift.grid()[1].sum() == pytest.approx(1)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "diagnose requires --counters"),
        (["--target", "m"], "--target requires --drafter"),
        (["--counters", "{source: a, heat: 3}"], "key 'heat': is unknown"),
        (["--counters", "missing.log"], "missing.log"),
        (["--counters", "FILE", "--counters", "FILE", "--counters", "FILE"], "one or two sources, not 3"),
        (["--counters", "{source: FILE, gamma: 3}"], "1 drafters or draft lengths (4); choose one"),
    ],
)
def test_unclear_requests_are_refused(argv: list[str], message: str, tmp_path: Path, capsys: Any) -> None:
    file = scrape_rates(tmp_path / "a.txt", SIGNATURES["nothing at any position"])
    assert cli.main(["diagnose", *[word.replace("FILE", file) for word in argv]]) == 2
    assert message in capsys.readouterr().err


def test_sources_of_two_servers_are_warned_of(tmp_path: Path, capsys: Any) -> None:
    files = [scrape_rates(tmp_path / name, rates) for name, rates in (("a", [0.7, 0.5]), ("b", [0.3, 0.1]))]
    argv = ["diagnose", "--counters", f"{{source: {files[0]}, batch_size: 1}}"]
    argv += ["--counters", f"{{source: {files[1]}, batch_size: 8}}"]
    assert cli.main(argv) == 0
    assert "Warning" not in capsys.readouterr().out
    for file, model in zip(files, ("one", "other"), strict=True):
        path = Path(file)
        text = path.read_text(encoding="utf-8").replace("_total ", f'_total{{model_name="{model}"}} ')
        path.write_text(text.replace("position=", f'model_name="{model}",position='), encoding="utf-8")
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    assert "is of the model 'one'" in out and "of 'other': if they are of two servers" in out
    assert cli.main([*argv, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["warnings"]) == 1


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ('x_total{engine="0",model_name="m"} 3', "m"),
        ("Initializing an engine with config: model='a', served_model_name=b, seed=0", "b"),
        ('{"id": 1, "model": "org/m", "choices": []}', "org/m"),
        ("nothing about it", ""),
    ],
)
def test_name_of_the_served_model_is_found(text: str, model: str) -> None:
    assert served_model(text) == model
