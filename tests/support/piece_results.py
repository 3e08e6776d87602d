"""Made-up pieces of prompts whose steps all take the same time."""

from typing import Any

from crossdraft.framework.metrics.pieces import Piece


def made_piece(emitted: int, steps: int, shape: str = "0 0", waited: float = 0.0, **options: Any) -> Piece:
    """A piece of equal steps; ``options``: total seconds of phases, or attributes of the piece."""
    phases = {phase: float(options.pop(phase, 0.0)) for phase in ("draft", "target", "verify", "rest")}
    row = [round(1e6 * s / steps) for s in (*phases.values(), waited)]
    return Piece(emitted, {"prefill": 0.5} | phases, steps={shape: [row] * steps}, **options)
