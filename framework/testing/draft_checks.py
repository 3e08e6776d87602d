"""What a single draft has to keep: shapes, parents, limits, laws."""

from __future__ import annotations

import torch
from torch import Tensor

from ..contracts.draft import Draft, Sequences
from ..contracts.drafter import DraftTraits


def check_draft(name: str, draft: Draft, traits: DraftTraits, sequences: Sequences, vocab_size: int) -> None:
    """Raise AssertionError, naming what is wrong, for a draft of drafter ``name`` that breaks the contract."""
    b, n = sequences.batch_size, draft.width
    for field in ("tokens", "parents", "valid"):
        shape = tuple(getattr(draft, field).shape)
        assert shape == (b, n), f"{name}: draft.{field} has shape {shape}, not [B, N] = {(b, n)}: a shape is off"
    assert draft.tokens.dtype == draft.parents.dtype == torch.long and draft.valid.dtype == torch.bool, (
        f"{name}: tokens and parents are int64 and valid is bool, not {draft.tokens.dtype}, {draft.parents.dtype}, "
        f"{draft.valid.dtype}"
    )
    assert n <= traits.nodes, f"{name}: the draft has {n} nodes, more than traits.nodes = {traits.nodes}"
    if not n:
        return
    assert draft.drawn == (traits.drawn or draft.drawn), f"{name}: drawn is {draft.drawn}, traits say {traits.drawn}"
    order, valid = torch.arange(n), draft.valid
    inside = (draft.tokens >= 0) & (draft.tokens < vocab_size)
    assert bool((inside | ~valid).all()), f"{name}: a drafted token is outside of the vocabulary"
    assert bool(inside.all()), f"{name}: a padded token is outside of the vocabulary, where the target looks it up"
    assert bool(((draft.parents < order) & (draft.parents >= -1)).all()), (
        f"{name}: a node's parent must come before it (or be -1, the root)"
    )
    parent_valid = torch.cat([torch.ones_like(valid[:, :1]), valid], 1).gather(1, draft.parents + 1)
    assert bool((parent_valid | ~valid).all()), f"{name}: a valid node hangs below an invalid one"
    candidates = draft.candidates
    if candidates.is_chain:
        straight = bool((candidates.parents == torch.arange(candidates.width) - 1).all())
        assert straight, f"{name}: in a chain every node is the child of the one before it"
        ends = candidates.valid.int().diff(dim=1) <= 0
        assert bool(ends.all()), f"{name}: the invalid nodes of a chain come last"
    depth = torch.where(candidates.valid, candidates.depth, 0).amax(1).tolist()
    for row, (deepest, most, history) in enumerate(zip(depth, sequences.limit, sequences.history, strict=True)):
        assert deepest <= (most if history else 0), (
            f"{name}: slot {row} is drafted {deepest} deep, but sequences.limit allows {most if history else 0}"
        )
    _check_laws(name, draft, candidates)


def _check_laws(name: str, draft: Draft, candidates: Draft) -> None:
    n = candidates.width
    if draft.q is None:
        if draft.drawn in ("chain", "deterministic"):
            _check_twins(name, candidates)
        return
    assert draft.q.is_floating_point(), f"{name}: q is {draft.q.dtype}, not a floating-point law"
    rows = draft.q.shape[1]
    highest = int(candidates.law.max()) if candidates.law is not None else n - 1
    assert draft.q.dim() == 3 and rows > highest, (
        f"{name}: q has shape {tuple(draft.q.shape)}, too few rows for {n} nodes: a shape is off"
    )
    law = draft.q[:, :n] if candidates.law is None else _taken(draft.q, candidates.law)
    law, valid = law.double(), candidates.valid
    assert bool((law >= 0).all()), f"{name}: q is negative or NaN somewhere"
    off = (law.sum(-1) - 1).abs()[valid]
    assert not off.numel() or float(off.max()) < 1e-4, f"{name}: a row of q sums to {1 + float(off.max()):.4g}, not 1"
    drawn = law.gather(2, candidates.tokens[..., None]).squeeze(2)
    assert bool((drawn[valid] > 0).all()), f"{name}: q is 0 at a token that was drawn from it"
    if draft.drawn == "iid":
        assert draft.sequences is not None, f"{name}: 'iid' drafts need draft.sequences; Draft.iid makes them"
    else:
        _check_twins(name, candidates)


def _check_twins(name: str, draft: Draft) -> None:
    same = (draft.parents[:, :, None] == draft.parents[:, None]) & (draft.tokens[:, :, None] == draft.tokens[:, None])
    both = draft.valid[:, :, None] & draft.valid[:, None] & ~torch.eye(draft.width, dtype=torch.bool)
    assert not bool((same & both).any()), f"{name}: two siblings carry the same token"


def draws(draft: Draft) -> tuple[Tensor, Tensor, Tensor]:
    """What was drawn: tokens ``[B, E]``, their laws ``[B, E, V]``, and which of them count ``[B, E]``.

    That is the nodes; of independent sequences, which share nodes where they agree, the tokens of every sequence.
    """
    assert draft.q is not None
    law = torch.arange(draft.width).expand_as(draft.tokens) if draft.law is None else draft.law
    tokens, valid = draft.tokens, draft.valid
    if draft.sequences is not None:
        entry = draft.sequences.transpose(1, 2).flatten(1)
        valid, entry = entry >= 0, entry.clamp(min=0)
        tokens, law = tokens.gather(1, entry), law.gather(1, entry)
    return tokens, _taken(draft.q, law), valid


def _taken(q: Tensor, law: Tensor) -> Tensor:
    return q.gather(1, law[..., None].expand(-1, -1, q.shape[2]))
