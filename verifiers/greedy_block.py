"""Greedy block verification with distribution modification: the full-information ideal, paid for later.

Z. Sun, U. Mendlovic, Y. Leviathan, A. Aharoni, J. H. Ro, A. Beirami, A. T. Suresh, "Block Verification
Accelerates Speculative Decoding", ICLR 2025, Algorithms 4 (the block), 5 (the modification), 6 (the outer loop).

    pt_i = R_i = prod_{j<=i} P_{j-1}(x_j) / Q_{j-1}(x_j)                   (no min)
    A_i = sum_x (pt_i P_i - Q_i)_+,   B_i = sum_x (Q_i - pt_i P_i)_+
    h_i = A_i / max(A_i, B_i) for i < gamma,   h_gamma = min(1, pt_gamma)
    tau = max{i : eta_i < h_i},   Y ~ norm((pt_tau P_tau - Q_tau)_+), or P_gamma if tau = gamma

Then Pr(tau >= i | draft) = min(1, R_i). After a block that accepts tau < gamma, the target of the next
gamma - tau - 1 tokens is modified: at a prefix z of that block it is

    P'(. | z) = norm((P(. | z) - r(z) Q(. | z))_+),   r(z) = Q(z) / P(z) over the tokens of the block so far.

A block that starts while modifications are active stacks its own on top. Each layer k sees the target T_{k-1}
as the older layers left it; the newest one is what this block verifies against.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from ..framework.draft import Draft, Verdict
from ..framework.drafter import StrategyConfig
from ..framework.errors import ContractError
from ..framework.rng import RoundRng
from ..framework.verifier import Verifier, VerifierTraits
from ._chain import next_token, pieces, ratios
from ._tree import choose
from .block import Block


class GreedyBlock(Verifier):
    """Accepts the most any single block can, and modifies the targets that follow. Lossless; replayable chains."""

    name = "greedy-block"
    traits = VerifierTraits(drawn=frozenset({"chain"}), stateful=True, modifies_target=True)

    def __init__(self, config: StrategyConfig | None = None):
        super().__init__(config)
        #: Per slot, how many positions each layer still modifies, oldest first. Host integers.
        self._remaining: dict[int, list[int]] = {}
        #: Per slot, r of each layer: restored values, or a row of `_r` (``[B, layers]`` float64).
        self._restored: dict[int, list[float]] = {}
        self._r: Tensor | None = None

    # -- state -------------------------------------------------------------------------------------------

    def begin(self, row: int) -> None:
        self._remaining[row] = []
        self._restored.pop(row, None)

    retire = begin

    def snapshot(self, row: int) -> Hashable:
        remaining = self._remaining.get(row, [])
        if not remaining:
            return None
        values = self._restored.get(row)
        if values is None:
            assert self._r is not None
            values = self._r[row, : len(remaining)].tolist()
        layers = [(left, r) for left, r in zip(remaining, values, strict=True) if r > 0]  # r = 0 modifies nothing
        return tuple(layers) or None

    def restore(self, row: int, snapshot: Hashable) -> None:
        layers = list(snapshot or ())  # type: ignore[call-overload]
        self._remaining[row] = [left for left, _ in layers]
        self._restored[row] = [r for _, r in layers]

    def observe(self, accepted: Sequence[int], drafted: Sequence[int]) -> None:
        """Age the layers by the tokens emitted, append this block's, drop those that modify nothing any more."""
        assert self._r is not None
        kept: list[list[int]] = []
        for row, (tau, gamma) in enumerate(zip(accepted, drafted, strict=True)):
            old = self._remaining.get(row, [])
            # Column `width` holds the new layer; columns before it the old ones.
            aged = [(column, left - tau - 1) for column, left in enumerate(old)]
            aged.append((self._r.shape[1] - 1, gamma - tau - 1))
            kept.append([column for column, left in aged if left > 0])
            self._remaining[row] = [left for _, left in aged if left > 0]
        width = max(map(len, kept))
        columns = torch.tensor([row + [0] * (width - len(row)) for row in kept], dtype=torch.long)
        self._r = self._r.gather(1, columns.view(len(kept), width).to(self._r.device, non_blocking=True))

    def _layers(self, batch_size: int, device: torch.device) -> tuple[Tensor, list[list[int]]]:
        """r ``[B, layers]`` (0 = no layer) and the positions each layer still modifies, per row."""
        remaining = [self._remaining.get(row, []) for row in range(batch_size)]
        width = max(map(len, remaining))
        mask = [[1.0] * len(left) + [0.0] * (width - len(left)) for left in remaining]
        r = torch.tensor(mask, dtype=torch.float64).view(batch_size, width).to(device, non_blocking=True)
        if self._r is not None and width:
            r = r * torch.nn.functional.pad(self._r, (0, width))[:, :width]
        for row, values in self._restored.items():
            r[row, : len(values)] = torch.tensor(values, dtype=torch.float64, device=device)
        self._restored.clear()
        return r, remaining

    # -- one block ---------------------------------------------------------------------------------------

    def verify(self, draft: Draft, p: Tensor, rng: RoundRng) -> Verdict:
        r, remaining = self._layers(draft.batch_size, p.device)
        target, along, mass = self._modified(draft, p, r, remaining)
        steps = [torch.ones(draft.batch_size, dtype=torch.float64, device=p.device)]
        for ratio in ratios(draft, target).unbind(1):
            steps.append((steps[-1] * ratio).clamp_(max=1e150))
        pt = torch.stack(steps, 1)
        p_i = pt.clamp(max=1)
        # A_i >= B_i where pt_i >= 1, so h_i = 1 there; elsewhere B_i = A_i + 1 - pt_i as in block verification.
        h = Block.acceptance(draft, target, p_i)
        order = torch.arange(1, draft.width + 1, device=p.device)
        tau = (rng.accept(h) * order).amax(1) if draft.width else torch.zeros_like(draft.count)
        scale = pt.gather(1, tau[:, None]).squeeze(1)
        token = next_token(draft, target, tau, scale, rng)
        self._advance(draft, p, target, along, mass, tau, token, scale)
        return Verdict(tau, token, survival=p_i[:, 1:] * draft.valid)

    def _modified(
        self, draft: Draft, p: Tensor, r: Tensor, remaining: list[list[int]]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """T_m ``[B, N+1, V]``; r of every layer along the draft (0 once it has expired) and the mass that it leaves of
        the target it sees (1 where it changes nothing), both ``[B, layers, N+1]``."""
        layers, positions = r.shape[1], draft.width + 1
        along = torch.zeros(draft.batch_size, layers, positions, dtype=torch.float64, device=p.device)
        masses = torch.ones_like(along)
        if not layers or draft.q is None:
            return p, along, masses
        lasts = [[min(left[k], positions) if len(left) > k else 0 for k in range(layers)] for left in remaining]
        reach = max(map(max, lasts))
        if reach > draft.q.shape[1]:
            raise ContractError(
                "greedy-block needs the drafter's law after the last token of a draft shorter than gamma "
                "(DraftContext.final_law), and this draft does not carry it"
            )
        active = torch.tensor(lasts).to(p.device, non_blocking=True)[..., None] > torch.arange(
            positions, device=p.device
        )
        target = p.clone()
        for k in range(layers):
            # Along the draft r needs only what this layer's target, the one older layers left, says of the tokens.
            steps = _ratio(draft.q[:, : draft.width], target[:, :-1], draft.tokens)
            along[:, k] = torch.where(active[:, k], torch.cat([r[:, k, None], steps], 1).cumprod(1), 0.0)
            for rows, places in pieces(target[:, :reach]):
                if any(last[k] > places.start for last in lasts[rows]):
                    t, mass = self._without(target[rows, places], draft.q[rows, places], along[rows, k, places])
                    target[rows, places], masses[rows, k, places] = t, mass
        return target, along, masses

    def _advance(
        self,
        draft: Draft,
        p: Tensor,
        target: Tensor,
        along: Tensor,
        masses: Tensor,
        tau: Tensor,
        token: Tensor,
        scale: Tensor,
    ) -> None:
        """r of every layer after the emitted tokens, and r of the layer that this block creates (last column)."""
        rows = torch.arange(len(tau), device=p.device)
        layers = along.shape[1]
        new = torch.zeros(len(tau), layers + 1, dtype=torch.float64, device=p.device)
        if draft.q is not None:
            q = draft.q[rows, tau.clamp(max=draft.q.shape[1] - 1), token].double()
            t = p[rows, tau, token].double()
            for k in range(layers):
                r = along[rows, k, tau]
                new[:, k] = r * torch.where(t > 0, q / t, 0.0)
                t = (t - r * q).clamp(min=0) / masses[rows, k, tau]
            t = target[rows, tau, token].double()
            new[:, layers] = torch.where(t > 0, q / t, 0.0) / scale
        self._r = new

    @staticmethod
    def _without(t: Tensor, q: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        """norm((t - r q)_+) where r > 0, ``t`` itself elsewhere, ``[.., V]``; and the mass before, float64, else 1."""
        left = torch.addcmul(t, q, r[..., None].to(q.dtype), value=-1).clamp_(min=0)
        mass = left.sum(-1)
        changed = (r > 0) & (mass > 0)
        mass = torch.where(changed, mass, 1.0)
        return choose(changed, left.div_(mass[..., None]), t), mass.double()


def _ratio(q: Tensor, t: Tensor, token: Tensor) -> Tensor:
    """``[B, N]`` float64: q(x) / t(x) of ``q, t [B, N, V]`` and ``token [B, N]``; 0 where the target cannot say x."""
    below = t.gather(2, token[..., None]).squeeze(2).double()
    return torch.where(below > 0, q.gather(2, token[..., None]).squeeze(2).double() / below, 0.0)
