"""Cost curves with numbers that are known, and records of steps, for the tests of prediction."""

from collections.abc import Sequence
from itertools import product
from typing import Any

from crossdraft.framework.cost.curve import CostCurve, Point
from crossdraft.framework.metrics.cell_metrics import StepRecord
from crossdraft.framework.metrics.pieces import Piece

HERE = {"device": "cpu (toy)", "torch": "2.0", "threads": 2}


def seconds(b: float, width: float, context: float) -> float:
    """Linear in each argument, so that interpolation reproduces it."""
    return 10 + 2 * b * width + b * context / 100


def curve(
    batch_sizes: Sequence[int] = (1, 2, 8),
    widths: Sequence[int] = (1, 2, 5),
    contexts: Sequence[int] = (100, 300),
    cost: Any = seconds,
    **about: Any,
) -> CostCurve:
    points = [Point(b, w, c, t := cost(b, w, c), t - 1, t + 1) for b, w, c in product(batch_sizes, widths, contexts)]
    arguments = {"model": "m", "sha256": "abc", "dtype": "float32", "device": HERE, **about}
    return CostCurve(points=tuple(points), **arguments)


def rows(prompt: int, turn: int, emitted: Sequence[int], width: int = 2) -> list[StepRecord]:
    return [StepRecord(prompt, f"q{prompt}", "a", turn, i, e - 1, e, width, width, 9) for i, e in enumerate(emitted)]


def piece(emitted: int, **phases: float) -> Piece:
    return Piece(emitted, {"prefill": 0.0, "draft": 1.0, "target": 4.0, "verify": 2.0, "rest": 1.0} | phases)
