"""Shared functions of the tree verifiers: children in verification order, and their draft distributions.

Symbols follow the literature: P(u) is the target's distribution after node u, q_j the distribution of child j given its
earlier siblings.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..framework.contracts.draft import Draft, Verdict
from ..framework.contracts.rng import StepRng, UniformStepRng
from ..framework.util.tensors import columns, eager_on_cpu, take_rows
from ._chain import total


class Children:
    """The drafted children of all nodes as a list of entries, parents before children.

    An entry is a drawn token: a node, or, ``with_copies``, each of the equal tokens of i.i.d. sequences.

    Attributes:
        node, parent, token: ``[B, E]`` int64; parent -1 is the root.
        valid: ``[B, E]`` bool.
    """

    def __init__(self, draft: Draft, with_copies: bool = False, last_sibling_first: bool = False):
        self.draft = draft
        sequences = draft.drawn_sequences() if with_copies else None
        self._copies = sequences is not None
        if sequences is not None:
            entry = sequences.transpose(1, 2).reshape(draft.batch_size, -1)  # level by level
            self.valid = entry >= 0
            self.node = entry.clamp(min=0)
        elif last_sibling_first:
            # Sorted by parent: still topological order, with siblings adjacent.
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
        """``[B, V]``: q of one entry; ``like [B, V]`` has the shape and dtype of a point mass."""
        node = self.node[:, entry]
        q = self.draft.q_of(node, like)
        if self.draft.kind.merged_sequences and not self._copies:
            q = without_earlier_siblings(
                self.draft, q[:, None], self.draft.earlier_siblings[self._rows, node][:, None]
            ).squeeze(1)
        return q


def draft_probs_of(draft: Draft, nodes: Sequence[int], like: Tensor) -> Tensor:
    """``[B, n, V]``: q of n ``nodes``, each given its earlier siblings; ``like [B, n, V]`` shapes point masses."""
    if draft.q is None:
        return torch.zeros_like(like).scatter_(2, columns(draft.tokens, nodes)[..., None], 1.0)
    q = columns(draft.q, nodes) if draft.q_index is None else take_rows(draft.q, columns(draft.q_index, nodes))
    return (
        without_earlier_siblings(draft, q, columns(draft.earlier_siblings, nodes)) if draft.kind.merged_sequences else q
    )


def without_earlier_siblings(draft: Draft, q: Tensor, earlier_siblings: Tensor) -> Tensor:
    """Distributions of merged i.i.d. sequences: a later child differs from its earlier siblings; q is renormalised.

    Args:
        q: ``[B, n, V]``, the distribution of each draw.
        earlier_siblings: ``[B, n, N]`` bool, the earlier siblings of n nodes.
    """
    factor = torch.where(earlier_siblings, 0.0, torch.inf).to(q.dtype)
    q = q.scatter_reduce(2, draft.tokens[:, None].expand_as(factor), factor, "amin")
    mass = total(q)[..., None].to(q.dtype)
    return torch.where(mass > 0, q / mass, q)


def is_empty(rows: Tensor) -> bool:
    """True if no row of ``rows [B]`` is set, checked only on a CPU outside compiled code, where it needs no sync.

    A verifier may then skip work that no row needs.
    """
    return eager_on_cpu(rows) and not rows.any()


def choose(condition: Tensor, this: Tensor, that: Tensor) -> Tensor:
    """``[.., V]``: ``this`` where ``condition [..]``, else ``that``, both finite.

    lerp is exact for weights 0 and 1, and on a CPU several times faster than where with a broadcast condition.
    """
    return torch.lerp(that, this, condition[..., None].to(this.dtype))


def force_token(weights: Tensor, token: Tensor, fixed: Tensor) -> Tensor:
    """``weights [B, V]``, but one-hot at ``token [B]`` where ``fixed [B]``: the draw is deterministic."""
    mask = fixed[:, None].to(weights.dtype)
    return (weights * (1 - mask)).scatter_add_(1, token[:, None], mask)


def draw_where(
    rng: StepRng,
    mask: Tensor | None,
    weights: Tensor,
    token: Tensor | None,
    purpose: str = "residual",
    index: int = 0,
) -> Tensor:
    """``[B]``: a token drawn from ``weights [B, V]`` where ``mask [B]`` (``None`` = all rows), else ``token``.

    For a source that enumerates outcomes the other draws are deterministic.
    """
    if mask is None or token is None:
        return rng.draw(weights, purpose, index)
    if isinstance(rng, UniformStepRng):
        return torch.where(mask, rng.draw(weights, purpose, index), token)
    return rng.draw(force_token(weights, token, ~mask), purpose, index)


def at_token(probs: Tensor, token: Tensor) -> Tensor:
    """``[..]`` float64: ``probs [.., V]`` at ``token [..]``."""
    return probs.gather(-1, token[..., None]).squeeze(-1).double()


def likelihood_ratio(p: Tensor, q: Tensor, token: Tensor) -> Tensor:
    """``[..]`` float64: p(x) / q(x) of ``p, q [.., V]`` at ``x = token [..]``; 0 where p(x) is 0."""
    top = at_token(p, token)
    return torch.where(top > 0, top / at_token(q, token), 0.0)


def residual(p: Tensor, q: Tensor, credit: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(credit p - q)_+ normalised ``[B, V]``, and its mass ``[B]`` float64; p itself if the mass is 0."""
    scaled = p if credit is None else p * credit[:, None].to(p.dtype)
    left = (scaled - q).clamp_(min=0)
    mass = total(left)
    positive = mass > 0
    left = left / torch.where(positive, mass, 1.0)[:, None].to(left.dtype)
    return choose(positive, left, p), mass


def stop_at(draft: Draft, node: Tensor, token: Tensor) -> Verdict:
    """Return the verdict that accepts the path to ``node [B]`` (-1 = nothing) and emits ``token [B]`` after it."""
    if not draft.width:
        return Verdict(torch.zeros_like(token), token)
    path = None if draft.is_chain else draft.path_to(node)
    if path is not None and draft.sequences is not None:
        return Verdict((path >= 0).sum(1), token, path)
    return Verdict(draft.depth_of(node), token, path)
