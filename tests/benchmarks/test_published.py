"""The published series are consistent, and predictions hold for them."""

import sys
from datetime import date
from pathlib import Path

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
    for level in range(len(published.LEVELS)):
        results = [r for s in CORPUS if s.is_chain and (r := published.predicted(s, level, prior))]
        assert published.fmean(r.inside for r in results) > (0.85 if level == 1 else 0.93)
