"""Teacher-forced scores of a drafter on a recorded response."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .iid_chains import ChainSums


@dataclass(frozen=True)
class DraftScores:
    """Scores of a drafter on a response of T tokens x, for a step of G drafted tokens that starts at each token.

    A step that starts at t has committed x[:t]; token j (from 0) of its draft is at the position of x[t + j]. Entries
    with t + j >= T are undefined.

    Attributes:
        log_q: float64 [T, G], log Q(x[t + j] | prompt, x[:t + j]) of a step that started at t and drafted x up to
            there; for point masses 0 if the drafted token is x[t + j] and -inf otherwise.
        lengths: int64 [T], drafted tokens of a step at t if they equal x: at most G, fewer if the drafter proposes
            fewer or its length policy stops.
        log_p: float64 [T], log P(x[t] | prompt, x[:t]) of the target as sampled; 0 at temperature 0.
        log_top: float64 [T, G], the largest log-probability of the distribution of each drafted token (at temperature
            0, of the model's softmax), for confidence policies (`length_policies`). None if it was not requested.
        own_log_p: float64 [T], log P computed by the target if ``log_p`` is the recorded one and the target was run.
        sums: `iid_chains.sums` for verifiers of several i.i.d. sequences; None if they were not requested.
    """

    log_q: np.ndarray
    lengths: np.ndarray
    log_p: np.ndarray
    sums: ChainSums | None = None
    log_top: np.ndarray | None = None
    own_log_p: np.ndarray | None = None


def shifted_windows(values: np.ndarray, depth: int, beyond: float = 0.0) -> np.ndarray:
    """``[T, depth]`` with ``values[t + j]`` at (t, j), padded with ``beyond``."""
    padded = np.concatenate([values, np.full(depth, beyond)])
    return np.lib.stride_tricks.sliding_window_view(padded, depth)[: len(values)]
