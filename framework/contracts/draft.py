"""The tensors that travel between drafter, target and verifier. Ground floor: imports nothing of ours.

Shapes use B = rows of the batch (slots), N = drafted nodes of the widest row, D = depth of the deepest
node, V = the target's vocabulary. Every tensor of one step lives on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..util.static_trees import TreeShape, tree_constant
from ..util.tensors import ancestor_mask, counting, eager_on_cpu, on_device, take_rows
from .draft_kind import CHAIN, DETERMINISTIC, IID, DraftKind
from .scores import DenseScores as DenseScores  # the tensors of a step are imported from one place
from .scores import Scores as Scores


@dataclass
class Draft:
    """The proposed tokens of one step: one token tree per row; a chain is a tree without branches.

    Attributes:
        tokens: ``[B, N]`` int64, parents before children, siblings in the order they were drawn.
        parents: ``[B, N]`` int64, index of each node's parent, -1 = the root (the last committed token).
        valid: ``[B, N]`` bool. Rows may be ragged, 0 nodes allowed. In a chain, invalid nodes come last in their row;
            in a tree they may stand anywhere, and what hangs below one is invalid too.
        q: ``[B, M, V]`` float32 (float64 on exact models), the laws the tokens were *actually* drawn from,
            after every temperature, top-k and top-p that was applied; ``None`` = every node is a point mass. Finite in
            padding, too, because rules multiply it by 0. A chain may have more rows than nodes: the law after a last
            token (`DraftContext.final_q`), and what was cut.
        q_index: ``[B, N]`` int64, the row of ``q`` each node was drawn from; ``None`` = row i for node i.
        kind: structure of the draft, see `DraftKind`.
        sequences: ``[B, K, L]`` int64 for ``iid``: the node that token i of sequence k is, -1 = past its end;
            all sequences of a row are equally long. ``None`` for other drafts.
        levels: depth of the deepest node there can be, if the drafter knows it (rules that walk down level by
            level save time); ``None`` = N.
        children: of a tree that is the same in all rows, settled before anything was drawn: how many children each
            node has, see `fixed_tree`. Rules judge such a tree level by level; ``None`` = another tree.
        probes: so many of the last nodes are scored, but are no candidates: the verifier never sees them, and the
            drafter finds what the target says after them in ``Scores`` (lookahead's window). A probe's parent may be a
            candidate or a probe; probes do not count towards ``sequences.limit``.
        finite: ``[B]`` bool, False where a logit that the draft was made from was NaN: that sequence ends with a
            sentence that names the drafter; ``None`` = the drafter does not say.
        begun: of a chain, the fork of the target (`LM.fork`) that was fed the root and then this draft's first tokens:
            the target takes up what that computed in its first layers, see `LM.forward`. ``None`` = there is none.

    Siblings never carry the same token. The loop checks all of this, see `Decoder`.

    The q contract: ``q`` must be the law of the draw, and a token that was looked at (to decide whether to go
    on, say) must be kept in the draft. Breaking either changes what the target says; ``crossdraft certify``
    shows it.
    """

    tokens: Tensor
    parents: Tensor
    valid: Tensor
    q: Tensor | None = None
    q_index: Tensor | None = None
    kind: DraftKind = CHAIN
    sequences: Tensor | None = None
    levels: int | None = None
    children: TreeShape | None = None
    probes: int = 0
    finite: Tensor | None = None
    resume_from: Any = None

    @classmethod
    def chain(
        cls, tokens: Tensor, length: Tensor | Sequence[int], q: Tensor | None = None, *, finite: Tensor | None = None
    ) -> Draft:
        """A chain per row: ``tokens [B, N]``, of which the first ``length [B]`` count; ``q [B, N, V]`` or None.

        Lengths that are known on the host, a list, cut the columns that no row fills: the target evaluates every column
        for every row. Of a tensor they cannot be known without waiting for the device.
        """
        if not isinstance(length, Tensor):
            tokens, length = tokens[:, : max(length, default=0)], on_device(list(length), tokens.device)
        order = counting(tokens.shape[1], tokens.device)
        return cls(
            tokens=tokens,
            parents=(order - 1).expand_as(tokens),
            valid=order < length[:, None],
            q=q,
            kind=CHAIN,
            finite=finite,
        )

    @classmethod
    def copied(
        cls,
        rows: Sequence[Sequence[int]],
        device: torch.device | str,
        parents: Sequence[Sequence[int]] | None = None,
    ) -> Draft:
        """Point masses from lists of token ids on the host, one list a row, of any length: chains, or trees.

        ``parents``: the index of each token's parent in its row, -1 = the root; parents come before children.
        """
        device, width = torch.device(device), max(map(len, rows), default=0)
        padded = [[*tokens, *[0] * (width - len(tokens))] for tokens in rows]
        if parents is None:
            tokens = on_device(padded, device).view(len(rows), width)
            return cls.chain(tokens, [len(row) for row in rows])
        if not width:
            return cls.empty(len(rows), device)
        links = [[*row, *[-1] * (width - len(row))] for row in parents]
        there = [[i < len(row) for i in range(width)] for row in rows]
        tokens, above, valid = on_device([padded, links, there], device)
        levels = 0
        for row in parents:
            depth: list[int] = []
            for parent in row:
                depth.append(depth[parent] + 1 if parent >= 0 else 1)
            levels = max(levels, *depth) if depth else levels
        return cls(tokens, above, valid.bool(), kind=DETERMINISTIC, levels=levels)

    @classmethod
    def iid(cls, tokens: Tensor, length: Tensor, q: Tensor) -> Draft:
        """K sequences per row, drawn independently, merged into a tree whose nodes the target evaluates once.

        Args:
            tokens: ``[B, K, L]``, of which the first ``length [B]`` count.
            q: ``[B, 1 + (L - 1) K, V]``: row 0 is the law of every first token, row ``1 + (i - 1) K + k`` that of
                token i of sequence k (i = 1, 2, ..).
        """
        (b, k, depth), device = tokens.shape, tokens.device
        inside = (counting(depth, device) < length[:, None])[:, None].expand(b, k, depth)
        same = (tokens[:, :, None] == tokens[:, None]).long().cumprod(-1)  # [B, k, k', i]: equal up to token i
        first = same.argmax(2)  # the first sequence that shares sequence k's prefix of i + 1 tokens
        new = (first == counting(k, device)[:, None]) & inside
        count = new.transpose(1, 2).reshape(b, -1).cumsum(1)  # level by level
        index = (count - 1).view(b, depth, k).transpose(1, 2)
        sequences = torch.where(inside, index.gather(1, first), -1)
        # Fewer target rows, where the host may look for nothing.
        width = int(count[:, -1].max()) if k * depth and eager_on_cpu(tokens) else k * depth
        if not width:
            return cls.empty(b, device)
        parents = functional.pad(sequences[:, :, :-1], (1, 0), value=-1)
        # Siblings name the same row, that of the first sequence through their parent.
        q_index = functional.pad(first[:, :, :-1] + 1 + counting(depth - 1, device, k), (1, 0))
        slot = torch.where(new, sequences, width).flatten(1)  # copies land in a spare column
        compact = torch.zeros(b, 3, width + 1, dtype=torch.long, device=device)
        compact.scatter_(2, slot[:, None].expand(-1, 3, -1), torch.stack([tokens, parents + 1, q_index], 1).flatten(2))
        tokens, above, q_index = compact[:, :, :width].unbind(1)
        return cls(
            tokens=tokens,
            parents=above - 1,
            valid=counting(width, device) < count[:, -1:],
            q=q,
            q_index=q_index,
            kind=IID,
            sequences=sequences,
            levels=depth,
        )

    @classmethod
    def empty(cls, batch_size: int, device: torch.device | str = "cpu") -> Draft:
        """No proposal for any row: the target decodes one token by itself."""
        nothing = torch.empty(batch_size, 0, dtype=torch.long, device=device)
        return cls(tokens=nothing, parents=nothing, valid=nothing.bool())

    @property
    def batch_size(self) -> int:
        return self.tokens.shape[0]

    @property
    def width(self) -> int:
        """N, nodes of the widest row (padding included)."""
        return self.tokens.shape[1]

    @property
    def is_chain(self) -> bool:
        """True if every node is the child of the one before it."""
        return self.kind.is_chain and not self.probes

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> Draft:
        """A copy with ``function`` applied to every tensor ``[B, ..]``, to select or reorder rows.

        A fork to resume from (``begun``) belongs to the whole batch and is left out.
        """
        tensors = {one.name: value for one in fields(self) if isinstance(value := getattr(self, one.name), Tensor)}
        return replace(self, **{name: function(value) for name, value in tensors.items()}, resume_from=None)

    def first_nodes(self, n: int) -> Draft:
        """A copy with the first ``n`` nodes of every row; q keeps all its rows, and probes count from the end."""
        nodes = {name: getattr(self, name)[:, :n] for name in ("tokens", "parents", "valid")}
        return replace(self, **nodes, q_index=None if self.q_index is None else self.q_index[:, :n])

    @property
    def candidates(self) -> Draft:
        """The draft without its probes: the nodes that a verifier judges."""
        return replace(self.first_nodes(self.width - self.probes), children=None, probes=0) if self.probes else self

    def trimmed(self, most: int) -> Draft:
        """A chain without its columns beyond ``most``, which no row has room for; other drafts as they are."""
        return self.first_nodes(most) if self.is_chain and self.width > most else self

    @property
    def point_mass(self) -> bool:
        return self.q is None

    def q_of(self, node: Tensor, like: Tensor) -> Tensor:
        """``[B, V]``: the law ``node [B]`` of each row was drawn from; ``like [B, V]`` shapes a point mass."""
        node = node[:, None]
        if self.q is None:
            return torch.zeros_like(like).scatter_(1, self.tokens.gather(1, node), 1.0)
        return take_rows(self.q, (node if self.q_index is None else self.q_index.gather(1, node)).squeeze(1))

    def as_sequences(self) -> Tensor:
        """``[B, K, L]``: the node that token i of sequence k is, -1 past its end; a chain is one sequence.

        A tree that branches at the root alone, level after level, is as many chains as the root has children.
        """
        if self.sequences is not None:
            return self.sequences
        if not self.width:
            return self.tokens[:, None]
        order = torch.arange(self.width, device=self.tokens.device)
        depth = self.width if self.is_chain or not self.levels else self.levels
        return torch.where(self.valid, order, -1).view(self.batch_size, depth, -1).transpose(1, 2)

    @cached_property
    def count(self) -> Tensor:
        """``[B]`` int64, valid nodes per row (a chain's draft length gamma)."""
        return self.valid.sum(1)

    @cached_property
    def ancestor_mask(self) -> Tensor:
        """``[B, N, N]`` bool, ``[b, i, j]``: node j is node i or one of its ancestors."""
        n = self.width
        if self.is_chain:
            order = torch.arange(n, device=self.tokens.device)
            return (order[:, None] >= order).expand(self.batch_size, n, n)
        if not n:
            return self.valid[..., None].expand(self.batch_size, 0, 0)
        if self.children is not None:
            return tree_constant(self.children, "ancestor_mask", self.tokens.device).expand(self.batch_size, n, n)
        return ancestor_mask(self.parents, n if self.levels is None else self.levels)

    @cached_property
    def earlier_siblings(self) -> Tensor:
        """``[B, N, N]`` bool, ``[b, i, j]``: node j is an elder sibling of node i (drawn before it)."""
        order = torch.arange(self.width, device=self.tokens.device)
        return (self.parents[..., None] == self.parents[:, None]) & (order[:, None] > order) & self.valid[:, None]

    @cached_property
    def depth(self) -> Tensor:
        """``[B, N]`` int64, 1 for a child of the root."""
        if self.children is not None:
            return tree_constant(self.children, "depth", self.tokens.device)[1:].expand_as(self.tokens)
        return self.ancestor_mask.sum(-1)

    def depth_of(self, node: Tensor) -> Tensor:
        """``[B]`` int64: the depth of ``node [B]``, 0 for the root (-1)."""
        if self.children is not None:
            return tree_constant(self.children, "depth", node.device).index_select(0, node + 1)
        return torch.where(node >= 0, self.depth.gather(1, node.clamp(min=0)[:, None]).squeeze(1), 0)

    def path_to(self, node: Tensor) -> Tensor:
        """``[B, D]`` int64: nodes from the root's child down to ``node [B]``, padded with -1 (node -1: all padding)."""
        if self.width == 0:
            return self.tokens.clone()
        if self.children is not None:
            return tree_constant(self.children, "paths", node.device).index_select(0, node + 1)
        if self.sequences is not None:
            # Any sequence through it, down to it: what is below a node has a higher index.
            through = (self.sequences == node[:, None, None]).any(2).max(1).indices
            along = self.sequences.gather(1, through[:, None, None].expand(-1, 1, self.sequences.shape[2])).squeeze(1)
            return torch.where(along <= node[:, None], along, -1)
        index = node.clamp(min=0)
        on_path = self.ancestor_mask[torch.arange(self.batch_size, device=node.device), index] & (node >= 0)[:, None]
        order = torch.arange(self.width, device=node.device).expand_as(self.tokens)
        padded = torch.full((self.batch_size, self.width + 1), -1, dtype=torch.long, device=node.device)
        slot = torch.where(on_path, self.depth - 1, self.width)  # nodes off the path land in the spare column
        padded.scatter_(1, slot, torch.where(on_path, order, -1))
        return padded[:, : self.width]


@dataclass
class Verdict:
    """Accepted tokens of a draft, and the token that follows them.

    Attributes:
        length: ``[B]`` int64, tau, the accepted draft tokens of each row.
        token: ``[B]`` int64, the correction (or bonus) token drawn after them.
        path: ``[B, D]`` int64, indices of the accepted nodes, padded with -1; ``None`` = the first tau nodes,
            which is what accepting a prefix of a chain means.
        survival: optional ``[B, D]`` float64, Pr(tau >= i | the first i tokens of this draft), which single-draft rules
            know in closed form: averaging it estimates block efficiency with less noise than the 0/1 outcome.
    """

    length: Tensor
    token: Tensor
    path: Tensor | None = None
    survival: Tensor | None = None


@dataclass
class Sequences:
    """The committed tokens of every slot: what a drafter may look at.

    Attributes:
        history: per slot, the committed tokens (prompt and output) as a list; empty for a free slot.
        tokens: ``[B, max_length]`` int64 on the device, the same tokens; written when they are read.
        limit: per slot, how many tokens a draft may be deep this step (tokens still wanted minus the one
            the verifier always adds); 0 for a free slot.
        stream: per slot, the number of the random stream (the prompt's index in the run).
    """

    history: list[list[int]]
    tokens: Tensor
    limit: list[int] = field(default_factory=list)
    stream: list[int] = field(default_factory=list)

    @property
    def batch_size(self) -> int:
        return len(self.history)

    @property
    def occupied(self) -> int:
        """Slots that hold a sequence."""
        return sum(map(bool, self.history))

    @property
    def device(self) -> torch.device:
        return self._held.device

    def append(self, row: int, new: Sequence[int]) -> None:
        """Commit ``new`` tokens to slot ``row``."""
        self._written[row] = min(self._written[row], len(self.history[row]))
        self.history[row].extend(new)

    def _hold(self, tokens: Tensor) -> None:
        self._held, self._written = tokens, [len(history) for history in self.history]

    def _up_to_date(self) -> Tensor:
        missing = [
            (row, place, history[place])
            for row, (history, written) in enumerate(zip(self.history, self._written, strict=True))
            for place in range(written, len(history))
        ]
        if missing:
            rows, places, tokens = on_device(list(zip(*missing, strict=True)), self.device)
            self._held[rows, places] = tokens
            self._written = [len(history) for history in self.history]
        return self._held


Sequences.tokens = property(Sequences._up_to_date, Sequences._hold)  # type: ignore[assignment]
