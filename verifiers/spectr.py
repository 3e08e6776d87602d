"""SpecTr: K i.i.d. sequences under sequential selection, K-SEQ, with the best valid rho at every node.

Z. Sun, A. T. Suresh, J. H. Ro, A. Beirami, H. Jain, F. Yu, "SpecTr: Fast Speculative Decoding via Optimal
Transport", NeurIPS 2023, Algorithms 2 and 3 (the paper's gamma is called rho here; gamma is a draft length).

With n active sequences, whose next tokens X_1 .. X_n were drawn from Q, and the target's distribution P:

    beta(rho) = sum_x min(Q(x), P(x) / rho),   p_acc = 1 - (1 - beta)^n
    accept X_k with probability min(1, P(X_k) / (rho Q(X_k))), the first accepted one is Y,
    else Y ~ norm(P - min(Q, P / rho) p_acc / beta)

which is valid iff p_acc <= rho beta; rho* is the smallest such rho in [1, n]. Sequences whose next token is Y stay
active, whether Y was accepted or drawn; n = 1 is token verification.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..framework.contracts.draft import Draft, Verdict, take_rows
from ..framework.contracts.draft_kind import DELAYED_SEQUENCES, INDEPENDENT_SEQUENCES
from ..framework.contracts.rng import StepRng
from ..framework.contracts.verifier import Verifier, VerifierTraits
from ._chain import total
from ._tree import choose, force_token, is_empty, stop_at

#: Iterations for rho*; more hardly change the acceptance.
STEPS = {torch.float64: 40, torch.float32: 6, torch.bfloat16: 4, torch.float16: 4}


class SpecTr(Verifier):
    """K-SEQ with rho*. Lossless; K i.i.d. sequences, also after a common one, or a chain (K = 1)."""

    name = "spectr"

    @classmethod
    def traits(cls, config: Any) -> VerifierTraits:
        return VerifierTraits(accepts=frozenset({INDEPENDENT_SEQUENCES, DELAYED_SEQUENCES}), shortenable=True)

    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        rows = torch.arange(draft.batch_size, device=p.device)
        sequences = draft.as_sequences()
        k, depth = sequences.shape[1:]
        racing = torch.ones(draft.batch_size, k, dtype=torch.bool, device=p.device)
        node, active = torch.full_like(rows, -1), torch.ones_like(rows, dtype=torch.bool)
        token = torch.zeros_like(rows)
        for level in range(depth + 1):
            target = take_rows(p, node + 1)
            weights, chosen = target, torch.zeros_like(active)
            if level < depth:
                nodes = sequences[:, :, level]
                racing = racing & (nodes >= 0) & active[:, None]
                draws = 1 if level < draft.trunk else k
                n = racing[:, :draws].sum(1)
                x = draft.tokens.gather(1, nodes.clamp(min=0))
                first = nodes.clamp(min=0).gather(1, racing.long().argmax(1, keepdim=True)).squeeze(1)
                q = draft.q_of(first, target)
                rho = rho_star(target, q, n) if draws > 1 else torch.ones_like(n, dtype=torch.float64)
                h = (target.gather(1, x) / (rho[:, None] * q.gather(1, x))).nan_to_num(0.0).clamp(max=1)
                for i in range(draws):
                    candidate = racing[:, i] & ~chosen
                    accepted = rng.accept(torch.where(candidate, h[:, i], 0.0)[:, None], index=level * k + i).squeeze(1)
                    token = torch.where(accepted, x[:, i], token)
                    chosen = chosen | accepted
                common = torch.minimum(q, target / rho[:, None].to(target.dtype))
                beta = total(common)
                share = torch.where(beta > 0, (1 - (1 - beta).clamp(min=0) ** n) / beta, 0.0)
                rest = (target - common * share[:, None].to(target.dtype)).clamp_(min=0)
                usable = (n > 0) & (rest.sum(1) > 0)
                weights = choose(usable, rest, target)
            fixed = chosen | ~active
            token = rng.draw(force_token(weights, token, fixed), index=level)
            if level < depth:
                racing = racing & (x == token[:, None])
                active = racing.any(1)
                reached = nodes.gather(1, racing.long().argmax(1, keepdim=True)).squeeze(1)
                node = torch.where(active, reached, node)
                if is_empty(active):
                    break
        return stop_at(draft, node, token)


def rho_star(p: Tensor, q: Tensor, n: Tensor) -> Tensor:
    """``[B]`` float64: the smallest valid rho for ``n [B]`` draws from ``q [B, V]`` and target ``p [B, V]``.

    With m = rho beta the condition p_acc <= rho beta becomes rho >= phi(m) = m / (1 - (1 - m)^(1/n)). The difference of
    both sides increases with a slope of at least 1, even if P and Q are close and p_acc - rho beta is nearly flat. As
    phi decreases and m increases with rho, phi(m(1)) is valid. The root in between is found by the Illinois method
    (regula falsi that halves the value of a retained end). The upper end of the bracket is returned: a rho slightly too
    large is valid, one slightly too small would make the residual negative.
    """
    draws = n.double().clamp(min=2)

    def excess(rho: Tensor) -> tuple[Tensor, Tensor]:
        m = total(torch.minimum(q * rho[:, None].to(q.dtype), p)).clamp(1e-300, 1)
        return torch.addcdiv(rho, m, torch.expm1(torch.log1p(-m) / draws)), m

    start = torch.ones_like(draws)
    at_start, common = excess(start)
    valid = start - at_start
    # The end moved last, and the other one.
    end, other, at_other = valid, start, at_start
    at_end, _ = excess(end)
    for _ in range(STEPS[p.dtype]):
        rho = end - at_end * (end - other) / (at_end - at_other)
        value, _ = excess(rho)
        crossed = value * at_end < 0
        other, at_other = torch.where(crossed, end, other), torch.where(crossed, at_end, at_other / 2)
        end, at_end = rho, value
    # By rounding, both ends may be invalid or NaN.
    root = torch.where(torch.maximum(at_end, at_other) >= 0, torch.where(at_end >= 0, end, other), valid)
    # P = Q up to rounding, to which the root is very sensitive; and a single draw.
    equal = common >= 1 - 4 * torch.finfo(p.dtype).eps
    return torch.where(equal | (n < 2), 1.0, root.minimum(valid))
