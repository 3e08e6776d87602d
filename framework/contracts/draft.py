"""The tensors passed between drafter, target and verifier.

Shapes use B = rows of the batch (slots), N = drafted nodes of the widest row, D = depth of the deepest
node, V = the target's vocabulary. All tensors of a step are on one device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..util.static_trees import TreeShape, tree_constant
from ..util.tensors import ancestor_mask, at_once, counting, eager_on_cpu, on_device, start_host_copy, take_rows
from .draft_kind import CHAIN, DELAYED_IID, DETERMINISTIC, IID, DraftKind


class DraftLists(NamedTuple):
    """Nodes of a draft on the host: for each row, a value per node."""

    tokens: Sequence[Sequence[int]]
    parents: Sequence[Sequence[int]]
    valid: Sequence[Sequence[int]]


@dataclass
class Draft:
    """The proposed tokens of one step: one token tree per row; a chain is a tree without branches.

    Attributes:
        tokens: ``[B, N]`` int64, parents before children, siblings in the order they were drawn.
        parents: ``[B, N]`` int64, index of each node's parent, -1 = the root (the last committed token).
        valid: ``[B, N]`` bool. Rows may be ragged, down to 0 nodes. In a chain, invalid nodes come last in their row;
            in a tree they may be anywhere, and the children of an invalid node are invalid.
        q: ``[B, M, V]`` float32 (float64 on exact models), the distributions the tokens were *actually* drawn from,
            after temperature, top-k and top-p; ``None`` = every node is a point mass. Finite in padding too, because
            verifiers multiply it by 0. A chain may have more rows than nodes: the distribution after its last token
            (`DraftContext.final_q`), and rows of trimmed nodes.
        q_index: ``[B, N]`` int64, the row of ``q`` each node was drawn from; ``None`` = row i for node i.
        kind: structure of the draft, see `DraftKind`.
        sequences: ``[B, K, L]`` int64 for ``iid``: node index of token i of sequence k, -1 = past its end;
            all sequences of a row have equal length. ``None`` for other drafts.
        trunk: number of first levels of ``sequences`` that were drawn once and are common to all (``delayed_iid``).
        levels: maximum depth of a node, if the drafter knows it (verifiers that process trees level by level save
            time); ``None`` = N.
        children: number of children of each node of a static tree, one shape for all rows, see
            `util.static_trees`. Verifiers process such a tree level by level; ``None`` = a dynamic tree.
        probes: number of nodes, the last of each row, that the target scores but that are not candidates (the window
            of lookahead). The verifier does not get them; the drafter reads their logits from ``Scores``. A
            probe's parent is a candidate or a probe; probes do not count towards ``sequences.limit``.
        finite: ``[B]`` bool, False if the drafter's logits contained NaN: the sequence ends with an error that names
            the drafter; ``None`` = unchecked.
        resume_from: for a chain, a fork of the target (`LM.fork`) that was fed the root and then the first tokens of
            this draft. The target reuses the fork's output of the shared first layers, see `LM.forward`.
        lists: its nodes on the host, if it was made by `copied`; None in changed copies.

    Siblings have distinct tokens. The decoder checks these properties, see `Decoder`.

    The q contract: ``q`` is the distribution of the draw, and a token that was drawn and inspected (to decide whether
    to continue, for example) stays in the draft. Breaking either changes the output distribution; ``crossdraft
    certify`` detects it.
    """

    tokens: Tensor
    parents: Tensor
    valid: Tensor
    q: Tensor | None = None
    q_index: Tensor | None = None
    kind: DraftKind = CHAIN
    sequences: Tensor | None = None
    trunk: int = 0
    levels: int | None = None
    children: TreeShape | None = None
    probes: int = 0
    finite: Tensor | None = None
    resume_from: Any = None
    lists: DraftLists | None = field(default=None, init=False, repr=False, compare=False)

    @classmethod
    def chain(
        cls, tokens: Tensor, length: Tensor | Sequence[int], q: Tensor | None = None, *, finite: Tensor | None = None
    ) -> Draft:
        """A chain per row: the first ``length [B]`` of ``tokens [B, N]`` are valid; ``q [B, N, V]`` or None.

        With a list of lengths, unused columns are cut, since the target evaluates every column for every row. With a
        tensor they stay, since reading it would wait for the device.
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
        cls, rows: Sequence[Sequence[int]], device: torch.device | str, parents: Sequence[Sequence[int]] | None = None
    ) -> Draft:
        """Point masses from one list of token ids per row: chains, or trees if ``parents`` is given.

        ``parents``: the index of each token's parent in its row, -1 = the root; parents come before children.
        """
        device, width = torch.device(device), max(map(len, rows), default=0)
        if not width:
            return cls.empty(len(rows), device)
        padded = [[*tokens, *[0] * (width - len(tokens))] for tokens in rows]
        in_row = [[i < len(row) for i in range(width)] for row in rows]
        if parents is None:
            links = [list(range(-1, width - 1))] * len(rows)
            draft = cls.chain(on_device(padded, device), [len(row) for row in rows])
        else:
            links = [[*row, *[-1] * (width - len(row))] for row in parents]
            tokens, parent_index, valid = on_device([padded, links, in_row], device)
            levels = 0
            for row in parents:
                depth: list[int] = []
                for parent in row:
                    depth.append(depth[parent] + 1 if parent >= 0 else 1)
                levels = max(levels, *depth) if depth else levels
            draft = cls(tokens, parent_index, valid.bool(), kind=DETERMINISTIC, levels=levels)
        draft.lists = DraftLists(padded, links, in_row)
        return draft

    @classmethod
    def iid(cls, tokens: Tensor, length: Tensor, q: Tensor, trunk: int | None = None) -> Draft:
        """K independently drawn sequences per row, merged into a prefix tree.

        Args:
            tokens: ``[B, K, L]``; the first ``length [B]`` tokens are valid.
            q: ``[B, 1 + (L - 1) K, V]``: row 0 is the distribution of every first token, row ``1 + (i - 1) K + k``
                that of token i of sequence k (i = 1, 2, ..).
            trunk: None, or the number of first tokens, equal in all sequences, that were drawn once. The first
                ``trunk`` rows of ``q`` are then their distributions, and the others start after them.
        """
        (b, k, depth), device = tokens.shape, tokens.device
        inside = (counting(depth, device) < length[:, None])[:, None].expand(b, k, depth)
        same = (tokens[:, :, None] == tokens[:, None]).long().cumprod(-1)  # [B, k, k', i]: equal up to token i
        first = same.argmax(2)  # the first sequence with the same first i + 1 tokens
        new = (first == counting(k, device)[:, None]) & inside
        count = new.transpose(1, 2).reshape(b, -1).cumsum(1)  # level by level
        index = (count - 1).view(b, depth, k).transpose(1, 2)
        sequences = torch.where(inside, index.gather(1, first), -1)
        stem = trunk or 0
        width = min(stem, depth) + max(depth - stem, 0) * k
        if width and eager_on_cpu(tokens):  # fewer target rows, if reading the count does not synchronise
            width = int(count[:, -1].max())
        if not width:
            return cls.empty(b, device)
        parents = functional.pad(sequences[:, :, :-1], (1, 0), value=-1)
        # Siblings share the row of the first sequence through their parent.
        branches = first[:, :, stem:-1] + (1 + stem) + counting(max(depth - 1 - stem, 0), device, k)
        q_index = torch.cat([counting(stem + 1, device).expand(b, k, -1), branches], 2)[:, :, :depth]
        slot = torch.where(new, sequences, width).flatten(1)  # copies land in a spare column
        compact = torch.zeros(b, 3, width + 1, dtype=torch.long, device=device)
        compact.scatter_(2, slot[:, None].expand(-1, 3, -1), torch.stack([tokens, parents + 1, q_index], 1).flatten(2))
        tokens, parents, q_index = compact[:, :, :width].unbind(1)
        return cls(
            tokens=tokens,
            parents=parents - 1,
            valid=counting(width, device) < count[:, -1:],
            q=q,
            q_index=q_index,
            kind=IID if trunk is None else DELAYED_IID,
            sequences=sequences,
            trunk=stem,
            levels=depth,
        )

    @classmethod
    def empty(cls, batch_size: int, device: torch.device | str = "cpu") -> Draft:
        """A draft without nodes: the target decodes one token."""
        no_nodes = torch.empty(batch_size, 0, dtype=torch.long, device=device)
        return cls(tokens=no_nodes, parents=no_nodes, valid=no_nodes.bool())

    def start_copy(self) -> Callable[[], DraftLists]:
        """Start to copy the nodes to the host; the result waits for the copy, if they are not there already."""
        lists = self.lists if self.width else DraftLists(*[[[]] * self.batch_size] * 3)
        if lists is not None:
            return lambda: lists
        read = start_host_copy(torch.stack([self.tokens, self.parents, self.valid.long()]))
        return lambda: DraftLists(*read())

    @property
    def batch_size(self) -> int:
        return self.tokens.shape[0]

    @property
    def width(self) -> int:
        """N, nodes of the widest row."""
        return self.tokens.shape[1]

    @property
    def is_chain(self) -> bool:
        """True if every node is the child of the one before it."""
        return self.kind.is_chain and not self.probes

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> Draft:
        """A copy with ``function`` applied to every tensor ``[B, ..]``, to select or reorder rows.

        ``resume_from`` is dropped, since a fork holds the whole batch.
        """
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        tensors = {name: function(value) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **tensors, resume_from=None)

    def first_nodes(self, n: int) -> Draft:
        """A copy with the first ``n`` nodes of every row and all rows of q."""
        nodes = {name: getattr(self, name)[:, :n] for name in ("tokens", "parents", "valid")}
        return replace(self, **nodes, q_index=None if self.q_index is None else self.q_index[:, :n])

    @property
    def candidates(self) -> Draft:
        """The draft without its probes: the nodes to verify."""
        return replace(self.first_nodes(self.width - self.probes), children=None, probes=0) if self.probes else self

    def trimmed(self, max_len: int) -> Draft:
        """A chain cut to ``max_len`` columns; other drafts unchanged."""
        return self.first_nodes(max_len) if self.is_chain and self.width > max_len else self

    @property
    def point_mass(self) -> bool:
        return self.q is None

    def q_of(self, node: Tensor, like: Tensor) -> Tensor:
        """``[B, V]``: the distribution that ``node [B]`` was drawn from, for one node of each row.

        Args:
            node: ``[B]`` int64, index of a node in each row, at least 0.
            like: ``[B, V]``, any tensor with the shape, dtype and device of the result, such as ``p[:, 0]``. Only its
                shape, dtype and device are used, and only if the draft has no q: then the result is 1 at the node's
                token and 0 elsewhere.
        """
        node = node[:, None]
        if self.q is None:
            return torch.zeros_like(like).scatter_(1, self.tokens.gather(1, node), 1.0)
        return take_rows(self.q, (node if self.q_index is None else self.q_index.gather(1, node)).squeeze(1))

    def as_sequences(self) -> Tensor:
        """``[B, K, L]``: node index of token i of sequence k, -1 past its end; a chain is one sequence.

        A tree that branches only at the root has one sequence per child of the root.
        """
        if self.sequences is not None:
            return self.sequences
        if not self.width:
            return self.tokens[:, None]
        order = torch.arange(self.width, device=self.tokens.device)
        depth = self.width if self.is_chain or not self.levels else self.levels
        return torch.where(self.valid, order, -1).view(self.batch_size, depth, -1).transpose(1, 2)

    def drawn_sequences(self) -> Tensor | None:
        """`sequences` with every draw once: -1 for the trunk of all sequences but the first."""
        if self.sequences is None or not self.trunk:
            return self.sequences
        trunk = functional.pad(self.sequences[:, :1, : self.trunk], (0, 0, 0, self.sequences.shape[1] - 1), value=-1)
        return torch.cat([trunk, self.sequences[:, :, self.trunk :]], 2)

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
        """``[B, N, N]`` bool, ``[b, i, j]``: node j is a sibling of node i, drawn before it."""
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
            # The prefix of any sequence through the node: its descendants have higher indices.
            k = (self.sequences == node[:, None, None]).any(2).max(1).indices
            sequence = self.sequences.gather(1, k[:, None, None].expand(-1, 1, self.sequences.shape[2])).squeeze(1)
            return torch.where(sequence <= node[:, None], sequence, -1)
        index = node.clamp(min=0)
        on_path = self.ancestor_mask[torch.arange(self.batch_size, device=node.device), index] & (node >= 0)[:, None]
        order = torch.arange(self.width, device=node.device).expand_as(self.tokens)
        padded = torch.full((self.batch_size, self.width + 1), -1, dtype=torch.long, device=node.device)
        slot = torch.where(on_path, self.depth - 1, self.width)  # other nodes go to a spare column
        padded.scatter_(1, slot, torch.where(on_path, order, -1))
        return padded[:, : self.width]


class Scores(ABC):
    """Result of one forward pass of the target over a draft.

    Attributes:
        p: ``[B, N+1, V]`` target distributions after the root (index 0) and after node i (index i+1), warped by the
            sampling parameters; float32 (float64 on exact models). Verifiers never write into it.
        logits: ``[B, N+1, V]`` output of the model in its own precision, before temperature, top-k and top-p: rank
            tokens by these at temperature 0, where p is one-hot.
        hidden: ``[B, N+1, L, H]`` hidden states of the layers requested by the drafter, or ``None``.
        resume_matches: ``[B]`` bool, False if the fork of `Draft.resume_from` was fed other tokens than the draft
            holds; ``None`` if no fork was resumed.
    """

    p: Tensor
    logits: Tensor
    hidden: Tensor | None
    resume_matches: Tensor | None

    @abstractmethod
    def prob_of(self, positions: Tensor, tokens: Tensor) -> Tensor:
        """``[B, n]`` probabilities of ``tokens [B, n]``, each under the distribution at ``positions [B, n]`` of p."""


@dataclass
class DenseScores(Scores):
    """Scores whose distributions are one tensor in memory."""

    p: Tensor
    logits: Tensor
    hidden: Tensor | None = None
    resume_matches: Tensor | None = None

    def prob_of(self, positions: Tensor, tokens: Tensor) -> Tensor:
        return self.p.flatten(1).gather(1, torch.add(tokens, positions, alpha=self.p.shape[2]))


@dataclass
class ChunkedScores(Scores):
    """Scores too large to keep: ``probs`` computes distributions from logits, each time they are read."""

    probs: Callable[[Tensor], Tensor]
    logits: Tensor
    hidden: Tensor | None = None
    resume_matches: Tensor | None = None

    @property
    def p(self) -> Tensor:  # type: ignore[override]
        return self.probs(self.logits)

    def prob_of(self, positions: Tensor, tokens: Tensor) -> Tensor:
        (b, n), v = positions.shape, self.logits.shape[2]
        return torch.cat(
            [
                self.probs(take_rows(self.logits[rows], positions[rows])).gather(2, tokens[rows][..., None]).squeeze(2)
                for rows in at_once(b, n * v)
            ]
        )


@dataclass
class Verdict:
    """Accepted tokens of a draft, and the token that follows them.

    Attributes:
        length: ``[B]`` int64, tau, the accepted draft tokens of each row.
        token: ``[B]`` int64, the correction (or bonus) token drawn after them.
        path: ``[B, D]`` int64, indices of the accepted nodes, padded with -1; ``None`` = the first tau nodes (of a
            chain).
        survival: optional ``[B, D]`` float64, Pr(tau >= i | the first i tokens of this draft), if the verifier has it
            in closed form. Its mean estimates block efficiency with less noise than the 0/1 outcome.
    """

    length: Tensor
    token: Tensor
    path: Tensor | None = None
    survival: Tensor | None = None


@dataclass
class Sequences:
    """The committed tokens of every slot: the input of a drafter.

    Attributes:
        history: per slot, the committed tokens (prompt and output) as a list; empty for a free slot.
        tokens: ``[B, max_length]`` int64 on the device, the same tokens; updated when read.
        limit: per slot, maximum depth of a draft in this step (remaining tokens minus the one that the verifier
            adds); 0 for a free slot.
        stream: per slot, the number of its random stream (the prompt's index in the run).
        max_length: length of a slot, in tokens: of the longest sequence and a draft.
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

    def append(self, row: int, new: Sequence[int]) -> None:
        """Commit ``new`` tokens to slot ``row``."""
        self._written[row] = min(self._written[row], len(self.history[row]))
        self.history[row].extend(new)

    def _set_tokens(self, tokens: Tensor) -> None:
        self._tokens, self._written = tokens, [len(history) for history in self.history]
        self.device, self.max_length = tokens.device, tokens.shape[1]

    def _get_tokens(self) -> Tensor:
        missing = [
            (row, position, history[position])
            for row, (history, written) in enumerate(zip(self.history, self._written, strict=True))
            for position in range(written, len(history))
        ]
        if missing:
            rows, positions, tokens = on_device(list(zip(*missing, strict=True)), self.device)
            self._tokens[rows, positions] = tokens
            self._written = [len(history) for history in self.history]
        return self._tokens


Sequences.tokens = property(Sequences._get_tokens, Sequences._set_tokens)  # type: ignore[assignment]
