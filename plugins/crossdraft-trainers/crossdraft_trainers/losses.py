"""Divergences between target and student distributions, computed from final hidden states in slices of rows.

The softmax over the vocabulary dominates the cost of training a small drafter. So ``[n, V]`` is never materialised, and
tokens that do not occur in the texts can be represented by a random sample, see :class:`SampledHead`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, get_args

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from .contract import Divergence

#: Decay of KL's share in ``lk-hybrid``, exp(-decay sum min(p, q)): the paper's best.
LK_DECAY = 3.0


class _Distil(torch.autograd.Function):
    """Weighted divergences of K student distributions from a target distribution, given final hidden states.

    ``[n, V]`` is never materialised: gradients with respect to the students' hidden states and head are computed in the
    forward pass, in slices of rows, so that the logits of a slice stay in the CPU cache; target probabilities are
    computed once for all students.
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
        states_grad = torch.empty_like(students) if ctx.needs_input_grad[0] else None
        head_grad = torch.zeros_like(head) if ctx.needs_input_grad[1] else None
        for start in range(0, len(target), rows):
            part = slice(start, start + rows)
            log_p = functional.log_softmax((target[part] @ target_head.T).float() + bias, -1)
            p = log_p.exp()
            next_tokens = None if tokens is None else tokens[part, None]
            for k, (states, weight) in enumerate(zip(students[:, part], weights[:, part, None], strict=True)):
                log_q = functional.log_softmax((states @ head.T).float() + bias, -1)
                q = log_q.exp()
                min_pq = torch.minimum(p, q).sum(-1, keepdim=True)
                overlap[k] += (min_pq * weight).sum()
                if kind == "nll" and next_tokens is not None:
                    divergence = -log_q.gather(1, next_tokens)
                    slope = q.scatter_add(1, next_tokens, torch.full_like(divergence, -1.0))
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
                elif kind in {"tv", "lk", "lk-hybrid"}:
                    below = (q < p).float()
                    slope = -q * (below - (q * below).sum(-1, keepdim=True))
                    divergence = 1 - min_pq
                    if kind == "lk":
                        min_pq = min_pq.clamp(min=torch.finfo(min_pq.dtype).tiny)
                        divergence, slope = -min_pq.log(), slope / min_pq
                    elif kind == "lk-hybrid":
                        kl_share = (-LK_DECAY * min_pq).exp()
                        divergence = divergence.lerp((p * (log_p - log_q)).sum(-1, keepdim=True), kl_share)
                        slope = slope.lerp(q - p, kl_share)
                else:
                    raise ValueError(
                        f"unknown divergence {kind!r}; use one of {', '.join(get_args(Divergence))}, or nll if tokens "
                        "are given"
                    )
                loss += (divergence * weight).sum()
                slope = (slope * weight).to(head.dtype)
                if states_grad is not None:
                    states_grad[k, part] = (slope @ head).to(states_grad.dtype)
                if head_grad is not None:
                    head_grad += (slope.T @ states).to(head_grad.dtype)
        ctx.save_for_backward(states_grad, head_grad)
        ctx.mark_non_differentiable(overlap)
        return loss, overlap

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        states_grad, head_grad = (None if saved is None else saved * grads[0] for saved in ctx.saved_tensors)
        return states_grad, head_grad, None, None, None, None, None, None, None, None


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

    The bias is the log of the number of tokens represented by a row of the head, 0 for a full head. ``beta`` is that of
    ``jsd``. With ``tokens [n]`` int64, the head rows of the next tokens, the divergence may be ``nll``, their -log q:
    sequence-level distillation.
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
        keep: ``[K, n]`` bool, rows that the means are over.
        target: ``[n, Ht]``, final hidden states of the target.
        head: ``[R, H]``, the students' head.
        bias, beta, tokens: see `distil`.
        target_head: ``[R, Ht]``, the target's head over the same R tokens if it differs.
        rows: rows per slice.
    """
    target_head = head if target_head is None else target_head
    factors = decay ** torch.arange(len(students), device=keep.device)
    weights = keep / keep.sum(1, keepdim=True).clamp(min=1) * factors[:, None]
    loss, overlap = _Distil.apply(  # type: ignore[misc]
        students.to(head.dtype),
        head,
        target.to(target_head.dtype),
        target_head,
        bias,
        weights,
        divergence,
        beta,
        tokens,
        rows,
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
    """sum_x min(p, q) at temperature 1, ``[K, n]`` float32: acceptance probability of token verification.

    Args:
        students: ``[K, n, H]``, inputs of ``head [R, H]``.
        target: ``[n, Ht]``, inputs of ``target_head [V, Ht]``; p is over the full vocabulary.
        ids: ``[R]``, target ids of the rows of ``head``; ``None`` = equal ids.
        rows: rows per slice.
    """
    result = torch.empty(students.shape[:2], device=students.device)
    for start in range(0, len(target), rows):
        part = slice(start, start + rows)
        p = (target[part].to(target_head.dtype) @ target_head.T).float().softmax(-1)
        if ids is not None:
            p = p[:, ids]
        for k, states in enumerate(students[:, part].to(head.dtype)):
            result[k, part] = torch.minimum(p, (states @ head.T).float().softmax(-1)).sum(-1)
    return result


def sampled_vocab_option() -> Any:
    """The training option for ``n_sampled`` of `SampledHead`."""
    text = "random tokens per step that represent all tokens not in the texts (0: full vocabulary)"
    return Field(2048, description=text, ge=0, le=10_000_000)


class SampledHead:
    """Subset of head rows for each step: tokens that occur in the texts, and a random sample of the others.

    Args:
        head: ``[V, H]``, of the target.
        occurring: tokens included in every step.
        n_sampled: random rows per step; 0, or at least the number of other tokens, selects the full head.
        seed: of the sample, together with the step.
    """

    def __init__(self, head: Tensor, occurring: Iterable[int], n_sampled: int, seed: int):
        self.head, self.n_sampled, self.seed = head, n_sampled, seed
        self._common = torch.tensor(sorted(set(occurring)), dtype=torch.long, device=head.device)
        rest = torch.ones(len(head), dtype=torch.bool, device=head.device)
        rest[self._common] = False
        self._others = rest.nonzero().squeeze(1)

    def row_indices(self, tokens: Tensor) -> Tensor:
        """Row indices ``[n]`` of occurring ``tokens [n]`` in every step."""
        whole = not 0 < self.n_sampled < len(self._others)
        return tokens if whole else torch.searchsorted(self._common, tokens)

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """Rows ``[R, H]`` of a step, and the log ``[R]`` float32 of the number of tokens that each represents."""
        others, device = self._others, self.head.device
        if not 0 < self.n_sampled < len(others):
            return self.head, torch.zeros(len(self.head), device=device)
        random_order = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        chosen = others[torch.randperm(len(others), generator=random_order)[: self.n_sampled].to(device)]
        share = math.log(len(others) / self.n_sampled)
        bias = torch.cat([torch.zeros(len(self._common)), torch.full((self.n_sampled,), share)]).to(device)
        return self.head[torch.cat([self._common, chosen])], bias


def most_frequent(tokens: Iterable[int], size: int, vocab_size: int) -> Tensor:
    """Most frequent tokens, ``[size]`` int64 ascending; ties are broken by lower id.

    Tokens that do not occur are ranked by id, which approximates frequency in a byte-pair vocabulary.
    """
    counts = torch.bincount(torch.tensor(list(tokens), dtype=torch.long), minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:size].sort().values
