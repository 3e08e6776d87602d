"""Drafting a chain with an autoregressive model, under a length policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...framework.contracts.draft import Draft, Sequences, on_device
from ...framework.contracts.rng import StepRng
from ...framework.contracts.sampling import Sampling
from ...framework.util.tensors import Gathered
from .length_policy import LengthPolicy


def needs_final_q(policy: LengthPolicy, sequences: Sequences, final_q: bool, sampled: bool) -> bool:
    """True if the verifier needs q after the last token of a row cut short by its limit (`DraftContext.final_q`)."""
    rows = zip(sequences.history, sequences.limit, strict=True)
    return final_q and sampled and any(history and limit < policy.gamma for history, limit in rows)


def grow_chain(
    root: Tensor,
    expand: Callable[[Tensor], Tensor],
    lengths: Sequence[int],
    policy: LengthPolicy,
    sampling: Sampling,
    rng: StepRng,
    *,
    final_q: bool = False,
) -> Draft:
    """Draft a chain for every row, token by token; at temperature 0 the argmax, as a point mass.

    Args:
        root: ``[B, V]`` logits after the last committed token.
        expand: feeds ``tokens [B, 1]`` after the previous ones and returns logits ``[B, 1, V]``.
        lengths: maximum draft length of each row, see `LengthPolicy.draft_lengths`.
        sampling: warps logits into the distribution q that tokens are drawn from.
        final_q: append the distribution after the last token, see `needs_final_q`.
    """
    steps, sampled = max(lengths), sampling.temperature > 0
    length = on_device(list(lengths), root.device)
    going = torch.ones_like(length, dtype=torch.bool) if policy.stops_early else None
    logits, drafted, q_rows = root, [], Gathered(steps + final_q)
    finite: list[Tensor] = []  # at temperature 0; otherwise q is checked
    for i in range(steps + final_q):
        if sampled:
            q = sampling.probs(logits)
            q_rows.add(q[:, None])
        else:
            q, is_finite = sampling.checked_probs(logits)
            finite.append(is_finite)
        if i == steps:
            break
        token = rng.draw(q, "draft", i) if sampled else q.argmax(-1)
        drafted.append(token)
        if going is not None:
            # At temperature 0 q is one-hot; the confidence is the softmax of the logits.
            going = going & policy.should_continue(logits, q if sampled else logits.float().softmax(-1), token)
            # A token whose value decided must stay. A token drawn after its row had stopped can be dropped.
            length = torch.where(going, length, length.clamp(max=i + policy.keeps_last))
            if not bool(going.any()):
                break
        if i + 1 < steps + final_q:
            logits = expand(token[:, None])[:, 0]
    width = len(drafted)
    if width < steps:
        length = length.clamp(max=width)
    if policy.stops_early and not policy.keeps_last and width:
        width = int(length.max())  # one more host sync, fewer target rows
    tokens = torch.stack(drafted, 1)[:, :width] if drafted else length.new_empty(len(length), 0)
    q = q_rows.tensor() if sampled else None
    sound = (sampling.sound(q) if q is not None else torch.stack(finite, 1)).all(1)
    q = None if q is None else q[:, : width + final_q]
    return Draft.chain(tokens, length, q, finite=sound)
