"""Next-token distributions after many prefixes in few passes: sequences with common prefixes share a token tree.

Of texts, also the differences of logits by which a token is the target's choice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from crossdraft import LM, LoadedModel, NumericalError, Sampling, on_device
from crossdraft.commands import PREFILL_TOKENS
from crossdraft.framework.contracts.lm import prefill
from crossdraft.framework.engine.prefill import passes
from crossdraft.models import make_slots

NODES, WIDTH, ROWS = 256, 64, 8  # maximum nodes of a tree in the cache and in one pass, and number of slots
BYTES = 2**28  # maximum bytes of the logits of a pass


@dataclass
class TokenTree:
    """Sequences drawn after one prompt."""

    # tokens, parents: of each node; node 0 is the prompt. Leaves of the drawn sequences are counted, not stored.
    tokens: list[int] = field(default_factory=lambda: [0])
    parents: list[int] = field(default_factory=lambda: [-1])
    # next token -> number of draws, for each node
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
    """Nodes scored in one batch; ``parents`` are indices into ``nodes``, and the others are context."""

    nodes: list[int]
    parents: list[int]
    is_output: list[bool]


def subtrees(tree: TokenTree, maximum: int) -> Iterator[Subtree]:
    """Split a tree, depth first, into subtrees of at most ``maximum`` nodes, each with the path from the prompt."""
    children: list[list[int]] = [[] for _ in tree.tokens]
    for node, parent in enumerate(tree.parents[1:], 1):
        children[parent].append(node)
    positions: dict[int, int] = {}
    part = Subtree([], [], [])
    stack = [0]
    while stack:
        node = stack.pop()
        if len(part.nodes) >= maximum:
            yield part
            positions, part, path = {}, Subtree([], [], []), []
            above = tree.parents[node]
            while above >= 0:
                path.append(above)
                above = tree.parents[above]
            for ancestor in reversed(path):
                _append(tree, part, positions, ancestor, False)
        _append(tree, part, positions, node, True)
        stack += reversed(children[node])
    yield part


def _append(tree: TokenTree, part: Subtree, positions: dict[int, int], node: int, is_output: bool) -> None:
    positions[node] = len(part.nodes)
    part.nodes.append(node)
    part.parents.append(positions.get(tree.parents[node], -1))
    part.is_output.append(is_output)


def distributions(
    make: Callable[[int, int], LM],
    prompts: Sequence[Sequence[int]],
    trees: Sequence[TokenTree],
    sampling: Sampling,
    label: str,
    context_length: int | None = None,
) -> Iterator[tuple[Tensor, list[tuple[int, int]]]]:
    """Yield next-token distributions ``[n, V]`` after nodes of trees, and their (tree, node); each node once.

    ``make``: ``make(rows, length)`` returns slots of the target; ``prompts``: non-empty prompt of each tree. Raises
    NumericalError: NaN in the logits.
    """
    order = sorted(range(len(trees)), key=lambda i: len(prompts[i]))
    deepest = max(tree.depth for tree in trees)
    longest = max(map(len, prompts))
    largest = max(len(tree.tokens) for tree in trees)
    maximum = min(largest, max(NODES, 2 * deepest))
    if context_length is not None:
        maximum = max(deepest, min(maximum, context_length - longest + 1))
    rows = min(ROWS, len(trees))
    lm = make(rows, longest + maximum)
    width = max(1, min(WIDTH, BYTES // (4 * rows * lm.vocab_size)))
    empty = Subtree([], [], [])

    @torch.inference_mode()
    def score(group: Sequence[int], parts: Sequence[Subtree | None]) -> Iterator[tuple[Tensor, list[tuple[int, int]]]]:
        all_parts = [part or empty for part in parts] + [empty] * (lm.batch_size - len(parts))
        longest = max(len(part.nodes) for part in all_parts)
        tokens, parents = [], []
        for row, part in enumerate(all_parts):
            tree = trees[group[row]] if part.nodes else None
            row_tokens = (
                [prompts[group[row]][-1] if node == 0 else tree.tokens[node] for node in part.nodes] if tree else []
            )
            tokens.append(row_tokens + [0] * (longest - len(row_tokens)))
            parents.append(part.parents + [-1] * (longest - len(row_tokens)))
        inputs, input_parents = on_device(tokens, lm.device), on_device(parents, lm.device)
        try:
            for start in range(0, longest, width):
                logits, _ = lm.forward(inputs[:, start : start + width], input_parents[:, start : start + width])
                positions = [
                    (row, column)
                    for row, part in enumerate(all_parts)
                    for column, is_output in enumerate(part.is_output[start : start + width])
                    if is_output
                ]
                if not positions:
                    continue
                indices = on_device([list(position) for position in positions], lm.device)
                probs, finite = sampling.checked_probs(logits[indices[:, 0], indices[:, 1]])
                if not bool(finite.all()):
                    raise NumericalError(
                        f"the {label} produced NaN or infinite logits; try --dtype float32 or check the weights"
                    )
                yield probs, [(group[row], all_parts[row].nodes[start + column]) for row, column in positions]
        finally:
            lm.commit([0] * lm.batch_size)

    for first in range(0, len(order), rows):
        group = order[first : first + rows]
        _prefill(lm, [prompts[i] for i in group])
        cuts = [subtrees(trees[i], maximum) for i in group]
        while any(parts := [next(cut, None) for cut in cuts]):
            yield from score(group, parts)
        for row in range(len(group)):
            lm.free(row)


def _prefill(lm: LM, prompts: Sequence[Sequence[int]]) -> None:
    lengths = {row: len(prompt) - 1 for row, prompt in enumerate(prompts)}
    with torch.inference_mode():
        for step in passes(lengths, PREFILL_TOKENS):
            prefill(lm, {row: prompts[row][:upto] for row, upto in step.items()})
            for row, upto in step.items():
                if upto == lengths[row]:
                    lm.start(row, list(prompts[row]))


def first_beyond(gaps: np.ndarray, tie: float) -> int | None:
    """Index of the first token that is not the target's, even with rounding."""
    beyond = np.flatnonzero(gaps > tie)
    return int(beyond[0]) if len(beyond) else None


def token_gaps(
    prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], target: LoadedModel
) -> list[np.ndarray]:
    """Logit gaps ``[T, 2]`` of each text: of its token to the greatest logit, and of the greatest to the second."""
    gaps = [np.zeros((len(text), 2)) for text in texts]
    for probs, places in positions(prompts, texts, target, Sampling(temperature=1.0)):
        top = probs.topk(2, dim=1).values
        own = probs.gather(1, torch.tensor([[token] for _, _, token in places], device=probs.device))
        # Logarithms of ratios, since two logarithms of one number may differ in the last bit.
        logs = (top[:, :1] / torch.cat([own, top[:, 1:]], dim=1)).log()
        for (text, t, _), gap in zip(places, logs.tolist(), strict=True):
            gaps[text][t] = gap
    return gaps


def positions(
    prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], target: LoadedModel, sampling: Sampling
) -> Iterator[tuple[Tensor, list[tuple[int, int, int]]]]:
    """Target distributions ``[n, V]``, and for each the index of the text, the index of the next token, and it."""
    trees = []
    for text in texts:
        tree = TokenTree()
        tree.add(list(text))
        trees.append(tree)

    options = trees, sampling, f"target '{target.name}'", target.context_length
    for probs, places in distributions(partial(make_slots, target), [list(prompt) for prompt in prompts], *options):
        yield probs, [(i, node, next(iter(trees[i].counts[node]))) for i, node in places]
