"""Prompts that nobody wrote: tokens drawn at random from the vocabulary, as load generators make them.

On such text drafters do not do what they do in use: there is nothing to copy or to learn from, and what the target goes
on with is no text either. Written text is made of a small part of a vocabulary, whose tokens are numbered by how often
they were merged; tokens drawn at random are spread over all of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: Fewer tokens say nothing.
LEAST = 128
#: Kolmogorov-Smirnov distance of token numbers from a uniform law below which they were hardly written by anybody.
#: With SmolLM2's tokenizer, 128 tokens that were drawn, decoded and encoded again stay below 0.2; the built-in prompts
#: have 0.57 to 0.87, texts in Chinese, Hindi and Russian, which it cuts into bytes, 0.51, 0.37 and 0.32.
NEAR = 0.25
#: As many prompts are looked at.
MOST = 64


def distance(tokens: Sequence[int], vocabulary: int) -> float:
    """Kolmogorov-Smirnov distance between the token numbers and the uniform law on ``range(vocabulary)``; 0 to 1."""
    found, counts = np.unique(np.asarray(tokens), return_counts=True)
    after = np.cumsum(counts) / len(tokens)
    before = np.concatenate([[0.0], after[:-1]])
    return float(max(np.abs(after - (found + 1) / vocabulary).max(), np.abs(before - found / vocabulary).max()))


def warning(prompts: Sequence[Sequence[int]], vocabulary: int) -> str | None:
    """What to say of prompts, as token ids, most of which look like random tokens; None where there is nothing to say.

    Those of fewer than `LEAST` tokens are not looked at.
    """
    long = [tokens for tokens in prompts if len(tokens) >= LEAST]
    random = sum(distance(tokens, vocabulary) < NEAR for tokens in long)
    if not long or 2 * random <= len(long):
        return None
    return (
        f"{random} of {len(long)} prompts look like random tokens, which nobody writes: what drafters do on them says "
        "little about use; take prompts of the kind that will be asked"
    )
