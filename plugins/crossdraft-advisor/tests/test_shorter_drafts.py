"""Rates that others published for several draft lengths on one server: what follows from the longer for the shorter."""

import csv
from collections import defaultdict
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from crossdraft_advisor.shorter_drafts import shorter_drafts

FILE = Path(__file__).parents[3] / "benchmarks" / "published" / "rates.csv"


def rates() -> dict[tuple[str, str], dict[int, np.ndarray]]:
    """Pr(tau >= i) by drafter and data, then by draft length."""
    lines = (line for line in FILE.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    by_drafter: defaultdict[tuple[str, str], dict[int, np.ndarray]] = defaultdict(dict)
    for row in csv.DictReader(lines):
        by_drafter[row["drafter"], row["data"]][int(row["gamma"])] = np.array(row["rates"].split(), float)
    return by_drafter


@pytest.mark.parametrize(("drafter", "cut"), [("Gemma 4 MTP", -0.60), ("EAGLE-3", -1.46), ("DFlash", -3.05)])
def test_errors_have_no_sign(drafter: str, cut: float) -> None:
    """Medians in per cent: a plain cut is too low, the model is not."""
    errors = []
    for by_length in (lengths for (name, _), lengths in rates().items() if name == drafter):
        for longest, gamma in permutations(by_length, 2):
            if gamma < longest:
                own, measured = by_length[longest], 1 + by_length[gamma].sum()
                derived = (1 + shorter_drafts(own, gamma).sum(), 1 + own[:gamma].sum())
                errors.append([100 * (value / measured - 1) for value in derived])
    model, plain = np.median(errors, axis=0)
    assert plain == pytest.approx(cut, abs=0.01)
    assert abs(model) < 0.25
    assert np.abs(np.array(errors)[:, 0]).max() < 1.1


def test_rates_are_possible() -> None:
    for by_length in rates().values():
        for gamma, own in by_length.items():
            assert len(own) == gamma
            assert (np.diff(own, prepend=1.0) <= 0).all()
