"""Detection of prompts made of random tokens, as load generators create them.

Drafters do not behave on such prompts as in use: there is nothing to copy or to learn from, and the continuation is not
text either. Natural text uses a small part of the vocabulary, whose token ids are ordered by merge frequency; random
tokens are spread uniformly over it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: Minimum number of tokens for the test.
MIN_TOKENS = 128
#: Kolmogorov-Smirnov distance from the uniform distribution below which token ids count as random. With SmolLM2's
#: tokenizer, 128 random tokens, decoded and encoded again, stay below 0.2; the built-in prompts have 0.57 to 0.87, and
#: texts in Chinese, Hindi and Russian, which are split into bytes, 0.51, 0.37 and 0.32.
MAX_DISTANCE = 0.25
#: Maximum number of prompts that are tested.
MAX_PROMPTS = 64


def distance(tokens: Sequence[int], vocabulary: int) -> float:
    """Kolmogorov-Smirnov distance, 0 to 1, of token ids from the uniform distribution on ``range(vocabulary)``."""
    values, counts = np.unique(np.asarray(tokens), return_counts=True)
    upper = np.cumsum(counts) / len(tokens)
    lower = np.concatenate([[0.0], upper[:-1]])
    return float(max(np.abs(upper - (values + 1) / vocabulary).max(), np.abs(lower - values / vocabulary).max()))


def warning(prompts: Sequence[Sequence[int]], vocabulary: int) -> str | None:
    """Return a warning if most prompts, given as token ids, look like random tokens.

    Prompts of fewer than `MIN_TOKENS` tokens are not tested.
    """
    long = [tokens for tokens in prompts if len(tokens) >= MIN_TOKENS]
    random = sum(distance(tokens, vocabulary) < MAX_DISTANCE for tokens in long)
    if not long or 2 * random <= len(long):
        return None
    return (
        f"{random} of {len(long)} prompts look like random tokens; results on them are not representative of use: "
        "choose prompts like those of the application"
    )
