"""Sample the target, look for the token among the children ("naive" multi-draft sampling).

X. Miao et al., "SpecInfer", ASPLOS 2024, section 4.3 (naive sampling), the baseline there.

    y ~ P(node); if a child carries y go on there, else emit y and stop; at a leaf y is the bonus.

It never looks at q, so it is exact for any tree, also for one that was pruned or ranked after sampling.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..framework.contracts.draft import Draft, Verdict, take_rows
from ..framework.contracts.draft_kind import ANY_TREE
from ..framework.contracts.rng import StepRng
from ..framework.contracts.verifier import Verifier, VerifierTraits
from ._tree_rules import none, settle, stop_at


class SampleMatch(Verifier):
    """Samples the target at every node it reaches. Lossless on any tree, whatever drew it."""

    name = "sample-match"

    @classmethod
    def traits(cls, config: Any) -> VerifierTraits:
        return VerifierTraits(accepts=ANY_TREE)

    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        rows = torch.arange(draft.batch_size, device=p.device)
        at, walking = torch.full_like(rows, -1), torch.ones_like(rows, dtype=torch.bool)
        token = torch.zeros_like(rows)
        levels = draft.width if draft.levels is None else min(draft.levels, draft.width)
        for level in range(levels + 1):
            law = take_rows(p, at + 1)
            if level:
                law = settle(law, token, ~walking)
            token = rng.draw(law, index=level)
            if level < levels:
                carries = (draft.parents == at[:, None]) & (draft.tokens == token[:, None]) & draft.valid
                walking = walking & carries.any(1)
                at = torch.where(walking, carries.long().argmax(1), at)
                if none(walking):
                    break
        return stop_at(draft, at, token)
