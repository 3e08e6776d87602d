"""Rules written wrongly, for the tests of the certificate and of the first token's distribution."""

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
    """Emits the drafter's tokens."""

    name = "accepts-all"

    def verify(self, draft: Draft, p: torch.Tensor, rng: Any) -> Verdict:
        return Verdict(torch.ones_like(draft.count), torch.zeros_like(draft.count))


def accepts_from(depth: int, rule: str = "token") -> type:
    """A right rule that accepts anything from token ``depth`` of a draft on, once those before are accepted."""

    class AcceptsFrom(plugins.get("verifiers", rule)):
        name = f"accepts-from-{depth}"

        def verify(self, draft: Draft, p: torch.Tensor, rng: Any) -> Verdict:
            verdict = super().verify(draft, p, rng)
            length, token = verdict.length.clone(), verdict.token.clone()
            path = [list(range(n)) for n in length] if verdict.path is None else verdict.path.tolist()
            after = rng.draw(p[:, 0], "other")  # where nothing is drafted so deep, not used
            below, last = [], torch.full_like(length, -1)
            for row, tau in enumerate(length.tolist()):
                nodes = path[row][:tau]
                while tau >= depth - 1 and (child := _child(draft, row, nodes[-1] if nodes else -1)) is not None:
                    nodes.append(child)
                if len(nodes) > tau:
                    length[row], last[row] = len(nodes), nodes[-1]
                below.append(nodes + [-1] * (draft.width - len(nodes)))
            rows = torch.arange(draft.batch_size)
            drawn = rng.draw(p[rows, last + 1], "other", 1) if draft.width else after
            token = torch.where(last >= 0, drawn, token)
            return Verdict(length, token, None if verdict.path is None else torch.tensor(below).view(len(below), -1))

    return AcceptsFrom


def _child(draft: Draft, row: int, parent: int) -> int | None:
    """The first valid child of a node."""
    nodes = zip(draft.parents[row].tolist(), draft.valid[row].tolist(), strict=True)
    return next((node for node, (above, valid) in enumerate(nodes) if valid and above == parent), None)
