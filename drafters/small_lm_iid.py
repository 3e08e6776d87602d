"""A small language model draws K sequences, independently.

Z. Sun et al., "SpecTr: Fast Speculative Decoding via Optimal Transport", NeurIPS 2023; X. Miao et al.,
"SpecInfer", ASPLOS 2024. Prefixes on which sequences agree are one node each, so the target evaluates them once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field

from ..framework.decoding.sampling import Sampling
from ..framework.draft import Draft, Scores, Sequences, Verdict, on_device
from ..framework.drafter import DraftTraits
from ..framework.rng import RoundRng
from .small_lm import SmallLM


class SmallLMIid(SmallLM):
    """K sequences of gamma tokens from gamma passes over K rows each. At temperature 0, or K = 1: one chain."""

    name = "small-lm-iid"

    class Config(SmallLM.Config):
        K: int = Field(default=2, ge=1, description="number of draft sequences")

    config: Config

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        chain = super().traits(config, sampling)
        if config.K == 1 or chain.point_mass:
            return chain
        return DraftTraits(drawn="iid", point_mass=False, nodes=config.gamma * config.K)

    def propose(self, sequences: Sequences, rng: RoundRng) -> Draft:
        self._place = None
        steps, k = min(self.config.gamma, max(sequences.limit)), self.config.K
        if k == 1 or self.sampling.temperature == 0 or steps == 0:
            return super().propose(sequences, rng)
        laws = [self._law(self._root(sequences), sequences, 0)[:, None]]
        tokens = [torch.stack([rng.draw(laws[0][:, 0], "draft", j) for j in range(k)], 1)]
        fed = torch.full_like(tokens[0], -1)
        for i in range(1, steps):
            logits, _ = self.lm.grow(tokens[-1], fed)
            fed = torch.arange((i - 1) * k, i * k, device=fed.device).expand_as(fed)
            q = self._law(logits, sequences, i)
            laws.append(q)
            tokens.append(torch.stack([rng.draw(q[:, j], "draft", i * k + j) for j in range(k)], 1))
        length = on_device(sequences.limit, sequences.device).clamp(max=steps)
        draft = Draft.iid(torch.stack(tokens, 2), length, torch.cat(laws, 1))
        # Of the sequences through a node, any one was fed; the first level is 0 .. K - 1, and so on.
        assert draft.sequences is not None
        b = draft.batch_size
        order = torch.arange(steps, device=fed.device) * k + torch.arange(k, device=fed.device)[:, None]
        order = torch.where(torch.arange(steps, device=fed.device) < steps - 1, order, -1).expand(b, k, steps)
        slot = torch.where(draft.sequences >= 0, draft.sequences, draft.width)
        place = torch.full((b, draft.width + 1), -1, dtype=torch.long, device=fed.device)
        self._place = place.scatter_(1, slot.reshape(b, -1), order.reshape(b, -1))[:, : draft.width]
        self._fed = steps - 1
        return draft

    def observe(
        self, sequences: Sequences, draft: Draft, verdict: Verdict, accepted: Sequence[int], scores: Scores
    ) -> None:
        if self._place is None:
            super().observe(sequences, draft, verdict, accepted, scores)
        else:
            self._keep(self._place, verdict, [min(tau, self._fed) for tau in accepted])
