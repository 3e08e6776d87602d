"""Growing a token tree with any autoregressive drafter: fixed shapes, and the dynamic growth of EAGLE-2 and OPT-Tree.

A drafter hands over the logits after the root and ``expand(tokens, parents)``, which feeds new nodes to its model;
what comes back is the draft and, for every node of it, the place at which that model has seen it (-1 = never).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import mul
from typing import Literal

import torch
from torch import Tensor

from ...framework.contracts.draft import Draft
from ...framework.contracts.draft_kind import CHAIN, DETERMINISTIC, GREEDY_DRAFT, WITHOUT_REPLACEMENT
from ...framework.contracts.rng import StepRng, draw_each
from ...framework.contracts.sampling import Sampling
from ...framework.util.limits import MOST_LEVELS, MOST_NODES, MOST_SIBLINGS, Limit
from ...framework.util.static_trees import TreeShape, tree_constant, tree_families
from ...framework.util.tensors import Gathered, columns

#: ``expand(tokens [B, W], parents [B, W]) -> logits [B, W, V]``; parents count the nodes fed so far, -1 = the root.
Expand = Callable[[Tensor, Tensor], Tensor]
#: A node and its children.
Family = tuple[int, list[int]]
#: Nodes as lists of the sibling ranks that lead to them.
Choices = tuple[tuple[int, ...], ...]
#: How the children of one node are chosen.
Siblings = Literal["without-replacement", "top-k", "greedy"]
SIBLING_KINDS = {
    "without-replacement": WITHOUT_REPLACEMENT,
    "top-k": DETERMINISTIC,
    "greedy": GREEDY_DRAFT,
}


@dataclass(frozen=True)
class Shape:
    """A fixed tree: per level, the parent of each node (its index in the level above) and its rank among siblings."""

    parents: tuple[tuple[int, ...], ...]
    ranks: tuple[tuple[int, ...], ...]

    @property
    def nodes(self) -> int:
        return sum(map(len, self.ranks))

    @property
    def is_path(self) -> bool:
        return all(len(level) == 1 for level in self.ranks)

    @cached_property
    def children(self) -> TreeShape:
        """How many children each node has, see `fixed_tree`."""
        above = [1, *map(len, self.ranks)]
        return tuple(tuple(map(level.count, range(width))) for width, level in zip(above, self.parents, strict=False))

    def cut(self, levels: int) -> Shape:
        """Its first levels."""
        return Shape(self.parents[:levels], self.ranks[:levels])

    @classmethod
    def branching(cls, children: Sequence[int]) -> Shape:
        """Every node of level i has ``children[i]`` children: ``[2, 2, 1]`` has 2 + 4 + 4 nodes.

        Raises:
            ValueError: a number below 1, or a tree larger than `util.limits` allow.
        """
        check_most(MOST_LEVELS, len(children), "levels")
        if min(children, default=1) < 1:
            raise ValueError(f"branching must hold positive numbers, got {list(children)!r:.80}")
        check_most(MOST_SIBLINGS, max(children, default=0), "children of a node")
        check_size(sum(accumulate(children, mul)))  # before anything is built
        parents, ranks, width = [], [], 1
        for count in children:
            parents.append(tuple(parent for parent in range(width) for _ in range(count)))
            ranks.append(tuple(range(count)) * width)
            width *= count
        return cls(tuple(parents), tuple(ranks))

    @classmethod
    def choices(cls, paths: Sequence[Sequence[int]], contiguous: bool = False) -> Shape:
        """Medusa's choice lists (T. Cai et al. 2024): a node is the list of ranks that lead to it.

        Raises:
            ValueError: a list is empty or given twice, its parent is missing, or (``contiguous``) a rank is; or the
                tree is larger than `util.limits` allow.
        """
        check_size(len(paths))
        check_most(MOST_LEVELS, max(map(len, paths), default=0), "levels")
        check_most(MOST_SIBLINGS, max((rank + 1 for path in paths for rank in path), default=0), "ranks of siblings")
        wanted = sorted({tuple(path) for path in paths}, key=lambda path: (len(path), path))
        if len(wanted) != len(paths) or any(not path or min(path) < 0 for path in wanted):
            raise ValueError("choices must be distinct lists of ranks, each of at least one rank, counted from 0")
        known = set(wanted)
        parents, ranks = [], []
        above: list[tuple[int, ...]] = [()]
        for depth in range(1, len(wanted[-1]) + 1 if wanted else 1):
            level = [path for path in wanted if len(path) == depth]
            for path in level:
                if depth > 1 and path[:-1] not in known:
                    raise ValueError(f"choices hold {list(path)} but not its parent {list(path[:-1])}")
                if contiguous and path[-1] and (*path[:-1], path[-1] - 1) not in known:
                    raise ValueError(
                        f"choices hold {list(path)} but no elder sibling of rank {path[-1] - 1}; only siblings "
                        "'top-k' may leave out ranks"
                    )
            parents.append(tuple(above.index(path[:-1]) for path in level))
            ranks.append(tuple(path[-1] for path in level))
            above = level
        return cls(tuple(parents), tuple(ranks))


def tree_shape(branching: Sequence[int] | None, choices: Choices | None, *, contiguous: bool = False) -> Shape:
    """The tree that a config describes: by ``choices`` if there are any, else by its ``branching``.

    Raises:
        ValueError: they describe none, see `Shape`.
    """
    if choices is not None:
        return Shape.choices(choices, contiguous=contiguous)
    assert branching is not None
    return Shape.branching(branching)


def check_size(nodes: int) -> None:
    """Raise ValueError for a draft that is too large to be meant."""
    check_most(MOST_NODES, nodes, "nodes")


def check_most(limit: Limit, n: int, what: str) -> None:
    """Raise ValueError for a draft with more of something than there may be."""
    if reason := limit.refusal(n):
        count = n if n < 10**12 else "more than 10^12"
        raise ValueError(f"the draft has {count} {what}; {reason}")


def check_candidates(depth: int, top_k: int, nodes: int) -> None:
    """Raise ValueError for a dynamic tree that keeps more nodes than it looks at, or too many."""
    candidates = top_k + (depth - 1) * top_k**2
    if nodes > candidates:
        raise ValueError(f"depth {depth} and top_k {top_k} give {candidates} nodes, not {nodes}")
    check_size(nodes)
    check_most(MOST_NODES, (depth - 1) * top_k, "expanded nodes")


def dynamic_room(depth: int, top_k: int, nodes: int) -> int:
    """Tokens that the slots of a dynamic tree's model need beyond the ``nodes`` of its draft."""
    return max((depth - 1) * top_k - nodes, 0)


def most_expanded(depth: int, nodes: int) -> int:
    """Most nodes that the model of an optimal tree is fed (`grow_dynamic` without ``top_k``)."""
    # A node of level i that is among the best has i - 1 ancestors that are, too.
    return sum(_width(nodes - level + 1, nodes) for level in range(1, min(depth - 1, nodes) + 1))


def _width(wanted: int, most: int) -> int:
    """A level's width, rounded up to a power of two: a pass is recorded for each width there is."""
    return min(1 << (wanted - 1).bit_length(), most) if wanted else 0


def grow_fixed(
    shape: Shape, siblings: Siblings, root: Tensor, expand: Expand, sampling: Sampling, limit: Tensor, rng: StepRng
) -> tuple[Draft, Tensor]:
    """A tree of a fixed shape, level by level; all nodes but the last level are fed.

    Args:
        root: ``[B, V]`` logits after the last committed token.
        sampling: warps the logits into the law that siblings are drawn from (top-k siblings rank the logits).
        limit: ``[B]`` most levels of each row.

    Returns:
        the draft, and ``[B, N]`` the index at which each node was fed, -1 for the last level.
    """
    children, b = shape.children, len(root)
    parents, depth, ancestor_mask, fed = (
        tree_constant(children, what, root.device) for what in ("parents", "depth", "ancestor_mask", "fed")
    )
    logits, above, first = root[:, None], -1, 0  # of the level above: its first node
    tokens, drawn, laws, finite = [], [], Gathered(shape.nodes), []
    for level, ranks in zip(tree_families(children), shape.ranks, strict=True):
        if siblings == "top-k":
            token, some, fine = _most_probable(logits, level, above, ranks)
        else:
            token, some, rows, fine = _drawn(logits, level, above, siblings, sampling, rng)
            laws.add(*(row[:, None] for row in rows))
            del rows  # the next level's take their place
        tokens.append(token)
        drawn.append(some)
        finite.append(fine)
        above, first = first, first + len(ranks)
        if first < shape.nodes:
            logits = expand(token, parents[above:first].expand(b, -1))
    there = torch.cat(drawn, 1) & (depth[1:] <= limit[:, None])
    draft = Draft(
        tokens=torch.cat(tokens, 1),
        parents=parents.expand(b, -1),
        valid=~(ancestor_mask & ~there[:, None]).any(
            2
        ),  # what hangs below a node that is not there is not there either
        q=None if siblings == "top-k" else laws.tensor(),
        kind=CHAIN if shape.is_path else SIBLING_KINDS[siblings],
        levels=len(children),
        children=None if shape.is_path else children,
        finite=torch.cat(finite, 1).all(1),
    )
    return draft, fed.expand(b, -1)


def _most_probable(
    logits: Tensor, level: Sequence[Family], above: int, ranks: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """The nodes of a level by their ``ranks``; see `_drawn`."""
    most = max(ranks) + 1
    ranked = ordered(logits, most)
    scores = logits.gather(2, ranked)
    places = [(parent - above) * most for parent, nodes in level for _ in nodes]
    chosen = [place + rank for place, rank in zip(places, ranks, strict=True)]
    token, score = (columns(values.flatten(1), chosen) for values in (ranked, scores))
    return token, score > -torch.inf, ~scores[..., 0].isnan()  # a NaN is ranked first


def _drawn(
    logits: Tensor, level: Sequence[Family], above: int, siblings: Siblings, sampling: Sampling, rng: StepRng
) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
    """The nodes of a level, drawn at the same time but for siblings, which come one after the other.

    Args:
        logits: ``[B, P, V]`` of the nodes of the level above, of which ``above`` is the first one's number.

    Returns:
        tokens and whether there is one, both ``[B, W]``; the W laws ``[B, V]``; whether logits were free of NaN
        ``[B, P]``.
    """
    left, fine = sampling.checked_probs(logits)
    level = sorted(level, key=lambda family: -len(family[1]))  # who has one more child is at the front
    left, some = columns(left, [parent - above for parent, _ in level]), torch.ones_like(fine)
    token, found = some, {}
    for rank in range(len(level[0][1])):
        nodes = [children[rank] for _, children in level if rank < len(children)]
        n = len(nodes)
        if rank:
            left = left[:, :n].scatter(2, token[:, :n, None], 0.0)
            mass = left.sum(2)
            some = mass > 0
            left.div_((mass + ~some)[..., None])  # without mass there is nothing to draw
        # Of a greedy draft all siblings but the youngest are the most probable ones.
        taken = sum(rank + 1 < len(children) for _, children in level) if siblings == "greedy" else 0
        parts: list[tuple[Tensor, Tensor]] = []
        if taken:
            best = left[:, :taken].argmax(2)
            parts.append((best, torch.zeros_like(left[:, :taken]).scatter_(2, best[..., None], 1.0)))
        if taken < n:
            parts.append((draw_each(rng, left[:, taken:n], "draft", nodes[taken:]), left[:, taken:n]))
        token = torch.cat([part for part, _ in parts], 1) if len(parts) > 1 else parts[0][0]
        laws = [row for _, rows in parts for row in rows.unbind(1)]
        found |= {node: (token[:, i], some[:, i], laws[i]) for i, node in enumerate(nodes)}
    tokens, there, rows = zip(*(found[node] for node in sorted(found)), strict=True)
    return torch.stack(tokens, 1), torch.stack(there, 1), list(rows), fine


def ordered(scores: Tensor, k: int) -> Tensor:
    """``[.., k]``: indices of the k largest ``scores [.., V]``, largest first, ties by lowest id (not so topk)."""
    best = []
    for _ in range(k):
        best.append(scores.argmax(-1))
        scores = scores.scatter(-1, best[-1][..., None], -torch.inf)
    return torch.stack(best, -1)


def grow_dynamic(
    depth: int,
    top_k: int | None,
    nodes: int,
    root: Tensor,
    expand: Expand,
    limit: Tensor,
    *,
    threshold: float = 0.0,
) -> tuple[Draft, Tensor]:
    """A tree whose shape follows the drafter's confidence: the dynamic tree of EAGLE-2, or the optimal one of OPT-Tree.

    EAGLE-2 (Y. Li, F. Wei, C. Zhang, H. Zhang, EMNLP 2024, section 4). Expansion: of each level's candidates the
    ``top_k`` with the largest joint probability are fed, each gets its ``top_k`` most probable children. Re-ranking:
    of all candidates the ``nodes`` with the largest joint probability are kept; a parent is never less probable than
    its child, so they form a tree. Point masses.

    OPT-Tree (J. Wang et al., TACL 2025), without ``top_k``: of each level those are fed that are among the ``nodes``
    best so far, each gets its ``nodes`` most probable children. So what is kept is the tree with the largest sum of
    joint probabilities, which is the expected number of accepted tokens if the target says what the drafter says. A row
    grows on while a level adds at least ``threshold`` to its sum. The host asks once a level how wide the next one is.

    Args:
        root: ``[B, V]`` logits after the last committed token.
        limit: ``[B]`` most levels of each row.
    """
    b, device = root.shape[0], root.device
    rows = torch.arange(b, device=device)[:, None]
    born = min(nodes, root.shape[1]) if top_k is None else top_k
    score, token = root.float().log_softmax(-1).topk(born)
    finite = ~score.isnan().any(1)
    tokens, scores, parents, fed, levels = [token], [score], [torch.full_like(token, -1)], [], [1]
    first, seen = 0, 0  # index of the current level's first candidate; nodes that were fed
    total, going = torch.zeros_like(limit, dtype=score.dtype), torch.ones_like(limit, dtype=torch.bool)
    for level in range(1, depth):
        score, width = scores[-1], born
        if top_k is None:
            joint = torch.cat(scores, 1)
            best = _best(joint, nodes)
            before, total = total, joint.gather(1, best).exp().sum(1)
            going = going & (total - before >= threshold)
            kept = torch.zeros_like(joint, dtype=torch.bool).scatter_(1, best, True)[:, first:]
            kept = kept & (going & (limit > level))[:, None] & (score > -torch.inf)
            width = _width(int(kept.sum(1).max()), min(nodes, score.shape[1]))
            if not width:
                break
            score = score.masked_fill(~kept, -torch.inf)  # and so are the children of a node that is only padding
        frontier = score.topk(width).indices
        candidate = first + frontier
        place = torch.full((b, tokens[-1].shape[1]), -1, dtype=torch.long, device=device)
        place.scatter_(1, frontier, torch.arange(width, device=device).expand_as(frontier) + seen)
        seen += width
        fed.append(place)
        above = parents[-1].gather(1, frontier)
        # The parent's own place among the fed nodes: parents are indices of candidates.
        at = torch.cat(fed, 1).gather(1, above.clamp(min=0)) if level > 1 else above
        logits = expand(tokens[-1].gather(1, frontier), torch.where(above >= 0, at, -1))
        logp, child = logits.float().log_softmax(-1).topk(born, -1)
        finite = finite & ~logp.isnan().flatten(1).any(1)
        first += tokens[-1].shape[1]
        joint = (score.gather(1, frontier)[..., None] + logp).view(b, -1)
        scores.append(joint)
        tokens.append(child.reshape(b, -1))
        parents.append(candidate[..., None].expand(-1, -1, born).reshape(b, -1))
        levels.append(level + 1)
    fed.append(torch.full_like(tokens[-1], -1))
    token, parent, place = torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(fed, 1)
    generation = torch.cat([torch.full_like(t, level) for t, level in zip(tokens, levels, strict=True)], 1)
    joint = torch.cat(scores, 1).masked_fill(generation > limit[:, None], -torch.inf)
    best = _best(joint, nodes).sort(1).values  # back into topological order
    new = torch.full_like(token, -1).scatter_(1, best, torch.arange(best.shape[1], device=device).expand_as(best))
    old_parent = parent.gather(1, best)
    draft = Draft(
        tokens=token.gather(1, best),
        parents=torch.where(old_parent >= 0, new.gather(1, old_parent.clamp(min=0)), -1),
        valid=joint[rows, best] > -torch.inf,
        kind=DETERMINISTIC,
        levels=levels[-1],
        finite=finite,
    )
    return draft, place.gather(1, best)


def _best(joint: Tensor, nodes: int) -> Tensor:
    """Indices of the ``nodes`` largest; stable, so that of equals the parent comes first."""
    return joint.sort(dim=1, descending=True, stable=True).indices[:, :nodes]
