"""Greedy texts of an engine against the target's argmax, token by token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from crossdraft.framework.contracts.models import LoadedModel
from crossdraft.framework.contracts.sampling import Sampling


@dataclass
class GreedyText:
    """Greedy responses against the target's argmax."""

    equal: int = 0  # responses that are the argmax at every token
    tied: int = 0  # responses that are not, by ties within rounding only
    # prompt, token and logit gap of the first token beyond a tie, of every other response
    other: list[tuple[str, int, float]] = field(default_factory=list)
    tokens: int = 0  # number of compared tokens
    largest: float = 0.0  # largest logit gap

    def add(self, name: str, gaps: np.ndarray, tie: float) -> None:
        """Add a response with the logit gap of each token, see `token_gaps`."""
        self.tokens += len(gaps)
        self.largest = max(self.largest, float(gaps.max(initial=0.0)))
        if (first := first_beyond(gaps, tie)) is not None:
            self.other.append((name, first, float(gaps[first])))
        elif (gaps > 0).any():
            self.tied += 1
        else:
            self.equal += 1


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
) -> Iterable[tuple[Any, list[tuple[int, int, int]]]]:
    """Target distributions ``[n, V]``, and for each the index of the text, the index of the next token, and it."""
    from crossdraft.framework.api.build import make_slots

    from .samples.token_tree import TokenTree, distributions

    trees = []
    for text in texts:
        tree = TokenTree()
        tree.add(list(text))
        trees.append(tree)

    def make(rows: int, length: int) -> Any:
        return make_slots(target, rows, length)

    for probs, places in distributions(
        make, [list(prompt) for prompt in prompts], trees, sampling, f"target '{target.name}'", target.context_length
    ):
        yield probs, [(i, node, next(iter(trees[i].counts[node]))) for i, node in places]
