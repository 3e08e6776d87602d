"""A verifier of crossdraft on the flat tensors of an engine: rejection sampling of a ragged batch of chains.

T is the number of drafted tokens of all rows, B the number of rows, V the size of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from crossdraft import Draft, UniformStepRng, Verifier, on_device
from crossdraft.framework.contracts.rng import PURPOSES

#: Entry of a row of output after its tokens.
PADDING = -1


def verify_flat(
    verifier: Verifier,
    draft_tokens: Tensor,
    lengths: Sequence[int],
    draft_probs: Tensor | None,
    target_probs: Tensor,
    bonus: Tensor,
    generators: Mapping[int, torch.Generator] | None = None,
) -> Tensor:
    """Accepted tokens and one more of each row.

    Args:
        draft_tokens: ``[T]``, the drafts of all rows; -1 = a token that the engine masked, which is rejected.
        lengths: length of each row's draft.
        draft_probs: ``[T, V]`` the distributions they were drawn from; None = point masses.
        target_probs: ``[T, V]`` the target's distributions before each drafted token.
        bonus: ``[B]`` a draw of each row from the distribution after its draft.
        generators: random generators by row; other rows use the default one.

    Returns:
        int64 ``[B, max(lengths) + 1]``, `PADDING` after the last token.
    """
    b, n, v = len(lengths), max(lengths, default=0), target_probs.shape[1]
    bonus = bonus.view(-1).long()
    if not n:
        return bonus[:, None].clone()
    device = target_probs.device
    row, column = on_device(
        [[i for i, k in enumerate(lengths) for _ in range(k)], [j for k in lengths for j in range(k)]], device
    )
    # Column V is a token that the target never emits.
    tokens = torch.zeros(b, n, dtype=torch.long, device=device)
    tokens[row, column] = torch.where(draft_tokens < 0, v, draft_tokens).long()
    p = target_probs.new_zeros(b, n + 1, v + 1)
    p[row, column, :v] = target_probs
    end = on_device(list(lengths), device)
    p[torch.arange(b, device=device), end, bonus] = 1.0  # what follows an accepted draft is drawn already
    q = None
    if draft_probs is not None:
        q = draft_probs.new_zeros(b, n, v + 1)
        q[row, column, :v] = draft_probs
    verdict = verifier.verify(Draft.chain(tokens, list(lengths), q), p, step_rng(b, n, lengths, generators, device))
    order = torch.arange(n + 1, device=device)
    kept = torch.where(order < verdict.length[:, None], torch.nn.functional.pad(tokens, (0, 1)), PADDING)
    return torch.where(order == verdict.length[:, None], verdict.token[:, None], kept)


def step_rng(
    rows: int,
    n: int,
    lengths: Sequence[int],
    generators: Mapping[int, torch.Generator] | None,
    device: torch.device,
) -> UniformStepRng:
    """Fresh random numbers of a step for drafts of at most ``n`` tokens."""
    uniforms = torch.rand(2 * len(PURPOSES), rows, n + 1, dtype=torch.float64, device=device)
    for index, generator in (generators or {}).items():
        if lengths[index]:  # as vLLM: a row without a draft does not use up numbers
            uniforms[:, index].uniform_(generator=generator)
    return UniformStepRng(uniforms)
