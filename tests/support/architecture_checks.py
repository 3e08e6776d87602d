"""Decoder compared with the model: every node of random steps against plain passes, and greedy text."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import torch
from oracle_trees import NEW, PROMPTS

from crossdraft.framework.lm.architectures import longrope_boundary, text_config
from crossdraft.framework.lm.transformers_lm import model_slots


@torch.inference_mode()
def plain(model: Any, tokens: list[int]) -> torch.Tensor:
    """``[T, V]``, a model's logits for one unpadded sequence, without cache, mask or positions."""
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()


def at_ends(model: Any, tokens: list[int], start: int) -> torch.Tensor:
    """Logits from index ``start`` on, each as at the end of its own text: longrope depends on the length of a text."""
    boundary = longrope_boundary(text_config(model))
    if boundary is None or not start < boundary < len(tokens):
        return plain(model, tokens)[start:]
    return torch.cat([plain(model, tokens[:boundary])[start:], plain(model, tokens)[boundary:]])


def disagreement(
    model: Any,
    *,
    lm_class: Any = model_slots,
    max_length: int = 64,
    steps: int = 4,
    chains: int = 2,
    prompts: Sequence[list[int]] = PROMPTS,
) -> float:
    """Largest difference of a logit, in standard deviations of the logits, over all nodes of ragged steps.

    First ``chains`` steps of chains, then trees in two pieces each; a random branch is kept, and a slot changes hands.
    """
    reference, chance = copy.deepcopy(model), random.Random(0)
    lm = lm_class(model, len(prompts), max_length)
    texts = [list(prompt) for prompt in prompts]
    for row, text in enumerate(texts):
        lm.start(row, text)
    worst = 0.0
    for turn in range(steps):
        if turn == steps - 1:  # a slot is refilled
            lm.free(0)
            texts[0] = [chance.randrange(1, 90) for _ in range(7)]
            lm.start(0, texts[0])
        widths = [4] if turn < chains else [4, 3]
        nodes = sum(widths)
        drawn = [[chance.randrange(1, 90) for _ in range(nodes)] for _ in texts]
        above = [[-1] + [i - 1 if turn < chains else chance.randrange(0, i) for i in range(1, nodes)] for _ in texts]
        for b, text in enumerate(texts):
            drawn[b][0] = text[-1]
        logits, first = [], 0
        for width in widths:
            piece = torch.tensor([row[first : first + width] for row in drawn])
            parents = torch.tensor([row[first : first + width] for row in above]) if turn >= chains else None
            logits.append(lm.forward(piece, parents)[0])
            first += width
        actual = torch.cat(logits, 1).float()
        paths = []
        for b, text in enumerate(texts):
            branches: list[list[int]] = []
            for node in range(nodes):
                up = above[b][node]
                branches.append([*(branches[up] if up >= 0 else []), node])
            inner = set(above[b])
            for node in range(nodes):
                if node in inner:
                    continue
                branch = branches[node]
                want = at_ends(reference, text[:-1] + [drawn[b][i] for i in branch], len(text) - 1)
                off = (actual[b, branch] - want).abs().max() / want.std()
                worst = max(worst, float(off)) if off.isfinite() else float("inf")
            paths.append(chance.choice(branches))
        depth = max(map(len, paths))
        padded = torch.tensor([path + [-1] * (depth - len(path)) for path in paths])
        lm.commit([len(path) for path in paths], padded if turn >= chains else None)
        for b, path in enumerate(paths):
            texts[b] += [drawn[b][i] for i in path[1:]] + [chance.randrange(1, 90)]
    return worst


def greedy(model: Any, prompt: list[int]) -> list[int]:
    """`NEW` tokens, one plain pass each."""
    text = list(prompt)
    for _ in range(NEW):
        text.append(int(plain(model, text)[-1].argmax()))
    return text[len(prompt) :]
