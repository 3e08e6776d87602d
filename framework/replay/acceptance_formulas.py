"""Pr(tau >= i) of one step given what the output turns out to be, for every rule that has an identity for it.

A step starts after a committed prefix, x_1 x_2 .. is what the output says from there on, P the target's law and Q the
drafter's; r_j = Q(x_j) / P(x_j), R_i = r_1 .. r_i. Given the output, whatever was drafted:

    token verification      prod_j min(1, r_j)
    block verification      min(1, R_1, .., R_i)
    sample-match, K i.i.d.  1 - (1 - Q(x_1 .. x_i))^K
    a point mass            1 if the first i drafted tokens are x_1 .. x_i, else 0: under any of these rules

Block verification keeps p_i = min(p_{i-1} P / Q, 1), and w_i = R_i p_i is min(w_{i-1}, R_i): it ends at i and emits
x_{i+1} with joint probability Q(x^i) max(p_i P(x_{i+1}) - Q(x_{i+1}), 0), which over P(x^{i+1}) is w_i - w_{i+1}. So
w_i is Pr(tau >= i) given the output. SpecInfer and SpecTr on K sequences are Markov chains, see `sequences`.

The rules: Y. Leviathan et al., ICML 2023 (token); Z. Sun et al., ICLR 2025 (block); X. Miao et al., ASPLOS 2024
(SpecInfer, sample-match); Z. Sun et al., NeurIPS 2023 (SpecTr). That a whole response decides all draft lengths at once
is proved by enumeration in tests/replay/test_identities.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import NumericalError, UsageError
from .teacher_forcing.forced_draft import Forced, ahead
from .teacher_forcing.iid_chains import CHAINS, many

#: Rules whose acceptance follows from log P and log Q of what was said, and what of them: by name, because an identity
#: belongs to one rule. ``greedy`` needs temperature 0, where P is 1 and every rule accepts what agrees.
SINGLE = {"token": "token", "greedy": "token", "block": "block", "specinfer": "token", "spectr": "token"}
#: The same where K sequences are drawn independently.
SEQUENCES = (*CHAINS, "sample-match")
RULES = (*SINGLE, "sample-match")
#: How far above 0 rounding may put the logarithm of a probability.
SLACK = 1e-3


def token(log_r: np.ndarray) -> np.ndarray:
    """Pr(tau >= i | output) of token verification, ``[.., G]`` for i = 1 .. G, from ``log_r [.., G]``, ln(Q / P)."""
    return np.exp(np.cumsum(np.minimum(log_r, 0.0), -1))


def block(log_r: np.ndarray) -> np.ndarray:
    """The same of block verification: the running minimum of 1 and the products R_i."""
    return np.exp(np.minimum.accumulate(np.minimum(np.cumsum(log_r, -1), 0.0), -1))


def sample_match(log_q: np.ndarray, k: int = 1) -> np.ndarray:
    """The same of sampling the target and looking whether one of ``k`` i.i.d. sequences says it."""
    with np.errstate(divide="ignore"):
        return -np.expm1(k * np.log1p(-np.minimum(np.exp(np.cumsum(log_q, -1)), 1.0)))


def survival(rule: str, forced: Forced, ks: Sequence[int] = (1,)) -> dict[int, np.ndarray]:
    """Pr(tau >= i | the rest of the response) of a step that starts at each token, by number of sequences K.

    Args:
        rule: a name of `RULES`; for K > 1 of `SEQUENCES`.

    Returns:
        for each K float64 ``[T, G]``, i = 1 .. G; 0 beyond the draft's length and the end of the response.

    Raises:
        UsageError: a rule without an identity; several sequences where nothing is known about them.
        NumericalError: log P or log Q that are no logarithms of probabilities.
    """
    if rule not in RULES:
        raise UsageError(no_identity(rule))
    depth = forced.log_q.shape[1]
    t = np.arange(len(forced.log_p))[:, None]
    reach = np.minimum(forced.lengths[:, None], len(t) - t)  # tokens that it can accept
    inside = np.arange(depth) < reach
    check(forced, inside)
    log_q = np.where(inside, forced.log_q, -np.inf)
    found = {}
    for k in ks:
        if rule == "sample-match":
            found[k] = sample_match(log_q, k)
        elif k == 1:
            log_r = log_q - ahead(forced.log_p, depth)
            found[k] = (block if SINGLE[rule] == "block" else token)(log_r)
        elif rule == "greedy":
            found[k] = sample_match(log_q, k)
        elif rule not in SEQUENCES:
            raise UsageError(f"verifier '{rule}' judges one sequence, not {k}; take {' or '.join(SEQUENCES)}")
        elif forced.sums is None:
            raise UsageError(f"'{rule}' on {k} sequences needs rows of both laws, which were not computed here")
    rest = [k for k in ks if k not in found]
    if rest:
        assert forced.sums is not None
        for k, values in many(rule, forced.sums, depth, rest).items():
            found[k] = np.where(inside, values, 0.0)
    return found


def certain(forced: Sequence[Forced]) -> list[np.ndarray] | None:
    """The same for responses whose drafts are all point masses, by any rule of `RULES`; None if some are not.

    A point mass is accepted as far as it agrees with the output, whatever P says.
    """
    log_q = np.concatenate([one.log_q for one in forced])
    log_p = np.concatenate([one.log_p for one in forced])
    agrees = log_q == 0
    if not ((agrees | (log_q == -np.inf)).all() and (np.isfinite(log_p) & (log_p <= SLACK)).all()):
        return None
    lengths = np.concatenate([one.lengths for one in forced])
    agrees &= np.arange(log_q.shape[1]) < lengths[:, None]
    found = np.logical_and.accumulate(agrees, axis=1).astype(np.float64)
    ends = np.cumsum([len(one.log_p) for one in forced])
    return [found[end - len(one.log_p) : end] for end, one in zip(ends, forced, strict=True)]


def check(forced: Forced, inside: np.ndarray) -> None:
    """Raise NumericalError unless log P is finite and at most 0, and log Q at most 0 ``inside``."""
    if not np.all(np.isfinite(forced.log_p)) or np.any(forced.log_p > SLACK):
        at = int(np.argmin(np.isfinite(forced.log_p) & (forced.log_p <= SLACK)))
        raise NumericalError(
            f"log P of token {at} of the response is {forced.log_p[at]:g}, which is no logarithm of the probability of "
            "a token that was said"
        )
    wrong = inside & ~(forced.log_q <= SLACK)
    if wrong.any():
        at, j = (int(i) for i in np.argwhere(wrong)[0])
        raise NumericalError(
            f"log Q of drafted token {j + 1} from token {at} of the response on is {forced.log_q[at, j]:g}, which is "
            "no logarithm of a probability"
        )


def no_identity(rule: str) -> str:
    """Why a rule cannot be replayed, for people."""
    return (
        f"verifier '{rule}' cannot be replayed: how often it accepts does not follow from the text alone; measure it "
        f"with crossdraft run. Rules that can: {', '.join(RULES)}"
    )
