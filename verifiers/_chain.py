"""Shared functions of the chain verifiers: P and Q of drafted tokens, and the draw of the next token.

Symbols follow Sun et al. 2024: P_i is the target's distribution after the first i draft tokens, Q_i the distribution
that token i + 1 was drawn from, tau the number of accepted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ..framework.contracts.draft import Draft, take_rows
from ..framework.contracts.rng import StepRng
from ..framework.util.tensors import at_once, counting, eager_on_cpu

#: Value of a division by zero: products of a few stay finite.
HUGE = 1e30
#: Numbers that fit into the last-level CPU cache beside others: 8 MiB of float32.
CACHED = 2**21


def ratios(draft: Draft, p: Tensor) -> Tensor:
    """``[B, N]`` float64: P_{i-1}(x_i) / Q_{i-1}(x_i) of every drafted token; 0 on padding.

    For a point mass Q is 1 at the token. If Q is 0 at a drafted token (the drafter did not sample from its q), the
    ratio is `HUGE`, or 0 if P is 0, too.
    """
    x = draft.tokens[..., None]
    ratio = p.gather(2, x).double()  # N of its N + 1 positions
    if draft.q is not None:
        ratio = (ratio / draft_probs(draft).gather(2, x)).nan_to_num_(0.0, posinf=HUGE)
    return ratio.squeeze(2) * draft.valid


def draft_probs(draft: Draft) -> Tensor:
    """``[B, N, V]``: Q_{i-1}, the distribution token i was drawn from."""
    assert draft.q is not None
    if draft.q_index is None:
        return draft.q[:, : draft.width]
    return draft.q.gather(1, draft.q_index[..., None].expand(-1, -1, draft.q.shape[2]))


def next_token(draft: Draft, p: Tensor, tau: Tensor, rng: StepRng, minus: Tensor | None = None) -> Tensor:
    """``[B]``: Y ~ norm((P_tau - minus Q_tau)_+).

    Args:
        tau: ``[B]`` accepted tokens.
        minus: ``[B]`` float64; ``None`` = 1 after a rejection, 0 if the whole draft was accepted.
    """
    target = take_rows(p, tau)
    if not draft.width and (draft.q is None or not draft.q.shape[1]):
        return rng.draw(target)
    if minus is None:
        minus = (tau < draft.count).to(p.dtype)
    if draft.q is None:
        # (P - minus onehot(x))_+ is P without x: a point mass never lets P(x) exceed minus.
        x = draft.tokens.gather(1, tau.clamp(max=draft.width - 1)[:, None])
        weights = target.scatter(1, x, torch.where(minus[:, None] > 0, 0.0, target.gather(1, x)))
    else:
        last = (draft.q if draft.q_index is None else draft.q_index).shape[1] - 1
        weights = subtract(target, draft.q_of(tau.clamp(max=last), target), minus)
    return rng.draw(or_target(weights, target))


def or_target(weights: Tensor, target: Tensor) -> Tensor:
    """Replace rows of ``weights [B, V]`` without mass by ``target [B, V]``, in place.

    No mass means p = q, where a rejection has probability 0 and happens only by rounding.
    """
    empty = (weights.sum(1, keepdim=True) <= 0).to(weights.dtype)
    return weights.addcmul_(target, empty)


def joint(ratio: Tensor) -> Tensor:
    """``[B, N]``: p_1 .. p_N of p_i = min(1, p_{i-1} ratio_i), p_0 = 1: the product over its running maximum."""
    product = ratio.cumprod(1)
    return product / product.cummax(1).values.clamp_(min=1) if ratio.shape[1] else product


def longest(accepted: Tensor) -> Tensor:
    """``[B]``: the last i with ``accepted [B, N]`` at i - 1, 0 without one."""
    n = accepted.shape[1]
    if not n:
        return accepted.sum(1)
    return (accepted * counting(n + 1, accepted.device)[1:]).amax(1)


def inner_excess(draft: Draft, p: Tensor, minus: Tensor) -> Tensor:
    """``[B, N-1]`` float64: sum_x (P_i(x) - minus_i Q_i(x))_+ for 1 <= i < N, ``minus [B, N-1]`` at least 1."""
    if draft.q is None or draft.width < 2:  # Q_i is one-hot at x_{i+1}
        return 1 - p[:, 1:-1].gather(2, draft.tokens[:, 1:, None]).squeeze(2).double()
    return excess(p[:, 1:-1], draft_probs(draft)[:, 1:], minus)


def subtract(p: Tensor, q: Tensor, minus: Tensor) -> Tensor:
    """``[.., V]``: (P - minus Q)_+ of ``p, q [.., V]`` and ``minus [..]``."""
    factor = minus.clamp(max=min(HUGE, torch.finfo(p.dtype).max))[..., None].to(p.dtype)
    return torch.addcmul(p, q, factor, value=-1).clamp_(min=0)


def excess(p: Tensor, q: Tensor, minus: Tensor) -> Tensor:
    """``[.., M]`` float64: sum_x (P(x) - minus Q(x))_+ of ``p, q [.., M, V]`` and ``minus [.., M]``."""
    # On a CPU, blocks of the vocabulary, so that intermediate results stay in the cache.
    v, step = p.shape[-1], max(CACHED // max(minus.numel(), 1), 1024)
    if step >= v or not eager_on_cpu(p):
        pieces = at_once(len(p), p[0].numel() if len(p) else 0)
        parts = [total(subtract(p[rows], q[rows], minus[rows])) for rows in pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    mass = torch.zeros_like(minus)
    for first in range(0, v, step):
        mass += total(subtract(p[..., first : first + step], q[..., first : first + step], minus))
    return mass


def cache_slices(rows: int, numbers: int, like: Tensor) -> list[slice]:
    """Slices of ``rows`` of ``numbers`` each: on a CPU, intermediate results fit the cache; elsewhere see `at_once`."""
    if not eager_on_cpu(like):
        return at_once(rows, numbers)
    step = max(CACHED // 2 // max(numbers, 1), 1)
    return [slice(first, first + step) for first in range(0, rows, step)]


def total(weights: Tensor) -> Tensor:
    """Sum ``weights [.., V]`` over V, ``[..]`` float64.

    torch sums in pairs, but compiled CPU code sums sequentially, which needs float64 for a large vocabulary.
    """
    sequential = weights.device.type == "cpu" and torch.compiler.is_compiling()
    return weights.sum(-1, dtype=torch.float64 if sequential else None).double()


def prefix_excess(p: Tensor, q: Tensor, minus: Tensor, ends: Sequence[int] | None) -> Tensor:
    """``[B, M]`` float64: `excess` at positions with a ``q``, 0 elsewhere.

    Args:
        p, q: ``[B, positions, V]``; q may have fewer than M positions.
        minus: ``[B, M]``.
        ends: number of positions needed per row, the others are 0; ``None`` = all.
    """
    if ends is None:
        n = min(minus.shape[1], q.shape[1])
        mass = excess(p[:, :n], q[:, :n], minus[:, :n])
        return functional.pad(mass, (0, minus.shape[1] - n))
    mass = torch.zeros_like(minus)
    for row, end in enumerate(ends):
        if end:
            mass[row, :end] = excess(p[row, :end], q[row, :end], minus[row, :end])
    return mass
