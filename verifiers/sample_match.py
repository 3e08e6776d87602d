"""Sample the target and match the token among the children ("naive" multi-draft sampling).

X. Miao et al., "SpecInfer", ASPLOS 2024, section 4.3 (naive sampling), the baseline there.

    y ~ P(node); if a child has token y continue there, else emit y and stop; at a leaf y is the bonus token.

q is not used, so it is lossless for any tree, including one that was pruned or ranked after sampling.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..framework.contracts.draft import Draft, Verdict, take_rows
from ..framework.contracts.draft_kind import ANY_TREE
from ..framework.contracts.rng import StepRng
from ..framework.contracts.verifier import Verifier, VerifierTraits
from ._tree import force_token, is_empty, stop_at


class SampleMatch(Verifier):
    """Samples the target at every node it reaches. Lossless on any tree."""

    name = "sample-match"

    @classmethod
    def traits(cls, config: Any) -> VerifierTraits:
        return VerifierTraits(accepts=ANY_TREE, shortenable=True)

    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        rows = torch.arange(draft.batch_size, device=p.device)
        node, active = torch.full_like(rows, -1), torch.ones_like(rows, dtype=torch.bool)
        token = torch.zeros_like(rows)
        levels = draft.width if draft.levels is None else min(draft.levels, draft.width)
        for level in range(levels + 1):
            target = take_rows(p, node + 1)
            if level:
                target = force_token(target, token, ~active)
            token = rng.draw(target, index=level)
            if level < levels:
                matches = (draft.parents == node[:, None]) & (draft.tokens == token[:, None]) & draft.valid
                active = active & matches.any(1)
                node = torch.where(active, matches.long().argmax(1), node)
                if is_empty(active):
                    break
        return stop_at(draft, node, token)
