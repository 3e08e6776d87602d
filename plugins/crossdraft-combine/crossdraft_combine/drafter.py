"""The drafter ``combine``: several drafters in one.

``mode: first`` uses, for every slot, the first drafter with a draft: an n-gram if one matches, else a model (the hybrid
of SuffixDecoding, arXiv:2411.04975, section 3, among others). The draft of a slot comes from one drafter, with its q;
the choice of the drafter does not depend on drawn tokens.

``mode: merge`` merges point-mass drafts into one tree of at most ``nodes`` nodes: common prefixes are evaluated once,
and nodes are added round-robin until the tree is full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from pydantic import Field, field_validator
from torch import Tensor
from torch.nn import functional

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
    on_device,
    take_rows,
)

from .merging import merge_trees


class Combine(Drafter):
    """The first drafter with a draft, or the merged trees of all drafters."""

    name = "combine"

    class Config(StrategyConfig):
        drafters: tuple[str | dict[str, Any], ...] = Field(
            min_length=2, max_length=8, description="names, or mappings with name and options, in order"
        )
        mode: Literal["first", "merge"] = Field(
            default="first", description="first: the first drafter with a draft; merge: one tree of all drafts"
        )
        nodes: int = Field(default=32, ge=1, le=MOST_NODES, description="maximum number of nodes of a merged tree")

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
        results = [find_drafter(drafter) for drafter in self.config.drafters]
        self.parts = [_Part(cls(options, context), cls.traits(options, context.sampling)) for cls, options in results]
        offset = 0
        for part in self.parts:  # separate random numbers
            part.offset, offset = offset, offset + (0 if part.traits.point_mass else part.traits.nodes)

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        parts = []
        for drafter in config.drafters:
            part, options = find_drafter(drafter)
            traits = part.traits(options, sampling)
            if reason := _misfit(traits, config.mode):
                raise UsageError(f"drafter 'combine' cannot use '{part.name}': {reason}")
            parts.append(traits)
        point_mass = all(traits.point_mass for traits in parts)
        trees = any(not traits.is_chain for traits in parts)
        if trees and not point_mass:
            raise UsageError(
                "drafter 'combine' cannot use a tree together with a sampled chain: no verifier supports both in one "
                "batch; use only chains, or temperature 0"
            )
        merge = config.mode == "merge"
        read = sum(not (traits.on_host or (_always(traits) and not merge)) for traits in parts[: None if merge else -1])
        nodes, levels = max(traits.nodes for traits in parts), max(traits.depth for traits in parts)
        return DraftTraits(
            kind=DETERMINISTIC if trees or merge else CHAIN,
            point_mass=point_mass,
            nodes=config.nodes if merge else nodes,
            levels=min(levels, config.nodes) if merge else levels,
            temperature_zero_only=any(traits.temperature_zero_only for traits in parts),
            adapts=any(traits.adapts for traits in parts),
            # The nodes of all drafts, and the accepted ones; or the valid nodes of each draft but the last.
            waits=sum(traits.waits for traits in parts) + (1 + (read > 0) if merge else read),
            on_host=merge,
        )

    @classmethod
    def wrapped(cls, config: Any) -> Sequence[type[Drafter]]:
        results = [find_drafter(drafter) for drafter in config.drafters]
        return [drafter for part, options in results for drafter in (part, *part.wrapped(options))]

    @classmethod
    def remembers(cls, config: Any) -> bool:
        results = [find_drafter(drafter) for drafter in config.drafters]
        return any(part.remembers(options) for part, options in results)

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
        if self.config.mode == "first":
            for part in self.parts:
                part.drafter.observe(sequences, *part.own_rows(sequences, draft, verdict, accepted, scores))
            return
        if verdict.path is None or not draft.width:
            rows = [[row] for row in verdict.token.tolist()]
        else:  # the emitted token, the path, and the drafted tokens, in one copy
            rows = torch.cat([verdict.token[:, None], verdict.path, draft.tokens], 1).tolist()
        for part in self.parts:
            part.drafter.observe(sequences, *part.own_nodes(draft, rows, accepted, scores))

    # -- mode first -----------------------------------------------------------------------------------------

    def _first(self, sequences: Sequences, rng: StepRng) -> Draft:
        limit = list(sequences.limit)
        for part in self.parts:
            part.propose(replace(sequences, limit=list(limit)), rng)
            part.chosen = part.drafted(limit, last=part is self.parts[-1])
            limit = [0 if chosen else length for length, chosen in zip(limit, part.chosen, strict=True)]
        width = max(part.draft.width for part in self.parts)
        if not width:
            return Draft.empty(sequences.batch_size, sequences.device)
        chain = all(part.traits.is_chain for part in self.parts)
        order = torch.arange(width, device=sequences.device).expand(sequences.batch_size, width)
        tokens, parents, valid = torch.zeros_like(order), order - 1, torch.zeros_like(order, dtype=torch.bool)
        q, finite = None, None
        if not all(part.traits.point_mass for part in self.parts):
            dtypes = [part.draft.q.dtype for part in self.parts if part.draft.q is not None]
            dtype = dtypes[0] if dtypes else torch.float32
            q = torch.zeros(*order.shape, self.context.vocab_size, dtype=dtype, device=order.device)
        for part in self.parts:
            own, n = part.draft, part.draft.width
            chosen = on_device(part.chosen, order.device).bool()[:, None]
            tokens[:, :n] = torch.where(chosen, own.tokens, tokens[:, :n])
            parents[:, :n] = torch.where(chosen, own.parents, parents[:, :n])
            valid[:, :n] = torch.where(chosen, own.valid, valid[:, :n])
            if q is not None and n:
                q[:, :n] = torch.where(chosen[..., None], _draft_probs(own, q), q[:, :n])
            if own.finite is not None:
                sound = own.finite | ~(chosen & own.valid).any(1)
                finite = sound if finite is None else finite & sound
        return Draft(tokens, parents, valid, q, kind=CHAIN if chain else DETERMINISTIC, finite=finite)

    # -- mode merge ------------------------------------------------------------------------------------------

    def _merged(self, sequences: Sequences, rng: StepRng) -> Draft:
        for part in self.parts:
            part.propose(sequences, rng)
        nodes = self._nodes()
        trees = [merge_trees([rows[row] for rows in nodes], self.config.nodes) for row in range(sequences.batch_size)]
        for i, part in enumerate(self.parts):
            part.indices = [tree.indices[i] for tree in trees]
        draft = Draft.copied([t.tokens for t in trees], sequences.device, [t.parents for t in trees])
        finite = [part.draft.finite for part in self.parts if part.draft.finite is not None]
        draft.finite = torch.stack(finite).all(0) if finite else None
        return draft

    def _nodes(self) -> list[list[list[tuple[int, int]]]]:
        """Per part and slot, token and parent of every node; token -1 = invalid."""
        copies = [part.draft.start_copy() for part in self.parts]
        drafts = [copy() for copy in reversed(copies)]  # one wait: with the last copy all have arrived
        return [
            [
                [(token if valid else -1, parent) for token, parent, valid in zip(*row, strict=True)]
                for row in zip(*draft, strict=True)
            ]
            for draft in reversed(drafts)
        ]


class _Part:
    """One of the drafters, and its draft of this step.

    Attributes:
        offset: of its random numbers.
        chosen: per slot, True if the draft is this drafter's.
        indices: per slot, index in the merged tree of each of its nodes, -1 = dropped.
    """

    def __init__(self, drafter: Drafter, traits: DraftTraits):
        self.drafter, self.traits, self.offset = drafter, traits, 0
        self.draft = Draft.empty(0)
        self.chosen: list[bool] = []
        self.indices: list[list[int]] = []

    def propose(self, sequences: Sequences, rng: StepRng) -> None:
        self.draft = self.drafter.propose(sequences, cast(StepRng, _OffsetRng(rng, self.offset)))
        if self.draft.probes:
            raise UsageError(
                f"drafter 'combine' cannot use '{self.drafter.name}': its drafts contain probes, which are not verified"
            )

    def drafted(self, limit: Sequence[int], last: bool) -> list[bool]:
        """For each slot, True if it has a draft; of the last drafter, if it had room for one."""
        if last or _always(self.traits):
            return [length > 0 for length in limit]
        return [length > 0 and any(row) for length, row in zip(limit, self.draft.start_copy()().valid, strict=True)]

    def own_rows(
        self, sequences: Sequences, draft: Draft, verdict: Verdict, accepted: Sequence[int], scores: Scores
    ) -> tuple[Draft, Verdict, list[int], Scores]:
        """Arguments of `observe`, restricted to the slots whose draft was chosen."""
        own = self.draft.trimmed(draft.width)
        chosen = on_device(self.chosen, own.tokens.device).bool()
        path = verdict.path if verdict.path is None else torch.where(chosen[:, None], verdict.path, -1)
        own_verdict = Verdict(torch.where(chosen, verdict.length, 0), verdict.token, path)
        n = own.width + 1
        return (
            replace(own, valid=own.valid & chosen[:, None]),
            own_verdict,
            [tau if is_chosen else 0 for tau, is_chosen in zip(accepted, self.chosen, strict=True)],
            DenseScores(scores.p[:, :n], scores.logits[:, :n], scores.hidden),
        )

    def own_nodes(
        self, draft: Draft, rows: Sequence[Sequence[int]], accepted: Sequence[int], scores: Scores
    ) -> tuple[Draft, Verdict, list[int], Scores]:
        """Arguments of `observe`, restricted to this drafter's nodes of the merged tree and of the accepted path.

        ``rows``: for each slot the emitted token, the path and the merged tree's tokens.
        """
        own, device = self.draft, self.draft.tokens.device
        width = draft.width
        paths, token = [], [row[0] for row in rows]
        accepted_paths = [row[1 : len(row) - width] for row in rows]
        for row, indices in enumerate(self.indices):
            own_node = {index: node for node, index in enumerate(indices) if index >= 0}
            own_path = [own_node.get(index, -1) for index in accepted_paths[row][: accepted[row]]]
            tau = own_path.index(-1) if -1 in own_path else len(own_path)
            if tau < len(own_path):  # the next accepted token is the target's token for this drafter
                token[row] = rows[row][len(rows[row]) - width + accepted_paths[row][tau]]
            paths.append(own_path[:tau])
        lengths = [len(path) for path in paths]
        index = functional.pad(on_device(self.indices, device).view(len(paths), own.width) + 1, (1, 0))
        depth = max(lengths)
        padded = [[*path, *[-1] * (depth - len(path))] for path in paths]
        path = None if own.is_chain else on_device(padded, device).view(len(paths), depth)
        kept = index[:, 1:] > 0
        own_verdict = Verdict(on_device(lengths, device), on_device(token, device), path)
        own_scores = DenseScores(take_rows(scores.p, index), take_rows(scores.logits, index), scores.hidden)
        return replace(own, valid=own.valid & kept), own_verdict, lengths, own_scores


@dataclass(frozen=True)
class _OffsetRng:
    """The random numbers of a step from ``offset`` on."""

    rng: StepRng
    offset: int

    def accept(self, h: Tensor, purpose: str = "accept", index: int = 0) -> Tensor:
        return self.rng.accept(h, purpose, index + self.offset)

    def draw(self, weights: Tensor, purpose: str = "residual", index: int = 0) -> Tensor:
        return self.rng.draw(weights, purpose, index + self.offset)


def _draft_probs(draft: Draft, like: Tensor) -> Tensor:
    """``[B, N, V]``: q of each node; one-hot for point masses."""
    if draft.q is None:
        return torch.zeros_like(like[:, : draft.width]).scatter_(2, draft.tokens[..., None], 1)
    return draft.q[:, : draft.width] if draft.q_index is None else take_rows(draft.q, draft.q_index)


def _always(traits: DraftTraits) -> bool:
    """True if a slot with room for a draft always has one."""
    return traits.always_drafts and traits.nodes > 0


def _misfit(traits: DraftTraits, mode: str) -> str | None:
    """Reason why drafts with these traits cannot be combined; None if they can."""
    if traits.kind not in (CHAIN, DETERMINISTIC):
        return f"it drafts '{traits.kind}'" if traits.kind else "it never drafts"
    if traits.hidden_layers:
        return "it reads the target's hidden states of its own drafts only"
    if mode == "merge" and not traits.point_mass:
        return "it samples its tokens, but merge needs point masses; use mode: first, or temperature 0"
    return None
