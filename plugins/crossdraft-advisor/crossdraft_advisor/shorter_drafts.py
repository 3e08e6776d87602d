"""Acceptance of shorter drafts, from the acceptance by position of longer ones.

Cutting Pr(tau >= i) at a smaller gamma underestimates short drafts: a step of long drafts usually starts after a
rejection, where drafting is hard, and one of short drafts often starts after accepted tokens.

Model: the drafter is right or wrong at each position of the text, wherever the step started. A *run* is a maximal
sequence of positions at which it is right, with the wrong one that ends it. Every run starts a step, because a
rejection (and an untested bonus token) commits the wrong position; so a run of n + 1 tokens takes
ceil((n + 1) / (gamma + 1)) steps of each draft length. With T(n) the number of runs of at least n right positions per
step of K tokens, the steps with tau >= i are

    Pr(tau >= i) = sum_j T((K + 1) j + i),    i = 0 .. K,

which is K + 1 equations. Beyond K positions, T is assumed to decrease by a constant ratio r. Its self-consistent value
and the solution are r = m_K / m_(K-1) and T(n) = m_n - m_K r^(n + 1), where m_i is the measured Pr(tau >= i). For
drafts of gamma tokens, the numerator is sum_j T((gamma + 1) j + i) and the denominator the same for i = 0.
"""

from __future__ import annotations

import numpy as np
from scipy.special import expit, logit

#: Change of the logit of a conditional rate for a change by 1 of the share of steps that accept their whole draft.
_EASE = 0.4


def shorter_drafts(marginal: np.ndarray, gamma: int) -> np.ndarray:
    """Pr(tau >= i) with drafts of ``gamma`` tokens, float64 ``[.., gamma]``, from that with K, ``[.., K]``, K >= gamma.

    The larger of two: runs, and the measured rates, eased where more steps start after a whole draft. Where runs are
    below, a drafter gets worse along its draft (it reads its own features), and the next step starts afresh.
    """
    return np.maximum(by_runs(marginal, gamma), by_starts(marginal, gamma))


def by_starts(marginal: np.ndarray, gamma: int) -> np.ndarray:
    """Pr(tau >= i) of `shorter_drafts` by conditional rates; text behind an accepted draft is easier.

    With w the share of steps that accept their whole draft, each rate r becomes expit(logit(r) + 0.4 (w_gamma - w_K)).
    The factor was fitted to published rates of several lengths on one server (`benchmarks/published/rates.csv`).
    """
    before = np.concatenate([np.ones_like(marginal[..., :1]), marginal[..., :-1]], -1)
    rates = logit(np.divide(marginal, before, out=np.zeros_like(marginal), where=before > 0)[..., :gamma])
    eased = marginal[..., :gamma]
    for _ in range(12):  # w moves itself by less than 0.15 of a change
        eased = np.cumprod(expit(rates + _EASE * (eased[..., -1:] - marginal[..., -1:])), -1)
    return eased


def by_runs(marginal: np.ndarray, gamma: int) -> np.ndarray:
    """Pr(tau >= i) of `shorter_drafts` by the model alone.

    Rates that do not belong to any distribution of runs are moved to the nearest that do, from left to right.
    """
    longest, width = marginal.shape[-1], gamma + 1
    m = np.concatenate([np.ones_like(marginal[..., :1]), marginal], -1)
    last, before = m[..., longest], m[..., longest - 1]
    r = np.divide(last, before, out=np.zeros_like(last), where=before > 0)
    n = np.arange(longest + 1)
    runs = np.minimum.accumulate(m - last[..., None] * r[..., None] ** (n + 1), -1)
    # T(K + d) = T(K) r^d; the ratio of the geometric sums is (1 - r^(K + 1)) / (1 - r^(gamma + 1)), also at r = 1.
    tail = last * (r[..., None] ** n).sum(-1) / (r[..., None] ** np.arange(width)).sum(-1)
    first = (np.arange(width) - longest - 1) % width + 1  # the first position beyond K of each residue
    steps = tail[..., None] * r[..., None] ** first
    for i in range(width):
        steps[..., i] += runs[..., i::width].sum(-1)
    return np.minimum.accumulate(np.minimum(steps[..., 1:] / steps[..., :1], 1.0), -1)
