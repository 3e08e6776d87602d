"""Block verification: judge the draft as a whole; the longest surviving prefix wins.

Z. Sun, U. Mendlovic, Y. Leviathan, A. Aharoni, J. H. Ro, A. Beirami, A. T. Suresh, "Block Verification
Accelerates Speculative Decoding", ICLR 2025, Algorithm 2 (equations 3-5).

    p_0 = 1,  p_i = min(1, p_{i-1} P_{i-1}(x_i) / Q_{i-1}(x_i))
    S_i = sum_x (p_i P_i(x) - Q_i(x))_+                    0 <= i < gamma
    h_i = S_i / (S_i + 1 - p_i)  for i < gamma,            h_gamma = p_gamma
    tau = max{i : eta_i < h_i}, independent eta_i, no break at a rejection
    Y ~ norm((p_tau P_tau - Q_tau)_+) if tau < gamma,      Y ~ P_gamma otherwise

Then Pr(tau >= i | draft) = p_i (Lemma 3), the largest value any valid single-draft rule can have (Lemma 4).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..framework.draft import Draft, Verdict
from ..framework.rng import RoundRng
from ..framework.verifier import Verifier, VerifierTraits
from ._chain import excess, laws, next_token, ratios


class Block(Verifier):
    """Joint verification of the whole draft. Lossless and optimal for one draft; sampled and point-mass chains."""

    name = "block"
    traits = VerifierTraits(drawn=frozenset({"chain"}))

    def verify(self, draft: Draft, p: Tensor, rng: RoundRng) -> Verdict:
        n = draft.width
        steps = [torch.ones(draft.batch_size, dtype=torch.float64, device=p.device)]
        for ratio in ratios(draft, p).unbind(1):
            steps.append((steps[-1] * ratio).clamp_(max=1))
        p_i = torch.stack(steps, 1)
        h = self.acceptance(draft, p, p_i)
        order = torch.arange(1, n + 1, device=p.device)
        tau = (rng.accept(h) * order).amax(1) if n else torch.zeros_like(draft.count)
        scale = p_i.gather(1, tau[:, None]).squeeze(1)
        return Verdict(tau, next_token(draft, p, tau, scale, rng), survival=p_i[:, 1:] * draft.valid)

    @staticmethod
    def acceptance(draft: Draft, p: Tensor, p_i: Tensor) -> Tensor:
        """h_1 .. h_N as ``[B, N]`` float64, given p_0 .. p_N ``[B, N+1]``; 0 past the end of a ragged row."""
        h = p_i[:, 1:].clone()  # h_gamma = p_gamma; the interior entries are replaced
        if draft.width > 1:
            inner = p_i[:, 1:-1]
            if draft.q is None:  # Q_i is one-hot at x_{i+1}: S_i = p_i (1 - P_i(x_{i+1}))
                px = p[:, 1:-1].gather(2, draft.tokens[:, 1:, None]).squeeze(2).double()
                s = inner * (1 - px)
            else:
                s = excess(p[:, 1:-1], laws(draft)[:, 1:], inner)
            # The parentheses matter: (s + 1) - p loses s when it is small, and h came out above 1.
            denominator = s + (1 - inner)
            interior = torch.where(denominator > 0, s / denominator, 1.0)
            interior = torch.where(inner == 1, 1.0, interior)
            h[:, :-1] = torch.where(draft.valid[:, 1:], interior, h[:, :-1])
        return torch.where(draft.valid, h, 0.0)
