"""Block verification: accept or reject prefixes of the draft jointly; the longest accepted prefix is kept.

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

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..framework.contracts.draft import Draft, Verdict
from ..framework.contracts.draft_kind import SINGLE_CHILD
from ..framework.contracts.rng import StepRng
from ..framework.contracts.verifier import Verifier, VerifierTraits
from ._chain import inner_excess, joint, longest, next_token, ratios


class Block(Verifier):
    """Joint verification of the whole draft. Lossless and optimal for one draft; sampled and point-mass chains."""

    name = "block"

    @classmethod
    def traits(cls, config: Any) -> VerifierTraits:
        return VerifierTraits(accepts=frozenset({SINGLE_CHILD}), shortenable=True)

    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        p_i = joint(ratios(draft, p))
        # p_i P - Q is P - Q / p_i up to a factor.
        h = self.acceptance(draft, p_i, p_i[:, :-1] * inner_excess(draft, p, 1 / p_i[:, :-1]))
        tau = longest(rng.accept(h))
        scale = functional.pad(p_i, (1, 0), value=1.0).gather(1, tau[:, None]).squeeze(1)
        return Verdict(tau, next_token(draft, p, tau, rng, (tau < draft.count) / scale), survival=p_i)

    @staticmethod
    def acceptance(draft: Draft, p_i: Tensor, s_i: Tensor) -> Tensor:
        """h_1 .. h_N as ``[B, N]`` float64, given p_1 .. p_N ``[B, N]`` and S_1 .. S_{N-1} ``[B, N-1]``.

        Past the end of a ragged row h is 0.
        """
        inner = p_i[:, :-1]
        # The parentheses matter: (s + 1) - p loses s when it is small, and h came out above 1. 0 / 0 is p_i = 1, s = 0.
        interior = (s_i / (s_i + (1 - inner))).nan_to_num_(1.0)
        # A row's last token has h = p, and its padding p = 0.
        return torch.cat([torch.where(draft.valid[:, 1:], interior, inner), p_i[:, -1:]], 1)
