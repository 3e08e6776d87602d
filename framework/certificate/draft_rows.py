"""Drafts on the host: their rows, and a verifier that records all drafts of a drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..contracts.draft import Draft, Verdict
from ..contracts.rng import StepRng
from ..contracts.verifier import Verifier, VerifierTraits


class DraftRow(NamedTuple):
    """The valid nodes of a row: their indices, tokens, parents (among them) and q, None for point masses."""

    nodes: np.ndarray
    tokens: list[int]
    parents: list[int]
    q: np.ndarray | None


def draft_row(draft: Draft, row: int) -> DraftRow:
    nodes = draft.valid[row].nonzero()[:, 0]
    number: dict[int, int] = {-1: -1, **{node: i for i, node in enumerate(nodes.tolist())}}
    index = nodes if draft.q_index is None else draft.q_index[row, nodes]
    q = None if draft.q is None else draft.q[row, index].double().numpy()
    parents = [number.get(parent, int(parent)) for parent in draft.parents[row, nodes].tolist()]
    return DraftRow(nodes.numpy(), draft.tokens[row, nodes].tolist(), parents, q)


def paths_of(tokens: Sequence[int], parents: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Tokens from the root to each node; none to the root, -1."""
    paths: dict[int, tuple[int, ...]] = {-1: ()}
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        paths[node] = (*paths[parent], token)
    return paths


class DraftRecorder(Verifier):
    """Verifier that rejects everything and passes each batch of drafts to ``record``, for use in `certify`.

    ``record`` receives the draft, the target's distributions ``[B, N + 1, V]``, and the probability ``[B]`` of each
    row.
    """

    name = "draft-recorder"

    @classmethod
    def traits(cls, config: Any) -> VerifierTraits:
        return VerifierTraits(accepts=frozenset(), lossless=False)

    def __init__(self, record: Callable[[Draft, Tensor, np.ndarray], None]):
        super().__init__()
        self._record = record

    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        self._record(draft, p, rng.weight)  # type: ignore[attr-defined] - the source of `certify`
        no_path = torch.full_like(draft.tokens, -1)
        return Verdict(torch.zeros_like(draft.count), p[:, 0].argmax(-1), None if draft.is_chain else no_path)
