"""SpecTr: K i.i.d. sequences under sequential selection, K-SEQ, with the best valid rho at every node.

Z. Sun, A. T. Suresh, J. H. Ro, A. Beirami, H. Jain, F. Yu, "SpecTr: Fast Speculative Decoding via Optimal
Transport", NeurIPS 2023, Algorithms 2 and 3 (the paper's gamma is called rho here; gamma is a draft length).

With n sequences still in the race, whose next tokens X_1 .. X_n were drawn from Q, and the target's law P:

    beta(rho) = sum_x min(Q(x), P(x) / rho),   p_acc = 1 - (1 - beta)^n
    accept X_k with probability min(1, P(X_k) / (rho Q(X_k))), the first accepted one is Y,
    else Y ~ norm(P - min(Q, P / rho) p_acc / beta)

which is valid iff p_acc <= rho beta; rho* is the smallest such rho in [1, n]. The sequences whose next token is
Y stay in the race, however Y came about; n = 1 is token verification.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..framework.draft import Draft, Verdict, take
from ..framework.rng import RoundRng
from ..framework.verifier import Verifier, VerifierTraits
from ._chain import total
from ._tree import choose, settle, stop_at

#: Steps to rho*, which reach what the law's precision allows.
STEPS = {torch.float64: 24, torch.float32: 8, torch.bfloat16: 4, torch.float16: 4}


class SpecTr(Verifier):
    """K-SEQ with rho*. Lossless; K i.i.d. sequences, or a chain (K = 1)."""

    name = "spectr"
    traits = VerifierTraits(drawn=frozenset({"chain", "iid"}))

    def verify(self, draft: Draft, p: Tensor, rng: RoundRng) -> Verdict:
        rows = torch.arange(draft.batch_size, device=p.device)
        sequences = draft.as_sequences()
        k, depth = sequences.shape[1:]
        racing = torch.ones(draft.batch_size, k, dtype=torch.bool, device=p.device)
        at, walking = torch.full_like(rows, -1), torch.ones_like(rows, dtype=torch.bool)
        token = torch.zeros_like(rows)
        for level in range(depth + 1):
            law = take(p, at + 1)
            weights, chosen = law, torch.zeros_like(walking)
            if level < depth:
                nodes = sequences[:, :, level]
                racing = racing & (nodes >= 0) & walking[:, None]
                n = racing.sum(1)
                x = draft.tokens.gather(1, nodes.clamp(min=0))
                one = nodes.clamp(min=0).gather(1, racing.long().argmax(1, keepdim=True)).squeeze(1)
                q = draft.law_of(one, law)
                rho = rho_star(law, q, n)
                h = (law.gather(1, x) / (rho[:, None] * q.gather(1, x))).nan_to_num(0.0).clamp(max=1)
                for i in range(k):
                    tried = racing[:, i] & ~chosen
                    accepted = rng.accept(torch.where(tried, h[:, i], 0.0)[:, None], index=level * k + i).squeeze(1)
                    token = torch.where(accepted, x[:, i], token)
                    chosen = chosen | accepted
                common = torch.minimum(q, law / rho[:, None].to(law.dtype))
                beta = total(common)
                share = torch.where(beta > 0, (1 - (1 - beta).clamp(min=0) ** n) / beta, 0.0)
                rest = (law - common * share[:, None].to(law.dtype)).clamp_(min=0)
                usable = (n > 0) & (rest.sum(1) > 0)
                weights = choose(usable, rest, law)
            settled = chosen | ~walking
            token = rng.draw(settle(weights, token, settled), index=level)
            if level < depth:
                racing = racing & (x == token[:, None])
                walking = racing.any(1)
                reached = nodes.gather(1, racing.long().argmax(1, keepdim=True)).squeeze(1)
                at = torch.where(walking, reached, at)
        return stop_at(draft, at, token)


def rho_star(p: Tensor, q: Tensor, n: Tensor) -> Tensor:
    """``[B]`` float64: the smallest valid rho for ``n [B]`` draws from ``q [B, V]`` and target ``p [B, V]``.

    With m = rho beta the condition p_acc <= rho beta reads rho >= m / (1 - (1 - m)^(1/n)). The difference of the two
    sides rises with a slope of at least 1, also where P and Q are close and p_acc - rho beta is nearly flat. Its root
    in [1, n] by the Illinois method (regula falsi that halves the value of an end that stays). The upper end of the
    bracket is returned: a rho slightly too large is valid and hardly weaker, one slightly too small would make the
    residual negative.
    """
    n = n.double().clamp(min=1)

    def common(rho: Tensor) -> Tensor:
        return total(torch.minimum(q * rho[:, None].to(q.dtype), p)).clamp(max=1)

    def excess(rho: Tensor, m: Tensor) -> Tensor:
        return rho - torch.where(m > 0, m / (1 - (1 - m) ** (1 / n)), n)

    low, high = torch.ones_like(n), n
    first = common(low)
    at_low, at_high = excess(low, first), excess(high, common(high))
    stayed = torch.zeros_like(n)  # the end that stayed in the last step: -1 the low one, 1 the high one
    for _ in range(STEPS[p.dtype]):
        rho = (low - at_low * (high - low) / (at_high - at_low).clamp(min=1e-300)).clamp(low, high)
        value = excess(rho, common(rho))
        up = value >= 0  # rho is valid
        at_low = torch.where(up, torch.where(stayed == -1, at_low / 2, at_low), value)
        at_high = torch.where(up, value, torch.where(stayed == 1, at_high / 2, at_high))
        low, high = torch.where(up, low, rho), torch.where(up, rho, high)
        stayed = torch.where(up, -1.0, 1.0)
    # P = Q but for rounding, to which the root is very sensitive there.
    return torch.where(first >= 1 - 4 * torch.finfo(p.dtype).eps, 1.0, high)
