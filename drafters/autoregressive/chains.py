"""Growing a chain with any autoregressive drafter, under a length policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...framework.contracts.draft import Draft, Sequences, on_device
from ...framework.contracts.rng import StepRng
from ...framework.contracts.sampling import Sampling
from ...framework.util.tensors import Gathered
from .length_policy import LengthPolicy


def law_after(policy: LengthPolicy, sequences: Sequences, final_q: bool, sampled: bool) -> bool:
    """Does the verifier want the law after the last token of some row, whose draft is cut short (`DraftContext`)?"""
    rows = zip(sequences.history, sequences.limit, strict=True)
    return final_q and sampled and any(history and limit < policy.gamma for history, limit in rows)


def grow_chain(
    root: Tensor,
    expand: Callable[[Tensor], Tensor],
    wanted: Sequence[int],
    policy: LengthPolicy,
    sampling: Sampling,
    rng: StepRng,
    *,
    one_more: bool = False,
) -> Draft:
    """A chain for every row, drawn token after token; at temperature 0 the argmax, and a point mass.

    Args:
        root: ``[B, V]`` logits after the last committed token.
        expand: feeds ``tokens [B, 1]`` behind what was fed before; logits ``[B, 1, V]`` after them.
        wanted: per row, most tokens; of `LengthPolicy.wanted`.
        sampling: warps logits into the law that tokens are drawn from.
        one_more: add the law after the last token, see `law_after`.
    """
    steps, sampled = max(wanted), sampling.temperature > 0
    length = on_device(list(wanted), root.device)
    going = torch.ones_like(length, dtype=torch.bool) if policy.asks else None
    logits, drafted, laws = root, [], Gathered(steps + one_more)
    finite: list[Tensor] = []  # at temperature 0; otherwise the laws tell
    for i in range(steps + one_more):
        if sampled:
            q = sampling.probs(logits)
            laws.add(q[:, None])
        else:
            q, fine = sampling.checked_probs(logits)
            finite.append(fine)
        if i == steps:
            break
        token = rng.draw(q, "draft", i) if sampled else q.argmax(-1)
        drafted.append(token)
        if going is not None:
            # At temperature 0 q is one-hot; what the model believes is its own softmax.
            going = going & policy.goes_on(logits, q if sampled else logits.float().softmax(-1), token)
            # A token that was looked at must stay. One that nobody looked at, drawn from a law at which the row had
            # stopped already, is as good as not drawn.
            length = torch.where(going, length, length.clamp(max=i + policy.keeps_last))
            if not bool(going.any()):
                break
        if i + 1 < steps + one_more:
            logits = expand(token[:, None])[:, 0]
    width = len(drafted)
    if width < steps:
        length = length.clamp(max=width)
    if policy.asks and not policy.keeps_last and width:
        width = int(length.max())  # one more look at the device: fewer target rows
    tokens = torch.stack(drafted, 1)[:, :width] if drafted else length.new_empty(len(length), 0)
    q = laws.tensor() if sampled else None
    fine = (sampling.sound(q) if q is not None else torch.stack(finite, 1)).all(1)
    q = None if q is None else q[:, : width + one_more]
    return Draft.chain(tokens, length, q, finite=fine)
