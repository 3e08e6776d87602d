"""Divergences between the target's law and a student's, made from final hidden states a slice of rows at a time.

The softmax over the vocabulary is most of the cost of training a small drafter. So laws are never held whole, and
tokens that do not occur in the texts can be stood for by a few random ones, see :class:`SampledHead`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, get_args

import torch
from torch import Tensor
from torch.nn import functional

from ..contracts.training import Divergence


class _Distil(torch.autograd.Function):
    """Weighted divergences between a law over V and those of K students, given final hidden states.

    No ``[n, V]`` is ever held: the gradients with respect to the students' hidden states and head are formed in the
    forward pass, a slice of rows at a time, so that the logits of a slice stay in the processor's cache; and the
    target's law is made once for all students.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        students: Tensor,
        head: Tensor,
        target: Tensor,
        target_head: Tensor,
        bias: Tensor,
        weights: Tensor,
        kind: str,
        beta: float,
        tokens: Tensor | None,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        loss = students.new_zeros((), dtype=torch.float32)
        overlap = students.new_zeros(len(students), dtype=torch.float32)
        of_states = torch.empty_like(students) if ctx.needs_input_grad[0] else None
        of_head = torch.zeros_like(head) if ctx.needs_input_grad[1] else None
        for start in range(0, len(target), rows):
            part = slice(start, start + rows)
            log_p = functional.log_softmax((target[part] @ target_head.T).float() + bias, -1)
            p = log_p.exp()
            said = None if tokens is None else tokens[part, None]
            for k, (states, weight) in enumerate(zip(students[:, part], weights[:, part, None], strict=True)):
                log_q = functional.log_softmax((states @ head.T).float() + bias, -1)
                q = log_q.exp()
                same = torch.minimum(p, q).sum(-1, keepdim=True)
                overlap[k] += (same * weight).sum()
                if kind == "nll" and said is not None:
                    divergence = -log_q.gather(1, said)
                    slope = q.scatter_add(1, said, torch.full_like(divergence, -1.0))
                elif kind == "forward-kl":
                    divergence = (p * (log_p - log_q)).sum(-1, keepdim=True)
                    slope = q - p
                elif kind == "reverse-kl":
                    difference = log_q - log_p
                    divergence = (q * difference).sum(-1, keepdim=True)
                    slope = q * (difference - divergence)
                elif kind == "jsd":
                    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log(1 - beta))
                    difference = log_q - log_m
                    to_mixture = (q * difference).sum(-1, keepdim=True)
                    divergence = beta * (p * (log_p - log_m)).sum(-1, keepdim=True) + (1 - beta) * to_mixture
                    slope = (1 - beta) * q * (difference - to_mixture)
                elif kind == "tv":
                    divergence = 1 - same
                    below = (q < p).float()
                    slope = -q * (below - (q * below).sum(-1, keepdim=True))
                else:
                    raise ValueError(
                        f"there is no divergence {kind!r}; the names are {', '.join(get_args(Divergence))}, and nll "
                        "where the texts' own tokens are given"
                    )
                loss += (divergence * weight).sum()
                slope = (slope * weight).to(head.dtype)
                if of_states is not None:
                    of_states[k, part] = (slope @ head).to(of_states.dtype)
                if of_head is not None:
                    of_head += (slope.T @ states).to(of_head.dtype)
        ctx.save_for_backward(of_states, of_head)
        ctx.mark_non_differentiable(overlap)
        return loss, overlap

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        of_states, of_head = (None if saved is None else saved * grads[0] for saved in ctx.saved_tensors)
        return of_states, of_head, None, None, None, None, None, None, None, None


def distil(
    student: Tensor,
    target: Tensor,
    head: Tensor,
    bias: Tensor,
    divergence: Divergence | str,
    rows: int = 128,
    *,
    beta: float = 0.5,
    tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Mean divergence and mean sum_x min(p, q) over ``[n, H]`` final hidden states, a head ``[R, H]`` and bias ``[R]``.

    The bias is the logarithm of how many tokens a row of the head stands for: 0 for a full head. ``beta`` is that of
    ``jsd``. With ``tokens [n]`` int64, the rows of the head that the texts go on with, the divergence may be ``nll``,
    -log q of these: sequence-level distillation.
    """
    keep = torch.ones(1, len(student), dtype=torch.bool, device=student.device)
    loss, overlap = distil_many(
        student[None], keep, target, head, bias, divergence, beta=beta, tokens=tokens, rows=rows
    )
    return loss, overlap[0]


def distil_many(
    students: Tensor,
    keep: Tensor,
    target: Tensor,
    head: Tensor,
    bias: Tensor,
    divergence: Divergence | str,
    *,
    beta: float = 0.5,
    tokens: Tensor | None = None,
    decay: float = 1.0,
    target_head: Tensor | None = None,
    rows: int = 128,
) -> tuple[Tensor, Tensor]:
    """Sum over K students of ``decay ** k`` times the mean divergence, and ``[K]`` mean sum_x min(p, q).

    Gradients flow to ``students``, and to ``head`` if it is trained.

    Args:
        students: ``[K, n, H]`` final hidden states.
        keep: ``[K, n]`` bool, what the means are over.
        target: ``[n, Ht]``, whose law all students are to match.
        head: ``[R, H]``, the students'.
        bias, beta, tokens: see `distil`.
        target_head: ``[R, Ht]``, if the target's law over the same R tokens has another head than the students'.
        rows: hidden states taken at a time.
    """
    own = head if target_head is None else target_head
    factors = decay ** torch.arange(len(students), device=keep.device)
    weights = keep / keep.sum(1, keepdim=True).clamp(min=1) * factors[:, None]
    loss, overlap = _Distil.apply(  # type: ignore[misc]
        students.to(head.dtype), head, target.to(own.dtype), own, bias, weights, divergence, beta, tokens, rows
    )
    return loss, overlap / factors


@torch.no_grad()
def overlap(
    students: Tensor,
    target: Tensor,
    head: Tensor,
    target_head: Tensor,
    ids: Tensor | None = None,
    rows: int = 128,
) -> Tensor:
    """``[K, n]`` float32, sum_x min(p, q) at temperature 1: how probably token verification accepts a token of q.

    Args:
        students: ``[K, n, H]`` what ``head [R, H]`` reads.
        target: ``[n, Ht]`` what ``target_head [V, Ht]`` reads; p is always the whole law.
        ids: ``[R]`` the target's id of each row of ``head``; ``None`` = the same ids.
        rows: hidden states taken at a time.
    """
    found = torch.empty(students.shape[:2], device=students.device)
    for start in range(0, len(target), rows):
        part = slice(start, start + rows)
        p = (target[part].to(target_head.dtype) @ target_head.T).float().softmax(-1)
        if ids is not None:
            p = p[:, ids]
        for k, states in enumerate(students[:, part].to(head.dtype)):
            found[k, part] = torch.minimum(p, (states @ head.T).float().softmax(-1)).sum(-1)
    return found


class SampledHead:
    """Some rows of a head for each step: the tokens that occur in the texts, and random ones that stand for the rest.

    Args:
        head: ``[V, H]``, the target's.
        occurring: tokens of which every step has the row.
        wanted: random rows a step; 0, or as many as there are others, gives the whole head.
        seed: with the step's number it decides which.
    """

    def __init__(self, head: Tensor, occurring: Iterable[int], wanted: int, seed: int):
        self.head, self.wanted, self.seed = head, wanted, seed
        self._common = torch.tensor(sorted(set(occurring)), dtype=torch.long, device=head.device)
        rest = torch.ones(len(head), dtype=torch.bool, device=head.device)
        rest[self._common] = False
        self._others = rest.nonzero().squeeze(1)

    def places(self, tokens: Tensor) -> Tensor:
        """``[n]``: which of every step's rows are those of ``tokens [n]`` that occur in the texts."""
        whole = not 0 < self.wanted < len(self._others)
        return tokens if whole else torch.searchsorted(self._common, tokens)

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """Rows ``[R, H]``, and the logarithm ``[R]`` float32 of how many tokens each stands for."""
        others, device = self._others, self.head.device
        if not 0 < self.wanted < len(others):
            return self.head, torch.zeros(len(self.head), device=device)
        random_order = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        chosen = others[torch.randperm(len(others), generator=random_order)[: self.wanted].to(device)]
        share = math.log(len(others) / self.wanted)
        bias = torch.cat([torch.zeros(len(self._common)), torch.full((self.wanted,), share)]).to(device)
        return self.head[torch.cat([self._common, chosen])], bias


def most_frequent(tokens: Iterable[int], size: int, vocab_size: int) -> Tensor:
    """``[size]`` int64, ascending: the tokens that occur most often; of equals, the lower ids.

    Tokens that do not occur at all come in the order of their ids, which in a byte-pair vocabulary is roughly that of
    their frequency.
    """
    counts = torch.bincount(torch.tensor(list(tokens), dtype=torch.long), minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:size].sort().values
