"""What the rules for chains share: looking up P and Q along the draft, and drawing the next token.

Symbols follow Sun et al. 2024: P_i is the target's law after the first i draft tokens, Q_i the law the
(i+1)-th was drawn from, tau the accepted tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..framework.draft import Draft, take
from ..framework.rng import RoundRng

#: Numbers that fit in a processor's cache beside others: 1 MiB of float32.
CACHED = 2**18


def ratios(draft: Draft, p: Tensor) -> Tensor:
    """``[B, N]`` float64: P_{i-1}(x_i) / Q_{i-1}(x_i) of every drafted token; 0 on padding.

    For a point mass Q is 1 at the token. Where Q says 0 of a token that was drawn (a drafter that reports a
    law it did not sample from) the ratio is inf, or 0 if P is 0 too.
    """
    px = p[:, :-1].gather(2, draft.tokens[..., None]).squeeze(2).double()
    if draft.q is not None:
        qx = laws(draft).gather(2, draft.tokens[..., None]).squeeze(2).double()
        px = px.div_(qx).nan_to_num_(0.0, posinf=torch.inf)
    return torch.where(draft.valid, px, 0.0)


def laws(draft: Draft) -> Tensor:
    """``[B, N, V]``: Q_{i-1}, the law token i was drawn from."""
    assert draft.q is not None
    if draft.law is None:
        return draft.q[:, : draft.width]
    return draft.q.gather(1, draft.law[..., None].expand(-1, -1, draft.q.shape[2]))


def next_token(draft: Draft, p: Tensor, tau: Tensor, scale: Tensor | None, rng: RoundRng) -> Tensor:
    """``[B]``: Y ~ norm((scale * P_tau - Q_tau)_+) after a rejection, P_tau once the whole draft is accepted.

    Args:
        tau: ``[B]`` accepted tokens.
        scale: ``[B]`` float64 factor on P_tau (block verification's p_tau; may exceed 1), ``None`` = 1.
    """
    target = take(p, tau)
    if not draft.width:
        return rng.draw(target)
    rejected = (tau < draft.count)[:, None]
    at = tau.clamp(max=draft.width - 1)
    if draft.q is None:
        # (s P - onehot(x))_+ is s P without x: a point mass never lets s P(x) exceed 1.
        x = draft.tokens.gather(1, at[:, None])
        weights = target.scatter(1, x, torch.where(rejected, 0.0, target.gather(1, x)))
    else:
        q, scaled = draft.law_of(at, target).mul_(rejected), target
        if scale is not None:  # both divided by max(1, scale), which may be too large a number
            scaled = target * scale.clamp(max=1)[:, None].to(target.dtype)
            q = q.div_(scale.clamp(min=1)[:, None])
        weights = (scaled - q).clamp_(min=0)
    # No mass left means p = q, and then a rejection has probability 0; rounding must not make it a crash.
    empty = (weights.sum(1, keepdim=True) <= 0).to(weights.dtype)
    return rng.draw(weights.addcmul_(target, empty))


def excess(p: Tensor, q: Tensor, scale: Tensor) -> Tensor:
    """``[B, M]`` float64: sum_x (scale P(x) - Q(x))_+ of ``p, q [B, M, V]`` and ``scale [B, M]``."""
    scale = scale[..., None].to(p.dtype)
    found = torch.empty(p.shape[:2], dtype=torch.float64, device=p.device)
    for part in pieces(p):
        found[part] = (p[part] * scale[part]).sub_(q[part]).clamp_(min=0).sum(2).double()
    return found


def pieces(p: Tensor) -> Iterator[tuple[slice, slice]]:
    """Indices that split ``p [B, M, V]`` into a few rows at a time on a CPU, so that what lies between the steps of a
    calculation stays in its cache; elsewhere the whole is one piece."""
    b, m, v = p.shape
    if p.device.type != "cpu" or b * m * v <= CACHED:
        yield slice(0, b), slice(0, m)
        return
    step = max(1, CACHED // v)
    for row in range(b):
        for first in range(0, m, step):
            yield slice(row, row + 1), slice(first, min(first + step, m))
