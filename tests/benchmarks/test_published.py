"""The published series are consistent, and predictions hold for them."""

import math
import sys
from datetime import date
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
published = pytest.importorskip("published")

CORPUS = published.read()


def test_every_series_is_possible() -> None:
    assert len(CORPUS) >= 25
    assert len({s.source for s in CORPUS}) >= 12
    for s in CORPUS:
        assert s.facts["date"][:4] in {str(year) for year in range(2022, date.today().year + 2)}
        assert len(set(s.gammas)) == len(s.gammas)
        for gamma, length, ratio in zip(s.gammas, s.lengths, s.ratios, strict=True):
            assert 1 <= length <= gamma + 1
            assert ratio > 0
            if s.plain_known:
                assert 0.5 < ratio < 20


def test_published_speed_ups_are_inside_the_intervals() -> None:
    """With the prior as shipped. Plain and one length hold less: engines that replay states are not in the prior."""
    prior = published.step_cost.published_prior()
    for level, share in (("acceptance only", 0.93), ("longest", 0.85), ("ends", 0.9)):
        results = [r for s in CORPUS if s.is_chain and (r := published.predicted(s, level, prior))]
        assert float(published.total(level, results)[4]) > 100 * share


@pytest.mark.thorough
def test_fit_finds_the_prior_that_series_were_drawn_from() -> None:
    """60 series of 60 sources with a of 1.2 +- 10 %, b of 0.15 +- 40 % and errors of 2 %."""
    rng = np.random.default_rng(1)
    series = []
    for i in range(60):
        a, b = 1.2 * np.exp(0.1 * rng.standard_normal()), 0.15 * np.exp(0.4 * rng.standard_normal())
        ratios = [float((a + b * gamma) * np.exp(0.02 * rng.standard_normal())) for gamma in (1, 3, 7)]
        series.append(published.Series({"source": str(i)}, True, (1.0, 1.0, 1.0), (1, 3, 7), tuple(ratios)))
    prior = published.Likelihoods(series).fit()
    assert prior.centre == pytest.approx((math.log(1.2), math.log(0.15)), abs=0.15)
    assert prior.scale == pytest.approx((0.1, 0.4), rel=0.35)
    assert 0.005 < prior.noise < 0.03
