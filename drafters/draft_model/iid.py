"""``draft-model-iid``: a draft model draws K independent sequences.

Z. Sun et al., "SpecTr: Fast Speculative Decoding via Optimal Transport", NeurIPS 2023; X. Miao et al.,
"SpecInfer", ASPLOS 2024. A common prefix of sequences is stored once, so the target evaluates it once.

Delayed tree expansion: R. Thomas, T. Kitanovski, M. Goldblum, A. Pal, "Dynamic Delayed Tree Expansion For Improved
Multi-Path Speculative Decoding", 2026.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ...framework.contracts.draft import Draft, Scores, Sequences, Verdict, on_device
from ...framework.contracts.draft_kind import DELAYED_IID, IID
from ...framework.contracts.drafter import DraftContext, DraftTraits, StrategyConfig, TextDistribution
from ...framework.contracts.rng import StepRng, draw_each
from ...framework.contracts.sampling import Sampling
from ...framework.util.limits import MOST_SIBLINGS
from ...framework.util.tensors import Gathered, counting
from ..autoregressive.trees import check_size
from .draft_model import ChainConfig, DraftModelChain
from .tree_drafter import TreeDrafter


class DraftModelIid(TreeDrafter):
    """K sequences of gamma tokens, from gamma passes over K tokens per slot. At temperature 0, or K = 1: one chain.

    With ``delay`` the first tokens are drawn once and common to all sequences, which branch after them.
    """

    name = "draft-model-iid"

    class Config(ChainConfig):
        K: int = Field(default=2, ge=1, le=MOST_SIBLINGS, description="number of draft sequences")
        delay: int = Field(default=0, ge=0, description="number of first tokens that all sequences share, below gamma")

        @model_validator(mode="after")
        def _size(self) -> Any:
            check_size(self.gamma * self.K)
            if self.delay and self.delay >= self.gamma:
                raise ValueError(
                    f"delay is {self.delay}, but the sequences branch after it and have gamma = {self.gamma} tokens; "
                    "use a smaller delay"
                )
            return self

        @property
        def nodes(self) -> int:
            """Maximum number of nodes of a draft."""
            return self.delay + (self.gamma - self.delay) * self.K

    config: Config

    def __init__(self, config: StrategyConfig, context: DraftContext):
        self.chain = DraftModelChain(config, context)  # the case of one sequence
        super().__init__(config, context, self.chain.model)
        self.sampling = self.chain.sampling
        self._levels = 0  # of the last draft, that were fed

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        chain = DraftModelChain.traits(config, sampling)
        if config.K == 1 or chain.point_mass:
            return chain
        kind = DELAYED_IID if config.delay else IID
        return DraftTraits(kind=kind, point_mass=False, nodes=config.nodes, levels=config.gamma)

    def text_distribution(self) -> TextDistribution | None:
        return self.chain.text_distribution()

    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        self.fed_index = None
        steps, k = min(self.config.gamma, max(sequences.limit)), self.config.K
        if k == 1 or self.sampling.temperature == 0 or steps == 0:
            return self.chain.propose(sequences, rng)
        trunk = min(self.config.delay, steps)
        # Of each level: its first position in the order of feeding, and its number of draws.
        starts = [_first_position(level, trunk, k) for level in range(steps)]
        widths = [1 if level < trunk else k for level in range(steps)]
        order = counting(starts[-1] + widths[-1], sequences.device).expand(sequences.batch_size, -1)
        probs, q_rows = self.sampling.probs(self.model.root(sequences))[:, None], Gathered(1 + starts[-1])
        tokens: list[Tensor] = []
        for level, (start, width) in enumerate(zip(starts, widths, strict=True)):
            if level:
                above = (
                    order[:, starts[level - 2] : starts[level - 1]] if level > 1 else torch.full_like(order[:, :1], -1)
                )
                probs = self.sampling.probs(self.model.forward(tokens[-1], above.expand_as(tokens[-1])))
            q_rows.add(probs)
            tokens.append(draw_each(rng, probs.expand(-1, width, -1), "draft", range(start, start + width)))
        length = on_device([min(limit, steps) for limit in sequences.limit], sequences.device)
        q = q_rows.tensor()
        sampled = torch.stack([level.expand(-1, k) for level in tokens], 2)
        draft = Draft.iid(sampled, length, q, trunk if self.config.delay else None)
        draft.finite = self.sampling.sound(q).all(1)
        # All sequences of a shared node were fed; any of their positions will do.
        assert draft.sequences is not None
        slot = draft.sequences.remainder(draft.width + 1).flatten(1)  # -1 (past the end) maps to a spare column
        fed_index = torch.full((len(slot), draft.width + 1), -1, dtype=torch.long, device=slot.device)
        self.fed_index = fed_index.scatter_(1, slot, _fed_order(k, steps, trunk, slot.device).expand_as(slot))[
            :, : draft.width
        ]
        self._levels = steps - 1
        return draft

    def observe(
        self, sequences: Sequences, draft: Draft, verdict: Verdict, accepted: Sequence[int], scores: Scores
    ) -> None:
        if self.fed_index is None:
            self.chain.observe(sequences, draft, verdict, accepted, scores)
        else:
            self.model.commit(verdict, accepted, self.fed_index, self._levels)


def _first_position(level: int, trunk: int, k: int) -> int:
    """Position of the first token of a level in the order of feeding: one token per level of the trunk, then k."""
    return level if level <= trunk else trunk + (level - trunk) * k


@cache
def _fed_order(k: int, steps: int, trunk: int, device: torch.device) -> Tensor:
    """``[k * steps]``: position of each token of k sequences in the order of feeding; -1 for the last, not fed."""
    positions = [
        _first_position(i, trunk, k) + (j if i >= trunk else 0) if i < steps - 1 else -1
        for j in range(k)
        for i in range(steps)
    ]
    with torch.inference_mode(False):
        return on_device(positions, device)
