"""Acceptance of K i.i.d. sequences: given the output, the number of live sequences is a Markov chain.

Write S for the number of sequences that share the accepted prefix (K at first), p and q for the target and draft
distributions at a node, y for the next output token, r = q(y) / p(y).

*SpecInfer* (multi-step rejection; copies keep their turn). With c_1 = 0 and c_{k+1} = c_k + sum_v max(p - c_k q, 0) the
k-th draw is the accepted one with probability min(1, c_{k+1} r) - min(1, c_k r). A rejected draw is never y; each of
the S - k later ones is y with probability q(y): S' = 1 + Binomial(S - k, q(y)).

*SpecTr* (K-SEQ) with its rho for S sequences, beta = sum_v min(p / rho, q) and m = min(p(y) / rho, q(y)): the k-th draw
is the accepted one with probability (1 - beta)^(k-1) m / p(y). A rejected draw is y with probability
(q(y) - m) / (1 - beta), a later one with q(y), and all draws equal to y stay live. The remaining mass is the
residual's: all S draws were rejected, and those equal to y stay live, too. (With the smallest valid rho the residual
has no mass there; the formula holds for any valid rho.)

Pr(tau >= i given the output) is the mass of the chain after i tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from crossdraft.verifiers.spectr import rho_star


@dataclass(frozen=True)
class ChainSums:
    """Sums over the target and draft distributions at each of T tokens, for up to K sequences."""

    # p, q: float64 [T], P and Q of the token itself
    p: np.ndarray
    q: np.ndarray
    c: np.ndarray  # float64 [T, K + 1], SpecInfer's c_1 .. c_{K+1}
    # rho, beta: float64 [T, K], SpecTr's rho and sum_v min(p / rho, q) for S = 1 .. K live sequences.
    rho: np.ndarray
    beta: np.ndarray

    @classmethod
    def joined(cls, parts: Sequence[ChainSums]) -> ChainSums:
        """Concatenate the sums of consecutive chunks."""
        return cls(*(np.concatenate([vars(part)[name] for part in parts]) for name in cls.__dataclass_fields__))


def sums(p: Any, q: Any, tokens: Any, k: int) -> ChainSums:
    """`ChainSums` of n tokens from target and draft probabilities at each, ``[n, V]``, for up to ``k`` sequences."""
    p, q = torch.as_tensor(p), torch.as_tensor(q)
    x = torch.as_tensor(tokens, dtype=torch.long).to(p.device)[:, None]
    c = [torch.zeros(len(p), dtype=torch.float64, device=p.device)]
    for _ in range(k):
        rest = (p - c[-1][:, None].to(p.dtype) * q).clamp_(min=0)
        c.append(c[-1] + rest.sum(1, dtype=torch.float64))
    rho = torch.stack([rho_star(p, q, torch.full_like(x[:, 0], s)) for s in range(1, k + 1)], 1)
    beta = torch.stack([torch.minimum(p / r[:, None].to(p.dtype), q).sum(1, dtype=torch.float64) for r in rho.T], 1)
    values = (p.gather(1, x)[:, 0], q.gather(1, x)[:, 0], torch.stack(c, 1), rho, beta.clamp(max=1))
    return ChainSums(*(value.double().cpu().numpy() for value in values))


def specinfer(sums: ChainSums) -> np.ndarray:
    """Transition matrices of SpecInfer, ``[T, K + 1, K + 1]``: Pr(S' = j | S = s, output) at (s, j); 0 absorbs."""
    t, k = sums.rho.shape
    r = (sums.q / sums.p)[:, None]
    accepted = np.diff(np.minimum(sums.c * r, 1.0), axis=1)  # [T, K]: by index of the accepted draw
    others = _binomials(sums.q, k)
    moves = np.zeros((t, k + 1, k + 1))
    for s in range(1, k + 1):
        for draw in range(1, s + 1):
            left = s - draw
            moves[:, s, 1 : left + 2] += accepted[:, draw - 1, None] * others[:, left, : left + 1]
    return _stopped(moves)


def spectr(sums: ChainSums) -> np.ndarray:
    """Transition matrices of SpecTr (K-SEQ), as of `specinfer`."""
    t, k = sums.rho.shape
    later = _binomials(sums.q, k)
    moves = np.zeros((t, k + 1, k + 1))
    for s in range(1, k + 1):
        beta, m = sums.beta[:, s - 1], np.minimum(sums.p / sums.rho[:, s - 1], sums.q)
        missed = np.where(beta < 1, (sums.q - m) / np.where(beta < 1, 1 - beta, 1.0), 0.0).clip(0, 1)
        earlier = _binomials(missed, k)
        left = np.ones(t)
        for draw in range(s):  # draws before the accepted one
            share = (1 - beta) ** draw * m / sums.p
            left -= share
            for j in range(draw + 1):
                moves[:, s, 1 + j : s - draw + j + 1] += (share * earlier[:, draw, j])[:, None] * later[
                    :, s - draw - 1, : s - draw
                ]
        moves[:, s, 1 : s + 1] += left.clip(0)[:, None] * earlier[:, s, 1 : s + 1]
    return _stopped(moves)


def _stopped(moves: np.ndarray) -> np.ndarray:
    moves[:, :, 0] = 1 - moves[:, :, 1:].sum(-1)
    return moves


def _binomials(probability: np.ndarray, k: int) -> np.ndarray:
    """``[T, k + 1, k + 1]``: Pr(Binomial(n, probability) = j) at (n, j)."""
    probs = np.zeros((len(probability), k + 1, k + 1))
    probs[:, 0, 0] = 1
    for n in range(1, k + 1):
        probs[:, n] = probs[:, n - 1] * (1 - probability)[:, None]
        probs[:, n, 1:] += probs[:, n - 1, :-1] * probability[:, None]
    return probs


TRANSITIONS = {"specinfer": specinfer, "spectr": spectr}  # verifier -> transition matrices


def chain_survival(verifier: str, sums: ChainSums, depth: int, ks: Sequence[int]) -> dict[int, np.ndarray]:
    """Pr(tau >= i | output), ``[T, depth]`` for i = 1 .. depth, by number of sequences.

    Values past the end of the text (t + i > T) are undefined.
    """
    moves = TRANSITIONS[verifier](sums)[:, 1:, 1:]
    t, k = sums.rho.shape
    alive = np.ones((t + 1, k, 1))  # Pr(i more tokens are accepted | s live sequences at each token)
    result = np.zeros((t, depth, k))
    for i in range(depth):
        alive[:-1] = moves @ alive[1:]
        alive[-1] = 0
        result[:, i] = alive[:-1, :, 0]
    return {k: result[..., k - 1] for k in ks}
