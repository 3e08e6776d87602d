"""The published series are consistent, the fit is one, and predictions hold for the series."""

import math
import sys
from datetime import date
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
published = pytest.importorskip("published")

CORPUS = published.CORPUS


def test_every_series_is_possible() -> None:
    assert len(CORPUS) >= 70
    assert len({s.source for s in CORPUS}) >= 20
    chains = [s.name for s in CORPUS if s.is_chain and s.plain_known]
    assert len(set(chains)) == len(chains)
    for s in CORPUS:
        assert s.facts["date"][:4] in {str(year) for year in range(2022, date.today().year + 2)}
        assert s.kind in {"sequential", *published.KINDS.values()}
        if s.is_chain:
            assert len(set(s.gammas)) == len(s.gammas)
        for gamma, length, ratio in zip(s.gammas, s.lengths, s.ratios, strict=True):
            assert 1 <= length <= gamma + 1
            assert ratio > 0
            if s.plain_known:
                assert 0.5 < ratio < 20


def test_published_speed_ups_are_inside_the_intervals() -> None:
    """With the priors as shipped."""
    for level in ("acceptance only", "longest", "ends"):
        priors = [(s, published.advised_prior(s)) for s in CORPUS if s.is_chain]
        results = [r for s, prior in priors if (r := published.predicted(s, level, prior))]
        assert float(published.total(level, results)[4]) >= 93


@pytest.mark.thorough
def test_widened_intervals_hold_what_they_were_chosen_for() -> None:
    """The factor of a source is chosen on the others; with their own, intervals hold at least 95 %."""
    prior = published.replace(published.step_cost.published_prior(), widening=(1.0, 1.0, 1.0), noise=0.005)
    results = {level: [] for level in published.LEVELS}
    for level in published.WIDENED:
        results[level] = [r for s in CORPUS[:12] if (r := published.predicted(s, level, prior))]
    factors = published.widening(results)
    assert factors[2] > 1
    wide = published.widened(results, lambda source: factors)
    for level in published.WIDENED:
        assert float(published.total(level, wide[level])[4]) >= 94.9
    first = CORPUS[0].source
    without = {level: [r for r in own if r.series.source != first] for level, own in results.items()}
    assert published.widening(results, first) == published.widening(without)


@pytest.mark.thorough
def test_fit_finds_the_prior_that_series_were_drawn_from() -> None:
    """60 series of 60 sources with a of 1.2 +- 10 %, b of 0.15 +- 40 %, 2.5 times that on servers, errors of 2 %."""
    rng = np.random.default_rng(1)
    series, prices = [], []
    for i in range(60):
        a, b = 1.2 * np.exp(0.1 * rng.standard_normal()), 0.15 * np.exp(0.4 * rng.standard_normal())
        facts = {"source": str(i), "engine": "vllm" if i % 2 else "own", "drafter": "mtp", "experts": False}
        b *= 2.5 if i % 2 else 1.0
        prices.append(math.log(b))
        ratios = [float((a + b * gamma) * np.exp(0.02 * rng.standard_normal())) for gamma in (1, 3, 7)]
        series.append(published.Series(facts, True, (1.0, 1.0, 1.0), (1, 3, 7), tuple(ratios)))
    fit = published.Likelihoods(series).fit(None, (("log_b", "serving"),))
    assert fit.prior.centre == pytest.approx((math.log(1.2), math.log(0.15)), abs=0.2)
    assert fit.prior.scale == pytest.approx((0.1, 0.4), rel=0.4)
    assert 0.005 < fit.prior.noise < 0.03
    by, deviation = fit.shifts["log_b", "serving"]
    drawn = np.mean(prices[1::2]) - np.mean(prices[::2])  # 0.71 where 0.92 +- 0.10 is expected
    assert abs(by - drawn) < 3 * deviation < 0.6


def test_page_has_the_table_of_the_script() -> None:
    """published/predictions.csv is what --csv wrote; the page has its totals."""
    page = (ROOT / "docs" / "predictions.md").read_text(encoding="utf-8")
    results = published.read_csv(ROOT / "benchmarks" / "published" / "predictions.csv")
    for line in published.text(results).splitlines():
        assert line in page.splitlines()
