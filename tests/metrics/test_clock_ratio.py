"""The ratio by the clock of two cells whose pieces were decoded back to back."""

import pytest

from crossdraft.framework.metrics.cell_metrics import clock_ratio
from crossdraft.framework.metrics.pieces import Piece


def piece(tokens: int, steps: int, seconds: float) -> Piece:
    """A piece of steps of equal shape."""
    return Piece(tokens, {"target": seconds}, steps={"3 0": [[1, 1, 1, 1, 0]] * steps})


def test_median_ignores_a_few_slow_pieces() -> None:
    """Two tokens a step in steps of 1.25 plain ones, so 1.6, though another program slows two of nine pieces down."""
    seconds = [1.24, 1.25, 1.26, 1.25, 1.25, 1.24, 1.26, 9.0, 5.0]
    pairs = [(piece(20, 10, s), piece(10, 10, 1.0)) for s in seconds]
    ratio = clock_ratio(pairs)
    assert ratio is not None and ratio.value == pytest.approx(1.6)
    assert ratio.low is not None and ratio.high is not None and ratio.low < 1.2 and ratio.high > 2.0
    quiet = clock_ratio(pairs[:7])
    assert quiet is not None and quiet.value == pytest.approx(1.6)
    assert quiet.low is not None and quiet.low > 1.55


def test_tokens_per_step_are_of_all_pieces() -> None:
    """A median over pieces of the whole ratio would be that of most pieces."""
    pairs = [(piece(tokens, 10, 1.0), piece(10, 10, 1.0)) for tokens in (10, 10, 40)]
    ratio = clock_ratio(pairs)
    assert ratio is not None and ratio.value == pytest.approx(2.0)


def test_rates_without_steps_are_of_the_totals() -> None:
    pairs = [(Piece(10, {"target": s}), Piece(10, {"target": 2.0})) for s in (1.0, 1.0, 4.0)]
    ratio = clock_ratio(pairs)
    assert ratio is not None and ratio.value == pytest.approx(1.0)
    assert clock_ratio([]) is None and clock_ratio([(piece(1, 1, 0.0), piece(1, 1, 1.0))]) is None
