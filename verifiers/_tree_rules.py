"""What the rules for trees share: the children in the order they are examined, and the laws they were drawn from.

Symbols follow the literature: P(u) is the target's law after node u, q_j the law child j was drawn from given
that its elder siblings were drawn before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..framework.contracts.draft import Draft, Verdict
from ..framework.contracts.draft_kind import IID
from ..framework.contracts.rng import StepRng, UniformStepRng
from ..framework.util.tensors import columns, eager_on_cpu, take_rows
from ._chain import total


class Children:
    """The drafted children of all nodes as one list of entries, parents before children.

    An entry is a drawn token. That is a node, except that of i.i.d. sequences which agree each keeps its own
    entry ``with_copies``.

    Attributes:
        node, parent, token: ``[B, E]`` int64; parent -1 is the root.
        valid: ``[B, E]`` bool.
    """

    def __init__(self, draft: Draft, with_copies: bool = False, youngest_first: bool = False):
        self.draft = draft
        self._copies = with_copies and draft.sequences is not None
        if self._copies:
            assert draft.sequences is not None
            entry = draft.sequences.transpose(1, 2).reshape(draft.batch_size, -1)  # level by level
            self.valid = entry >= 0
            self.node = entry.clamp(min=0)
        elif youngest_first:
            # Sorted by parent a tree is still in topological order, and siblings are neighbours.
            order = torch.arange(draft.width, device=draft.tokens.device)
            last = (draft.width + 1) ** 2
            key = torch.where(draft.valid, draft.parents * (draft.width + 1) - order, last)
            self.node = key.argsort(1)
            self.valid = draft.valid.gather(1, self.node)
        else:
            self.node = torch.arange(draft.width, device=draft.tokens.device).expand_as(draft.tokens)
            self.valid = draft.valid
        if draft.width:
            self.parent, self.token = draft.parents.gather(1, self.node), draft.tokens.gather(1, self.node)
        self._rows = torch.arange(draft.batch_size, device=draft.tokens.device)

    def __len__(self) -> int:
        return self.node.shape[1] if self.draft.width else 0

    def q(self, entry: int, like: Tensor) -> Tensor:
        """``[B, V]``: q of one entry per row; ``like [B, V]`` gives the width and dtype of a point mass."""
        node = self.node[:, entry]
        q = self.draft.q_of(node, like)
        if self.draft.kind is IID and not self._copies:
            q = without_elder(self.draft, q[:, None], self.draft.earlier_siblings[self._rows, node][:, None]).squeeze(1)
        return q


def laws_of_nodes(draft: Draft, nodes: Sequence[int], like: Tensor) -> Tensor:
    """``[B, n, V]``: the laws of n ``nodes``, each given its elder siblings; ``like [B, n, V]`` shapes point masses."""
    if draft.q is None:
        return torch.zeros_like(like).scatter_(2, columns(draft.tokens, nodes)[..., None], 1.0)
    q = columns(draft.q, nodes) if draft.q_index is None else take_rows(draft.q, columns(draft.q_index, nodes))
    return without_elder(draft, q, columns(draft.earlier_siblings, nodes)) if draft.kind is IID else q


def without_elder(draft: Draft, q: Tensor, earlier_siblings: Tensor) -> Tensor:
    """Laws of merged i.i.d. sequences: a later child is one that differs from its elder siblings, drawn from the rest.

    Args:
        q: ``[B, n, V]``, the law of each draw.
        elder: ``[B, n, N]`` bool, the elder siblings of n nodes.
    """
    kept = torch.where(earlier_siblings, 0.0, torch.inf).to(q.dtype)
    q = q.scatter_reduce(2, draft.tokens[:, None].expand_as(kept), kept, "amin")
    mass = total(q)[..., None].to(q.dtype)
    return torch.where(mass > 0, q / mass, q)


def none(rows: Tensor) -> bool:
    """Whether no row of ``rows [B]`` is left, where the host sees it without waiting: on a CPU, outside compiled code.

    What a rule would go on to do for no row may then be left out.
    """
    return eager_on_cpu(rows) and not rows.any()


def choose(condition: Tensor, this: Tensor, that: Tensor) -> Tensor:
    """``[.., V]``: ``this`` where ``condition [..]``, else ``that``, both finite.

    A weight of 0 or 1 makes lerp exact, and on a CPU it is several times faster than where with a broadcast condition.
    """
    return torch.lerp(that, this, condition[..., None].to(this.dtype))


def settle(weights: Tensor, token: Tensor, settled: Tensor) -> Tensor:
    """``weights [B, V]``, but all of it on ``token [B]`` where ``settled [B]``: a draw that is none."""
    mask = settled[:, None].to(weights.dtype)
    return (weights * (1 - mask)).scatter_add_(1, token[:, None], mask)


def draw_where(
    rng: StepRng,
    wanted: Tensor | None,
    weights: Tensor,
    token: Tensor | None,
    purpose: str = "residual",
    index: int = 0,
) -> Tensor:
    """``[B]``: a token drawn from ``weights [B, V]`` where ``wanted [B]`` (``None`` = all rows), else ``token``.

    A source that enumerates outcomes is told which draws are none; for numbers it makes no difference.
    """
    if wanted is None or token is None:
        return rng.draw(weights, purpose, index)
    if isinstance(rng, UniformStepRng):
        return torch.where(wanted, rng.draw(weights, purpose, index), token)
    return rng.draw(settle(weights, token, ~wanted), purpose, index)


def at_token(law: Tensor, token: Tensor) -> Tensor:
    """``[..]`` float64: ``law [.., V]`` at ``token [..]``."""
    return law.gather(-1, token[..., None]).squeeze(-1).double()


def ratio(law: Tensor, q: Tensor, token: Tensor) -> Tensor:
    """``[..]`` float64: law(x) / q(x) of ``law, q [.., V]`` at ``x = token [..]``; 0 where the law has no mass."""
    top = at_token(law, token)
    return torch.where(top > 0, top / at_token(q, token), 0.0)


def residual(law: Tensor, q: Tensor, credit: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(credit law - q)_+ normalised ``[B, V]`` and its mass ``[B]`` float64; without mass, ``law`` itself."""
    scaled = law if credit is None else law * credit[:, None].to(law.dtype)
    left = (scaled - q).clamp_(min=0)
    mass = total(left)
    some = mass > 0
    left = left / torch.where(some, mass, 1.0)[:, None].to(left.dtype)
    return choose(some, left, law), mass


def stop_at(draft: Draft, node: Tensor, token: Tensor) -> Verdict:
    """The verdict that accepts the path down to ``node [B]`` (-1 = nothing) and emits ``token [B]`` after it."""
    if not draft.width:
        return Verdict(torch.zeros_like(token), token)
    path = None if draft.is_chain else draft.path_to(node)
    if path is not None and draft.sequences is not None:
        return Verdict((path >= 0).sum(1), token, path)
    return Verdict(draft.depth_of(node), token, path)
