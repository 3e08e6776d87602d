"""Numbers of pieces that reach an interval."""

import numpy as np
import pytest
from crossdraft_advisor.intervals import pieces_needed

from crossdraft.runs import estimate


def test_planned_pieces_reach_requested_interval() -> None:
    """Mean half widths of 6 pieces, and of the `pieces_needed` for a quarter of that."""
    rng = np.random.default_rng(0)

    def half(pieces: int) -> float:
        widths = []
        for _ in range(200):
            sums = np.stack([np.ones(pieces), rng.normal(size=pieces)], -1)
            result = estimate(lambda s: s[..., 1] / s[..., 0], sums, log=False)
            assert result.low is not None and result.high is not None
            widths.append((result.high - result.low) / 2)
        return float(np.sqrt(np.mean(np.square(widths))))

    few = half(6)
    assert half(round(pieces_needed(few, few / 4, 6))) == pytest.approx(few / 4, rel=0.1)
