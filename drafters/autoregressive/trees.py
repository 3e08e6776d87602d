"""Drafting a token tree with an autoregressive model: static trees, and the dynamic trees of EAGLE-2 and OPT-Tree.

The drafter passes the logits after the root and ``expand(tokens, parents)``, which feeds new nodes to its model. The
result is the draft and, for every node, its position in the order of feeding (-1 = not fed).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import accumulate
from operator import mul
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from ...framework.contracts.draft import Draft
from ...framework.contracts.draft_kind import CHAIN, DETERMINISTIC, GREEDY_DRAFT, WITHOUT_REPLACEMENT
from ...framework.contracts.rng import StepRng, draw_each
from ...framework.contracts.sampling import Sampling
from ...framework.util.limits import MOST_LEVELS, MOST_NODES, MOST_SIBLINGS, Limit
from ...framework.util.static_trees import Family, TreeShape, tree_constant, tree_families
from ...framework.util.tensors import Gathered, columns, counting

#: ``expand(tokens [B, W], parents [B, W]) -> logits [B, W, V]``; parents index the nodes fed so far, -1 = the root.
Expand = Callable[[Tensor, Tensor], Tensor]
#: Nodes as lists of the sibling ranks that lead to them.
Choices = tuple[tuple[int, ...], ...]
#: How the children of one node are chosen.
Siblings = Literal["without-replacement", "top-k", "greedy"]
SIBLING_KINDS = {"without-replacement": WITHOUT_REPLACEMENT, "top-k": DETERMINISTIC, "greedy": GREEDY_DRAFT}


@dataclass(frozen=True)
class TreeTemplate:
    """A static tree: per level, the parent of each node (index in its level) and the rank among siblings."""

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
        """Number of children of each node, level by level, see `Draft.children`."""
        sizes = [1, *map(len, self.ranks)]
        return tuple(tuple(map(level.count, range(width))) for width, level in zip(sizes, self.parents, strict=False))

    def cut(self, levels: int) -> TreeTemplate:
        return TreeTemplate(self.parents[:levels], self.ranks[:levels])

    @classmethod
    def branching(cls, children: Sequence[int]) -> TreeTemplate:
        """Build a tree with ``children[i]`` children per node of level i: ``[2, 2, 1]`` has 2 + 4 + 4 nodes.

        Raises:
            ValueError: a number is below 1, or the tree exceeds `util.limits`.
        """
        check_most(MOST_LEVELS, len(children), "levels")
        if min(children, default=1) < 1:
            raise ValueError(f"branching is {list(children)!r:.80}; all numbers must be positive")
        check_most(MOST_SIBLINGS, max(children, default=0), "children of a node")
        check_size(sum(accumulate(children, mul)))  # before anything is built
        parents, ranks, width = [], [], 1
        for count in children:
            parents.append(tuple(parent for parent in range(width) for _ in range(count)))
            ranks.append(tuple(range(count)) * width)
            width *= count
        return cls(tuple(parents), tuple(ranks))

    @classmethod
    def choices(cls, paths: Sequence[Sequence[int]], contiguous: bool = False) -> TreeTemplate:
        """Build a tree from Medusa's choice lists (T. Cai et al. 2024): a node is the list of ranks on its path.

        Raises:
            ValueError: a list is empty or duplicated, its parent is missing, or (``contiguous``) an earlier sibling
                is; or the tree exceeds `util.limits`.
        """
        check_size(len(paths))
        check_most(MOST_LEVELS, max(map(len, paths), default=0), "levels")
        check_most(MOST_SIBLINGS, max((rank + 1 for path in paths for rank in path), default=0), "ranks of siblings")
        nodes_by_level = sorted({tuple(path) for path in paths}, key=lambda path: (len(path), path))
        if len(nodes_by_level) != len(paths) or any(not path or min(path) < 0 for path in nodes_by_level):
            raise ValueError("choices must be distinct, non-empty lists of ranks, counted from 0")
        all_nodes = set(nodes_by_level)
        parents, ranks = [], []
        parent_level: list[tuple[int, ...]] = [()]
        for depth in range(1, len(nodes_by_level[-1]) + 1 if nodes_by_level else 1):
            level = [path for path in nodes_by_level if len(path) == depth]
            for path in level:
                if depth > 1 and path[:-1] not in all_nodes:
                    raise ValueError(f"choices hold {list(path)} but not its parent {list(path[:-1])}; add it")
                if contiguous and path[-1] and (*path[:-1], path[-1] - 1) not in all_nodes:
                    raise ValueError(
                        f"choices hold {list(path)} but not its sibling of rank {path[-1] - 1}; only siblings "
                        "'top-k' may skip ranks"
                    )
            parents.append(tuple(parent_level.index(path[:-1]) for path in level))
            ranks.append(tuple(path[-1] for path in level))
            parent_level = level
        return cls(tuple(parents), tuple(ranks))


def tree_shape(branching: Sequence[int] | None, choices: Choices | None, *, contiguous: bool = False) -> TreeTemplate:
    """Build the tree of a config, from ``choices`` if given, else from ``branching``.

    Raises:
        ValueError: they do not describe a tree, see `TreeTemplate`.
    """
    if choices is not None:
        return TreeTemplate.choices(choices, contiguous=contiguous)
    assert branching is not None
    return TreeTemplate.branching(branching)


def best_paths(acceptance: Sequence[Sequence[float]], nodes: int) -> Choices:
    """Return the ``nodes`` most probable paths of ranks if levels are independent of each other.

    The probability of a path is the product of its numbers, at most that of its parent, so greedy selection yields a
    tree. Ties go to the shorter path, then to the lower ranks.

    Args:
        acceptance: ``[levels][ranks]``, probability that the node of rank k of level i is accepted after its parent.
        nodes: maximum number of nodes; fewer if all other paths have probability 0.

    Returns:
        choice lists, parents first.
    """
    chosen: list[tuple[int, ...]] = []
    frontier: list[tuple[float, int, tuple[int, ...]]] = [(-1.0, 0, ())]  # the root, not counted
    while frontier and len(chosen) <= nodes:
        product, level, path = heappop(frontier)
        chosen.append(path)
        for rank, number in enumerate(acceptance[level] if level < len(acceptance) else ()):
            if number > 0:
                heappush(frontier, (product * number, level + 1, (*path, rank)))
    return tuple(sorted(chosen[1:], key=lambda path: (len(path), path)))


def check_owners(
    config: Any, owners: Mapping[str, Sequence[str | None]], kind: str | None, names: Mapping[str | None, str]
) -> None:
    """Raise ValueError for an option that was given but does not apply to a draft of this ``kind``.

    Args:
        owners: by option, the kinds that it applies to; ``names``: of the kinds, for errors.
    """
    for key, kinds in owners.items():
        if kind not in kinds and getattr(config, key) != type(config).model_fields[key].default:
            text = " or ".join(names[owner] for owner in kinds)
            raise ValueError(f"{key} belongs to {text}, but the draft is {names[kind]}; leave it out")


def check_size(nodes: int) -> None:
    """Raise ValueError for a draft with too many nodes."""
    check_most(MOST_NODES, nodes, "nodes")


def check_most(limit: Limit, n: int, name: str) -> None:
    """Raise ValueError if ``n``, the draft's number of ``name``, exceeds ``limit``."""
    if reason := limit.violation(n):
        count = n if n < 10**12 else "more than 10^12"
        raise ValueError(f"the draft has {count} {name}; {reason}")


def check_candidates(depth: int, top_k: int, nodes: int) -> None:
    """Raise ValueError for a dynamic tree that keeps more nodes than it has candidates, or too many."""
    candidates = top_k + (depth - 1) * top_k**2
    if nodes > candidates:
        raise ValueError(f"depth {depth} and top_k {top_k} give {candidates} nodes, not {nodes}")
    check_size(nodes)
    check_most(MOST_NODES, (depth - 1) * top_k, "expanded nodes")


def dynamic_slack(depth: int, top_k: int, nodes: int) -> int:
    """Tokens per slot that the model of a dynamic tree is fed beyond the ``nodes`` of the draft."""
    return max((depth - 1) * top_k - nodes, 0)


def max_expanded(depth: int, nodes: int) -> int:
    """Maximum number of nodes fed to the model of an OPT-Tree (`grow_dynamic` without ``top_k``)."""
    # A node of level i among the best has i - 1 ancestors among the best.
    return sum(_width(nodes - level + 1, nodes) for level in range(1, min(depth - 1, nodes) + 1))


def _width(n: int, widest: int) -> int:
    """Round a level's width up to a power of two, at most ``widest``: one CUDA graph is captured per width."""
    return min(1 << (n - 1).bit_length(), widest) if n else 0


def grow_static(
    tree: TreeTemplate,
    levels: int,
    siblings: Siblings,
    root: Tensor,
    expand: Expand,
    sampling: Sampling,
    limit: Tensor,
    rng: StepRng,
) -> tuple[Draft, Tensor]:
    """Draft the first levels of a static tree, one by one; all nodes except the last level are fed.

    Args:
        tree: the whole tree, whose kind the draft has, even if its first levels are a path.
        levels: number of levels, at least 1.
        root: ``[B, V]`` logits after the last committed token.
        sampling: warps the logits into the distribution that siblings are drawn from (top-k siblings rank the logits).
        limit: ``[B]`` maximum number of levels of each row.

    Returns:
        the draft, and ``[B, N]`` the position of each node in the order of feeding, -1 for the last level.
    """
    shape, b = tree.cut(levels), len(root)
    children = shape.children
    parents, depth, ancestor_mask, fed = (
        tree_constant(children, constant, root.device) for constant in ("parents", "depth", "ancestor_mask", "fed")
    )
    logits, parent_first, first = root[:, None], -1, 0  # index of the first node of the parent level, of this level
    tokens, drawn, q_rows, finite = [], [], Gathered(shape.nodes), []
    for level, ranks in zip(tree_families(children), shape.ranks, strict=True):
        if siblings == "top-k":
            token, exists, sound = _most_probable(logits, level, parent_first, ranks)
        else:
            token, exists, rows, sound = _drawn(logits, level, parent_first, siblings, sampling, rng)
            q_rows.add(*(row[:, None] for row in rows))
            del rows  # free memory for the next level's
        tokens.append(token)
        drawn.append(exists)
        finite.append(sound)
        parent_first, first = first, first + len(ranks)
        if first < shape.nodes:
            logits = expand(token, parents[parent_first:first].expand(b, -1))
    exists = torch.cat(drawn, 1) & (depth[1:] <= limit[:, None])
    draft = Draft(
        tokens=torch.cat(tokens, 1),
        parents=parents.expand(b, -1),
        valid=~(ancestor_mask & ~exists[:, None]).any(2),  # descendants of a missing node are invalid, too
        q=None if siblings == "top-k" else q_rows.tensor(),
        kind=CHAIN if tree.is_path else SIBLING_KINDS[siblings],
        levels=len(children),
        children=None if tree.is_path else children,
        finite=torch.cat(finite, 1).all(1),
    )
    return draft, fed.expand(b, -1)


def _most_probable(
    logits: Tensor, level: Sequence[Family], parent_first: int, ranks: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the nodes of a level by their ``ranks``; arguments and results as in `_drawn`, without q."""
    ranks_count = max(ranks) + 1
    ranked = ordered(logits, ranks_count)
    scores = logits.gather(2, ranked)
    offsets = [(parent - parent_first) * ranks_count for parent, nodes in level for _ in nodes]
    chosen = [offset + rank for offset, rank in zip(offsets, ranks, strict=True)]
    token, score = (columns(values.flatten(1), chosen) for values in (ranked, scores))
    return token, score > -torch.inf, ~scores[..., 0].isnan()  # a NaN is ranked first


def _drawn(
    logits: Tensor, level: Sequence[Family], parent_first: int, siblings: Siblings, sampling: Sampling, rng: StepRng
) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
    """Draw the nodes of a level; children of different parents in parallel, siblings one after the other.

    Args:
        logits: ``[B, P, V]`` after the nodes of the parent level.
        parent_first: index of the first node of the parent level.

    Returns:
        tokens ``[B, W]``; True if a node exists, ``[B, W]``; the W rows of q ``[B, V]``; True if logits were finite,
        ``[B, P]``.
    """
    left, sound = sampling.checked_probs(logits)
    level = sorted(level, key=lambda family: -len(family[1]))  # parents with more children first
    left, exists = columns(left, [parent - parent_first for parent, _ in level]), torch.ones_like(sound)
    token, drawn = exists, {}
    for rank in range(len(level[0][1])):
        nodes = [children[rank] for _, children in level if rank < len(children)]
        n = len(nodes)
        if rank:
            left = left[:, :n].scatter(2, token[:, :n, None], 0.0)
            mass = left.sum(2)
            exists = mass > 0
            left.div_((mass + ~exists)[..., None])  # a row without mass stays 0: no token is left
        # In a greedy draft all siblings except the last are the most probable ones.
        taken = sum(rank + 1 < len(children) for _, children in level) if siblings == "greedy" else 0
        parts: list[tuple[Tensor, Tensor]] = []
        if taken:
            best = left[:, :taken].argmax(2)
            parts.append((best, torch.zeros_like(left[:, :taken]).scatter_(2, best[..., None], 1.0)))
        if taken < n:
            parts.append((draw_each(rng, left[:, taken:n], "draft", nodes[taken:]), left[:, taken:n]))
        token = torch.cat([part for part, _ in parts], 1) if len(parts) > 1 else parts[0][0]
        q_rows = [row for _, rows in parts for row in rows.unbind(1)]
        drawn |= {node: (token[:, i], exists[:, i], q_rows[i]) for i, node in enumerate(nodes)}
    tokens, existing, rows = zip(*(drawn[node] for node in sorted(drawn)), strict=True)
    return torch.stack(tokens, 1), torch.stack(existing, 1), list(rows), sound


def ordered(scores: Tensor, k: int) -> Tensor:
    """``[.., k]``: indices of the k largest ``scores [.., V]``, largest first, ties by lowest index (unlike topk).

    NaN comes first. Scores are compared in float32. Ranks beyond V have index 0.
    """
    if k == 1:
        return scores.argmax(-1, keepdim=True)
    # One NaN for all, and 0.0 for -0.0.
    bits = (scores.float().masked_fill(scores.isnan(), torch.nan) + 0.0).view(torch.int32)
    indices = counting(scores.shape[-1], scores.device)
    # The bits of a negative number grow as it falls. Lower bits order ties.
    keys = (bits ^ (bits >> 31 & 0x7FFFFFFF)).long() << 32 | ~indices & 0xFFFFFFFF
    best = ~keys.topk(min(k, len(indices))).values & 0xFFFFFFFF
    return functional.pad(best, (0, k - best.shape[-1]))


def grow_dynamic(
    depth: int, top_k: int | None, nodes: int, root: Tensor, expand: Expand, limit: Tensor, *, threshold: float = 0.0
) -> tuple[Draft, Tensor]:
    """Draft a tree whose shape depends on the drafter's confidence: EAGLE-2's dynamic tree, or OPT-Tree. Point masses.

    EAGLE-2 (Y. Li, F. Wei, C. Zhang, H. Zhang, EMNLP 2024, section 4). Expansion: the ``top_k`` candidates of a level
    with the largest joint probability are fed, and each gets its ``top_k`` most probable children. Re-ranking: the
    ``nodes`` candidates with the largest joint probability are kept; a parent is at least as probable as its child, so
    they form a tree.

    OPT-Tree (J. Wang et al., TACL 2025), without ``top_k``: the candidates of a level among the ``nodes`` best so far
    are fed, and each gets its ``nodes`` most probable children. The result is the tree with the largest sum of joint
    probabilities, the expected number of accepted tokens if the target's distribution were the drafter's. A row stops
    once a level adds less than ``threshold`` to its sum. One host sync per level, for the width of the next one.

    Args:
        root: ``[B, V]`` logits after the last committed token.
        limit: ``[B]`` maximum number of levels of each row.

    Returns:
        the draft, and ``[B, N]`` the position of each node in the order of feeding, -1 = not fed.
    """
    b, device = root.shape[0], root.device
    n_children = min(nodes, root.shape[1]) if top_k is None else top_k
    score, token = root.float().log_softmax(-1).topk(n_children)
    finite = ~score.isnan().any(1)
    tokens, scores, parents, fed = [token], [score], [torch.full_like(token, -1)], []
    first, n_fed = 0, 0  # index of the current level's first candidate; number of nodes fed
    total, going = torch.zeros_like(limit, dtype=score.dtype), torch.ones_like(limit, dtype=torch.bool)
    for level in range(1, depth):
        score, width = scores[-1], n_children
        if top_k is None:
            joint = torch.cat(scores, 1)
            best = _best(joint, nodes)
            previous, total = total, joint.gather(1, best).exp().sum(1)
            going = going & (total - previous >= threshold)
            kept = torch.zeros_like(joint, dtype=torch.bool).scatter_(1, best, True)[:, first:]
            kept = kept & (going & (limit > level))[:, None] & (score > -torch.inf)
            width = _width(int(kept.sum(1).max()), min(nodes, score.shape[1]))
            if not width:
                break
            score = score.masked_fill(~kept, -torch.inf)  # this masks the children of padding nodes, too
        frontier = score.topk(width).indices
        candidate = first + frontier
        position = torch.full((b, tokens[-1].shape[1]), -1, dtype=torch.long, device=device)
        position.scatter_(1, frontier, torch.arange(width, device=device).expand_as(frontier) + n_fed)
        n_fed += width
        fed.append(position)
        parent = parents[-1].gather(1, frontier)
        # `parents` index candidates; `expand` takes indices of fed nodes.
        fed_parent = torch.cat(fed, 1).gather(1, parent.clamp(min=0)) if level > 1 else parent
        logits = expand(tokens[-1].gather(1, frontier), torch.where(parent >= 0, fed_parent, -1))
        logp, child = logits.float().log_softmax(-1).topk(n_children, -1)
        finite = finite & ~logp.isnan().flatten(1).any(1)
        first += tokens[-1].shape[1]
        joint = (score.gather(1, frontier)[..., None] + logp).view(b, -1)
        scores.append(joint)
        tokens.append(child.reshape(b, -1))
        parents.append(candidate[..., None].expand(-1, -1, n_children).reshape(b, -1))
    fed.append(torch.full_like(tokens[-1], -1))
    draft, best = _reranked(tokens, scores, parents, nodes, limit, finite)
    return draft, torch.cat(fed, 1).gather(1, best)


def _reranked(
    tokens: list[Tensor], scores: list[Tensor], parents: list[Tensor], nodes: int, limit: Tensor, finite: Tensor
) -> tuple[Draft, Tensor]:
    """The tree of the best ``nodes`` candidates of all levels, and their indices."""
    token, parent = torch.cat(tokens, 1), torch.cat(parents, 1)
    generation = torch.cat([torch.full_like(of_level, level) for level, of_level in enumerate(tokens, 1)], 1)
    joint = torch.cat(scores, 1).masked_fill(generation > limit[:, None], -torch.inf)
    best = _best(joint, nodes).sort(1).values  # back into topological order
    new = torch.full_like(token, -1).scatter_(1, best, torch.arange(best.shape[1], device=best.device).expand_as(best))
    old_parent = parent.gather(1, best)
    draft = Draft(
        tokens=token.gather(1, best),
        parents=torch.where(old_parent >= 0, new.gather(1, old_parent.clamp(min=0)), -1),
        valid=joint.gather(1, best) > -torch.inf,
        kind=DETERMINISTIC,
        levels=len(tokens),
        finite=finite,
    )
    return draft, best


def _best(joint: Tensor, nodes: int) -> Tensor:
    """Indices of the ``nodes`` largest; the sort is stable, so a parent comes before an equal child."""
    return joint.sort(dim=1, descending=True, stable=True).indices[:, :nodes]
