"""What the rules for chains share: looking up P and Q along the draft, and drawing the next token.

Symbols follow Sun et al. 2024: P_i is the target's law after the first i draft tokens, Q_i the law the
(i+1)-th was drawn from, tau the accepted tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..framework.draft import Draft
from ..framework.rng import RoundRng


def ratios(draft: Draft, p: Tensor) -> Tensor:
    """``[B, N]`` float64: P_{i-1}(x_i) / Q_{i-1}(x_i) of every drafted token; 0 on padding.

    For a point mass Q is 1 at the token. Where Q says 0 of a token that was drawn (a drafter that reports a
    law it did not sample from) the ratio is inf, or 0 if P is 0 too.
    """
    px = p[:, :-1].gather(2, draft.tokens[..., None]).squeeze(2).double()
    if draft.q is not None:
        qx = laws(draft).gather(2, draft.tokens[..., None]).squeeze(2).double()
        px = torch.where(px > 0, px / qx, 0.0)
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
    rows = torch.arange(len(tau), device=tau.device)
    target = p[rows, tau]
    if not draft.width:
        return rng.draw(target)
    rejected = (tau < draft.count)[:, None]
    at = tau.clamp(max=draft.width - 1)
    if draft.q is None:
        # (s P - onehot(x))_+ is s P without x: a point mass never lets s P(x) exceed 1.
        weights = target.scatter(1, draft.tokens[rows, at][:, None], 0.0)
    else:
        q = draft.q[rows, at if draft.law is None else draft.law[rows, at]]
        if scale is not None:  # both divided by max(1, scale), which may be too large a number
            target = target * scale.clamp(max=1)[:, None].to(target.dtype)
            q = q / scale.clamp(min=1)[:, None].to(q.dtype)
        weights = (target - q).clamp_(min=0)
    # No mass left means p = q, and then a rejection has probability 0; rounding must not make it a crash.
    usable = rejected & (weights.sum(1, keepdim=True) > 0)
    return rng.draw(torch.where(usable, weights, p[rows, tau]))
