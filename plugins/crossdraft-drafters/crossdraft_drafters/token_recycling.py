"""``token-recycling``: draft the target's own top candidates after each token, from its last occurrence.

X. Luo, Y. Wang, Q. Zhu, Z. Zhang, X. Zhang, Q. Yang, D. Xu, "Turning Trash into Treasure: Accelerating Inference of
Large Language Models with Token Recycling", ACL 2025 (arXiv:2408.08696), section 3. An adjacency matrix holds, for
every token, the target's k most probable next tokens. A static tree is filled from it breadth first: a node's child of
rank r is entry r of the row of the node's token. After the pass the rows of all drafted tokens, accepted or not, are
replaced by the target's top candidates there. Drafts are point masses at any temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from crossdraft import (
    CHAIN,
    DETERMINISTIC,
    Draft,
    DraftContext,
    Drafter,
    DraftTraits,
    Sampling,
    Scores,
    Sequences,
    StepRng,
    StrategyConfig,
    Verdict,
    on_device,
    tree_constant,
)
from crossdraft.drafters.autoregressive.trees import Choices, TreeTemplate

#: The published tree of 80 nodes and six levels: number of children, of ranks 0, 1, .., of each inner node.
_PUBLISHED: dict[tuple[int, ...], int] = {
    **{(): 8, (0,): 8, (1,): 4, (2,): 3, (3,): 2, (4,): 1, (5,): 1, (6,): 1, (7,): 1},
    **{(0, 0): 8, (0, 1): 3, (0, 2): 2, (0, 3): 1, (0, 4): 1, (0, 5): 1, (0, 6): 1, (0, 7): 1},
    **{(1, 0): 2, (1, 1): 1, (2, 0): 1, (3, 0): 1, (4, 0): 1, (5, 0): 1},
    **{(0, 0, 0): 5, (0, 0, 1): 2, (0, 0, 2): 1, (0, 0, 3): 1, (0, 0, 4): 1, (0, 1, 0): 1, (0, 2, 0): 1},
    **{(1, 0, 0): 1, (2, 0, 0): 1, (3, 0, 0): 1},
    **{(0, 0, 0, 0): 3, (0, 0, 0, 1): 1, (0, 0, 0, 2): 1, (0, 0, 1, 0): 1, (0, 1, 0, 0): 1, (1, 0, 0, 0): 1},
    **{(0, 0, 0, 0, 0): 2, (0, 0, 0, 1, 0): 1},
}
#: Its nodes as lists of ranks, ordered by the sum of ranks and depth: every prefix is a tree, too.
PUBLISHED: Choices = tuple(
    sorted(
        ((*parent, rank) for parent, children in _PUBLISHED.items() for rank in range(children)),
        key=lambda path: (sum(path) + len(path), len(path), path),
    )
)
WIDEST = 1 + max(max(path) for path in PUBLISHED)
#: Block size of `best`.
_BLOCK = 64


class TokenRecycling(Drafter):
    """A static tree of the target's own candidates. The matrix is shared by all slots and kept until `reset`."""

    name = "token-recycling"

    class Config(StrategyConfig):
        nodes: int = Field(
            default=32, ge=1, le=len(PUBLISHED), description="nodes of the tree: the first n of the published 80"
        )
        width: int = Field(
            default=WIDEST, ge=1, le=WIDEST, description="candidates kept per token, and number of ranks in the tree"
        )

        def shape(self) -> TreeTemplate:
            """Build the tree."""
            return TreeTemplate.choices([path for path in PUBLISHED if max(path) < self.width][: self.nodes])

    config: Config

    def __init__(self, config: StrategyConfig | None = None, context: DraftContext | None = None):
        #: ``[V + 1, width]``: candidates after each token, the best first, -1 = none. The last row is a spare.
        self._candidates: Tensor | None = None
        super().__init__(config, context)

    def attach(self, context: DraftContext) -> None:
        super().attach(context)
        shape = self.config.shape()
        self._kind = CHAIN if shape.is_path else DETERMINISTIC
        self._levels = [
            (on_device(parents, context.device), on_device(ranks, context.device))
            for parents, ranks in zip(shape.parents, shape.ranks, strict=True)
        ]
        self._parents = tree_constant(shape.children, "parents", context.device)
        self._roots = torch.zeros(context.batch_size, dtype=torch.long, device=context.device)
        matrix = self._candidates
        if matrix is None or matrix.shape[0] != context.vocab_size + 1 or matrix.device != context.device:
            self.reset()

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        shape = config.shape()
        return DraftTraits(
            kind=CHAIN if shape.is_path else DETERMINISTIC,
            point_mass=True,
            nodes=shape.nodes,
            levels=len(shape.ranks),
            adapts=True,  # a text does not contain the candidates of rejected tokens
        )

    def reset(self) -> None:
        size = (self.context.vocab_size + 1, self.config.width)
        self._candidates = torch.full(size, -1, dtype=torch.long, device=self.context.device)

    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        assert self._candidates is not None
        device = sequences.device
        self._roots = on_device([history[-1] if history else 0 for history in sequences.history], device)
        steps = min(max(sequences.limit), len(self._levels))
        if steps == 0:
            return Draft.empty(sequences.batch_size, device)
        limit = on_device(sequences.limit, device)
        token = self._roots[:, None]
        valid = torch.ones_like(token, dtype=torch.bool)
        tokens, valids = [], []
        for level, (parents, ranks) in enumerate(self._levels[:steps]):
            child = self._candidates[token][:, parents, ranks]
            valid = valid[:, parents] & (child >= 0) & (limit > level)[:, None]
            token = torch.where(valid, child, 0)
            tokens.append(token)
            valids.append(valid)
        drafted = torch.cat(tokens, 1)
        return Draft(
            tokens=drafted,
            parents=self._parents[: drafted.shape[1]].expand_as(drafted),
            valid=torch.cat(valids, 1),
            kind=self._kind,
            levels=steps,
        )

    def observe(
        self, sequences: Sequences, draft: Draft, verdict: Verdict, accepted: Sequence[int], scores: Scores
    ) -> None:
        assert self._candidates is not None
        spare = len(self._candidates) - 1
        busy = on_device([bool(history) for history in sequences.history], sequences.device).bool()[:, None]
        seen = torch.cat([busy, busy & draft.valid], 1)
        # Ordered by level, then by row: of equal tokens, the node nearest to its root is used.
        token = torch.where(seen, torch.cat([self._roots[:, None], draft.tokens], 1), spare).t().reshape(-1)
        order = torch.arange(len(token), device=token.device)
        first = torch.full_like(self._candidates[:, 0], len(token)).scatter_reduce_(0, token, order, "amin")
        candidates = best(scores.logits.transpose(0, 1).flatten(0, 1), self.config.width)
        self._candidates[torch.where(first[token] == order, token, spare)] = candidates


def best(logits: Tensor, k: int) -> Tensor:
    """``[n, k]``: ids of the k largest ``logits [n, V]``, in descending order; -1 in place of -inf logits.

    They lie in the k blocks with the largest maxima, so only those are ranked: topk is much slower than a maximum.
    """
    n, v = logits.shape
    blocks = v // _BLOCK
    offset = torch.arange(v, device=logits.device).expand(n, -1)
    if blocks > k:
        full_blocks = logits[:, : blocks * _BLOCK].unflatten(1, (blocks, _BLOCK))
        chosen = full_blocks.amax(2).topk(k, 1).indices
        inside = torch.arange(_BLOCK, device=logits.device)
        rest = torch.arange(blocks * _BLOCK, v, device=logits.device).expand(n, -1)
        offset = torch.cat([(chosen[:, :, None] * _BLOCK + inside).flatten(1), rest], 1)
        logits = logits.gather(1, offset)
    value, index = logits.topk(min(k, v), 1)
    ids = torch.where(value > -torch.inf, offset.gather(1, index), -1)
    return functional.pad(ids, (0, k - ids.shape[1]), value=-1)
