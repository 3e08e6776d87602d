"""K sequences drawn independently: how many of them are still live, given the output, is a Markov chain.

Write S for the number of sequences that share the accepted prefix (K at first), p and q for the two laws at a node, y
for the token that follows, r = q(y) / p(y).

*SpecInfer* (multi-step rejection; copies keep their turn). With c_1 = 0 and c_{k+1} = c_k + sum_v max(p - c_k q, 0) the
k-th draw is the accepted one with probability min(1, c_{k+1} r) - min(1, c_k r). A rejected draw is never y; each of
the S - k later ones is y with probability q(y): S' = 1 + Binomial(S - k, q(y)).

*SpecTr* (K-SEQ) with its rho for S sequences, beta = sum_v min(p / rho, q) and m = min(p(y) / rho, q(y)): the k-th draw
is the accepted one with probability (1 - beta)^(k-1) m / p(y). A rejected draw is y with probability
(q(y) - m) / (1 - beta), a later one with q(y), and all that are y go on. What is left is the residual's share: all S
draws were rejected, and those that are y go on, too. (It has no mass where some could be, if rho is the smallest valid
one; the formula holds for any valid rho.)

Pr(tau >= i given the output) is the mass of the chain after i tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

#: Steps to rho, and how close to it is enough.
STEPS, CLOSE = 60, 1e-13


@dataclass(frozen=True)
class Sums:
    """What K sequences need of the two laws where each of T tokens stands, for every number of them up to K.

    Attributes:
        p, q: float64 [T], P and Q of the token itself.
        c: float64 [T, K + 1], SpecInfer's c_1 .. c_{K+1}.
        rho, beta: float64 [T, K], SpecTr's rho and sum_v min(p / rho, q) for S = 1 .. K live sequences.
    """

    p: np.ndarray
    q: np.ndarray
    c: np.ndarray
    rho: np.ndarray
    beta: np.ndarray

    @classmethod
    def joined(cls, parts: Sequence[Sums]) -> Sums:
        """Those of consecutive stretches of a text as one."""
        return cls(*(np.concatenate([vars(part)[name] for part in parts]) for name in cls.__dataclass_fields__))


def sums(p: Any, q: Any, tokens: Any, k: int) -> Sums:
    """The `Sums` of a stretch of a text.

    Args:
        p, q: ``[n, V]``, the laws of target and drafter where its tokens stand: arrays, or tensors on any device.
        tokens: ``[n]``, the token ids.
        k: most sequences.
    """
    p, q = torch.as_tensor(p), torch.as_tensor(q)
    x = torch.as_tensor(tokens, dtype=torch.long).to(p.device)[:, None]
    c = [torch.zeros(len(p), dtype=torch.float64, device=p.device)]
    for _ in range(k):
        rest = (p - c[-1][:, None].to(p.dtype) * q).clamp_(min=0)
        c.append(c[-1] + rest.sum(1, dtype=torch.float64))
    rho = torch.stack([_rho(p, q, s) for s in range(1, k + 1)], 1)
    beta = torch.stack([torch.minimum(p / one[:, None].to(p.dtype), q).sum(1, dtype=torch.float64) for one in rho.T], 1)
    values = (p.gather(1, x)[:, 0], q.gather(1, x)[:, 0], torch.stack(c, 1), rho, beta.clamp(max=1))
    return Sums(*(value.double().cpu().numpy() for value in values))


def _rho(p: torch.Tensor, q: torch.Tensor, s: int) -> torch.Tensor:
    """``[n]`` float64: the smallest valid rho for ``s`` draws.

    Valid is 1 - (1 - beta)^s <= rho beta; with m(rho) = sum_v min(rho q, p), which is rho beta, that reads
    rho >= m / (1 - (1 - m)^(1/s)). The right side falls while rho grows, so the root lies between 1 and the right side
    at 1, and a difference of d between the two sides means an error of at most d. Illinois method.
    """
    low = torch.ones(len(p), dtype=torch.float64, device=p.device)
    if s == 1:
        return low

    def excess(rho: torch.Tensor) -> torch.Tensor:
        m = torch.minimum(q * rho[:, None].to(p.dtype), p).sum(1, dtype=torch.float64).clamp(1e-300, 1)
        return rho + m / torch.expm1(torch.log1p(-m) / s)

    at_low = excess(low)
    high = low - at_low
    at_high = excess(high)
    best, error = torch.where(at_high < -at_low, high, low), torch.minimum(at_high.abs(), at_low.abs())
    last = torch.zeros_like(low)  # the end that was moved last: -1 or 1
    for _ in range(STEPS):
        if bool((error < CLOSE).all()):
            break
        middle = (low * at_high - high * at_low) / (at_high - at_low)
        middle = torch.where(torch.isfinite(middle), middle, best).clamp(low, high)
        value = excess(middle)
        best, error = torch.where(value.abs() < error, middle, best), torch.minimum(error, value.abs())
        up = value < 0
        twice = torch.where(up, -1.0, 1.0) == last  # then the other end's value is halved, so that it moves, too
        low, high = torch.where(up, middle, low), torch.where(up, high, middle)
        at_low, at_high = (
            torch.where(up, value, torch.where(twice, at_low / 2, at_low)),
            torch.where(up, torch.where(twice, at_high / 2, at_high), value),
        )
        last = torch.where(up, -1.0, 1.0)
    # Where P = Q but for rounding, the root is very sensitive to it.
    equal = torch.minimum(p, q).sum(1, dtype=torch.float64) >= 1 - 4 * torch.finfo(p.dtype).eps
    return torch.where(equal, 1.0, best)


# -- the chains --------------------------------------------------------------------------------------------------


def specinfer(sums: Sums) -> np.ndarray:
    """Pr(S' = j | S = s live sequences, the token that follows) at each token: ``[T, K + 1, K + 1]`` at (s, j); the
    chain ends where j is 0."""
    t, k = sums.rho.shape
    r = (sums.q / sums.p)[:, None]
    accepted = np.diff(np.minimum(sums.c * r, 1.0), axis=1)  # [T, K]: by the draw that is accepted
    others = _binomials(sums.q, k)
    moves = np.zeros((t, k + 1, k + 1))
    for s in range(1, k + 1):
        for one in range(1, s + 1):
            left = s - one
            moves[:, s, 1 : left + 2] += accepted[:, one - 1, None] * others[:, left, : left + 1]
    return _stopped(moves)


def spectr(sums: Sums) -> np.ndarray:
    """The same of K-SEQ."""
    t, k = sums.rho.shape
    later = _binomials(sums.q, k)
    moves = np.zeros((t, k + 1, k + 1))
    for s in range(1, k + 1):
        beta, m = sums.beta[:, s - 1], np.minimum(sums.p / sums.rho[:, s - 1], sums.q)
        missed = np.where(beta < 1, (sums.q - m) / np.where(beta < 1, 1 - beta, 1.0), 0.0).clip(0, 1)
        earlier = _binomials(missed, k)
        left = np.ones(t)
        for one in range(s):  # drawn before the accepted one
            share = (1 - beta) ** one * m / sums.p
            left -= share
            for j in range(one + 1):
                moves[:, s, 1 + j : s - one + j + 1] += (share * earlier[:, one, j])[:, None] * later[
                    :, s - one - 1, : s - one
                ]
        moves[:, s, 1 : s + 1] += left.clip(0)[:, None] * earlier[:, s, 1 : s + 1]
    return _stopped(moves)


def _stopped(moves: np.ndarray) -> np.ndarray:
    moves[:, :, 0] = 1 - moves[:, :, 1:].sum(-1)
    return moves


def _binomials(probability: np.ndarray, k: int) -> np.ndarray:
    """``[T, k + 1, k + 1]``: Pr(Binomial(n, probability) = j) at (n, j)."""
    found = np.zeros((len(probability), k + 1, k + 1))
    found[:, 0, 0] = 1
    for n in range(1, k + 1):
        found[:, n] = found[:, n - 1] * (1 - probability)[:, None]
        found[:, n, 1:] += found[:, n - 1, :-1] * probability[:, None]
    return found


#: The rules whose chain is known.
CHAINS = {"specinfer": specinfer, "spectr": spectr}


def many(rule: str, sums: Sums, depth: int, ks: Sequence[int]) -> dict[int, np.ndarray]:
    """Pr(tau >= i | output), ``[T, depth]`` for i = 1 .. depth by number of sequences, from one pass for all.

    Beyond the end of the text (t + i > T) values mean nothing.
    """
    moves = CHAINS[rule](sums)[:, 1:, 1:]
    t, k = sums.rho.shape
    alive = np.ones((t + 1, k, 1))  # Pr(i more tokens are accepted | s live sequences before each token)
    found = np.zeros((t, depth, k))
    for i in range(depth):
        alive[:-1] = moves @ alive[1:]
        alive[-1] = 0
        found[:, i] = alive[:-1, :, 0]
    return {one: found[..., one - 1] for one in ks}
