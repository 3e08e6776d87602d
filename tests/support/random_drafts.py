"""Random distributions and drafts for the verifiers' property tests."""

from __future__ import annotations

import torch
from torch import Tensor

from crossdraft.framework.contracts.draft import Draft


def random_laws(*shape: int, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    """Softmax rows from nearly flat to nearly one-hot, some with most of their tokens cut off."""
    sharpness = 10 ** (torch.rand(*shape[:-1], 1, generator=generator) * 3 - 1.5)
    logits = torch.randn(*shape, generator=generator) * sharpness
    cut = torch.rand(*shape, generator=generator) < torch.rand(*shape[:-1], 1, generator=generator) - 0.2
    cut.scatter_(-1, logits.argmax(-1, keepdim=True), False)
    return logits.masked_fill(cut, -torch.inf).to(dtype).softmax(-1)


def random_chains(seed: int, b: int, n: int, v: int, dtype: torch.dtype = torch.float32) -> tuple[Draft, Tensor]:
    """``b`` ragged chains drawn from their q, and a p that is sometimes the same."""
    generator = torch.Generator().manual_seed(seed)
    q = random_laws(b, n, v, generator=generator, dtype=dtype)
    p = random_laws(b, n + 1, v, generator=generator, dtype=dtype)
    same = torch.rand(b, n, generator=generator) < 0.5
    p[:, :n][same] = q[same]
    tokens = torch.zeros(b, n, dtype=torch.long)
    if n:
        tokens = torch.multinomial(q.double().view(-1, v), 1, generator=generator).view(b, n)
    return Draft.chain(tokens, torch.randint(0, n + 1, (b,), generator=generator), q), p
