"""Token verification written wrongly, for the test of the first token's law."""

from typing import Any

import torch

from crossdraft.framework import plugins
from crossdraft.framework.contracts.draft import Draft, Verdict


class Inverted(plugins.get("verifiers", "token")):
    """Token verification with Q / P for P / Q."""

    name = "inverted"

    def verify(self, draft: Draft, p: torch.Tensor, rng: Any) -> Verdict:
        assert draft.q is not None
        verdict = super().verify(Draft(**{**vars(draft), "q": p[:, :1]}), draft.q.expand_as(p), rng)
        return Verdict(verdict.length, verdict.token)


class NoResidual(plugins.get("verifiers", "token")):
    """Draws the correction from P itself."""

    name = "no-residual"

    def verify(self, draft: Draft, p: torch.Tensor, rng: Any) -> Verdict:
        verdict = super().verify(draft, p, rng)
        return Verdict(verdict.length, rng.draw(p[:, 0], index=1))


class AcceptsAll(plugins.get("verifiers", "token")):
    """Says what the drafter says."""

    name = "accepts-all"

    def verify(self, draft: Draft, p: torch.Tensor, rng: Any) -> Verdict:
        return Verdict(torch.ones_like(draft.count), torch.zeros_like(draft.count))
