"""Pr(tau >= i) of one step given the recorded output, for every verifier with a closed form.

A step starts after a committed prefix; x_1 x_2 .. are the output tokens that follow, P and Q the target's and the
drafter's distributions, r_j = Q(x_j) / P(x_j) and R_i = r_1 .. r_i. Given the output, for any draft:

    token verification      prod_j min(1, r_j)
    block verification      min(1, R_1, .., R_i)
    sample-match, K i.i.d.  1 - (1 - Q(x_1 .. x_i))^K
    a point mass            1 if the first i drafted tokens are x_1 .. x_i, else 0: for all of these verifiers

Block verification keeps p_i = min(p_{i-1} P / Q, 1), and w_i = R_i p_i is min(w_{i-1}, R_i): it ends at i and emits
x_{i+1} with joint probability Q(x^i) max(p_i P(x_{i+1}) - Q(x_{i+1}), 0), which over P(x^{i+1}) is w_i - w_{i+1}. So
w_i is Pr(tau >= i) given the output. SpecInfer and SpecTr on K sequences are Markov chains, see `iid_chains`.

References: Y. Leviathan et al., ICML 2023 (token); Z. Sun et al., ICLR 2025 (block); X. Miao et al., ASPLOS 2024
(SpecInfer, sample-match); Z. Sun et al., NeurIPS 2023 (SpecTr). tests/replay/test_acceptance_formulas.py proves by
enumeration that one response yields the acceptance of every draft length.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from crossdraft import NumericalError, UsageError

from .teacher_forcing.iid_chains import TRANSITIONS, chain_survival
from .teacher_forcing.scoring import DraftScores, shifted_windows

#: Single-sequence verifiers and the formula of each. ``greedy`` requires temperature 0, where P is 1 and every verifier
#: accepts a token if it equals the output.
SINGLE_SEQUENCE = {"token": "token", "greedy": "token", "block": "block", "specinfer": "token", "spectr": "token"}
IID_VERIFIERS = (*TRANSITIONS, "sample-match")  # verifiers of K i.i.d. sequences
VERIFIERS = (*SINGLE_SEQUENCE, "sample-match")
TOLERANCE = 1e-3  # rounding error allowed above 0 in a log-probability


def token(log_r: np.ndarray) -> np.ndarray:
    """Pr(tau >= i | output) of token verification, ``[.., G]`` for i = 1 .. G, from ``log_r [.., G]``, ln(Q / P)."""
    return np.exp(np.cumsum(np.minimum(log_r, 0.0), -1))


def block(log_r: np.ndarray) -> np.ndarray:
    """Pr(tau >= i | output) of block verification: the running minimum of 1 and the products R_i."""
    return np.exp(np.minimum.accumulate(np.minimum(np.cumsum(log_r, -1), 0.0), -1))


def sample_match(log_q: np.ndarray, k: int = 1) -> np.ndarray:
    """Pr(tau >= i | output) of sample matching: one of ``k`` i.i.d. sequences starts with the first i output tokens."""
    with np.errstate(divide="ignore"):
        return -np.expm1(k * np.log1p(-np.minimum(np.exp(np.cumsum(log_q, -1)), 1.0)))


def survival(verifier: str, scores: DraftScores, ks: Sequence[int] = (1,)) -> dict[int, np.ndarray]:
    """Pr(tau >= i | the rest of the response) of a step that starts at each token, ``[T, G]`` by number of sequences K.

    It is 0 beyond the draft's length and the end of the response. Raises UsageError if ``verifier`` has no closed form,
    or for K > 1 without the sums that it needs; NumericalError for invalid log-probabilities.
    """
    if verifier not in VERIFIERS:
        raise UsageError(no_formula(verifier))
    depth = scores.log_q.shape[1]
    t = np.arange(len(scores.log_p))[:, None]
    acceptable = np.minimum(scores.lengths[:, None], len(t) - t)  # tokens that it can accept
    inside = np.arange(depth) < acceptable
    check_log_probs(scores, inside)
    log_q = np.where(inside, scores.log_q, -np.inf)
    result = {}
    for k in ks:
        if verifier == "sample-match":
            result[k] = sample_match(log_q, k)
        elif k == 1:
            log_r = log_q - shifted_windows(scores.log_p, depth)
            result[k] = (block if SINGLE_SEQUENCE[verifier] == "block" else token)(log_r)
        elif verifier == "greedy":
            result[k] = sample_match(log_q, k)
        elif verifier not in IID_VERIFIERS:
            raise UsageError(f"verifier '{verifier}' verifies one sequence, not {k}; use {' or '.join(IID_VERIFIERS)}")
        elif scores.sums is None:
            raise UsageError(
                f"verifier '{verifier}' with K = {k} needs `DraftScores.sums`; set `ScoringRequest.sequences` to {k}"
            )
    remaining = [k for k in ks if k not in result]
    if remaining:
        assert scores.sums is not None
        for k, values in chain_survival(verifier, scores.sums, depth, remaining).items():
            result[k] = np.where(inside, values, 0.0)
    return result


def point_mass_survival(scores: Sequence[DraftScores]) -> list[np.ndarray] | None:
    """Pr(tau >= i | output), ``[T, G]`` for each response, if all drafts are point masses; otherwise None.

    All of `VERIFIERS` accept a point mass as far as it agrees with the output, for any P.
    """
    log_q = np.concatenate([item.log_q for item in scores])
    log_p = np.concatenate([item.log_p for item in scores])
    agrees = log_q == 0
    if not ((agrees | (log_q == -np.inf)).all() and (np.isfinite(log_p) & (log_p <= TOLERANCE)).all()):
        return None
    lengths = np.concatenate([item.lengths for item in scores])
    agrees &= np.arange(log_q.shape[1]) < lengths[:, None]
    survivals = np.logical_and.accumulate(agrees, axis=1).astype(np.float64)
    ends = np.cumsum([len(item.log_p) for item in scores])
    return [survivals[end - len(item.log_p) : end] for end, item in zip(ends, scores, strict=True)]


def check_log_probs(scores: DraftScores, inside: np.ndarray) -> None:
    """Raise NumericalError unless log P is finite and at most 0, and log Q at most 0 ``inside``."""
    if not np.all(np.isfinite(scores.log_p)) or np.any(scores.log_p > TOLERANCE):
        position = int(np.argmin(np.isfinite(scores.log_p) & (scores.log_p <= TOLERANCE)))
        raise NumericalError(
            f"log P of response token {position} is {scores.log_p[position]:g}, which is not a valid log-probability; "
            "it must be finite and at most 0"
        )
    wrong = inside & ~(scores.log_q <= TOLERANCE)
    if wrong.any():
        position, j = (int(i) for i in np.argwhere(wrong)[0])
        raise NumericalError(
            f"log Q of drafted token {j + 1} after response token {position} is {scores.log_q[position, j]:g}, which "
            "is not a valid log-probability; it must be at most 0"
        )


def no_formula(verifier: str) -> str:
    """Error message for a verifier that cannot be replayed."""
    return (
        f"verifier '{verifier}' cannot be replayed: its acceptance rate does not follow from the recorded text; "
        f"measure it with crossdraft run, or use one of {', '.join(VERIFIERS)}"
    )
