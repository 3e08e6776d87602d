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

from ..framework.draft import Draft, Verdict
from ..framework.rng import RoundRng
from ..framework.verifier import Verifier, VerifierTraits
from ._tree import one_hot, stop_at

#: Safeguarded Newton steps for rho*; six or seven reach machine precision.
STEPS = 10


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
            law = p[rows, at + 1]
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
                beta = common.sum(1, dtype=torch.float64)
                share = torch.where(beta > 0, (1 - (1 - beta).clamp(min=0) ** n) / beta, 0.0)
                rest = (law - common * share[:, None].to(law.dtype)).clamp_(min=0)
                usable = (n > 0) & (rest.sum(1) > 0)
                weights = torch.where(usable[:, None], rest, law)
            settled = chosen | ~walking
            token = rng.draw(torch.where(settled[:, None], one_hot(token, law), weights), index=level)
            if level < depth:
                racing = racing & (x == token[:, None])
                walking = racing.any(1)
                reached = nodes.gather(1, racing.long().argmax(1, keepdim=True)).squeeze(1)
                at = torch.where(walking, reached, at)
        return stop_at(draft, at, token)


def rho_star(p: Tensor, q: Tensor, n: Tensor) -> Tensor:
    """``[B]`` float64: the smallest valid rho for ``n [B]`` draws from ``q [B, V]`` and target ``p [B, V]``.

    Newton's method on rho beta - p_acc, kept inside a bracket. The upper end of the bracket is returned: a rho
    slightly too large is valid and hardly weaker, one slightly too small would make the residual negative.
    """
    n = n.double().clamp(min=1)

    def excess(rho: Tensor) -> tuple[Tensor, Tensor]:
        bound = rho[:, None].to(q.dtype) * q
        covered = bound <= p
        m = torch.where(covered, bound, p).sum(1, dtype=torch.float64)  # rho beta
        slope = (q * covered).sum(1, dtype=torch.float64)
        miss = (1 - m / rho).clamp(min=0)
        value = m - 1 + miss**n
        return value, slope + n * miss ** (n - 1) * (m / rho - slope) / rho

    low, high = torch.ones_like(n), n
    rho = (low + high) / 2
    slack = 1 + 64 * torch.finfo(p.dtype).eps
    for _ in range(STEPS):
        value, slope = excess(rho)
        low, high = torch.where(value >= 0, low, rho), torch.where(value >= 0, rho, high)
        step = (rho - value / slope.clamp(min=1e-30)) * slack
        rho = torch.where((step > low) & (step < high), step, (low + high) / 2)
    value, _ = excess(rho)
    rho = torch.where(value >= 0, torch.minimum(rho, high), high)
    # Where P = Q, 1 is a multiple root, which Newton's method nears too slowly.
    return torch.where(excess(torch.ones_like(n))[0] >= -4 * torch.finfo(p.dtype).eps, 1.0, rho)
