"""What a drafter would have made of a recorded response: all that the identities need."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .iid_chains import Sums


@dataclass(frozen=True)
class Forced:
    """One drafter on one recorded response of T tokens x, from every place at which a step can start, G tokens deep.

    A step that starts at t has committed x[:t]; the j-th token (from 0) of its draft stands where x[t + j] does.
    Cells with t + j >= T are of no meaning.

    Attributes:
        log_q: float64 [T, G], log Q(x[t + j] | prompt, x[:t + j]) by the drafter that started at t, whose own drafted
            tokens were x up to there; 0 and -inf where its draft is a point mass that is x[t + j], or is not.
        lengths: int64 [T], how many tokens it drafts from t on as long as the drafted ones are x: at most G, less
            where it has nothing to say or its length policy stops.
        log_p: float64 [T], log P(x[t] | prompt, x[:t]) by the target as it samples; 0 at temperature 0.
        log_top: float64 [T, G], the largest log-probability of the law that each token was drawn from, of the model's
            softmax at temperature 0; what policies of lengths ask for (`lengths`). None where nobody wanted to know it.
        own_log_p: float64 [T], log P by the target where ``log_p`` is the recorded one and the target was run, too.
        sums: what rules for several i.i.d. sequences need, where the drafter draws them: `sequences.sums` of the rows.
    """

    log_q: np.ndarray
    lengths: np.ndarray
    log_p: np.ndarray
    sums: Sums | None = None
    log_top: np.ndarray | None = None
    own_log_p: np.ndarray | None = None


def ahead(values: np.ndarray, depth: int, beyond: float = 0.0) -> np.ndarray:
    """``[T, depth]``: ``values[t + j]`` at (t, j), ``beyond`` behind the end."""
    padded = np.concatenate([values, np.full(depth, beyond)])
    return np.lib.stride_tricks.sliding_window_view(padded, depth)[: len(values)]
