"""The drafter ``combine``: several drafters in one.

``mode: first`` asks them in order, for every slot, until one has something: an n-gram where there is one, a model where
there is none (the hybrid of SuffixDecoding, arXiv:2411.04975, section 3, among others). The draft of a slot is one
drafter's own, with that drafter's q; which drafter that is does not depend on what was drawn.

``mode: merge`` puts drafts that nothing was drawn for into one tree of at most ``nodes`` nodes: equal beginnings are
evaluated once, and the drafters take turns, a node each, until the tree is full. All nodes are point masses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from pydantic import Field, field_validator
from torch import Tensor

from crossdraft import (
    CHAIN,
    DETERMINISTIC,
    MOST_NODES,
    CrossdraftError,
    DenseScores,
    Draft,
    DraftContext,
    Drafter,
    DraftTraits,
    Sampling,
    Scores,
    Sequences,
    StepRng,
    StrategyConfig,
    UsageError,
    Verdict,
    find_drafter,
    take_rows,
)

from .merging import merged


class Combine(Drafter):
    """The first drafter that has something, or the trees of all."""

    name = "combine"

    class Config(StrategyConfig):
        drafters: tuple[str | dict[str, Any], ...] = Field(
            min_length=2, max_length=8, description="names, or mappings with name and options, in order"
        )
        mode: Literal["first", "merge"] = Field(
            default="first", description="first: the first drafter that has something; merge: one tree of all"
        )
        nodes: int = Field(default=32, ge=1, le=MOST_NODES, description="most nodes of a merged tree")

        @field_validator("drafters")
        @classmethod
        def _known(cls, drafters: tuple[str | dict[str, Any], ...]) -> tuple[str | dict[str, Any], ...]:
            for drafter in drafters:
                try:
                    find_drafter(drafter)
                except CrossdraftError as error:
                    raise ValueError(str(error)) from None
            return drafters

    config: Config

    def __init__(self, config: StrategyConfig, context: DraftContext):
        super().__init__(config, context)
        found = [find_drafter(drafter) for drafter in self.config.drafters]
        self.parts = [_Part(cls(options, context), cls.traits(options, context.sampling)) for cls, options in found]
        offset = 0
        for part in self.parts:  # each draws numbers of its own
            part.offset, offset = offset, offset + (0 if part.traits.point_mass else part.traits.nodes)

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        parts = []
        for drafter in config.drafters:
            part, options = find_drafter(drafter)
            traits = part.traits(options, sampling)
            if reason := _misfit(traits, config.mode):
                raise UsageError(f"drafter 'combine' cannot take '{part.name}': {reason}")
            parts.append(traits)
        point_mass = all(traits.point_mass for traits in parts)
        trees = any(not traits.is_chain for traits in parts)
        if trees and not point_mass:
            raise UsageError(
                "drafter 'combine' cannot take a tree beside a chain that is drawn: no rule judges such drafts in one "
                "batch; take chains alone, or temperature 0"
            )
        merge = config.mode == "merge"
        nodes, levels = max(traits.nodes for traits in parts), max(traits.depth for traits in parts)
        return DraftTraits(
            kind=DETERMINISTIC if trees or merge else CHAIN,
            point_mass=point_mass,
            nodes=config.nodes if merge else nodes,
            levels=min(levels, config.nodes) if merge else levels,
            temperature_zero_only=any(traits.temperature_zero_only for traits in parts),
            adapts=any(traits.adapts for traits in parts),
        )

    @classmethod
    def wrapped(cls, config: Any) -> Sequence[type[Drafter]]:
        found = [find_drafter(drafter) for drafter in config.drafters]
        return [one for part, options in found for one in (part, *part.wrapped(options))]

    @classmethod
    def remembers(cls, config: Any) -> bool:
        found = [find_drafter(drafter) for drafter in config.drafters]
        return any(part.remembers(options) for part, options in found)

    @property
    def passes(self) -> int:
        return sum(part.drafter.passes for part in self.parts)

    def start(self, row: int, prompt: Sequence[int], hidden: Tensor | None = None) -> None:
        for part in self.parts:
            part.drafter.start(row, prompt)

    def free(self, row: int, finish_reason: str | None = None) -> None:
        for part in self.parts:
            part.drafter.free(row, finish_reason)

    def reset(self) -> None:
        for part in self.parts:
            part.drafter.reset()

    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        return self._merged(sequences, rng) if self.config.mode == "merge" else self._first(sequences, rng)

    def observe(
        self, sequences: Sequences, draft: Draft, verdict: Verdict, accepted: Sequence[int], scores: Scores
    ) -> None:
        for part in self.parts:
            see = part.own_nodes if self.config.mode == "merge" else part.own_rows
            part.drafter.observe(sequences, *see(sequences, draft, verdict, accepted, scores))

    # -- the first that has something -----------------------------------------------------------------------

    def _first(self, sequences: Sequences, rng: StepRng) -> Draft:
        limit = list(sequences.limit)
        for part in self.parts:
            part.propose(replace(sequences, limit=list(limit)), rng)
            part.mine = [bool(room and count) for room, count in zip(limit, part.counts(), strict=True)]
            limit = [0 if mine else room for room, mine in zip(limit, part.mine, strict=True)]
        width = max(part.draft.width for part in self.parts)
        if not width:
            return Draft.empty(sequences.batch_size, sequences.device)
        chain = all(part.traits.is_chain for part in self.parts)
        order = torch.arange(width, device=sequences.device).expand(sequences.batch_size, width)
        tokens, parents, valid = torch.zeros_like(order), order - 1, torch.zeros_like(order, dtype=torch.bool)
        q, finite = None, None
        if not all(part.traits.point_mass for part in self.parts):
            given = [part.draft.q.dtype for part in self.parts if part.draft.q is not None]
            dtype = given[0] if given else torch.float32
            q = torch.zeros(*order.shape, self.context.vocab_size, dtype=dtype, device=order.device)
        for part in self.parts:
            own, n = part.draft, part.draft.width
            mine = torch.tensor(part.mine, device=order.device)[:, None]
            tokens[:, :n] = torch.where(mine, own.tokens, tokens[:, :n])
            parents[:, :n] = torch.where(mine, own.parents, parents[:, :n])
            valid[:, :n] = torch.where(mine, own.valid, valid[:, :n])
            if q is not None and n:
                q[:, :n] = torch.where(mine[..., None], _laws(own, q), q[:, :n])
            if own.finite is not None:
                fine = own.finite | ~mine[:, 0]
                finite = fine if finite is None else finite & fine
        return Draft(tokens, parents, valid, q, kind=CHAIN if chain else DETERMINISTIC, finite=finite)

    # -- all of them -----------------------------------------------------------------------------------------

    def _merged(self, sequences: Sequences, rng: StepRng) -> Draft:
        for part in self.parts:
            part.propose(sequences, rng)
        nodes = [part.nodes() for part in self.parts]
        trees = [merged([of[row] for of in nodes], self.config.nodes) for row in range(sequences.batch_size)]
        for i, part in enumerate(self.parts):
            part.places = [tree.places[i] for tree in trees]
        found = Draft.copied([t.tokens for t in trees], sequences.device, [t.parents for t in trees])
        finite = [part.draft.finite for part in self.parts if part.draft.finite is not None]
        return replace(found, finite=torch.stack(finite).all(0)) if finite else found


class _Part:
    """One of the drafters, and what it proposed in this step.

    Attributes:
        offset: of the numbers that it draws.
        mine: whether each slot's draft is this drafter's.
        places: for each slot, the place in the merged tree of each of its nodes, -1 = none.
    """

    def __init__(self, drafter: Drafter, traits: DraftTraits):
        self.drafter, self.traits, self.offset = drafter, traits, 0
        self.draft = Draft.empty(0)
        self.mine: list[bool] = []
        self.places: list[list[int]] = []

    def propose(self, sequences: Sequences, rng: StepRng) -> None:
        self.draft = self.drafter.propose(sequences, cast(StepRng, _Shifted(rng, self.offset)))

    def counts(self) -> list[int]:
        """Nodes of each slot: what the device has to be asked for."""
        return self.draft.count.tolist() if self.draft.width else [0] * self.draft.batch_size

    def nodes(self) -> list[list[tuple[int, int]]]:
        """For each slot token and parent of every node up to the last valid one; token -1 = there is none."""
        own = self.draft
        tokens, parents = torch.stack([torch.where(own.valid, own.tokens, -1), own.parents]).tolist()
        return [list(zip(*row, strict=True)) for row in zip(tokens, parents, strict=True)]

    def own_rows(
        self, sequences: Sequences, draft: Draft, verdict: Verdict, accepted: Sequence[int], scores: Scores
    ) -> tuple[Draft, Verdict, list[int], Scores]:
        """What this drafter is to observe of a step in which some slots' drafts were its own: of others, none was."""
        own = self.draft.trimmed(draft.width)
        mine = torch.tensor(self.mine, device=own.tokens.device)
        path = verdict.path if verdict.path is None else torch.where(mine[:, None], verdict.path, -1)
        seen = Verdict(torch.where(mine, verdict.length, 0), verdict.token, path)
        n = own.width + 1
        return (
            replace(own, valid=own.valid & mine[:, None]),
            seen,
            [tau if is_mine else 0 for tau, is_mine in zip(accepted, self.mine, strict=True)],
            DenseScores(scores.p[:, :n], scores.logits[:, :n], scores.hidden),
        )

    def own_nodes(
        self, sequences: Sequences, draft: Draft, verdict: Verdict, accepted: Sequence[int], scores: Scores
    ) -> tuple[Draft, Verdict, list[int], Scores]:
        """The same of a merged tree: its nodes that were kept, and how far the accepted path went along them."""
        own, device = self.draft, self.draft.tokens.device
        taken = [[]] * own.batch_size if verdict.path is None else verdict.path.tolist()
        paths, token = [], verdict.token.tolist()
        for row, places in enumerate(self.places):
            back = {place: node for node, place in enumerate(places) if place >= 0}
            along = [back.get(place, -1) for place in taken[row][: accepted[row]]]
            tau = along.index(-1) if -1 in along else len(along)
            if tau < len(along):  # to this drafter, the rest is what the target says
                token[row] = int(draft.tokens[row, taken[row][tau]])
            paths.append(along[:tau])
        lengths = [len(path) for path in paths]
        index = torch.zeros(len(paths), own.width + 1, dtype=torch.long, device=device)
        index[:, 1:] = torch.tensor(self.places, device=device) + 1
        depth = max(lengths)
        padded = [[*path, *[-1] * (depth - len(path))] for path in paths]
        path = None if own.is_chain else torch.tensor(padded, dtype=torch.long, device=device).view(len(paths), depth)
        kept = index[:, 1:] > 0
        seen = Verdict(torch.tensor(lengths, device=device), torch.tensor(token, device=device), path)
        mine = DenseScores(take_rows(scores.p, index), take_rows(scores.logits, index), scores.hidden)
        return replace(own, valid=own.valid & kept), seen, lengths, mine


@dataclass(frozen=True)
class _Shifted:
    """A step's random numbers from an index on."""

    rng: StepRng
    offset: int

    def accept(self, h: Tensor, purpose: str = "accept", index: int = 0) -> Tensor:
        return self.rng.accept(h, purpose, index + self.offset)

    def draw(self, weights: Tensor, purpose: str = "residual", index: int = 0) -> Tensor:
        return self.rng.draw(weights, purpose, index + self.offset)


def _laws(draft: Draft, like: Tensor) -> Tensor:
    """``[B, N, V]``: the law of each node; a point mass is one-hot."""
    if draft.q is None:
        return torch.zeros_like(like[:, : draft.width]).scatter_(2, draft.tokens[..., None], 1)
    return draft.q[:, : draft.width] if draft.q_index is None else take_rows(draft.q, draft.q_index)


def _misfit(traits: DraftTraits, mode: str) -> str | None:
    """Why drafts like these cannot be combined; None if they can."""
    if traits.kind not in (CHAIN, DETERMINISTIC):
        return f"it drafts '{traits.kind}'" if traits.kind else "it never drafts"
    if traits.hidden_layers:
        return "it follows the target's hidden states, which it would miss where another one drafts"
    if mode == "merge" and not traits.point_mass:
        return "it draws its tokens here, and merge takes what nothing is drawn for; use mode: first, or temperature 0"
    return None
