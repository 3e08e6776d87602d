"""Next-token distributions after many prefixes in few passes: sequences that begin alike share a token tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...contracts.draft import on_device
from ...contracts.lm import LM, prefill
from ...contracts.sampling import Sampling
from ...engine.prefill import passes
from ...errors import NumericalError
from ...util.limits import PREFILL_TOKENS

#: Nodes of a tree in the cache at once, and in one pass; slots.
NODES, WIDTH, ROWS = 256, 64, 8
#: Bytes that the logits of a pass may take.
BYTES = 2**28


@dataclass
class TokenTree:
    """Sequences drawn after one prompt.

    Attributes:
        tokens, parents: of each node; node 0 is the prompt. A node is a token that another one follows.
        counts: how often each token followed a node.
    """

    tokens: list[int] = field(default_factory=lambda: [0])
    parents: list[int] = field(default_factory=lambda: [-1])
    counts: list[Counter[int]] = field(default_factory=lambda: [Counter()])
    _children: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, sequence: Sequence[int], count: int = 1) -> None:
        """Count the tokens of a drawn sequence."""
        node = 0
        for i, token in enumerate(sequence):
            self.counts[node][token] += count
            if i == len(sequence) - 1:
                return
            child = self._children.setdefault((node, token), len(self.tokens))
            if child == len(self.tokens):
                self.tokens.append(token)
                self.parents.append(node)
                self.counts.append(Counter())
            node = child

    @property
    def depth(self) -> int:
        """Nodes on the longest path."""
        depths = [1]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return max(depths)


@dataclass(frozen=True)
class Subtree:
    """Nodes that are scored together: ``parents`` are indices among them, those not ``wanted`` were scored before."""

    nodes: list[int]
    parents: list[int]
    wanted: list[bool]


def subtrees(tree: TokenTree, most: int) -> Iterator[Subtree]:
    """Cut a tree into subtrees of at most ``most`` nodes, each with the path from the prompt; depth first."""
    children: list[list[int]] = [[] for _ in tree.tokens]
    for node, parent in enumerate(tree.parents[1:], 1):
        children[parent].append(node)
    places: dict[int, int] = {}
    part = Subtree([], [], [])
    stack = [0]
    while stack:
        node = stack.pop()
        if len(part.nodes) >= most:
            yield part
            places, part, path = {}, Subtree([], [], []), []
            at = tree.parents[node]
            while at >= 0:
                path.append(at)
                at = tree.parents[at]
            for one in reversed(path):
                _append(tree, part, places, one, False)
        _append(tree, part, places, node, True)
        stack += reversed(children[node])
    yield part


def _append(tree: TokenTree, part: Subtree, places: dict[int, int], node: int, wanted: bool) -> None:
    places[node] = len(part.nodes)
    part.nodes.append(node)
    part.parents.append(places.get(tree.parents[node], -1))
    part.wanted.append(wanted)


def distributions(
    make: Callable[[int, int], LM],
    prompts: Sequence[Sequence[int]],
    trees: Sequence[TokenTree],
    sampling: Sampling,
    who: str,
    context_length: int | None = None,
) -> Iterator[tuple[Tensor, list[tuple[int, int]]]]:
    """Distributions ``[n, V]`` of the next token after nodes of trees, and (tree, node) of each; every node once.

    Args:
        make: ``make(rows, length)`` returns slots of the target.
        prompts: of each tree; not empty.

    Raises:
        NumericalError: NaN in the logits.
    """
    order = sorted(range(len(trees)), key=lambda i: len(prompts[i]))
    deepest = max(tree.depth for tree in trees)
    longest = max(map(len, prompts))
    largest = max(len(tree.tokens) for tree in trees)
    most = min(largest, max(NODES, 2 * deepest))
    if context_length is not None:
        most = max(deepest, min(most, context_length - longest + 1))
    rows = min(ROWS, len(trees))
    lm = make(rows, longest + most)
    width = max(1, min(WIDTH, BYTES // (4 * rows * lm.vocab_size)))
    for first in range(0, len(order), rows):
        group = order[first : first + rows]
        _begin(lm, [prompts[i] for i in group])
        cuts = [subtrees(trees[i], most) for i in group]
        while any(parts := [next(cut, None) for cut in cuts]):
            yield from _scored(lm, group, [prompts[i][-1] for i in group], trees, parts, width, sampling, who)
        for row in range(len(group)):
            lm.free(row)


def _begin(lm: LM, prompts: Sequence[Sequence[int]]) -> None:
    """Feed prompts, several in one pass."""
    lengths = {row: len(prompt) - 1 for row, prompt in enumerate(prompts)}
    with torch.inference_mode():
        for step in passes(lengths, PREFILL_TOKENS):
            prefill(lm, {row: prompts[row][:upto] for row, upto in step.items()})
            for row, upto in step.items():
                if upto == lengths[row]:
                    lm.start(row, list(prompts[row]))


@torch.inference_mode()
def _scored(
    lm: LM,
    group: Sequence[int],
    roots: Sequence[int],
    trees: Sequence[TokenTree],
    parts: Sequence[Subtree | None],
    width: int,
    sampling: Sampling,
    who: str,
) -> Iterator[tuple[Tensor, list[tuple[int, int]]]]:
    rows, empty = lm.batch_size, Subtree([], [], [])
    all_parts = [part or empty for part in parts] + [empty] * (rows - len(parts))
    longest = max(len(part.nodes) for part in all_parts)
    tokens, parents = [], []
    for row, part in enumerate(all_parts):
        tree = trees[group[row]] if part.nodes else None
        mine = [roots[row] if node == 0 else tree.tokens[node] for node in part.nodes] if tree else []
        tokens.append(mine + [0] * (longest - len(mine)))
        parents.append(part.parents + [-1] * (longest - len(mine)))
    fed, above = on_device(tokens, lm.device), on_device(parents, lm.device)
    try:
        for start in range(0, longest, width):
            logits, _ = lm.forward(fed[:, start : start + width], above[:, start : start + width])
            places = [
                (row, column)
                for row, part in enumerate(all_parts)
                for column, wanted in enumerate(part.wanted[start : start + width])
                if wanted
            ]
            if not places:
                continue
            at = on_device([list(place) for place in places], lm.device)
            probs, finite = sampling.checked_probs(logits[at[:, 0], at[:, 1]])
            if not bool(finite.all()):
                raise NumericalError(
                    f"the {who} produced NaN or infinite logits; try --dtype float32 or check the weights"
                )
            yield probs, [(group[row], all_parts[row].nodes[start + column]) for row, column in places]
    finally:
        lm.commit([0] * rows)
