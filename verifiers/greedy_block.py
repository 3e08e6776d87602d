"""Greedy block verification with distribution modification: accepts more now, modifies later targets.

Z. Sun, U. Mendlovic, Y. Leviathan, A. Aharoni, J. H. Ro, A. Beirami, A. T. Suresh, "Block Verification
Accelerates Speculative Decoding", ICLR 2025, Algorithms 4 (the block), 5 (the modification), 6 (the outer loop).

    pt_i = R_i = prod_{j<=i} P_{j-1}(x_j) / Q_{j-1}(x_j)                   (no min)
    A_i = sum_x (pt_i P_i - Q_i)_+,   B_i = sum_x (Q_i - pt_i P_i)_+
    h_i = A_i / max(A_i, B_i) for i < gamma,   h_gamma = min(1, pt_gamma)
    tau = max{i : eta_i < h_i},   Y ~ norm((pt_tau P_tau - Q_tau)_+), or P_gamma if tau = gamma

Then Pr(tau >= i | draft) = min(1, R_i). After a block that accepts tau < gamma, the target of the next
gamma - tau - 1 tokens is modified: at a prefix z of that block it is

    P'(. | z) = norm((P(. | z) - r(z) Q(. | z))_+),   r(z) = Q(z) / P(z) over the tokens of the block so far.

A block that starts while modifications are active adds a layer. Layer k modifies the target T_{k-1} of the earlier
layers; the block verifies against the last one. All layers subtract multiples of the same Q(. | z), so at every prefix
a target is one factor and one mass:

    T_k = (P - a_k Q)_+ / m_k,   a_k = a_{k-1} + r_k m_{k-1},   m_k = sum_x (P - a_k Q)_+,   a_0 = 0,  m_0 = 1
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..framework.contracts.draft import Draft, Verdict, on_device
from ..framework.contracts.draft_kind import SINGLE_CHILD
from ..framework.contracts.drafter import StrategyConfig
from ..framework.contracts.rng import StepRng
from ..framework.contracts.verifier import Verifier, VerifierTraits
from ..framework.errors import ContractError
from ._chain import inner_excess, longest, next_token, prefix_excess, ratios
from .block import Block


class GreedyBlock(Verifier):
    """Accepts as much as any single block can, and modifies the next targets. Lossless; replayable chains."""

    name = "greedy-block"

    @classmethod
    def traits(cls, config: Any) -> VerifierTraits:
        return VerifierTraits(accepts=frozenset({SINGLE_CHILD}), stateful=True, modifies_target=True)

    def __init__(self, config: StrategyConfig | None = None):
        super().__init__(config)
        #: Per slot, the number of positions that each layer still modifies, oldest first. Host integers.
        self._remaining: dict[int, list[int]] = {}
        #: r of every layer at the root, ``[B, layers]`` float64, 0 = inactive; and restored rows that replace it.
        self._r: Tensor | None = None
        self._restored: dict[int, list[float]] = {}

    # -- state -------------------------------------------------------------------------------------------

    def start(self, row: int) -> None:
        self._remaining[row], self._restored[row] = [], []

    free = start

    def snapshot(self, row: int) -> Hashable:
        remaining = self._remaining.get(row, [])
        if not remaining:
            return None
        values = self._restored.get(row)
        if values is None:
            assert self._r is not None
            values = self._r[row, : len(remaining)].tolist()
        layers = [(left, r) for left, r in zip(remaining, values, strict=True) if r > 0]  # r = 0 is inactive
        return tuple(layers) or None

    def restore(self, row: int, snapshot: Hashable) -> None:
        layers = list(snapshot or ())  # type: ignore[call-overload]
        self._remaining[row] = [left for left, _ in layers]
        self._restored[row] = [r for _, r in layers]

    def observe(self, accepted: Sequence[int], drafted: Sequence[int]) -> None:
        """Advance the layers by the emitted tokens, append the layer of this block, and drop expired layers."""
        assert self._r is not None
        newest, zero = self._r.shape[1] - 2, self._r.shape[1] - 1  # the last two columns
        kept: list[list[int]] = []
        for row, (tau, gamma) in enumerate(zip(accepted, drafted, strict=True)):
            aged = [(column, left - tau - 1) for column, left in enumerate(self._remaining.get(row, []))]
            aged.append((newest, gamma - tau - 1))
            kept.append([column for column, left in aged if left > 0])
            self._remaining[row] = [left for _, left in aged if left > 0]
        width = max(map(len, kept))
        columns = on_device([row + [zero] * (width - len(row)) for row in kept], self._r.device)
        self._r = self._r.gather(1, columns.view(len(kept), width))

    def state_tensors(self, draft: Draft) -> tuple[Tensor, Tensor]:
        """R of every layer at the root, ``[B, layers]``, and the number of positions of the draft it modifies.

        Raises:
            ContractError: the draft lacks Q at one of them.
        """
        return self._state(draft)[0]

    def store_state(self, r: Tensor) -> None:
        self._r = r

    def _state(self, draft: Draft) -> tuple[tuple[Tensor, Tensor], list[list[int]]]:
        """`state_tensors`, and the second of them as lists on the host."""
        device = draft.tokens.device
        if self._r is None or len(self._r) != draft.batch_size:
            self._r = torch.zeros(draft.batch_size, 0, dtype=torch.float64, device=device)
        if self._restored:
            width = max(self._r.shape[1], *map(len, self._restored.values()))
            self._r = functional.pad(self._r, (0, width - self._r.shape[1]))
            for row, values in self._restored.items():
                self._r[row] = on_device(values + [0.0] * (width - len(values)), device, torch.float64)
            self._restored.clear()
        layers, left = self._r.shape[1], []
        for row in range(draft.batch_size):
            counts = [min(positions, draft.width + 1) for positions in self._remaining.get(row, [])]
            left.append(counts + [0] * (layers - len(counts)))
        if draft.q is not None and max((end for counts in left for end in counts), default=0) > draft.q.shape[1]:
            raise ContractError(
                "greedy-block needs q after the last token of a draft shorter than gamma (DraftContext.final_q), which "
                "this draft does not have; use another verifier"
            )
        return (self._r, on_device(left, device).view(draft.batch_size, layers)), left

    # -- one block ---------------------------------------------------------------------------------------

    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        state, ends = self._state(draft)
        # On a CPU, skip positions that a layer does not modify.
        verdict, r = self.verify_with_state(draft, p, rng, *state, ends=ends if p.device.type == "cpu" else None)
        self.store_state(r)
        return verdict

    def verify_with_state(
        self, draft: Draft, p: Tensor, rng: StepRng, *state: Tensor, ends: Sequence[Sequence[int]] | None = None
    ) -> tuple[Verdict, Tensor]:
        """Verify a block, given `state_tensors`; ``ends``: the second of them as lists, if on the host."""
        root, left = state
        ratio = ratios(draft, p)
        r, a, m = self._modified(draft, p, ratio, root, left, ends)
        pt = ((ratio - a[-1][:, :-1]).clamp_(min=0) / m[-1][:, :-1]).cumprod(1).clamp_(max=1e150)
        p_i = pt.clamp(max=1)
        # If pt_i >= 1, A_i >= B_i and h_i = 1; else B_i = A_i + 1 - pt_i as in block verification.
        # pt T - Q is P - (a + m / pt) Q up to the factor pt / m.
        inner, inner_m = p_i[:, :-1], m[-1][:, 1:-1]
        excess = inner_excess(draft, p, a[-1][:, 1:-1] + inner_m / inner)
        h = Block.acceptance(draft, p_i, inner / inner_m * excess)
        tau = longest(rng.accept(h))
        table = torch.stack([functional.pad(pt, (1, 0), value=1.0), *r, *a, *m])  # values at tau: [.., B]
        pt_tau, *rest = table.gather(2, tau.expand(len(table), -1)[..., None]).squeeze(2)
        layers = len(r)
        r, a, m = rest[:layers], rest[layers : 2 * layers + 1], rest[2 * layers + 1 :]
        token = next_token(draft, p, tau, rng, a[-1] + (tau < draft.count) * m[-1] / pt_tau)
        if draft.q is None:
            new_r = torch.zeros(len(root), root.shape[1] + 2, dtype=torch.float64, device=p.device)
        else:
            new_r = self._next_r(draft, p, tau, token, [*r, 1 / pt_tau], torch.stack(a), torch.stack(m))
        return Verdict(tau, token, survival=p_i), new_r

    def _modified(
        self,
        draft: Draft,
        p: Tensor,
        ratio: Tensor,
        root: Tensor,
        left: Tensor,
        ends: Sequence[Sequence[int]] | None,
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """r_k of every layer (0 after its end), and a_k and m_k from k = 0 on, at every position, ``[B, N+1]`` each.

        Args:
            ratio: ``[B, N]``, P / Q of the drafted tokens.
            root: ``[B, layers]``, r_k before the draft.
            left: ``[B, layers]``, number of positions of the draft that each layer modifies; ``ends`` on the device.
        """
        r: list[Tensor] = []
        a = [torch.zeros(draft.batch_size, draft.width + 1, dtype=torch.float64, device=p.device)]
        m = [torch.ones_like(a[0])]
        if draft.q is None:  # point masses are not drawn: no modification
            return r, a, m
        position = torch.arange(draft.width + 1, device=p.device)
        for k in range(root.shape[1]):
            last_a, last_m = a[-1], m[-1]
            # Q / T_{k-1} of the drafted tokens; 0 if the target excludes the token.
            steps = (last_m[:, :-1] / (ratio - last_a[:, :-1]).clamp_(min=0)).nan_to_num_(0.0, posinf=0.0)
            r_k = torch.cat([root[:, k, None], steps], 1).cumprod(1)
            r_k = torch.where(position < left[:, k, None], r_k, 0.0)
            a_k = torch.addcmul(last_a, r_k, last_m)
            mass = prefix_excess(p, draft.q, a_k, None if ends is None else [counts[k] for counts in ends])
            changed = (r_k > 0) & (mass > 0)  # the mass may be 0 by rounding
            r.append(r_k)
            a.append(torch.where(changed, a_k, last_a))
            m.append(torch.where(changed, mass, last_m))
        return r, a, m

    def _next_r(
        self, draft: Draft, p: Tensor, tau: Tensor, token: Tensor, r: list[Tensor], a: Tensor, m: Tensor
    ) -> Tensor:
        """R of every layer after the emitted token, then that of this block's layer, then a column of zeros.

        Args:
            r: ``[B]`` each, at tau; 1 / pt_tau for the new layer.
            a, m: ``[layers + 1, B]``, at tau.
        """
        assert draft.q is not None
        rows = torch.arange(len(tau), device=p.device)
        q = draft.q[rows, tau.clamp(max=draft.q.shape[1] - 1), token].double()
        # Q / T_{k-1} = m / (P / Q - a)_+
        step = (m / (p[rows, tau, token] / q - a).clamp_(min=0)).nan_to_num_(0.0, posinf=0.0)
        return functional.pad((torch.stack(r) * step).t(), (0, 1))
